"""append_and_attend_: all bits are those of rope_append_ and then decode_attention."""

import math
import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from kv_cases import make_kv, on_cpu
from samples import BF16, F16, F32
from torch import Tensor

from deepspeed_ext.ops import (
    PagedKV,
    append_and_attend_,
    append_and_attend_ref_,
    decode_attention,
    rope_append_,
    rope_frequencies,
)
from deepspeed_ext.ops.attention.append_and_attend import _OPS

INT8, FP8 = torch.int8, torch.float8_e4m3fn
STORED = [F32, BF16, F16, INT8, FP8]
ATTENDING = ("alibi_slopes", "sinks", "window", "softcap", "scale", "slots", "counts")


def operands(
    batch: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as slices of one projection."""
    random = torch.Generator().manual_seed(heads)
    shape = (batch, 1, heads + 2 * kv_heads, width)
    packed = torch.randn(shape, generator=random).to(dtype).to(device)
    return packed.split([heads, kv_heads, kv_heads], 2)


def copied(kv: PagedKV) -> PagedKV:
    return PagedKV(*(t if t is None else t.clone() for t in kv))


def assert_same_bits(name: str, got: Tensor | None, want: Tensor | None) -> None:
    if got is not None and want is not None:
        bits = [t.contiguous().view(torch.uint8) for t in (got, want)]
        assert torch.equal(*bits), name


def in_turn(
    q: Tensor, k: Tensor, v: Tensor, kv: PagedKV, *args: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    attending = {n: options[n] for n in ATTENDING if n in options}
    appending = {n: o for n, o in options.items() if n not in ATTENDING[:-2]}
    appending["scale"] = appending.pop("rotation_scale", 1.0)
    turned = q.clone()
    rope_append_(turned, k, v, kv, *args, **appending)
    found = decode_attention(turned, kv, return_lse=True, **attending)
    assert isinstance(found, tuple)
    return found


def assert_as_in_turn(
    q: Tensor, k: Tensor, v: Tensor, kv: PagedKV, *args: Any, **options: Any
) -> None:
    """Compare results and the whole cache."""
    other, before = copied(kv), q.clone()
    want = in_turn(q, k, v, other, *args, **options)
    got = append_and_attend_(q, k, v, kv, *args, return_lse=True, **options)
    for name, mine, others in zip(("out", "lse"), got, want, strict=True):
        assert_same_bits(name, mine, others)
    for name in PagedKV._fields:
        assert_same_bits(name, getattr(kv, name), getattr(other, name))
    assert_same_bits("q", q, before)


def dtypes_of(stored: torch.dtype) -> tuple[torch.dtype, ...]:
    return (F16, BF16) if stored.itemsize == 1 else (stored,)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("width", [1, 7, 64, 80, 96, 128, 136, 192, 256])
def test_widths(width: int, stored: torch.dtype, device: str) -> None:
    frequencies = rope_frequencies(max(2, width // 2 * 2))[: width // 2].to(device)
    for dtype in dtypes_of(stored):
        kv = make_kv([3, 300, 65, 64], 2, width, stored, device)
        assert_as_in_turn(*operands(4, 6, 2, width, dtype, device), kv, frequencies)
        kv = make_kv([1], 1, width, stored, device)
        assert_as_in_turn(*operands(1, 1, 1, width, dtype, device), kv, frequencies)


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_all_lengths(stored: torch.dtype, device: str) -> None:
    """So that the new token is the first and the last of a page, and of a chunk."""
    lengths = list(range(1, 601))
    kv = make_kv(lengths, 1, 64, stored, device)
    qkv = operands(600, 4, 1, 64, dtypes_of(stored)[-1], device)
    assert_as_in_turn(*qkv, kv, rope_frequencies(64).to(device))


@pytest.mark.parametrize("stored", [BF16, INT8], ids=str)
@pytest.mark.parametrize("length", [1, 64, 65, 256, 257, 320, 1023, 1025, 2100, 4097, 16384])
def test_one_slot(length: int, stored: torch.dtype, device: str) -> None:
    frequencies = rope_frequencies(128).to(device)
    for capacity in (0, 70, 256, 400):  # pages: more blocks share them
        if 0 < capacity < length / 64:
            continue
        kv = make_kv([length], 2, 128, stored, device, capacity=capacity)
        assert_as_in_turn(*operands(1, 8, 2, 128, BF16, device), kv, frequencies)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 9, 16, 20])
@pytest.mark.parametrize("stored", [BF16, FP8], ids=str)
def test_groups(stored: torch.dtype, group: int, device: str) -> None:
    kv = make_kv([300, 7, 600], 2, 64, stored, device)
    qkv = operands(3, 2 * group, 2, 64, BF16, device)
    assert_as_in_turn(*qkv, kv, rope_frequencies(64).to(device))


OPTIONS: dict[str, Any] = {  # for 4 slots, 4 heads of 64
    "interleaved": True,
    "rotation_scale": 0.5,
    "q_weight": lambda: torch.linspace(0.5, 1.5, 64, dtype=BF16),
    "k_weight": lambda: torch.linspace(-0.5, 1.5, 64),
    "weight_offset": 1.0,
    "scale": 0.5,
    "window": 70,
    "softcap": 2.0,
    "alibi_slopes": lambda: torch.tensor([0.5, 0.25, 0.01, 0.0]),
    "sinks": lambda: torch.tensor([1.0, -3.0, 5.0, -math.inf]),
    "slots": lambda: torch.tensor([2, -1, 0, 3], dtype=torch.int32),
    "counts": lambda: torch.tensor([1, 0, 0, 1], dtype=torch.int32),
}


def option(name: str, device: str) -> Any:
    value = OPTIONS[name]
    return value().to(device) if callable(value) else value


@pytest.mark.parametrize("names", [*((n,) for n in OPTIONS), *combinations(OPTIONS, 2)], ids=str)
@pytest.mark.parametrize("stored", [BF16, INT8], ids=str)
def test_options(stored: torch.dtype, names: tuple[str, ...], device: str) -> None:
    kv = make_kv([300, 7, 600, 64], 2, 64, stored, device)
    qkv = operands(4, 4, 2, 64, BF16, device)
    options = {name: option(name, device) for name in names}
    assert_as_in_turn(*qkv, kv, rope_frequencies(64).to(device), **options)


@pytest.mark.parametrize("pairs", [0, 1, 20, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rotations(dtype: torch.dtype, pairs: int, device: str) -> None:
    frequencies = rope_frequencies(64)[:pairs].to(dtype).to(device)
    if pairs == 20:
        frequencies[3] = math.inf
    for interleaved in (False, True):
        kv = make_kv([300, 7], 2, 64, BF16, device)
        qkv = operands(2, 8, 2, 64, BF16, device)
        assert_as_in_turn(*qkv, kv, frequencies, interleaved=interleaved)
    assert_as_in_turn(*qkv, kv)


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 256, 257, 10_000])
@pytest.mark.parametrize("stored", [BF16, FP8], ids=str)
def test_windows(stored: torch.dtype, window: int, device: str) -> None:
    kv = make_kv([700, 3, 320, 257], 1, 64, stored, device)
    assert_as_in_turn(*operands(4, 8, 1, 64, BF16, device), kv, window=window)


@pytest.mark.parametrize("stored", [BF16, INT8, FP8], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, 1e-38])
def test_extremes(value: float, stored: torch.dtype, device: str) -> None:
    """In the key, the value, or the query of one row: the others have nothing of it."""
    for which in range(3):
        kv = make_kv([300, 64, 65], 2, 64, stored, device)
        qkv = [t.clone() for t in operands(3, 4, 2, 64, BF16, device)]
        qkv[which][1, 0, 1, :] = 0
        qkv[which][1, 0, 1, 5] = value
        assert_as_in_turn(qkv[0], qkv[1], qkv[2], kv, rope_frequencies(64).to(device))


@pytest.mark.parametrize("mixture", [(F32, BF16), (BF16, F32), (F16, BF16), (BF16, F16)], ids=str)
def test_mixtures(mixture: tuple[torch.dtype, torch.dtype], device: str) -> None:
    """Of q and what is stored; of q, and k and v."""
    q, k, v = operands(2, 4, 2, 64, mixture[0], device)
    kv = make_kv([100, 300], 2, 64, mixture[1], device)
    assert_as_in_turn(q, k, v, kv)
    kv = make_kv([100, 300], 2, 64, mixture[0], device)
    assert_as_in_turn(q, k.to(mixture[1]), v, kv)
    assert_as_in_turn(q, k, v.to(mixture[1]), kv)


@pytest.mark.parametrize("stored", [F32, BF16], ids=str)
def test_layouts(stored: torch.dtype, device: str) -> None:
    """Of no element in one piece, from an odd element, and expanded."""
    q, k, v = operands(2, 4, 2, 64, stored, device)
    for change in (
        lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
        lambda t: torch.cat([t[..., :1], t], -1)[..., 1:],
        lambda t: t[:1].expand_as(t),
    ):
        kv = make_kv([100, 300], 2, 64, stored, device)
        assert_as_in_turn(change(q), change(k), change(v), kv)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("slots", [1, 3, 40])
def test_the_capacity_makes_no_difference(slots: int, stored: torch.dtype, device: str) -> None:
    """As many kernels as it takes, and as many blocks."""
    lengths = [(37 * i + 500) % 700 + 1 for i in range(slots)]
    qkv = operands(slots, 16, 2, 64, dtypes_of(stored)[-1], device)
    found = []
    for capacity in (11, 40, 100, 140, 600, 6000):
        kv = make_kv(lengths, 2, 64, stored, device, capacity=capacity)
        out, lse = append_and_attend_(*qkv, kv, return_lse=True)
        again, again_lse = decode_attention(qkv[0], kv, return_lse=True)
        found.append([out, lse, again, again_lse, kv.keys, kv.values])
    for each in found[1:]:
        for got, want in zip(each, found[0], strict=True):
            assert_same_bits("capacity", got, want)


@pytest.mark.parametrize("stored", [BF16, INT8], ids=str)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_few_long_ones_among_many(width: int, stored: torch.dtype, device: str) -> None:
    """So that a block has all of a slot, which may be many chunks, or but one."""
    for capacity in (32, 33, 48, 64):  # pages: up to so many that a block has not all
        lengths = [capacity * 64, 1, 1100, 257, 2047, 1793] + [3] * 65
        kv = make_kv(lengths, 2, width, stored, device, capacity=capacity)
        assert_as_in_turn(*operands(len(lengths), 6, 2, width, BF16, device), kv)


@pytest.mark.parametrize("shape", [(0, 1, 4, 64), (2, 1, 0, 64)])
def test_nothing(shape: tuple[int, ...], device: str) -> None:
    """Without queries, what is to be appended is."""
    kv = make_kv([5] * shape[0], 2, 64, BF16, device)
    q, k, v = operands(shape[0], shape[2], 2, 64, BF16, device)
    assert_as_in_turn(q, k, v, kv)


WRONG: dict[str, Callable[[PagedKV], None]] = {
    "length beyond the table": lambda kv: kv.lengths.__setitem__(1, 10_000),
    "length below 0": lambda kv: kv.lengths.__setitem__(1, -3),
    "no length, as a free slot": lambda kv: kv.lengths.__setitem__(1, 0),
    "page beyond": lambda kv: kv.table.__setitem__((1, 4), 10_000),
    "page behind the last": lambda kv: kv.table.__setitem__((1, 4), len(kv.keys)),
    "page below": lambda kv: kv.table.__setitem__((1, 4), -1),
    "an earlier page": lambda kv: kv.table.__setitem__((1, 0), -7),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("stored", [F32, BF16, FP8], ids=str)
def test_what_cannot_be(name: str, stored: torch.dtype, device: str) -> None:
    kv = make_kv([100, 300, 100], 2, 64, stored, device)
    WRONG[name](kv)
    before = copied(kv)
    q, k, v = operands(3, 4, 2, 64, dtypes_of(stored)[-1], device)
    assert_as_in_turn(q, k, v, kv)
    assert int(kv.violations) == (name != "an earlier page")
    out = append_and_attend_(q, k, v, before)
    assert isinstance(out, Tensor)
    assert out[1].isnan().all() and out[::2].isfinite().all()


@pytest.mark.parametrize("slot", [3, -2, 2**31 - 1])
def test_slots_that_are_not_there(slot: int, device: str) -> None:
    kv = make_kv([100, 300, 100], 2, 64, BF16, device)
    slots = torch.tensor([slot, 1], dtype=torch.int32, device=device)
    assert_as_in_turn(*operands(2, 4, 2, 64, BF16, device), kv, slots=slots)
    assert int(kv.violations) == 1


def test_numbers(device: str) -> None:
    """Beside the reference."""
    kv = make_kv([100, 300, 65], 2, 64, F32, device)
    q, k, v = operands(3, 4, 2, 64, F32, device)
    frequencies, weight = rope_frequencies(64), torch.linspace(0.5, 1.5, 64)
    options: dict[str, Any] = dict(eps=0.1, rotation_scale=2.0, softcap=3.0, window=90)
    wide = on_cpu(copied(kv))
    want = append_and_attend_ref_(
        q.cpu(), k.cpu(), v.cpu(), wide, frequencies, q_weight=weight, k_weight=weight, **options
    )
    weight = weight.to(device)
    got = append_and_attend_(
        q, k, v, kv, frequencies.to(device), q_weight=weight, k_weight=weight, **options
    )
    assert isinstance(got, Tensor) and isinstance(want, Tensor)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", [BF16, INT8, FP8], ids=str)
def test_a_graph_looks_at_lengths_when_it_runs(stored: torch.dtype, cuda: str) -> None:
    """Kernels of a chain begin before what changes lengths has ended: three layers, 20 steps."""
    layers = [make_kv([600] * 3, 2, 128, stored, cuda, seed=i) for i in range(3)]
    lengths = torch.tensor([250, 60, 511], dtype=torch.int32, device=cuda)
    layers = [kv._replace(lengths=lengths) for kv in layers]
    q, k, v = (t.clone() for t in operands(3, 8, 2, 128, BF16, cuda))
    frequencies = rope_frequencies(128).to(cuda)
    others = [copied(kv) for kv in layers]

    def step() -> Tensor:
        lengths.add_(1)
        x = q
        for kv in layers:
            mixed = append_and_attend_(x, k, v, kv, frequencies)
            assert isinstance(mixed, Tensor)
            x = mixed
        return x

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    lengths.sub_(1)
    for kv, other in zip(layers, others, strict=True):  # as the warm-up was not
        for name in ("keys", "values", "key_scales", "value_scales"):
            if getattr(kv, name) is not None:
                getattr(kv, name).copy_(getattr(other, name))
    for _ in range(20):
        graph.replay()
        x = q
        for other in others:
            x, _ = in_turn(x, k, v, other._replace(lengths=lengths), frequencies)
        assert_same_bits("out", out, x)
    for kv, other in zip(layers, others, strict=True):
        assert_same_bits("keys", kv.keys, other.keys)
        assert_same_bits("values", kv.values, other.values)


# What torch is promised, and what is refused


@pytest.mark.parametrize("stored", [F32, BF16, INT8, FP8], ids=str)
def test_opcheck(stored: torch.dtype, device: str) -> None:
    kv = make_kv([100, 70], 2, 32, stored, device)
    q, k, v = operands(2, 4, 2, 32, F32, device)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    if stored.itemsize == 1:  # as of the other ops
        tests = tests[1:]
    kind = {INT8: "int8", FP8: "fp8"}.get(stored, "")
    checked = torch.library.opcheck(
        _OPS[kind],
        (q, k, v, kv.keys, kv.values, kv.violations, kv.key_scales, kv.value_scales, kv.table,
         kv.lengths, None, None, rope_frequencies(32).to(device), None, None,
         torch.ones(4, device=device), None),
        dict(interleaved=False, rotation_scale=1.0, eps=1e-6, weight_offset=0.0, scale=0.5,
             window=0, softcap=0.0),
        test_utils=tests,
    )  # fmt: skip
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("stored", [F32, BF16, INT8, FP8], ids=str)
def test_can_be_compiled(stored: torch.dtype, device: str) -> None:
    frequencies = rope_frequencies(32).to(device)

    def step(q: Tensor, k: Tensor, v: Tensor, kv: PagedKV) -> Tensor:
        out = append_and_attend_(q * 2, k, v, kv, frequencies, window=40)
        assert isinstance(out, Tensor)
        return out.sin()

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([100, 70], [9, 70, 64]):
        caches = [make_kv(lengths, 2, 32, stored, device) for _ in range(2)]
        qkv = operands(len(lengths), 4, 2, 32, BF16, device)
        with torch.no_grad():
            assert_same_bits("out", compiled(*qkv, caches[0]), step(*qkv, caches[1]))
        for mine, other in zip(*caches, strict=True):
            assert_same_bits("cache", mine, other)


REFUSED: dict[str, dict[str, Any]] = {
    "q has shape [2, 4, 32], expected [batch, tokens, heads, head_dim]":
        dict(q=torch.ones(2, 4, 32)),
    "q has 3 tokens for each slot, expected 1":
        dict(q=torch.ones(2, 3, 4, 32), k=torch.ones(2, 3, 2, 32), v=torch.ones(2, 3, 2, 32)),
    "q has 3 heads, expected a multiple of 2, the heads of keys": dict(q=torch.ones(2, 1, 3, 32)),
    "k has shape [2, 1, 1, 32], expected [2, 1, 2, 32]": dict(k=torch.ones(2, 1, 1, 32)),
    "rotation_scale is inf, expected a finite float32": dict(rotation_scale=math.inf),
    "scale is nan, expected a finite float32": dict(scale=math.nan),
    "eps is -1, expected 0 or more": dict(eps=-1.0),
    "window is -1, expected 0 or more": dict(window=-1),
    "sinks has shape [3], expected [4], the heads of q": dict(sinks=torch.ones(3)),
    "q_weight has shape [31], expected [32]": dict(q_weight=torch.ones(31)),
    "counts has shape [3], expected [2], the size of the batch":
        dict(counts=torch.ones(3, dtype=torch.int32)),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    """And writes nothing."""
    kv = make_kv([100, 70], 2, 32, F32, "cpu")
    q, k, v = operands(2, 4, 2, 32, F32, "cpu")
    append_and_attend_(q, k, v, kv)  # loads the library, so that it is the one that refuses
    before = copied(kv)
    arguments = dict(q=q + 1, k=k + 1, v=v + 1) | REFUSED[text]
    with pytest.raises(ValueError, match=rf"^append_and_attend_: {re.escape(text)}$"):
        append_and_attend_(kv=kv, **arguments)
    assert_same_bits("keys", kv.keys, before.keys)
    assert_same_bits("values", kv.values, before.values)


def test_writes_are_counted_and_gradients_refused(device: str) -> None:
    kv = make_kv([100, 70], 2, 32, F32, device)
    q, k, v = operands(2, 4, 2, 32, F32, device)
    versions = [t._version for t in (q, kv.keys, kv.values)]
    append_and_attend_(q, k, v, kv)
    now = [t._version for t in (q, kv.keys, kv.values)]
    assert now == [versions[0], versions[1] + 1, versions[2] + 1]
    with pytest.raises(RuntimeError, match="append_and_attend_: k requires a gradient"):
        append_and_attend_(q, k.clone().requires_grad_(), v, kv)
