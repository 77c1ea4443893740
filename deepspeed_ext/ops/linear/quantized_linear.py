"""A linear layer with a quantized weight: as a skinny GEMM as fast as the weight is read."""

from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deepspeed_ext.ops import _activations
from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops._library import refuse_gradients
from deepspeed_ext.ops._renamed import refuse_renamed
from deepspeed_ext.ops.linear.few_rows import (
    are_few,
    are_many,
    by_torch,
    check_many,
    linear_ref,
    without_autocast,
)
from deepspeed_ext.ops.linear.linear_ops import LinearOps
from deepspeed_ext.ops.linear.norms_around import (
    NextNorm,
    Undivided,
    divided_ref,
    next_norm_ref,
)
from deepspeed_ext.ops.linear.quantized_product import quantized_product
from deepspeed_ext.ops.quantization.fake_quantize import fake_quantize
from deepspeed_ext.ops.quantization.formats import FORMATS, LEAST_SCALE, number_of
from deepspeed_ext.ops.quantization.packed_weight import (
    PackedWeight,
    libraries_of,
    lines_of_bytes,
    row_bytes,
    unpack_weight,
    unpack_weight_ref,
)
from deepspeed_ext.ops.quantization.quantize import quantize
from deepspeed_ext.torch_internals.dispatch import int8_matmul

_EXACT_LENGTH, _UNIT = 65536, 16  # see quantized_linear.h; bytes that are read at once


