"""rope_append_: numbers against the reference and rope, codes, and where nothing is written."""

import math
from typing import Any

import pytest
import torch
from kv_cases import ROUNDING, make_kv
from samples import BF16, DTYPES, F16, F32
from tolerance import assert_within
from torch import Tensor

from deepspeed_ext.ops import PagedKV, rope, rope_append_, rope_append_ref_, rope_frequencies

INT8, FP8 = torch.int8, torch.float8_e4m3fn
LENGTHS = [5, 300, 64]


def operands(
    tokens: int, width: int, dtype: torch.dtype, device: str, batch: int = 3
) -> list[Tensor]:
    random = torch.Generator().manual_seed(tokens)
    shapes = [(batch, tokens, heads, width) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=random).to(dtype).to(device) for shape in shapes]


def appended(q: Tensor, k: Tensor, v: Tensor, kv: PagedKV, *args: Any, **options: Any) -> Tensor:
    turned = q.clone()
    rope_append_(turned, k, v, kv, *args, **options)
    return turned


def wide(kv: PagedKV) -> PagedKV:
    """The same on the CPU, with floats or codes in float64."""
    there = [t if t is None else t.cpu().clone() for t in kv]
    codes = there[0].dtype
    there[0], there[1] = (there[i].double() for i in range(2))
    for i in (5, 6):
        there[i] = None if there[i] is None else there[i].double()
    assert codes is not None
    return PagedKV(*there)


def assert_right(q: Tensor, k: Tensor, v: Tensor, kv: PagedKV, *args: Any, **options: Any) -> None:
    """Compare q and the whole cache, in which nothing else may have changed."""
    before, want = wide(kv), q.cpu().double()
    there = [a.cpu() for a in args]
    on_host = {n: o.cpu() if isinstance(o, Tensor) else o for n, o in options.items()}
    rope_append_ref_(want, k.cpu(), v.cpu(), before, *there, **on_host)
    got = appended(q, k, v, kv, *args, **options)
    size = 1 + want.abs().amax(-1, keepdim=True)
    assert_within("q", got.cpu(), want, 30 * ROUNDING * size.expand_as(want))
    for name in ("keys", "values"):
        after, expected = getattr(kv, name).cpu(), getattr(before, name)
        same = after.double().isnan() & expected.isnan()
        size = 1 + expected.nan_to_num().abs().amax(-1, keepdim=True).expand_as(expected)
        assert_within(
            name,
            after.masked_fill(same, 0),
            expected.masked_fill(same, 0),
            (30 * ROUNDING * size),
        )
    assert int(kv.violations) == 0


