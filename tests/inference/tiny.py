"""A small model made by hand, with random weights, and a tokenizer of bytes."""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.inference.execution.decoder import Decoder
from deepspeed_ext.inference.model.architecture import Architecture, architecture_of
from deepspeed_ext.inference.model.policies import policy_of
from deepspeed_ext.inference.serving.engine import InferenceEngine
from deepspeed_ext.inference.weights.loader import Taker

VOCABULARY = 97
CONFIG = dict(
    model_type="llama",
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    tie_word_embeddings=True,
)


def tensors(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return random weights, large enough for texts to depend on all that comes before."""
    random = torch.Generator().manual_seed(0)
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    width = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{p}_proj": (hidden, hidden) for p in "qo"}
        shapes |= {f"{at}self_attn.{p}_proj": (width, hidden) for p in "kv"}
        shapes |= {f"{at}mlp.{p}_proj": (wide, hidden) for p in ("gate", "up")}
        shapes[f"{at}mlp.down_proj"] = (hidden, wide)
        shapes |= {f"{at}{p}_layernorm": (hidden,) for p in ("input", "post_attention")}
    made = {}
    for name, shape in shapes.items():
        scale = 1.0 if len(shape) == 1 or "embed" in name else 2 / math.sqrt(shape[1])
        noise = torch.randn(shape, generator=random) * (0.1 if len(shape) == 1 else 1.0)
        made[f"{name}.weight"] = ((noise + (len(shape) == 1)) * scale).to(dtype)
    return made


def decoder(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    poisoned: int | None = None,
    **changes: Any,
) -> Decoder:
    """Return a model; the token `poisoned` makes NaN of whatever sees it."""
    config = CONFIG | changes
    policy = policy_of(config)
    of: Architecture = architecture_of(policy, config)
    made = tensors(config, dtype)
    if poisoned is not None:
        made["model.embed_tokens.weight"][poisoned, 3] = math.nan
        made["lm_head.weight"] = made["model.embed_tokens.weight"].nan_to_num(0.0)
        config = config | dict(tie_word_embeddings=False)
    return Decoder(of, Taker(policy, config, of, made, torch.device(device), dtype).take())


@functools.cache
def shared_decoder(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """Return one that all tests read."""
    return decoder(device, dtype)


def engine(
    device: str = "cpu", of: Decoder | None = None, max_batch: int = 8, **options: Any
) -> InferenceEngine:
    options = dict(max_tokens=256) | options
    return InferenceEngine(of or shared_decoder(device), max_batch=max_batch, **options)


class Bytes:
    """A tokenizer: tokens are bytes, from that of a space on."""

    def encode(self, text: str) -> list[int]:
        return [byte - 32 for byte in text.encode()]

    def decode(self, ids: list[int]) -> str:
        return bytes(token + 32 for token in ids).decode(errors="replace")


def check_all_is_free(engine: InferenceEngine) -> None:
    """Nothing is left of requests that are done, once what was cancelled is swept, as by a step."""
    engine._sweep()
    scheduler, table = engine._scheduler, engine._scheduler._table
    assert len(table.free) == engine.max_batch and table.promised == 0
    assert engine.cache.free_pages == table.pages
    assert not table.requests and not scheduler._waiting and not scheduler._unread
    engine.cache.check()