def _floats(x: Tensor, weight: list[Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return x as it is rounded, and the weight as floats, for as long as a backward takes."""
    codes, scales, offsets = weight
    format, group_size = FORMATS[options["format"]].name, options["group_size"]
    packed = PackedWeight(codes, scales, offsets, format, group_size, x.shape[-1])
    floats = unpack_weight(packed, x.dtype)
    return (fake_quantize(x) if options["integer"] else x), floats


_OPS = {
    bits: LinearOps(
        "quantized_linear",
        overload=f"w{bits}",
        weight="Tensor codes, Tensor scales, Tensor? offsets",
        options="int format, int group_size, int? activation, bool gated, bool integer",
        libraries=libraries_of(bits),
        floats=_floats,
        without_gradient=("scales", "offsets"),
    )
    for bits in (4, 8)
}
_OPS[4].count_flops()


def quantized_linear(
    x: Tensor | Undivided,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    input_format: str | None = None,
    **older: NoReturn,
) -> Tensor:
    """Return residual + activation(x @ w.T + bias), w being what the packed weight stands for.

    A row of x has the same bits as ``skinny_linear`` promises them, and autocast casts no more than
    there. With over 64 rows, or where torch.compile does not know that there are fewer, the weight
    is made floats of the dtype of x in one pass, and torch multiplies; up to 512 rows, and for a
    large weight, a kernel for compute capability 9.0 makes the same floats where it multiplies
    them. So it is for gradients, which there are of x, bias and residual. That of the rounding of x
    is taken as 1. Floats of the weight are made anew for the gradient to x, and none are kept until
    then.

    Args:
        x: (..., length), float32, bfloat16 or float16. Or what ``skinny_linear_norm`` or
            ``quantized_linear_norm`` has left of a norm, of up to 64 rows: the sums are divided by
            the rms before bias is added. There are no gradients then.
        weight: of ``pack_weight``, for n columns, with `gated` 2 n, gates first.
        bias: None, or (n,), with `gated` (2 n,), of the dtype of x.
        activation: None, or one that ``bias_activation`` knows.
        gated: whether weight has the rows of a gate first; needs an activation.
        residual: None, or (..., n), of the dtype of x: added in the end.
        input_format: None: codes and x are multiplied as floats. "int8": each row of x is rounded
            to 8-bit codes with a scale of its own, as by ``quantize``; not nf4. Products are summed
            up as integers; with over 64 rows so only on CUDA, of "int8" without offsets whose group
            is the whole row, if the weight has a multiple of 8 rows and x needs no gradient. Else
            what the codes stand for is rounded to the dtype of x, and multiplied.

    Returns:
        (..., n), contiguous, of the dtype of x.

    Raises:
        RuntimeError: the compute capability is below 8.0, torch refuses the arguments, or the
            gradient of scales or offsets is wanted.

    See: ``quantized_linear_ref`` is the same in float64; csrc/quantization/packed_weight.h.
    """
    if older:
        refuse_renamed("quantized_linear", older)
    if type(x) is not Tensor or type(weight) is not PackedWeight:
        rows = x.x if isinstance(x, Undivided) else x
        check_kinds("quantized_linear", x=(rows, Tensor), weight=(weight, PackedWeight))
    numbers = numbers_of("quantized_linear", weight, activation, gated, input_format)
    ops = _OPS[FORMATS[numbers["format"]].bits]
    check_length("quantized_linear", x, weight)
    if isinstance(x, Undivided):
        return ops.between_norms(x, weight[:3], bias, residual, None, **numbers)[0]
    if are_few(x):
        out: Tensor = ops.plain(x, *weight[:3], bias, residual, **numbers)
        return out
    refuse_gradients("quantized_linear", {"scales": weight.scales, "offsets": weight.offsets})
    of_weight = "codes", weight.codes, torch.uint8
    check_many("quantized_linear", x, *of_weight, bias, activation, gated, residual)
    with without_autocast(x):
        if input_format is not None and _takes_integers(x, weight):
            product = partial(_integer_product, x, weight)
        else:
            factors = x if input_format is None else fake_quantize(x)
            product = partial(_float_product, factors, weight)
        return by_torch(product, bias, activation, gated, residual)


def quantized_linear_norm(
    x: Tensor | Undivided,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    norm: NextNorm,
    activation: str | None = None,
    residual: Tensor | None = None,
    input_format: str | None = None,
    **older: NoReturn,
) -> tuple[Tensor, Undivided]:
    """Do a skinny GEMM as quantized_linear does, and begin the RMS norm that comes after it.

    As ``skinny_linear_norm`` does, with the same results for the layers that read the norm's. With
    `input_format` such a layer rounds rows that are not divided yet, by a scale of their own.

    Args:
        x, weight, bias, activation, residual, input_format: as of ``quantized_linear``; x has up to
            64 rows, and is float32 or bfloat16. n is a multiple of 8.
        norm: its weight has shape (n,), and the dtype of x.

    Returns:
        What quantized_linear returns, and that on its way through the norm.

    Raises:
        ValueError: an argument breaks a rule above, or that of ``quantized_linear``.
        RuntimeError: a gradient is wanted, or the compute capability is below 8.0.

    See: ``rms_norm``. ``quantized_linear_norm_ref`` is the same in float64.
    """
    if older:
        refuse_renamed("quantized_linear_norm", older)
    numbers = numbers_of("quantized_linear", weight, activation, False, input_format)
    check_length("quantized_linear_norm", x, weight)
    ops = _OPS[FORMATS[numbers["format"]].bits]
    out, scaled, squares = ops.between_norms(x, weight[:3], bias, residual, norm, **numbers)
    return out, Undivided(scaled, squares, norm.eps)


def numbers_of(
    op: str, weight: PackedWeight, activation: str | None, gated: bool, input_format: str | None
) -> dict[str, Any]:
    """Return the options of a call as the ops take them."""
    number = number_of(op, weight.format)
    if input_format not in (None, "int8"):
        raise ValueError(f"{op}: input_format is {input_format!r}, expected None or 'int8'")
    if input_format is not None and weight.format == "nf4":
        raise ValueError(
            f"{op}: input_format is {input_format!r}, expected None with nf4, whose levels are no"
            " integers"
        )
    return {
        "format": number,
        "group_size": weight.group_size,
        "activation": None if activation is None else _activations.number_of(op, activation),
        "gated": gated,
        "integer": input_format is not None,
    }


def check_length(op: str, x: Tensor | Undivided, weight: PackedWeight) -> None:
    """Refuse rows of another length, which the ops would take for that of the weight.

    They cannot tell: the bytes of a row of codes are padded.
    """
    rows = x.x if isinstance(x, Undivided) else x
    if rows.dim() == 0 or rows.shape[-1] != weight.length:
        raise ValueError(f"{op}: x has shape {list(rows.shape)}, expected [..., {weight.length}]")


def _takes_integers(x: Tensor, weight: PackedWeight) -> bool:
    """Tell whether torch multiplies the codes as they lie; what is wrong with them others say."""
    n, bytes = weight.codes.shape[0], row_bytes(weight.length, 8)
    return (
        x.is_cuda
        and are_many(x)
        and not (x.requires_grad and torch.is_grad_enabled())
        and weight.format == "int8"
        and weight.offsets is None
        and weight.group_size == weight.length == x.shape[-1] <= _EXACT_LENGTH
        and n > 0
        and n % 8 == 0
        and weight.codes.shape == (n, bytes)
        and weight.codes.dtype == torch.uint8
        and weight.codes.is_contiguous()
        and (torch.compiler.is_compiling() or weight.codes.storage_offset() % _UNIT == 0)
        and weight.scales.shape == (1, n)
        and weight.scales.dtype == torch.float32
    )


class _FloatProduct(torch.autograd.Function):
    """x @ w.T + bias; the gradient to x makes the floats of the weight anew, and none are kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        offsets: Tensor | None,
        bias: Tensor | None,
        format: str,
        group_size: int,
    ) -> Tensor:
        weight = PackedWeight(codes, scales, offsets, format, group_size, x.shape[-1])
        return quantized_product(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, codes, scales, offsets, _, format, group_size = inputs
        ctx.save_for_backward(codes, scales, offsets)
        ctx.numbers = format, group_size, x.shape[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, weight = grads[0], PackedWeight(*ctx.saved_tensors, *ctx.numbers)
        of_x = grad @ unpack_weight(weight, grad.dtype) if ctx.needs_input_grad[0] else None
        of_bias = grad.sum(tuple(range(grad.dim() - 1))) if ctx.needs_input_grad[4] else None
        return of_x, None, None, None, of_bias, None, None


def _unpacked(*parts: Any) -> Tensor:
    return unpack_weight(PackedWeight(*parts[:-1]), parts[-1])


def _float_product(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Return x @ w.T + bias, by the weight as floats for as long as it takes."""
    tensors = weight.codes, weight.scales, weight.offsets
    wanted = x.requires_grad and torch.is_grad_enabled()
    if wanted and torch.compiler.is_compiling():
        # The compiler would find that a function as below makes the same floats twice, and keep the
        # first ones; of what is checkpointed it is told not to.
        again: dict[str, Any] = dict(use_reentrant=False, preserve_rng_state=False)
        return F.linear(x, checkpoint(_unpacked, *weight, x.dtype, **again), bias)
    # What cannot be kept goes the plain way.
    if not wanted or any(each is not None and each.is_inference() for each in tensors):
        return quantized_product(x, weight, bias)
    out: Tensor = _FloatProduct.apply(  # type: ignore[no-untyped-call]
        x, *tensors, bias, weight.format, weight.group_size
    )
    return out


def _integer_product(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Return x @ w.T + bias by sums of integers, which do not mind the order of the codes."""
    rows = quantize(x.reshape(-1, weight.length))
    lines = lines_of_bytes(rows.codes, 8, weight.length, "int8", False).view(torch.int8)
    sums = int8_matmul(lines, weight.codes.view(torch.int8).t())
    out = sums * weight.scales * rows.scales
    if bias is not None:
        out = out + bias
    return out.to(x.dtype).view(*x.shape[:-1], -1)


def quantized_linear_ref(
    x: Tensor | Undivided,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    input_format: str | None = None,
) -> Tensor:
    """Do what quantized_linear does, in float64 and plain torch: its definition, for tests."""
    if input_format is not None:
        x = x._replace(x=rounded_rows(x.x)) if isinstance(x, Undivided) else rounded_rows(x)
    floats = unpack_weight_ref(weight)
    return linear_ref(divided_ref(x), floats, bias, activation, gated, residual)


def quantized_linear_norm_ref(
    x: Tensor | Undivided,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    norm: NextNorm,
    activation: str | None = None,
    residual: Tensor | None = None,
    input_format: str | None = None,
) -> tuple[Tensor, Undivided]:
    """Do what quantized_linear_norm does, in float64 and plain torch: its definition, for tests."""
    out = quantized_linear_ref(
        x, weight, bias, activation=activation, residual=residual, input_format=input_format
    )
    return out, next_norm_ref(out, norm)


def rounded_rows(x: Tensor) -> Tensor:
    """Return x as 8-bit codes times a scale for each row stand for it, as float64."""
    largest = F.pad(x.float().abs(), (0, 1)).amax(-1, keepdim=True)  # of nothing: 0
    scale = (largest / 127).clamp_min(LEAST_SCALE).double()
    return (x.double() / scale).round() * scale
