"""Linear layers of experts with quantized weights."""

from typing import Any

from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops._library import define, refuse_gradients
from deepspeed_ext.ops.linear.few_rows import grad_of_activated
from deepspeed_ext.ops.linear.grouped_linear import grad_of_bias
from deepspeed_ext.ops.linear.grouped_quantized_products import products_cpu, products_cuda
from deepspeed_ext.ops.linear.grouped_rows import (
    activated,
    are_few,
    check_options,
    fake_results,
    grouped_ref,
    permuted,
    unpermuted,
)
from deepspeed_ext.ops.linear.quantized_linear import check_length, numbers_of, rounded_rows
from deepspeed_ext.ops.quantization.fake_quantize import fake_quantize
from deepspeed_ext.ops.quantization.formats import FORMATS
from deepspeed_ext.ops.quantization.packed_weight import (
    PackedWeight,
    libraries_of,
    unpack_weight_ref,
)

_NAME = "grouped_quantized_linear"
_LIBRARIES = {bits: libraries_of(bits) for bits in (4, 8)}


def grouped_quantized_linear(
    x: Tensor,
    weight: PackedWeight,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    input_format: str | None = None,
) -> Tensor:
    """Return activation(x @ w.T + b) for each row, w being what its expert's codes stand for.

    As ``grouped_linear`` does, with a weight of codes: with its rows, slots and zeros. Few rows, as
    there, go to a kernel that reads the codes of each chosen expert once; a row then has the bits
    that ``quantized_linear`` gives it with its expert's weight.

    Else floats are made of the weight for as long as a call takes, and torch multiplies: on the CPU
    of one expert at a time, of those that have rows; on CUDA of those of some blocks of rows, of up
    to 128 MiB or one expert. There are gradients of x and bias; floats of the weight are made anew
    for that of x, and that of the rounding of x is taken as 1.

    Args:
        x: (rows, length), float32, bfloat16 or float16. With slots (..., length).
        weight: of ``pack_weight``, for experts * n rows, with `gated` experts * 2 n: the rows of
            one expert after the other.
        offsets: (experts,), int32: the end of each expert's rows, as of ``grouped_linear``.
        bias: None, or (experts, n), with `gated` (experts, 2 n), of the dtype of x.
        slots: None, or those of a routing, (..., choices), as of ``grouped_linear``.
        activation: None, or one that ``bias_activation`` knows.
        gated: whether each expert has the rows of a gate first, then those of what it gates; needs
            an activation.
        input_format: None: codes and x are multiplied as floats. "int8": each row of x is rounded
            to 8-bit codes with a scale of its own, as by ``quantize``; not nf4. The kernel adds up
            integers; torch multiplies what the codes stand for, rounded to the dtype of x.

    Returns:
        (rows, n), contiguous, of the dtype of x; with slots as many rows as slots has elements.

    Raises:
        RuntimeError: the gradient of scales or offsets of the weight is wanted.

    See: ``quantized_linear``. ``grouped_quantized_linear_ref`` is the same in float64.
    """
    check_kinds(_NAME, x=(x, Tensor), weight=(weight, PackedWeight), offsets=(offsets, Tensor))
    numbers = numbers_of(_NAME, weight, activation, gated, input_format)
    check_length(_NAME, x, weight)
    bits = FORMATS[numbers["format"]].bits
    if are_few(x, offsets, slots, _LIBRARIES[bits]):
        found: Tensor = _FEW[bits](x, *weight[:3], offsets, bias, slots, **numbers)
        return found
    refuse_gradients(_NAME, {"scales": weight.scales, "weight_offsets": weight.offsets})
    check_options(_NAME, x, slots, activation, gated, len(weight.codes) // max(1, len(offsets)))
    factors = x if input_format is None else fake_quantize(x)
    out: Tensor = _PRODUCTS(
        *(permuted(factors, slots, offsets), *weight[:3], offsets, bias),
        format=numbers["format"],
        group_size=weight.group_size,
        length=weight.length,
        transposed=False,
    )
    return activated(out, activation, gated)


def _fake_few(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    weight_offsets: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    slots: Tensor | None,
    **options: Any,
) -> Tensor:
    return fake_results(x, codes.shape[0] // max(1, offsets.shape[0]), slots, **options)


def _save_few(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = dict(keyword_only_inputs)


def _backward_few(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients by torch's multiplications."""
    x, *weight, offsets, bias, slots = ctx.saved_tensors
    needs_x, *_, needs_bias, _ = ctx.needs_input_grad
    given = ctx.options
    options = dict(format=given["format"], group_size=given["group_size"], length=x.shape[-1])
    if given["activation"] is not None:
        rows = permuted(fake_quantize(x) if given["integer"] else x, slots, offsets)
        sums = _PRODUCTS(rows, *weight, offsets, bias, **options, transposed=False)
        grad = grad_of_activated(grad, sums, given["activation"], given["gated"])
    of_x = None
    if needs_x:
        of_rows = _PRODUCTS(grad, *weight, offsets, None, **options, transposed=True)
        of_x = unpermuted(of_rows, slots, offsets)
    return of_x, *[None] * 4, grad_of_bias(grad, offsets) if needs_bias else None, None


_FEW = {
    bits: define(
        f"{_NAME}.w{bits}(Tensor x, Tensor codes, Tensor scales, Tensor? weight_offsets,"
        " Tensor offsets, Tensor? bias, Tensor? slots, *, int format, int group_size,"
        " int? activation, bool gated, bool integer) -> Tensor",
        libraries,
        fake=_fake_few,
        backward=_backward_few,
        setup_context=_save_few,
        without_gradient=("scales", "weight_offsets"),
    )
    for bits, libraries in _LIBRARIES.items()
}


def _fake(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    weight_offsets: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    **options: Any,
) -> Tensor:
    n = codes.shape[0] // max(1, offsets.shape[0])
    return x.new_empty(x.shape[0], options["length"] if options["transposed"] else n)


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:5])
    ctx.options = dict(keyword_only_inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *weight, offsets = ctx.saved_tensors
    needs_x, *_, needs_bias = ctx.needs_input_grad
    options = ctx.options | dict(transposed=not ctx.options["transposed"])
    return (
        _PRODUCTS(grad, *weight, offsets, None, **options) if needs_x else None,
        *[None] * 4,
        grad_of_bias(grad, offsets) if needs_bias else None,
    )


# Of any number of rows. Floats of the weight are made within, so no compiler keeps them.
_PRODUCTS = define(
    "grouped_quantized_products(Tensor x, Tensor codes, Tensor scales, Tensor? weight_offsets,"
    " Tensor offsets, Tensor? bias, *, int format, int group_size, SymInt length,"
    " bool transposed) -> Tensor",
    {"cpu": products_cpu, "cuda": products_cuda},
    fake=_fake,
    backward=_backward,
    setup_context=_save,
    without_gradient=("scales", "weight_offsets"),
)


def _flops(
    x: Any,
    codes: Any,
    scales: Any,
    weight_offsets: Any,
    offsets: Any,
    *others: Any,
    out_shape: Any = None,
    length: int | None = None,
    **options: Any,
) -> int:
    of_expert = codes[0] // max(1, offsets[0])
    return int(2 * out_shape[0] * of_expert * (x[-1] if length is None else length))


register_flop_formula([_FEW[4].overloadpacket, _PRODUCTS.overloadpacket])(_flops)


def grouped_quantized_linear_ref(
    x: Tensor,
    weight: PackedWeight,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    input_format: str | None = None,
) -> Tensor:
    """Do what grouped_quantized_linear does, in float64 and plain torch: its definition."""
    factors = x if input_format is None else rounded_rows(x)
    floats = unpack_weight_ref(weight)
    of_experts = floats.view(offsets.shape[0], -1, weight.length)
    return grouped_ref(factors, of_experts, offsets, bias, slots, activation, gated)
