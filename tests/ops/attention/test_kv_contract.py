"""Ops on a cache of keys and values: what they refuse, torch's compiler, bits, self-checks."""

import hashlib
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import warm_python
from kv_cases import make_kv
from samples import BF16, F32
from torch import Tensor

from deepspeed_ext.ops import (
    PagedKV,
    decode_attention,
    prefill_attention,
    rope_append_,
    rope_frequencies,
)
from deepspeed_ext.ops.attention import self_checks
from deepspeed_ext.ops.attention.decode_attention import _OPS as DECODE_OPS
from deepspeed_ext.ops.attention.prefill_attention import _OPS as PREFILL_OPS
from deepspeed_ext.ops.attention.rope_append import _OPS as APPEND_OPS

STORED = [F32, BF16, torch.int8, torch.float8_e4m3fn]
Change = Callable[[Tensor, PagedKV], tuple[Tensor, PagedKV, dict[str, Any]]]


def operands(device: str = "cpu", stored: torch.dtype = F32) -> tuple[Tensor, PagedKV]:
    return torch.ones(2, 3, 4, 32, device=device), make_kv([100, 70], 2, 32, stored, device)


def of_kv(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda q, kv: (q, kv._replace(**{name: change(getattr(kv, name))}), {})


def of_q(change: Callable[[Tensor], Tensor]) -> Change:
    return lambda q, kv: (change(q), kv, {})


def with_options(**options: Any) -> Change:
    return lambda q, kv: (q, kv, options)


CACHE: dict[str, Change] = {  # what both ops refuse
    "keys has shape [7, 2, 64], expected [pages, heads, 64, head_dim]":
        of_kv("keys", lambda t: t[..., 0]),
    "keys has shape [7, 2, 32, 32], expected [pages, heads, 64, head_dim]":
        of_kv("keys", lambda t: t[:7, :, :32]),
    "values has shape [3, 2, 64, 32], expected [7, 2, 64, 32]": of_kv("values", lambda t: t[:3]),
    "values has strides [4096, 1, 64, 2], expected 1 for the last dimension":
        of_kv("values", lambda t: torch.empty(7, 64, 32, 2).permute(0, 3, 1, 2)),
    "values has strides [2048, 14336, 32, 1], expected [4096, 2048, 32, 1]":
        of_kv("values", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)),
    "values is bfloat16, expected float32": of_kv("values", lambda t: t.bfloat16()),
    "keys is float64, expected float32, bfloat16 or float16": of_kv("keys", lambda t: t.double()),
    "table is int64, expected int32": of_kv("table", lambda t: t.long()),
    "table has shape [3] and strides [1], expected 2 contiguous dimensions":
        of_kv("table", lambda t: t[0]),
    "table has shape [2, 2] and strides [3, 1], expected 2 contiguous dimensions":
        of_kv("table", lambda t: t[:, :2]),
    "lengths is float32, expected int32": of_kv("lengths", lambda t: t.float()),
    "lengths has shape [1], expected [2], as table says": of_kv("lengths", lambda t: t[:1]),
    "lengths is on meta, expected cpu": of_kv("lengths", lambda t: t.to("meta")),
    "the batch has 1 rows, expected 2, one for each slot; pass slots": of_q(lambda t: t[:1]),
    "slots has shape [3], expected [2], the size of the batch":
        with_options(slots=torch.zeros(3, dtype=torch.int32)),
    "slots is int64, expected int32": with_options(slots=torch.zeros(2).long()),
    "counts is bool, expected int32": with_options(counts=torch.zeros(2).bool()),
    "scale is inf, expected a finite float32": with_options(scale=float("inf")),
}  # fmt: skip
ATTENTION: dict[str, Change] = CACHE | {  # what both ops of attention refuse
    "q has shape [2, 3, 128], expected [batch, tokens, heads, head_dim]":
        of_q(lambda t: t.flatten(2)),
    "q has head_dim 16, expected 32, that of keys": of_q(lambda t: t[..., :16]),
    "q has 3 heads, expected a multiple of 2, the heads of keys": of_q(lambda t: t[:, :, :3]),
    "q is float64, expected float32, bfloat16 or float16": of_q(lambda t: t.double()),
    "keys has head_dim 257, expected 1 to 256": lambda q, kv: (
        torch.ones(2, 3, 4, 257), make_kv([9, 9], 2, 257, F32, "cpu"), {}),
    "alibi_slopes has shape [3], expected [4], the heads of q":
        with_options(alibi_slopes=torch.ones(3)),
    "sinks is bfloat16, expected float32": with_options(sinks=torch.ones(4).bfloat16()),
    "softcap is -1, expected 0, or a number over 1e-30": with_options(softcap=-1.0),
    "softcap is nan, expected a finite float32":
        with_options(softcap=float("nan")),
    "softcap is 1e-46, expected 0, or a number over 1e-30": with_options(softcap=1e-46),
    "window is -1, expected 0 or more": with_options(window=-1),
}  # fmt: skip
DECODE: dict[str, Change] = ATTENTION | {
    "q has 17 tokens for each slot, expected 1 to 16": of_q(lambda t: torch.ones(2, 17, 4, 32)),
    "q has 0 tokens for each slot, expected 1 to 16": of_q(lambda t: t[:, :0]),
}
PREFILL: dict[str, Change] = ATTENTION | {
    "q has 0 tokens for each slot, expected 1 to 16777216": of_q(lambda t: t[:, :0]),
    "q has 16777217 tokens for each slot, expected 1 to 16777216":
        of_q(lambda t: t[:, :1].expand(2, (1 << 24) + 1, 4, 32)),
}  # fmt: skip
APPEND: dict[str, Change] = CACHE | {
    "q has shape [2, 3, 128], expected [batch, tokens, heads, head_dim]":
        of_q(lambda t: t.flatten(2)),
    "q has strides [384, 128, 1, 4], expected 1 for the last dimension":
        of_q(lambda t: torch.ones(2, 3, 32, 4).transpose(2, 3)),
    "q has strides [0, 128, 32, 1] for shape [2, 3, 4, 32], expected no element to be another one":
        of_q(lambda t: t[:1].expand_as(t)),
    "k has shape [2, 3, 1, 32], expected [2, 3, 2, 32]":
        with_options(k=torch.ones(2, 3, 1, 32)),
    "v has shape [2, 1, 2, 32], expected [2, 3, 2, 32]":
        with_options(v=torch.ones(2, 1, 2, 32)),
    "k is int8, expected float32, bfloat16 or float16":
        with_options(k=torch.ones(2, 3, 2, 32).to(torch.int8)),
    "keys has head_dim 257, expected 1 to 256": lambda q, kv: (
        torch.ones(2, 3, 4, 257), make_kv([9, 9], 2, 257, F32, "cpu"), {}),
    "frequencies has shape [17], expected at most [16], half of head_dim":
        with_options(frequencies=torch.ones(17)),
    "frequencies is bfloat16, expected float64 or float32":
        with_options(frequencies=torch.ones(4).bfloat16()),
    "q_weight has shape [31], expected [32]": with_options(q_weight=torch.ones(31)),
    "k_weight is float64, expected float32, bfloat16 or float16":
        with_options(k_weight=torch.ones(32).double()),
    "violations is int64 of 1 elements, expected int32 of 1":
        of_kv("violations", lambda t: t.long()),
    "k is overlapping q, expected separate memory": lambda q, kv: (q, kv, dict(k=q[:, :, 2:])),
    "keys is overlapping q, expected separate memory": lambda q, kv: (
        kv.keys.view(-1)[: q.numel()].view(q.shape), kv, {}),
    "values is overlapping keys, expected separate memory": lambda q, kv: (
        q, kv._replace(values=kv.keys), {}),
    "eps is -1, expected 0 or more": with_options(eps=-1.0),
    "weight_offset is nan, expected a finite float32": with_options(weight_offset=float("nan")),
}  # fmt: skip


