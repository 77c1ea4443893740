"""A folder with a LLaMA of random weights, as save_pretrained writes it; made without it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import Tensor

from deepspeed_ext.io import save

CONFIG: Mapping[str, Any] = tiny.CONFIG | {
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "eos_token_id": 2,
}


def tensors_of(
    config: Mapping[str, Any] = CONFIG, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return random weights by name; the same for the same sizes."""
    made = tiny.tensors(dict(config), dtype)
    return made | {"lm_head.weight": made["model.embed_tokens.weight"].flip(0).contiguous()}


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
