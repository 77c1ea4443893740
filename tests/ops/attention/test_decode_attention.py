"""decode_attention: numbers against the reference, and bits that depend on nothing else."""

import math
from itertools import combinations
from typing import Any

import pytest
import torch
from kv_cases import OPTIONS, assert_attends, make_kv, option, queries
from rms_norm_cases import BF16, F16, F32
from torch import Tensor

from deepspeed_ext.ops import PagedKV, decode_attention

INT8, FP8 = torch.int8, torch.float8_e4m3fn


def assert_right(q: Tensor, kv: PagedKV, **options: Any) -> None:
    assert_attends(decode_attention, q, kv, q.shape[-1] / 8, **options)


@pytest.mark.parametrize("width", [1, 7, 64, 80, 96, 128, 136, 192, 256])
@pytest.mark.parametrize("dtype", [F32, BF16, F16, INT8, FP8], ids=str)
def test_widths(dtype: torch.dtype, width: int, device: str) -> None:
    kv = make_kv([3, 300, 65], 2, width, dtype, device)
    for of_q in (F16, BF16) if dtype.itemsize == 1 else (dtype,):
        for tokens in (1, 3):
            assert_right(queries(3, tokens, 6, width, of_q, device), kv)


@pytest.mark.parametrize("dtype", [F32, BF16, INT8], ids=str)
def test_lengths(dtype: torch.dtype, device: str) -> None:
    lengths = [0, 1, 2, 63, 64, 65, 255, 256, 257, 512, 513, 1000]
    kv = make_kv(lengths, 1, 32, dtype, device)
    of_q = F32 if dtype == F32 else BF16
    counts = torch.tensor([min(1, n) for n in lengths], dtype=torch.int32, device=device)
    assert_right(queries(12, 1, 4, 32, of_q, device), kv, counts=counts)
    counts = torch.tensor([min(16, n) for n in lengths], dtype=torch.int32, device=device)
    assert_right(queries(12, 16, 2, 32, of_q, device), kv, counts=counts)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_long(dtype: torch.dtype, device: str) -> None:
    kv = make_kv([20_000], 1, 64, dtype, device)
    assert_right(queries(1, 2, 2, 64, dtype, device), kv)


@pytest.mark.parametrize("mixture", [(F32, BF16), (BF16, F32), (F16, BF16)], ids=str)
def test_mixtures(mixture: tuple[torch.dtype, torch.dtype], device: str) -> None:
    kv = make_kv([100, 300], 2, 64, mixture[1], device)
    assert_right(queries(2, 2, 4, 64, mixture[0], device), kv)


@pytest.mark.parametrize("names", [*((n,) for n in OPTIONS), *combinations(OPTIONS, 2)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, INT8], ids=str)
def test_options(dtype: torch.dtype, names: tuple[str, ...], device: str) -> None:
    kv = make_kv([300, 7, 600, 64], 2, 64, dtype, device)
    q = queries(4, 5, 4, 64, BF16, device)
    assert_right(q, kv, **{name: option(name, device) for name in names})


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 256, 257, 10_000])
def test_windows(window: int, device: str) -> None:
    kv = make_kv([700, 3, 320], 1, 32, BF16, device)
    assert_right(queries(3, 3, 8, 32, BF16, device), kv, window=window)


