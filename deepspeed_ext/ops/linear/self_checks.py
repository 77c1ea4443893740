"""Quick runs of linear layers with codes or experts against their references, for ds_report."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext import ops
from deepspeed_ext.ops._compare import compare
from deepspeed_ext.ops.quantization.formats import FORMATS, groups_of

_EPS = torch.finfo(torch.float32).eps
_FORMS: tuple[dict[str, Any], ...] = ({}, dict(activation="silu", gated=True))


def quantized_linear_w4(device: str) -> None:
    """Run `_check` on the formats of 4 bits."""
    _check(device, "int4", offsets=False)
    _check(device, "int4", offsets=True)
    _check(device, "nf4", offsets=False)
    _check_grouped(device, "int4")


def quantized_linear_w8(device: str) -> None:
    """Do the same for those of 8."""
    _check(device, "int8", offsets=False)
    _check(device, "int8", offsets=True)
    _check_grouped(device, "int8")


def grouped_linear(device: str) -> None:
    """Compare each form with its reference, on experts with rows and without.

    Raises:
        RuntimeError: a result is not what the reference says.
    """
    x, slots, ends, bias = _tokens()
    weight = torch.rand(4, 20, 77, generator=torch.Generator().manual_seed(3)) - 0.5
    for form in (*_FORMS, dict(activation="gelu")):
        want = ops.grouped_linear_ref(x, weight, ends, bias, slots=slots, **form)
        there = [tensor.to(device) for tensor in (x, weight, ends, bias)]
        got = ops.grouped_linear(*there, slots=slots.to(device), **form)
        compare(f"grouped_linear on {device}", got, want, 0, of_largest=100 * _EPS)


def _check_grouped(device: str, format: str) -> None:
    """Compare products with the codes of experts."""
    x, slots, ends, bias = _tokens()
    weight = _random_weight(4 * 20, 77, format, False, 20)
    there = weight._replace(codes=weight.codes.to(device), scales=weight.scales.to(device))
    for form in _FORMS:
        want = ops.grouped_quantized_linear_ref(x, weight, ends, bias, slots=slots, **form)
        rows, offsets, added, places = (t.to(device) for t in (x, ends, bias, slots))
        got = ops.grouped_quantized_linear(rows, there, offsets, added, slots=places, **form)
        compare(
            f"grouped_quantized_linear: {format} on {device}", got, want, 0, of_largest=1000 * _EPS
        )


def _tokens() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, slots, offsets and bias: 5 tokens with 2 choices of 4 experts, one dropped."""
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(5, 77, generator=generator) - 0.5
    slots = torch.tensor([[0, 4], [5, 1], [-1, 6], [2, 7], [3, 8]])
    ends = torch.tensor([4, 4, 6, 9], dtype=torch.int32)
    return x, slots, ends, torch.rand(4, 20, generator=generator)


def _check(device: str, format: str, offsets: bool) -> None:
    """Compare on random codes, with groups that end at whole runs and between, in every form.

    Raises:
        RuntimeError: a result is not what the reference says.
    """
    for length, group_size in ((300, 64), (77, 20)):
        weight = _random_weight(80, length, format, offsets, group_size)
        there = ops.PackedWeight(
            weight.codes.to(device),
            weight.scales.to(device),
            None if weight.offsets is None else weight.offsets.to(device),
            *weight[3:],
        )
        floats = ops.unpack_weight_ref(weight)
        compare(f"unpack_weight: {format} on {device}", ops.unpack_weight(there), floats, _EPS)
        x = torch.rand(5, length, generator=torch.Generator().manual_seed(1)) - 0.5
        for input_format in (None, "int8") if format != "nf4" else (None,):
            for form in _FORMS:
                got = ops.quantized_linear(x.to(device), there, input_format=input_format, **form)
                want = ops.quantized_linear_ref(x, weight, input_format=input_format, **form)
                # In 8 bits a tie goes either way: one code of x out of 127, in one of the terms.
                bound = 1000 * _EPS if input_format is None else 0.01
                what = f"quantized_linear: {format} with input_format={input_format} on {device}"
                compare(what, got, want, 0, of_largest=bound)
            norm = ops.NextNorm(torch.linspace(0.5, 1.5, 80))
            there_too = norm._replace(weight=norm.weight.to(device))
            kind: dict[str, Any] = dict(input_format=input_format)
            _, normed = ops.quantized_linear_norm(x.to(device), there, norm=there_too, **kind)
            _, far = ops.quantized_linear_norm_ref(x, weight, norm=norm, **kind)
            what = f"quantized_linear_norm: {format} with input_format={input_format} on {device}"
            compare(what, normed.x, far.x, 0, of_largest=bound)


def _random_weight(
    n: int, length: int, format: str, offsets: bool, group_size: int
) -> ops.PackedWeight:
    generator = torch.Generator().manual_seed(0)
    bits = next(each.bits for each in FORMATS if each.name == format)
    shape = (n, length if bits == 8 else (length + 1) // 2)
    codes = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    if bits == 8 and not offsets:
        codes = codes.view(torch.int8)
    scales = torch.rand(n, groups_of(length, group_size), generator=generator) + 0.5
    return ops.pack_weight(
        codes,
        scales,
        -3 * scales if offsets else None,
        format=format,
        group_size=group_size,
        length=length,
    )
