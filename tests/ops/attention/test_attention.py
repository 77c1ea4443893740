"""decode_attention and prefill_attention: what holds of both, and calls that cannot be."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import torch
from kv_cases import OPTIONS, assert_attends, make_kv, option, queries
from samples import BF16, F16, F32
from torch import Tensor

from deepspeed_ext.ops import PagedKV, decode_attention, prefill_attention

INT8 = torch.int8


@dataclass(frozen=True)
class Op:
    """One of the two, the tokens of a slot that it is called with, and those of a sum in a row."""

    run: Callable[..., Any]
    tokens: int
    chain: float  # the part of a dot product that is added up one after the other

    def assert_right(self, q: Tensor, kv: PagedKV, **options: Any) -> None:
        assert_attends(self.run, q, kv, q.shape[-1] * self.chain, **options)


OPS = {"decode": Op(decode_attention, 3, 1 / 8), "prefill": Op(prefill_attention, 45, 1)}
each_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


def dtype_of_queries(stored: torch.dtype) -> torch.dtype:
    return F32 if stored == F32 else BF16


@pytest.mark.parametrize("mixture", [(F32, BF16), (BF16, F32), (F16, BF16), (F32, INT8)], ids=str)
@each_op
def test_mixtures(op: Op, mixture: tuple[torch.dtype, torch.dtype], device: str) -> None:
    kv = make_kv([100, 300], 2, 64, mixture[1], device)
    op.assert_right(queries(2, op.tokens, 4, 64, mixture[0], device), kv)


@pytest.mark.parametrize("names", [*((n,) for n in OPTIONS), *combinations(OPTIONS, 2)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, INT8], ids=str)
@each_op
def test_options(op: Op, dtype: torch.dtype, names: tuple[str, ...], device: str) -> None:
    tokens = 5 if "counts" in names else op.tokens
    kv = make_kv([300, max(7, tokens), 600, 64], 2, 64, dtype, device)
    q = queries(4, tokens, 4, 64, dtype_of_queries(dtype), device)
    op.assert_right(q, kv, **{name: option(name, device) for name in names})


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 256, 257, 10_000])
@each_op
def test_windows(op: Op, window: int, device: str) -> None:
    kv = make_kv([700, op.tokens, 320], 1, 32, BF16, device)
    op.assert_right(queries(3, op.tokens, 8, 32, BF16, device), kv, window=window)


LAYOUTS = {
    "slice of a projection": lambda t: torch.cat([t, t, t], -2)[:, :, 4:8],
    "heads before tokens": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "every other element": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "from an odd element": lambda t: torch.cat([t[..., :1], t], -1)[..., 1:],
    "one for all": lambda t: t[:1, :1].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@each_op
def test_layouts(op: Op, dtype: torch.dtype, layout: str, device: str) -> None:
    kv = make_kv([100, 300], 2, 64, dtype, device)
    q = LAYOUTS[layout](queries(2, op.tokens, 4, 64, dtype, device))
    assert torch.equal(op.run(q, kv), op.run(q.clone(), kv))


@pytest.mark.parametrize(("slots", "heads"), [(0, 4), (2, 0)])
@each_op
def test_nothing(op: Op, slots: int, heads: int, device: str) -> None:
    kv = make_kv([50] * slots, 2, 64, BF16, device)
    q = torch.empty((slots, op.tokens, heads, 64), dtype=BF16, device=device)
    assert op.run(q, kv).shape == q.shape


WRONG = {
    "length beyond the table": lambda kv: kv.lengths.__setitem__(1, 10_000),
    "length below 0": lambda kv: kv.lengths.__setitem__(1, -3),
    "no length, as a free slot": lambda kv: kv.lengths.__setitem__(1, 0),
    "page beyond": lambda kv: kv.table.__setitem__((1, 0), 10_000),
    "page behind the last": lambda kv: kv.table.__setitem__((1, 0), len(kv.keys)),
    "page below": lambda kv: kv.table.__setitem__((1, 1), -1),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("dtype", [F32, BF16, INT8], ids=str)
@each_op
def test_what_cannot_be_is_nan(op: Op, name: str, dtype: torch.dtype, device: str) -> None:
    kv = make_kv([100, 100], 2, 64, dtype, device)
    q = queries(2, op.tokens, 4, 64, dtype_of_queries(dtype), device)
    want = op.run(q, kv)
    WRONG[name](kv)
    out, lse = op.run(q, kv, return_lse=True)
    assert torch.equal(out[0], want[0]) and out[1].isnan().all() and lse[1].isnan().all()


@pytest.mark.parametrize("slot", [2, -2, 2**31 - 1])
@each_op
def test_slots_that_are_not_there_are_nan(op: Op, slot: int, device: str) -> None:
    kv = make_kv([100, 100], 2, 64, BF16, device)
    q = queries(2, op.tokens, 4, 64, BF16, device)
    slots = torch.tensor([slot, 1], dtype=torch.int32, device=device)
    out = op.run(q, kv, slots=slots)
    assert out[0].isnan().all() and out[1].isfinite().all()
    counts = torch.tensor([op.tokens + 1, -1], dtype=torch.int32, device=device)
    assert op.run(q, kv, counts=counts).isnan().all()


@pytest.mark.parametrize("sink", [90.0, 1e30])
@each_op
def test_sinks_whose_powers_are_no_floats(op: Op, sink: float, device: str) -> None:
    """They take nearly all: next to nothing is left for values, and the sum is the sink's."""
    kv = make_kv([300, 7], 2, 64, F32, device)
    sinks = torch.full((4,), sink, device=device)
    out, lse = op.run(queries(2, 3, 4, 64, F32, device), kv, sinks=sinks, return_lse=True)
    assert out.abs().max() < 1e-25 and ((lse - sink).abs() <= 1e-6 * sink).all()