@pytest.mark.parametrize("text", DECODE)
def test_decode_refuses(text: str) -> None:
    q, kv, options = DECODE[text](*operands())
    decode_attention(*operands())  # loads the library, so that it is the one that refuses
    with pytest.raises(ValueError, match=rf"^decode_attention: {re.escape(text)}$"):
        decode_attention(q, kv, **options)


@pytest.mark.parametrize("text", PREFILL)
def test_prefill_refuses(text: str) -> None:
    q, kv, options = PREFILL[text](*operands())
    prefill_attention(*operands())
    with pytest.raises(ValueError, match=rf"^prefill_attention: {re.escape(text)}$"):
        prefill_attention(q, kv, **options)


def append(q: Tensor, kv: PagedKV, **options: Any) -> None:
    shape = (*q.shape[:2], kv.keys.shape[1], q.shape[-1])
    k, v = (options.pop(n, torch.ones(shape, device=q.device)) for n in "kv")
    rope_append_(q, k, v, kv, options.pop("frequencies", None), **options)


@pytest.mark.parametrize("text", APPEND)
def test_append_refuses(text: str) -> None:
    """And writes nothing."""
    append(*operands())
    q, kv, options = APPEND[text](*operands())
    before = [kv.keys.clone(), kv.values.clone()]
    with pytest.raises(ValueError, match=rf"^rope_append_: {re.escape(text)}$"):
        append(q, kv, **options)
    for got, want in zip((kv.keys, kv.values), before, strict=True):
        assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))


