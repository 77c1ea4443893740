"""What the tests of quantized_linear share: packed weights, and what results must be."""

from typing import Any

import torch
import torch.nn.functional as F
from activation_cases import ROUNDING
from samples import make
from skinny_linear_cases import EVERYTHING, assert_finished
from torch import Tensor

from deepspeed_ext.ops import (
    PackedWeight,
    pack_weight,
    quantized_linear,
    quantized_linear_ref,
    unpack_weight_ref,
)
from deepspeed_ext.ops.quantization.formats import LEAST_SCALE, groups_of
from deepspeed_ext.ops.quantization.packed_weight import signed_codes

__all__ = ["EVERYTHING", "INTEGERS", "WEIGHTS", "arguments", "assert_right", "weight_of"]

# Format, and whether it has offsets.
INTEGERS = [("int4", False), ("int4", True), ("int8", False), ("int8", True)]
WEIGHTS = [*INTEGERS, ("nf4", False)]
EXACT_LENGTH = 65536  # see quantized_linear.h


def weight_of(
    n: int, k: int, format: str, offsets: bool, group_size: int, device: str = "cpu", seed: int = 1
) -> PackedWeight:
    """Return random codes of every value, with scales for results of a few units."""
    generator = torch.Generator().manual_seed(seed)
    groups, eight = groups_of(k, group_size), format == "int8"
    codes = torch.randint(0, 256, (n, k if eight else (k + 1) // 2), generator=generator)
    codes = codes.to(torch.uint8)
    if not eight and k % 2:
        codes[:, -1] &= 15
    if eight and not offsets:
        codes = codes.view(torch.int8)  # -128 too, which others write
    largest = dict(int4=8.0, int8=128.0, nf4=1.0)[format]
    scales = (torch.rand(n, groups, generator=generator) + 0.5) / (largest * max(1, k) ** 0.5)
    least = -largest * scales * (1 + torch.rand(n, groups, generator=generator) / 4)
    weight = pack_weight(
        codes,
        scales,
        least if offsets else None,
        format=format,
        group_size=group_size,
        length=k,
    )
    return weight._replace(
        codes=weight.codes.to(device),
        scales=weight.scales.to(device),
        offsets=None if weight.offsets is None else weight.offsets.to(device),
    )


def on_cpu(weight: PackedWeight) -> PackedWeight:
    offsets = None if weight.offsets is None else weight.offsets.cpu()
    return weight._replace(codes=weight.codes.cpu(), scales=weight.scales.cpu(), offsets=offsets)


def arguments(
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    kind: tuple[str, bool],
    group_size: int,
    device: str = "cpu",
    *,
    bias: bool = False,
    residual: bool = False,
    activation: str | None = None,
    gated: bool = False,
) -> tuple[Tensor, PackedWeight, dict[str, Any]]:
    """Return x, a weight, and the options."""
    of_weight = 2 * n if gated else n
    options = dict(
        bias=make((of_weight,), dtype, 2, device) if bias else None,
        residual=make((rows, n), dtype, 3, device) if residual else None,
        activation=activation,
        gated=gated,
    )
    return (
        make((rows, k), dtype, 0, device),
        weight_of(of_weight, k, *kind, min(group_size, max(1, k)), device),
        options,
    )


def assert_right(
    x: Tensor, weight: PackedWeight, options: dict[str, Any], input_format: str | None = None
) -> Tensor:
    """Compare with the reference, and return the result.

    Each term goes through the additions of its unit, of 64 elements or more, and of all units that
    come after it, then by a few more to the result; tensor cores may round towards 0, by twice as
    much. An offset is no part of an element, but of a sum of its own.
    """
    got = quantized_linear(x, weight, **options, input_format=input_format)
    wide = {key: v.cpu().double() if isinstance(v, Tensor) else v for key, v in options.items()}
    there, far = on_cpu(weight), x.cpu().double()
    if input_format is not None:  # to the nearest code, of which the reference has another at ties
        codes, scale = rounded_rows(x.cpu())
        far = codes.double() * scale.double()
    want = quantized_linear_ref(far, there, **wide)
    factors = unpack_weight_ref(there)
    magnitude = factors.abs()
    if there.offsets is not None:
        offsets = there.offsets[:, : magnitude.shape[0]].t().double().abs()
        magnitude += 2 * offsets.repeat_interleave(weight.group_size, 1)[:, : weight.length]
    error = ROUNDING * (weight.length / 32 + 32) * F.linear(far.abs(), magnitude)
    assert got.dtype == x.dtype
    assert_finished(got, want, F.linear(far, factors, wide["bias"]), error, options)
    return got


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c of float32, rounded once: in float64 to an odd last bit, then to float32."""
    product, other = a.double() * b.double(), c.double()  # exact
    total = product + other
    back = total - product
    rest = (product - (total - back)) + (other - back)
    bits = total.view(torch.int64)
    away = torch.where((rest > 0) == (total > 0), 1, -1)
    inexact = (rest != 0) & (bits & 1 == 0) & total.isfinite()
    return torch.where(inexact, bits + away, bits).view(torch.float64).float()


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8-bit codes of rows of x, as int64, and their scales: what `quantize` does."""
    floats = x.float()
    largest = F.pad(floats.abs(), (0, 1)).amax(-1, keepdim=True)  # of nothing: 0
    scale = (largest / 127).clamp_min(LEAST_SCALE)
    scale = torch.where(floats.isfinite().all(-1, keepdim=True), scale, torch.nan)
    code = (floats.double() * (1 / scale).double()).round()
    rest = floats.double() - code * scale.double()
    code = torch.where(rest.abs() > scale.double() / 2, code + rest.sign(), code)
    return code.nan_to_num(0, 0, 0).long(), scale


def integer_sums(x: Tensor, weight: PackedWeight) -> Tensor:
    """Return what quantized_linear.h says of integer dot products, bit for bit, as float32."""
    q, scale = rounded_rows(x)
    codes = signed_codes(weight).long()
    if weight.offsets is not None:
        codes = codes + (128 if weight.format == "int8" else 8)
    n, group = codes.shape[0], weight.group_size
    total = torch.zeros(x.shape[0], n)
    for number, begin in enumerate(range(0, weight.length, group)):
        of_group = min(begin + group, weight.length)
        for start in range(begin, of_group, EXACT_LENGTH):
            part = slice(start, min(start + EXACT_LENGTH, of_group))
            # Products of float64 are exact here, and fast.
            dots = q[:, part].double() @ codes[:, part].double().t()
            assert dots.abs().max() < 2**31
            total = fused(weight.scales[number, :n], dots.long().float(), total)
            if weight.offsets is not None:
                of_x = q[:, part].sum(-1, keepdim=True).float()
                total = fused(weight.offsets[number, :n], of_x, total)
    return scale * total
