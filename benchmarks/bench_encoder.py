"""Encoders beside transformers: `python -m benchmarks.bench_encoder`.

Models have the shapes of real ones and random weights; texts have 8 to 128 tokens, drawn evenly,
and come in one padded batch. "sorted" takes them by length, 8 at a time, as one does to save
padding. One ceiling does the multiplications with weights alone, of tokens without padding; the
other reads these weights once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import Contender
from benchmarks.workloads import BF16, F32, Shapes, Workload, main
from deepspeed_ext.inference import init_inference

LEAST, MOST, SORTED = 8, 128, 8
MODELS = {  # hidden, layers, heads, intermediate
    "MiniLM": (384, 6, 12, 1536),
    "BERT base": (768, 12, 12, 3072),
    "BERT large": (1024, 24, 16, 4096),
}


def shapes_of(model: str) -> Shapes:
    """Return the shapes of the weights of all layers."""
    hidden, layers, _, wide = MODELS[model]
    return [(3 * hidden, hidden), (hidden, hidden), (wide, hidden), (hidden, wide)] * layers


def module(model: str, dtype: torch.dtype, device: str, attention: str) -> Any:
    """Return transformers' model."""
    from transformers import BertConfig, BertModel

    hidden, layers, heads, wide = MODELS[model]
    config = BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=wide,
        attn_implementation=attention,
    )
    return BertModel(config, add_pooling_layer=False).eval().to(device, dtype)


def texts(count: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of texts and their mask; a single text has the mean length."""
    lengths = torch.randint(LEAST, MOST + 1, (count,)) if count > 1 else torch.tensor([68])
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    return torch.randint(1000, 30000, mask.shape) * mask, mask.long()


def by_transformers(model: Any, batches: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], object]:
    def run() -> object:
        with torch.inference_mode():
            return [model(ids, attention_mask=mask).last_hidden_state for ids, mask in batches]

    return run


def multiplications(
    rows: int, shapes: Shapes, dtype: torch.dtype, device: str
) -> Callable[[], object]:
    weights = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    inputs = {k: torch.randn(rows, k, device=device).to(dtype) for _, k in shapes}

    def run() -> object:
        with torch.inference_mode():
            return [F.linear(inputs[weight.shape[1]], weight).shape for weight in weights]

    return run


def contenders(
    model: str, count: int, dtype: torch.dtype, shapes: Shapes, device: str
) -> list[Contender]:
    """Return ours and others, with the same weights."""
    ids, mask = texts(count)
    plain = {name: module(model, dtype, device, name) for name in ("sdpa", "eager")}
    plain["eager"].load_state_dict(plain["sdpa"].state_dict())
    engine = init_inference(plain["sdpa"])
    by_length = mask.sum(1).argsort().split(SORTED)
    cut = [(each, int(mask[each].sum(1).max())) for each in by_length]
    on_device = ids.to(device), mask.to(device)
    parts = [(on_device[0][each, :most], on_device[1][each, :most]) for each, most in cut]
    ways = {
        "deepspeed_ext": partial(engine, ids, mask),
        "transformers": by_transformers(plain["sdpa"], [on_device]),
        "transformers, eager attention": by_transformers(plain["eager"], [on_device]),
    }
    if count > SORTED:
        ways["transformers, sorted"] = by_transformers(plain["sdpa"], parts)
    rows = int(mask.sum())
    alone = multiplications(rows, shapes, dtype, device)
    made = [Contender(name, way) for name, way in ways.items()]
    return [*made, Contender("multiplications alone", alone, is_ceiling=True)]


def work(model: str, count: int, dtype: torch.dtype) -> Workload:
    how_many = f"{count} texts" if count > 1 else "1 text"
    name = f"{model}, {how_many}, {str(dtype).removeprefix('torch.')}"
    make = partial(contenders, model, count, dtype)
    return Workload(name, shapes_of(model), dtype.itemsize, make, only_reads=True)


WORKLOADS = {
    "cpu": [
        *[work("MiniLM", count, dtype) for dtype in (F32, BF16) for count in (1, 64)],
        *[work("BERT base", 16, dtype) for dtype in (F32, BF16)],
    ],
    "cuda": [
        work(model, count, BF16) for model in ("BERT base", "BERT large") for count in (1, 64, 512)
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)