def test_codes_have_scales() -> None:
    q, kv = operands(stored=torch.int8)
    decode_attention(q, kv)
    for change, text in (
        (dict(key_scales=None), "key_scales is None, expected the scales of codes"),
        (
            dict(value_scales=torch.ones(7, 2, 63)),
            "value_scales has shape [7, 2, 63] and strides [126, 63, 1], expected contiguous"
            " [7, 2, 64]",
        ),
        (dict(values=kv.values.float()), "values is float32, expected int8"),
    ):
        with pytest.raises(ValueError, match=rf"^decode_attention: {re.escape(text)}$"):
            decode_attention(q, kv._replace(**change))  # type: ignore[arg-type]


def test_a_gradient_is_refused(device: str) -> None:
    q, kv = operands(device)
    for op in (decode_attention, prefill_attention):
        out = op(q.requires_grad_(), kv)
        assert isinstance(out, Tensor)
        with pytest.raises(RuntimeError, match=f"{op.__name__}: the gradient of q is wanted"):
            out.sum().backward()


# What torch is promised


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_opcheck(stored: torch.dtype, device: str) -> None:
    q, kv = operands(device, stored)
    kind = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(stored, "")
    counts = torch.tensor([3, 2], dtype=torch.int32, device=device)
    of_kv = (kv.keys, kv.values, kv.table, kv.lengths, kv.key_scales, kv.value_scales)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    if stored.itemsize == 1:  # the check of a schema multiplies by what torch cannot do with codes
        tests = tests[1:]
    for ops in (DECODE_OPS, PREFILL_OPS):
        checked = torch.library.opcheck(
            ops.of_kind[kind],
            (q, *of_kv, None, counts, torch.ones(4, device=device), None),
            dict(scale=0.5, window=0, softcap=0.0),
            test_utils=tests,
        )
        assert set(checked.values()) == {"SUCCESS"}
    k, v = (torch.ones(2, 3, 2, 32, device=device) for _ in range(2))
    checked = torch.library.opcheck(
        APPEND_OPS[kind],
        (q, k, v, kv.keys, kv.values, kv.violations, kv.key_scales, kv.value_scales, kv.table,
         kv.lengths, None, counts, rope_frequencies(32).to(device), None, None),
        dict(interleaved=False, scale=1.0, eps=1e-6, weight_offset=0.0),
        test_utils=tests,
    )  # fmt: skip
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_can_be_compiled(stored: torch.dtype, device: str) -> None:
    """A step in one graph, with dynamic sizes, and with the same bits in results and cache."""
    frequencies = rope_frequencies(32).to(device)

    def step(q: Tensor, k: Tensor, v: Tensor, kv: PagedKV) -> Tensor:
        q = q * 2
        rope_append_(q, k, v, kv, frequencies)
        out, other = decode_attention(q, kv), prefill_attention(q, kv)
        assert isinstance(out, Tensor) and isinstance(other, Tensor)
        return out.sin() + other

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens, lengths in ((1, [100, 70]), (3, [9, 70, 64])):
        made = [
            torch.randn((len(lengths), tokens, n, 32), device=device).bfloat16() for n in (4, 2, 2)
        ]
        caches = [make_kv(lengths, 2, 32, stored, device) for _ in range(2)]
        with torch.no_grad():
            got, want = compiled(*made, caches[0]), step(*made, caches[1])
        assert torch.equal(got, want)
        for mine, other in zip(*caches, strict=True):
            if mine is not None:
                bits = [t.contiguous().view(torch.uint8) for t in (mine, other)]
                assert torch.equal(*bits)


