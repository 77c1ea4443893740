"""A folder with a LLaMA of random weights, as save_pretrained writes it; made without it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.io import save

CONFIG: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "eos_token_id": 2,
}


def tensors_of(config: Mapping[str, Any] = CONFIG, dtype: torch.dtype = torch.float32) -> Any:
    """Return random weights by name; the same for the same sizes."""
    generator = torch.Generator().manual_seed(1)
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]

    def of(*shape: int) -> Tensor:
        std = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        values = torch.randn(shape, generator=generator) * std
        return (values + (1 if len(shape) == 1 else 0)).to(dtype)

    tensors = {"model.embed_tokens.weight": of(config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": of(hidden, hidden),
            "self_attn.k_proj": of(kv, hidden),
            "self_attn.v_proj": of(kv, hidden),
            "self_attn.o_proj": of(hidden, hidden),
            "mlp.gate_proj": of(wide, hidden),
            "mlp.up_proj": of(wide, hidden),
            "mlp.down_proj": of(hidden, wide),
            "input_layernorm": of(hidden),
            "post_attention_layernorm": of(hidden),
        }
        tensors.update({f"model.layers.{i}.{name}.weight": t for name, t in layer.items()})
    tensors["model.norm.weight"] = of(hidden)
    tensors["lm_head.weight"] = of(config["vocab_size"], hidden)
    return tensors


def write(
    folder: Path,
    config: Mapping[str, Any] = CONFIG,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    files: int = 1,
) -> Path:
    """Write a folder: all tensors into one file, or by turns into several, with their index."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = tensors_of(config) if tensors is None else tensors
    if files == 1:
        save(tensors, folder / "model.safetensors", durable=False)
        return folder
    weight_map = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[number::files]}
        save(part, folder / name, durable=False)
        weight_map.update(dict.fromkeys(part, name))
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_index(folder: Path) -> dict[str, str]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: dict[str, str] = index["weight_map"]
    return found