@pytest.mark.parametrize("width", [1, 7, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_values(dtype: torch.dtype, width: int, tokens: int, device: str) -> None:
    kv = make_kv([max(tokens, length) for length in LENGTHS], 2, width, dtype, device)
    q, k, v = operands(tokens, width, dtype, device)
    frequencies = rope_frequencies(max(2, width // 2 * 2))[: width // 2].to(device)
    assert_right(q, k, v, kv, frequencies)
    assert_right(q, k, v, kv, frequencies[: width // 4], interleaved=True, scale=0.5)
    weights = [torch.linspace(0.5, 1.5, width, device=device).to(dtype) for _ in range(2)]
    assert_right(q, k, v, kv, frequencies, q_weight=weights[0], k_weight=weights[1])
    assert_right(q, k, v, kv, k_weight=weights[1], weight_offset=1.0, eps=0.1)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_turns_as_rope_does_bit_for_bit(
    dtype: torch.dtype, interleaved: bool, device: str
) -> None:
    kv = make_kv([9, 5000, 70], 2, 80, dtype, device)
    q, k, v = operands(3, 80, dtype, device)
    frequencies = rope_frequencies(64, base=500000.0).to(device)
    positions = (kv.lengths[:, None] - 3 + torch.arange(3, device=device)).long()
    want = rope(q, k, positions, frequencies, interleaved=interleaved)
    got = appended(q, k, v, kv, frequencies, interleaved=interleaved)
    assert torch.equal(got, want[0])
    for row in range(3):
        for token in range(3):
            at = int(positions[row, token])
            page = int(kv.table[row, at // 64])
            assert torch.equal(kv.keys[page, :, at % 64], want[1][row, token])
            assert torch.equal(kv.values[page, :, at % 64], v[row, token])


def test_mixtures_and_layouts(device: str) -> None:
    kv = make_kv(LENGTHS, 2, 32, F16, device)
    random = torch.Generator().manual_seed(0)
    packed = torch.randn((3, 4, 8, 32), generator=random).to(BF16).to(device)
    q, k, v = packed.split([4, 2, 2], 2)
    frequencies = rope_frequencies(32).float().to(device)
    k = torch.stack([k, k], -1).flatten(-2)[..., ::2]  # not in one piece
    assert_right(q.float(), k, v.half(), kv, frequencies)
    want = appended(q, k, v, kv, frequencies)
    rope_append_(q, k, v, kv, frequencies)
    assert torch.equal(packed[:, :, :4], want)


@pytest.mark.parametrize("dtype", [F32, INT8], ids=str)
def test_ragged(dtype: torch.dtype, device: str) -> None:
    """What is behind a row's tokens is left alone, as are rows of no slot."""
    kv = make_kv([5, 300, 64, 0], 2, 32, dtype, device)
    q, k, v = operands(70, 32, F32, device, batch=4)
    slots = torch.tensor([2, -1, 1, 3], dtype=torch.int32, device=device)
    counts = torch.tensor([64, 70, 3, 0], dtype=torch.int32, device=device)
    frequencies = rope_frequencies(32).to(device)
    if dtype == F32:
        assert_right(q, k, v, kv, frequencies, slots=slots, counts=counts)
    got = appended(q, k, v, kv, frequencies, slots=slots, counts=counts)
    for row, count in enumerate([64, 0, 3, 0]):
        assert torch.equal(got[row, count:], q[row, count:])
        last = slice(max(count - 1, 0), count)
        assert not torch.equal(got[row, last], q[row, last]) or count == 0
    assert int(kv.violations) == 0


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("part", [1, 2], ids=["whole", "half"])  # of a head that turns
@pytest.mark.parametrize("stored", [BF16, INT8, FP8], ids=str)
@pytest.mark.parametrize("width", [64, 128, 136, 256])
def test_many_tokens_as_one_at_a_time(
    width: int, stored: torch.dtype, part: int, interleaved: bool, device: str
) -> None:
    """Of many heads, and the whole cache, bit for bit."""
    count, frequencies = 80, rope_frequencies(width // part // 2 * 2).to(device)
    random = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn((1, count, heads, width), generator=random).to(BF16).to(device)
        for heads in (12, 4, 4)
    )
    weight = torch.linspace(0.5, 1.5, width).to(device)
    options: dict[str, Any] = dict(q_weight=weight, k_weight=weight, interleaved=interleaved)
    kv, other = (make_kv([300], 4, width, stored, device) for _ in range(2))
    got = appended(q, k, v, kv, frequencies, **options)
    for i in range(count):
        other.lengths.fill_(300 - count + i + 1)
        one = (each[:, i : i + 1] for each in (q, k, v))
        want = appended(*one, other, frequencies, **options)
        assert torch.equal(got[:, i : i + 1].view(torch.int16), want.view(torch.int16)), i
    for name in ("keys", "values", "key_scales", "value_scales"):
        mine, others = getattr(kv, name), getattr(other, name)
        if mine is not None:
            mine, others = (t.contiguous().view(torch.uint8) for t in (mine, others))
            assert torch.equal(mine, others), name


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize("of_k", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 64, 128])
def test_codes(width: int, of_k: torch.dtype, dtype: torch.dtype, device: str) -> None:
    """Each is the nearest one to the element by the scale, which is that of the largest one."""
    kv = make_kv(LENGTHS, 2, width, dtype, device)
    q, k, v = operands(5, width, of_k, device)
    k = k * torch.linspace(1e-3, 1e3, 5, device=device).to(of_k)[:, None, None]
    rope_append_(q, k, v, kv)
    largest = 127 if dtype == INT8 else 448
    for row, length in enumerate(LENGTHS):
        for token in range(5):
            at = length - 5 + token
            place = int(kv.table[row, at // 64]), slice(None), at % 64
            for codes, scales, x in (
                (kv.keys, kv.key_scales, k),
                (kv.values, kv.value_scales, v),
            ):
                assert scales is not None
                elements = x[row, token].cpu().double()
                scale = scales[place].cpu().double()
                want = elements.abs().amax(-1) / largest
                assert torch.all((scale - want).abs() <= 2 * ROUNDING * want)
                got = codes[place].cpu().double()
                exact = elements / scale[:, None]
                step = 1.0 if dtype == INT8 else exact.abs().clamp(min=2.0**-6).log2().floor()
                half = 0.5 if dtype == INT8 else 2.0 ** (step - 4)
                assert torch.all((got - exact).abs() <= half * (1 + 1e-5) + 448 * 4 * ROUNDING)
                assert torch.all(got.abs().amax(-1) == largest)


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize(
    ("value", "scale"),
    [(0.0, 0.0), (1e-38, 0.0), (math.nan, math.nan), (math.inf, math.nan), (-math.inf, math.nan)],
)
def test_extreme_heads(dtype: torch.dtype, value: float, scale: float, device: str) -> None:
    kv = make_kv([5, 5, 5], 2, 64, dtype, device)
    q, k, v = operands(1, 64, F32, device)
    k[1, 0, 1] = 0.0
    k[1, 0, 1, 63] = value
    rope_append_(q, k, v, kv)
    place = int(kv.table[1, 0]), slice(None), 4
    assert kv.key_scales is not None
    got = kv.key_scales[place].tolist()
    assert got[0] > 0 and (got[1] == scale or (math.isnan(got[1]) and math.isnan(scale)))
    assert (kv.keys[place][1].float() == 0).all()


WRONG = {
    "length beyond the table": lambda kv: kv.lengths.__setitem__(1, 10_000),
    "length below 0": lambda kv: kv.lengths.__setitem__(1, -3),
    "no length, as a free slot": lambda kv: kv.lengths.__setitem__(1, 0),
    "page beyond": lambda kv: kv.table.__setitem__((1, 4), 10_000),
    "page behind the last": lambda kv: kv.table.__setitem__((1, 4), len(kv.keys)),
    "page below": lambda kv: kv.table.__setitem__((1, 4), -1),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("dtype", [F32, FP8], ids=str)
def test_nothing_is_written_where_nothing_can_be(
    name: str, dtype: torch.dtype, device: str
) -> None:
    kv = make_kv([100, 300, 100], 2, 64, dtype, device)
    q, k, v = operands(2, 64, F32, device)
    WRONG[name](kv)
    before = [t if t is None else t.clone() for t in kv]
    slots = torch.tensor([2, 1], dtype=torch.int32, device=device)
    rope_append_(q[:2], k[:2], v[:2], kv, slots=slots)
    assert int(kv.violations) == 1
    other = int(before[2][2, 1])  # the page of slot 2 that is written, rows 34 and 35
    for which in (0, 1):
        bits = [t[which].view(torch.uint8 if dtype == FP8 else torch.int32) for t in (kv, before)]
        changed = (bits[0] != bits[1]).any(-1).nonzero().tolist()
        assert changed == [[other, head, row] for head in range(2) for row in (34, 35)]


def test_a_written_tensor_counts_its_writes(device: str) -> None:
    kv = make_kv(LENGTHS, 2, 32, F32, device)
    q, k, v = operands(1, 32, F32, device)
    versions = [t._version for t in (q, kv.keys, kv.values)]
    rope_append_(q, k, v, kv)
    assert [t._version for t in (q, kv.keys, kv.values)] == [n + 1 for n in versions]
    q.requires_grad_()
    with pytest.raises(RuntimeError, match="rope_append_: q requires a gradient"):
        rope_append_(q, k, v, kv)