# Bits


def digest() -> str:
    """Of results and caches of all kinds."""
    found = hashlib.sha256()
    for stored in (*STORED, torch.float16):
        for width in (7, 64, 80):
            kv = make_kv([300, 5, 70], 2, width, stored, "cpu")
            random = torch.Generator().manual_seed(width)
            q, k, v = (torch.randn((3, 5, n, width), generator=random) for n in (6, 2, 2))
            weight, slopes = torch.rand(width, generator=random), torch.rand(6, generator=random)
            frequencies = rope_frequencies(64)[: width // 2]
            rope_append_(q, k, v, kv, frequencies, q_weight=weight, k_weight=weight)
            options = dict(softcap=3.0, alibi_slopes=slopes, sinks=slopes, window=200)
            results = [
                *decode_attention(q, kv, return_lse=True),
                *decode_attention(q[:, :3].bfloat16(), kv, return_lse=True, **options),
                *prefill_attention(q, kv, return_lse=True),
                *prefill_attention(q[:, :3].half(), kv, return_lse=True, **options),
            ]
            for tensor in (*results, q, kv.keys, kv.values, kv.key_scales, kv.value_scales):
                if tensor is not None:
                    bits = tensor.contiguous().view(torch.uint8)
                    if tensor.is_floating_point() and tensor.element_size() > 1:
                        bits = tensor.nan_to_num(7).contiguous().view(torch.uint8)
                    found.update(bits.numpy().tobytes())
    return found.hexdigest()


def test_every_isa(isa: str) -> None:
    done = warm_python.run(__file__, env=os.environ | {"DSX_FORCE_ISA": isa})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest()


def test_any_number_of_threads() -> None:
    threads = torch.get_num_threads()
    try:
        found = set()
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.add(digest())
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


@pytest.mark.parametrize("op", ["append_and_attend_", "decode_attention", "prefill_attention"])
@pytest.mark.parametrize("name", ["kv_cache", "kv_cache_int8", "kv_cache_fp8"])
def test_self_checks(name: str, op: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    getattr(self_checks, name)(device)
    right = getattr(self_checks.ops, op)
    changed: Any = lambda *args, **options: right(*args, **options) * 1.05  # noqa: E731
    monkeypatch.setattr(self_checks.ops, op, changed)
    with pytest.raises(RuntimeError, match=rf"^{op}: out on .* has .*, expected "):
        getattr(self_checks, name)(device)


if __name__ == "__main__":
    print(digest())