LAYOUTS = {
    "slice of a projection": lambda t: torch.cat([t, t, t], -2)[:, :, 4:8],
    "heads before tokens": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "every other element": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "from an odd element": lambda t: torch.cat([t[..., :1], t], -1)[..., 1:],
    "one for all": lambda t: t[:1, :1].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_layouts(dtype: torch.dtype, layout: str, device: str) -> None:
    kv = make_kv([100, 300], 2, 64, dtype, device)
    q = LAYOUTS[layout](queries(2, 3, 4, 64, dtype, device))
    assert torch.equal(decode_attention(q, kv), decode_attention(q.clone(), kv))


@pytest.mark.parametrize("shape", [(0, 1, 4, 64), (2, 3, 0, 64)])
def test_nothing(shape: tuple[int, ...], device: str) -> None:
    kv = make_kv([5] * shape[0], 2, 64, BF16, device)
    assert decode_attention(torch.empty(shape, dtype=BF16, device=device), kv).shape == shape


# Bits


def slots_of(kv: PagedKV, slot: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a slot: (tokens, heads, width)."""
    length = int(kv.lengths[slot])
    pages = kv.table[slot, : -(-length // 64)].long()
    both = (t[pages].transpose(1, 2).flatten(0, 1)[:length] for t in (kv.keys, kv.values))
    return tuple(t.cpu() for t in both)  # type: ignore[return-value]


@pytest.mark.parametrize(("group", "dtype"), [(1, BF16), (3, F32), (3, BF16), (8, BF16)], ids=str)
def test_alone_and_in_company(group: int, dtype: torch.dtype, device: str) -> None:
    """In another slot, with other pages and capacity, beside longer ones, in a batch of 64."""
    generator = torch.Generator().manual_seed(3)
    mine = tuple(torch.randn((700, 2, 64), generator=generator).to(dtype) for _ in range(2))
    q = queries(1, 3, 2 * group, 64, dtype, device)
    options = dict(window=500, softcap=3.0, alibi_slopes=torch.rand(2 * group, device=device))
    alone = make_kv([700], 2, 64, dtype, device, content=[mine])
    want = decode_attention(q, alone, return_lse=True, **options)
    lengths = [5 + 37 * i for i in range(64)]
    lengths[41] = 700
    others = [
        tuple(torch.randn((n, 2, 64), generator=generator).to(dtype) for _ in range(2))
        for n in lengths
    ]
    others[41] = mine
    beside = make_kv(lengths, 2, 64, dtype, device, seed=9, capacity=60, content=others)
    many = queries(64, 3, 2 * group, 64, dtype, device, seed=5)
    many[41] = q[0]
    got = decode_attention(many, beside, return_lse=True, **options)
    again = decode_attention(many, beside, return_lse=True, **options)
    for expected, each, repeated in zip(want, got, again, strict=True):
        assert torch.equal(each[41], expected[0])
        assert torch.equal(each, repeated)


@pytest.mark.parametrize("dtype", [F32, BF16, INT8, FP8], ids=str)
@pytest.mark.parametrize("length", [16, 70, 263])
@pytest.mark.parametrize("window", [0, 20])
def test_one_at_a_time_or_all_at_once(
    dtype: torch.dtype, length: int, window: int, device: str
) -> None:
    kv = make_kv([length], 2, 64, dtype, device)
    q = queries(1, 16, 6, 64, F32 if dtype == F32 else BF16, device)
    sinks = torch.linspace(-1, 1, 6, device=device)
    options = dict(window=window, sinks=sinks, return_lse=True)
    want, want_lse = decode_attention(q, kv, **options)
    for i in range(16):
        shorter = kv._replace(lengths=kv.lengths - (15 - i))
        out, lse = decode_attention(q[:, i : i + 1], shorter, **options)
        assert torch.equal(out[0, 0], want[0, i]) and torch.equal(lse[0, 0], want_lse[0, i])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_seen_has_no_part(dtype: torch.dtype, value: float, device: str) -> None:
    """Also a later one of the new tokens, and one that is out of the window by now."""
    kv = make_kv([300], 1, 64, dtype, device)
    q = queries(1, 8, 3, 64, dtype, device)  # three rows of a token go beside one of the next
    want = decode_attention(q, kv, window=100)
    places = [(kv.table[0, i // 64].item(), 0, i % 64) for i in (297, 195)]
    for place in places:  # new token number 5, and the last key that only 0 to 2 see
        kv.values[place] = value
        kv.keys[place] = value
    got = decode_attention(q, kv, window=100)
    assert torch.equal(got[:, 3:5], want[:, 3:5]) and got[:, 5:].isnan().all()
    assert got[:, :3].isnan().all() or value == -math.inf


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("window", [20, 40, 130])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_token_alone_has_nothing_of_what_it_does_not_see(
    dtype: torch.dtype, window: int, value: float, device: str
) -> None:
    """Beside what it sees, and in the same part of a page."""
    kv = make_kv([300], 1, 64, dtype, device)
    q = queries(1, 1, 3, 64, dtype, device)
    want = decode_attention(q, kv, window=window)
    for i in (*range(300 - window - 3, 300 - window), 300 - window - 33):
        place = kv.table[0, i // 64].item(), 0, i % 64
        kv.values[place] = value
        kv.keys[place] = value
    assert torch.equal(decode_attention(q, kv, window=window), want)
    assert bool(want.isfinite().all())


def test_one_infinite_value_is_in_its_own_column(device: str) -> None:
    kv = make_kv([300], 1, 64, BF16, device)
    q = queries(1, 8, 3, 64, BF16, device)
    want = decode_attention(q, kv)
    kv.values[kv.table[0, 4].item(), 0, 41, 7] = math.inf  # token 297
    got = decode_attention(q, kv)
    assert torch.equal(got[:, :5], want[:, :5]) and (got[:, 5:, :, 7] == math.inf).all()
    got[:, 5:, :, 7] = want[:, 5:, :, 7]
    assert torch.equal(got, want)


WRONG = {
    "length beyond the table": lambda kv: kv.lengths.__setitem__(1, 10_000),
    "length below 0": lambda kv: kv.lengths.__setitem__(1, -3),
    "no length, as a free slot": lambda kv: kv.lengths.__setitem__(1, 0),
    "page beyond": lambda kv: kv.table.__setitem__((1, 0), 10_000),
    "page behind the last": lambda kv: kv.table.__setitem__((1, 0), len(kv.keys)),
    "page below": lambda kv: kv.table.__setitem__((1, 1), -1),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_what_cannot_be_is_nan(name: str, dtype: torch.dtype, device: str) -> None:
    kv = make_kv([100, 100], 2, 64, dtype, device)
    q = queries(2, 2, 4, 64, dtype, device)
    want = decode_attention(q, kv)
    WRONG[name](kv)
    out, lse = decode_attention(q, kv, return_lse=True)
    assert torch.equal(out[0], want[0]) and out[1].isnan().all() and lse[1].isnan().all()


@pytest.mark.parametrize("slot", [2, -2, 2**31 - 1])
def test_slots_that_are_not_there_are_nan(slot: int, device: str) -> None:
    kv = make_kv([100, 100], 2, 64, BF16, device)
    slots = torch.tensor([slot, 1], dtype=torch.int32, device=device)
    out = decode_attention(queries(2, 2, 4, 64, BF16, device), kv, slots=slots)
    assert out[0].isnan().all() and out[1].isfinite().all()
    counts = torch.tensor([3, -1], dtype=torch.int32, device=device)
    out = decode_attention(queries(2, 2, 4, 64, BF16, device), kv, counts=counts)
    assert out.isnan().all()
