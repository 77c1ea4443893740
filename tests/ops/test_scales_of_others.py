"""Scales that ours never makes, as files and caches of others may have them: the formula holds."""

from itertools import product

import pytest
import torch
from kv_cases import assert_attends, make_kv, queries
from quantized_linear_cases import WEIGHTS, arguments, assert_right, weight_of
from samples import BF16, F16, F32, make
from torch import Tensor

from deepspeed_ext.ops import (
    PackedWeight,
    decode_attention,
    dequantize,
    dequantize_ref,
    prefill_attention,
    quantized_linear,
    unpack_weight,
    unpack_weight_ref,
)
from deepspeed_ext.ops.quantization.formats import FORMATS

SMALL = (0.0, -0.0, 2.0**-149, -(2.0**-149), 1e-40, -3e-39, 2.0**-126)
FINITE = (*SMALL, -0.5, -1.0, 1.0, 3e38, -3e38)
ALL = (*FINITE, torch.inf, -torch.inf, torch.nan)


def assert_same(got: Tensor, want: Tensor) -> None:
    """Compare element by element with what is rounded once to the dtype; NaN is NaN."""
    got, want = got.cpu(), want.to(got.dtype)
    wrong = ~((got == want) | (got.isnan() & want.isnan()))
    assert not wrong.any(), (wrong.nonzero()[:5].tolist(), got[wrong][:5], want[wrong][:5])


@pytest.mark.parametrize("format", [each.name for each in FORMATS])
def test_dequantize(format: str, device: str) -> None:
    """Each code times each scale, rounded once; of 4 bits each byte, so each pair of codes."""
    codes = torch.arange(256, dtype=torch.uint8).expand(len(ALL), -1).contiguous()
    scales = torch.tensor(ALL)[:, None]
    kind = FORMATS[[each.name for each in FORMATS].index(format)]
    symmetric = codes.view(kind.code_dtype(True))
    got = dequantize(symmetric.to(device), scales.to(device), format=format)
    assert_same(got, dequantize_ref(symmetric, scales, format=format))
    if not kind.asymmetric_largest:
        return
    for offset in (*SMALL, 1.0, torch.inf, -torch.inf, torch.nan):
        offsets = torch.full_like(scales, offset)
        got = dequantize(codes.to(device), scales.to(device), offsets.to(device), format=format)
        assert_same(got, dequantize_ref(codes, scales, offsets, format=format))


def with_scales(weight: PackedWeight, scales: tuple[float, ...]) -> PackedWeight:
    """Give row i of a weight scale i, in all of its groups, and offsets that are as large."""
    given = torch.zeros_like(weight.scales, device="cpu")
    given[:, : len(scales)] = torch.tensor(scales)
    offsets = None if weight.offsets is None else (given * -0.75).to(weight.scales.device)
    return weight._replace(scales=given.to(weight.scales.device), offsets=offsets)


@pytest.mark.parametrize("kind", WEIGHTS, ids=str)
@pytest.mark.parametrize("group", [32, 24])
def test_unpack_weight(kind: tuple[str, bool], group: int, device: str) -> None:
    weight = with_scales(weight_of(len(ALL), 100, *kind, group, device), ALL)
    there = PackedWeight(*(t.cpu() if isinstance(t, Tensor) else t for t in weight))
    assert_same(unpack_weight(weight), unpack_weight_ref(there))


@pytest.mark.parametrize("kind", WEIGHTS, ids=str)
@pytest.mark.parametrize("input_format", [None, "int8"])
def test_quantized_linear(kind: tuple[str, bool], input_format: str | None, device: str) -> None:
    """Scales of 0, of either sign, and of floats below the least normal one, in one weight."""
    if kind[0] == "nf4" and input_format is not None:
        return
    some = (0.0, -0.0, -0.5, 0.25, -1e-3, 1e-40, -3e-39, 2.0**-149, 1e30, -1e30)
    for rows, group, dtype in product((1, 5, 40), (32, 24, 100), (F32, BF16)):
        x, weight, options = arguments(rows, len(some), 100, dtype, kind, group, device)
        got = assert_right(x, with_scales(weight, some), options, input_format)
        assert (got[:, :2] == 0).all()


