"""The demonstration's GPT as an inference engine, by a table of its own: what a user's model takes.

The table says where `gpt.py` keeps its weights and what it computes; the rest is the engine's.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from deepspeed_ext.dtensors import is_dtensor
from deepspeed_ext.inference import (
    ExpertNames,
    Experts,
    InferenceEngine,
    Key,
    Names,
    Policy,
    SamplingOptions,
    Windows,
    init_inference,
)
from examples.gpt import GPT, generate

TABLE = Policy(
    families=("example_gpt",),
    names=Names(
        prefixes=("",),
        embedding="embedding",
        layer="blocks.{}.",
        attention_norm="attention_norm",
        qkv=("attention.query_key_value",),
        out="attention.out",
        mlp_norm="mlp_norm",
        up=("up",),
        down="down",
        final_norm="norm",
        head=("head",),
    ),
    norm="layer",
    eps=1e-5,
    activation="gelu",
    gated=False,
    biases=(True, True, True, False),
    windows=Windows(),  # as in training nothing has looked further back
)
TABLE_OF_EXPERTS = replace(
    TABLE,
    families=("example_gpt_of_experts",),
    biases=(True, True, False, False),
    experts=Experts(
        names=(ExpertNames("moe.gate", ("moe.experts.up.weight",), "moe.experts.down.weight"),),
        count=Key("num_experts"),
        chosen=Key("num_experts_per_tok"),
        intermediate=Key("intermediate_size"),
        normalize=Key("norm_topk_prob"),
    ),
)
_ROUNDS, _BYTES = 3, 32


def engine_of(model: GPT, *, max_tokens: int, quantize: str | None = None) -> InferenceEngine:
    """Return an engine with a copy of a model's weights; tokens are bytes.

    Args:
        model: on any device, not sharded.
        max_tokens: of a text.
        quantize: as of ``init_inference``.
    """
    table = TABLE_OF_EXPERTS if model.experts else TABLE
    engine = init_inference(
        model, policy=table, max_batch=1, max_tokens=max_tokens, quantize=quantize
    )
    assert isinstance(engine, InferenceEngine)  # as the table is of no encoder
    return engine


def write_on(
    engine: InferenceEngine, prompt: bytes, length: int, temperature: float, seed: int
) -> bytes:
    """Continue a text, as `generate` does; draws are others."""
    options = SamplingOptions(max_new_tokens=length, temperature=temperature, seed=seed)
    return prompt + bytes(engine.generate(list(prompt), options)[0].tokens)


def speeds(model: GPT, engine: InferenceEngine, prompt: bytes) -> tuple[float, float]:
    """Return how many bytes a second an engine and its model write, which take turns.

    Args:
        model: not sharded.
        engine: with room for as many bytes as the prompt has.
        prompt: of which the first part, 32 bytes shorter, is continued.
    """
    prompt = prompt[:-_BYTES]
    ways: tuple[Callable[[], object], ...] = (
        lambda: write_on(engine, prompt, _BYTES, 1.0, 0),
        lambda: generate(model, prompt, _BYTES, 1.0, 0),
    )
    seconds: tuple[list[float], ...] = ([], [])
    for _ in range(_ROUNDS + 1):  # of which the first does not count
        for way, taken in zip(ways, seconds, strict=True):
            begin = time.perf_counter()
            way()
            taken.append(time.perf_counter() - begin)
    ours, plain = (_BYTES / statistics.median(taken[1:]) for taken in seconds)
    return ours, plain


def whole(model: GPT) -> GPT:
    """Return a model that is not sharded, with the same weights; all processes have to call it."""
    tensors = model.state_dict()
    if not any(map(is_dtensor, tensors.values())):
        return model
    with torch.device("meta"):
        width, layers = model.embedding.embedding_dim, len(model.blocks)
        made = GPT(width, layers, model.context, model.experts, model.top_k)
    full = {name: t.full_tensor() if is_dtensor(t) else t for name, t in tensors.items()}
    made.load_state_dict(full, assign=True)
    made.register_buffer("rotation", model.rotation, persistent=False)
    return made
