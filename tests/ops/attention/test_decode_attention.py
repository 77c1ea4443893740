"""decode_attention: numbers against the reference, and bits that depend on nothing else."""

import math
from typing import Any

import pytest
import torch
from kv_cases import assert_attends, make_kv, queries
from samples import BF16, F16, F32
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