@pytest.mark.parametrize("kind", WEIGHTS, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 70])
def test_rows_of_weights_without_a_finite_scale(
    kind: tuple[str, bool], rows: int, device: str
) -> None:
    """They have no finite result, and no other row has a part of them."""
    for bad in (torch.inf, -torch.inf, torch.nan):
        weight = with_scales(weight_of(6, 100, *kind, 32, device), (1, -1, 1, 0.5, 1, -2))
        x = make((rows, 100), F32, 0, device)
        want = quantized_linear(x, weight)
        scales = weight.scales.clone()
        scales[-1, 2] = scales[0, 5] = bad
        got = quantized_linear(x, weight._replace(scales=scales))
        assert torch.equal(got[:, [0, 1, 3, 4]], want[:, [0, 1, 3, 4]])
        assert not got[:, [2, 5]].isfinite().any()


def signs(like: Tensor, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, like.shape, generator=random).mul(2).sub(1).to(like)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("op", [decode_attention, prefill_attention], ids=lambda op: op.__name__)
@pytest.mark.parametrize("scale", ["of both signs", "zeros", "below normal ones", "large"])
def test_attention(dtype: torch.dtype, op: object, scale: str, device: str) -> None:
    for width, of_q in ((64, BF16), (80, F16), (64, F32)):
        kv = make_kv([300, 5, 64], 2, width, dtype, device)
        assert kv.key_scales is not None and kv.value_scales is not None
        keys, values = kv.key_scales, kv.value_scales
        if scale == "of both signs":
            keys, values = keys * signs(keys, 1), values * signs(values, 2)
        elif scale == "zeros":
            keys = keys * (signs(keys, 1) > 0)
            values = values * (signs(values, 2) > 0)
        elif scale == "below normal ones":
            keys = keys * 1e-38
            # Prefill on CUDA multiplies values as 16 bits, of which few are below normal ones.
            if device == "cpu" or op is decode_attention:
                values = values * 1e-38
        else:
            values = values * 1e34
        kv = kv._replace(key_scales=keys, value_scales=values)
        if of_q == F16 and scale == "large":
            continue
        assert_attends(op, queries(3, 2, 4, width, of_q, device), kv, width / 8)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("op", [decode_attention, prefill_attention], ids=lambda op: op.__name__)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("which", ["key_scales", "value_scales"])
def test_attention_to_tokens_without_a_finite_scale(
    dtype: torch.dtype, op: object, bad: float, which: str, device: str
) -> None:
    """What sees such a token is not finite, and all else is as it was.

    A score is the product of q and the codes, times the scale. If that is inf, scores are inf, of
    which softmax makes NaN, or -inf, and the token is not seen.
    """
    kv = make_kv([300, 5, 64], 2, 64, dtype, device)
    q = queries(3, 2, 4, 64, BF16, device)
    scales = getattr(kv, which).clone()
    page, token = int(kv.table[0, 1]), 7  # of slot 0, head 1
    scales[page, 1, token] = bad
    spoilt = kv._replace(**{which: scales})
    want = op(q, kv)  # type: ignore[operator]
    got = op(q, spoilt)  # type: ignore[operator]
    assert torch.equal(got[1:], want[1:])
    assert torch.equal(got[0, :, :2], want[0, :, :2]), "heads of q that share the first of keys"
    finite = got[0, :, 2:].isfinite()
    if which == "key_scales" and bad in (torch.inf, -torch.inf):
        scales[page, 1, token] = -bad
        finite &= op(q, spoilt)[0, :, 2:].isfinite()  # type: ignore[operator]
    assert not finite.any()
