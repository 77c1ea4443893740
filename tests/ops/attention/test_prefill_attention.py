"""prefill_attention: numbers against the reference, and bits that depend on nothing else."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from kv_cases import PAGE, assert_attends, make_kv, queries
from samples import BF16, F16, F32
from torch import Tensor

from deepspeed_ext.ops import PagedKV, prefill_attention

INT8, FP8 = torch.int8, torch.float8_e4m3fn


def assert_right(q: Tensor, kv: PagedKV, **options: Any) -> None:
    assert_attends(prefill_attention, q, kv, q.shape[-1], **options)


def counts_of(counts: list[int], device: str) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32, device=device)


@pytest.mark.parametrize("width", [1, 7, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [F32, BF16, F16, INT8, FP8], ids=str)
def test_widths(dtype: torch.dtype, width: int, device: str) -> None:
    """Strips that are full and others, from chunks that begin anywhere."""
    kv = make_kv([3, 300, 65], 2, width, dtype, device)
    counts = counts_of([3, 45, 45], device)
    for of_q in (F16, BF16) if dtype.itemsize == 1 else (dtype,):
        assert_right(queries(3, 45, 6, width, of_q, device), kv, counts=counts)


@pytest.mark.parametrize("dtype", [F32, BF16, INT8], ids=str)
def test_lengths(dtype: torch.dtype, device: str) -> None:
    """First chunks, whole and in pieces, and later ones."""
    lengths = [0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 512, 513]
    kv = make_kv(lengths, 1, 32, dtype, device)
    of_q = F32 if dtype == F32 else BF16
    for most in (64, 130):
        counts = counts_of([min(most, n) for n in lengths], device)
        assert_right(queries(14, most, 2, 32, of_q, device), kv, counts=counts)


@pytest.mark.parametrize("dtype", [F32, BF16, INT8], ids=str)
def test_long(dtype: torch.dtype, device: str) -> None:
    kv = make_kv([2000], 1, 128, dtype, device)
    assert_right(queries(1, 70, 4, 128, F32 if dtype == F32 else BF16, device), kv)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
def test_each_code_is_in_its_place(dtype: torch.dtype, width: int, device: str) -> None:
    """Of tokens that see themselves alone values are exact, and scores are elements of keys."""
    tokens, heads = 300, 2
    kv = make_kv([tokens], heads, width, dtype, device)
    random = torch.Generator().manual_seed(2)
    for stored in (kv.keys, kv.values):
        codes = torch.randint(0, 256, stored.shape, generator=random, dtype=torch.uint8)
        if dtype == FP8:
            codes[codes & 0x7F == 0x7F] = 0  # NaN
        stored.view(torch.uint8).copy_(codes)
    for scales in (kv.key_scales, kv.value_scales):
        assert scales is not None
        scales.copy_(2.0 ** torch.randint(-5, -2, scales.shape, generator=random))
    for of_q in (BF16, F16):
        q = torch.zeros((1, tokens, heads, width), dtype=of_q, device=device)
        columns = torch.arange(tokens, device=device) % width
        q[0, torch.arange(tokens, device=device), :, columns] = 1
        out, lse = prefill_attention(q, kv, window=1, scale=1.0, return_lse=True)
        places = kv.table[0].long()[torch.arange(tokens, device=device) // PAGE]
        rows = torch.arange(tokens, device=device) % PAGE
        assert kv.key_scales is not None and kv.value_scales is not None
        keys = kv.keys.double()[places, :, rows] * kv.key_scales[places, :, rows, None]
        values = kv.values.double()[places, :, rows] * kv.value_scales[places, :, rows, None]
        assert torch.equal(out[0].double(), values.to(of_q).double())
        want = keys[torch.arange(tokens, device=device), :, columns]
        assert torch.allclose(lse[0].double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
def test_more_strips_than_processors(dtype: torch.dtype, cuda: str) -> None:
    """Scales of every tile are its own, from one strip of a block to the next."""
    lengths = [45 + 29 * i % 700 for i in range(40)]
    kv = make_kv(lengths, 2, 64, dtype, cuda)
    for scales in (kv.key_scales, kv.value_scales):
        assert scales is not None
        scales.mul_(2.0 ** (torch.arange(len(scales), device=cuda) % 5)[:, None, None])
    assert_right(queries(40, 45, 6, 64, BF16, cuda), kv)


@pytest.mark.parametrize("heads", [1, 3, 8, 32])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_groups(dtype: torch.dtype, heads: int, device: str) -> None:
    kv = make_kv([200, 90], 1, 64, dtype, device)
    assert_right(queries(2, 33, heads, 64, dtype, device), kv)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_any_scale(dtype: torch.dtype, scale: float, device: str) -> None:
    kv = make_kv([100], 2, 64, dtype, device)
    q = queries(1, 70, 4, 64, dtype, device)
    if scale:
        assert_right(q, kv, scale=scale)
    out = prefill_attention(q, kv, scale=0.0)
    assert torch.equal(out, prefill_attention(torch.zeros_like(q), kv))


def test_pages_that_cannot_be_read_16_bytes_at_a_time(device: str) -> None:
    kv = make_kv([100, 300], 2, 64, BF16, device)
    odd = [torch.cat([t[..., :1], t], -1)[..., 1:] for t in (kv.keys, kv.values)]
    q = queries(2, 35, 4, 64, BF16, device)
    assert_right(q, kv._replace(keys=odd[0], values=odd[1]))


# Bits


@pytest.mark.parametrize(
    ("group", "dtype"), [(1, BF16), (3, F32), (3, BF16), (8, BF16), (4, INT8), (4, FP8)], ids=str
)
def test_alone_and_in_company(group: int, dtype: torch.dtype, device: str) -> None:
    """In another slot, with other pages and capacity, beside longer ones."""
    of_q = F32 if dtype == F32 else BF16
    kv = make_kv([400, 333, 64, 700], 2, 64, dtype, device, capacity=12)
    q = queries(4, 60, 2 * group, 64, of_q, device)
    options = dict(window=250, softcap=3.0, alibi_slopes=torch.rand(2 * group, device=device))
    want = prefill_attention(q, kv, return_lse=True, **options)
    order = torch.randperm(len(kv.keys), generator=torch.Generator().manual_seed(1)).to(device)
    moved = torch.argsort(order).int()
    table = torch.where(kv.table < 0, -1, moved[kv.table.clamp(min=0).long()])
    other = PagedKV(
        *(t[order] for t in (kv.keys, kv.values)),
        table[3:, :11].contiguous().int(),
        kv.lengths[3:],
        kv.violations,
        *(t[order] for t in (kv.key_scales, kv.value_scales) if t is not None),
    )
    got = prefill_attention(q[3:], other, return_lse=True, **options)
    again = prefill_attention(q, kv, return_lse=True, **options)
    for expected, each, repeated in zip(want, got, again, strict=True):
        assert torch.equal(each[0], expected[3])
        assert torch.equal(expected, repeated)


@pytest.mark.parametrize("dtype", [F32, BF16, INT8, FP8], ids=str)
@pytest.mark.parametrize("window", [0, 90])
def test_any_cut_of_a_prompt(dtype: torch.dtype, window: int, device: str) -> None:
    """Chunks of any size have the same bits as all at once; also tokens one by one."""
    length = 200
    kv = make_kv([length], 2, 64, dtype, device)
    q = queries(1, length, 6, 64, F32 if dtype == F32 else BF16, device)
    sinks = torch.linspace(-1, 1, 6, device=device)
    options = dict(window=window, sinks=sinks, return_lse=True)
    want, want_lse = prefill_attention(q, kv, **options)
    for cuts in ([0, 1, 2, 64, 69, 133, 199, 200], [0, 77, 78, 200]):
        for begin, end in pairwise(cuts):
            shorter = kv._replace(lengths=kv.lengths - (length - end))
            out, lse = prefill_attention(q[:, begin:end], shorter, **options)
            assert torch.equal(out, want[:, begin:end])
            assert torch.equal(lse, want_lse[:, begin:end])


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_seen_has_no_part(dtype: torch.dtype, value: float, device: str) -> None:
    """Also a later one of the new tokens, and one that is out of the window by now."""
    kv = make_kv([300], 1, 64, dtype, device)
    q = queries(1, 80, 3, 64, dtype, device)
    want = prefill_attention(q, kv, window=100)
    for i in (250, 130):  # tokens 220 to 299 are new: 31 first ones do not see the first one
        place = (kv.table[0, i // 64].item(), 0, i % 64)
        kv.values[place] = value
        kv.keys[place] = value
    got = prefill_attention(q, kv, window=100)
    fine = [i for i in range(80) if 130 + 100 <= 220 + i < 250]
    assert torch.equal(got[:, fine], want[:, fine])
    touched = [i for i in range(80) if i not in fine]
    assert got[:, touched].isnan().all() or value == -math.inf


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_one_value_is_in_its_own_column(dtype: torch.dtype, value: float, device: str) -> None:
    kv = make_kv([300], 1, 64, dtype, device)
    q = queries(1, 70, 3, 64, dtype, device)
    want = prefill_attention(q, kv)
    kv.values[kv.table[0, 4].item(), 0, 4, 7] = value  # token 260, number 30 of the new ones
    got = prefill_attention(q, kv)
    assert torch.equal(got[:, :30], want[:, :30])
    assert (got[:, 30:, :, 7] == value).all() or got[:, 30:, :, 7].isnan().all()
    got[:, 30:, :, 7] = want[:, 30:, :, 7]
    assert torch.equal(got, want)


def test_a_page_that_no_token_sees_may_be_anything(device: str) -> None:
    kv = make_kv([300], 2, 64, BF16, device)
    q = queries(1, 50, 4, 64, BF16, device)
    want = prefill_attention(q, kv, window=100)
    kv.table[0, :2] = -1  # tokens 250 to 299 see those from 151 on
    assert torch.equal(prefill_attention(q, kv, window=100), want)
