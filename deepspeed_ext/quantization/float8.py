"""Matrix multiplications of 8-bit floats, whose gradient to x goes through the floats."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_ext.ops import quantize
from deepspeed_ext.quantization.layout import WeightLayout
from deepspeed_ext.quantization.packing import dequantize_tensors
from deepspeed_ext.torch_internals.dispatch import float8_matmul

_LEAST_CAPABILITY = (8, 9)


class _Product(torch.autograd.Function):
    """x @ w.T of a weight in 8-bit floats; the gradient of the rounding of x is taken as 1."""

    @staticmethod
    def forward(x: Tensor, codes: Tensor, scales: Tensor, layout: WeightLayout) -> Tensor:
        return _multiply(x, codes, scales, layout)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, codes, scales, layout = inputs
        ctx.save_for_backward(codes, scales)
        ctx.layout = layout

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        codes, scales = ctx.saved_tensors
        grad = grads[0]
        weight = dequantize_tensors(ctx.layout, {"codes": codes, "scales": scales}, grad.dtype)
        return grad @ weight, None, None, None


def float8_linear(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, layout: WeightLayout
) -> Tensor:
    """Return x @ w.T + bias, x rounded to e4m3 with a scale for each row.

    Args:
        x: (..., in), float32, bfloat16 or float16.
        codes: (out, in), uint8, both sizes padded; scales: (1, out padded); see `WeightLayout`.
        bias: (out,), of the dtype of x, or None.
        layout: of the weight.

    Returns:
        (..., out), of the dtype of x.

    Raises:
        ValueError: x has another last dimension.
        RuntimeError: the device has no multiplication of 8-bit floats.
    """
    layout.check_rows(x)
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < _LEAST_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(x.device)
        raise RuntimeError(
            f"QuantizedLinear: {x.device} has compute capability {major}.{minor}, expected 8.9 or"
            f" newer for {layout.format}; int8 needs 8.0"
        )
    out: Tensor = _Product.apply(x, codes, scales, layout)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


def _multiply(x: Tensor, codes: Tensor, scales: Tensor, layout: WeightLayout) -> Tensor:
    n, length = layout.shape
    if x.numel() == 0 or n == 0:
        return x.new_zeros(*x.shape[:-1], n)
    rows = x.reshape(-1, length)
    padding = codes.shape[1] - length
    of_x = quantize(F.pad(rows, (0, padding)) if padding else rows, "fp8_e4m3")
    weight = codes.view(layout.code_dtype)
    if x.is_cuda:
        out = float8_matmul(
            of_x.codes, weight.t(), scale_a=of_x.scales, scale_b=scales, out_dtype=x.dtype
        )
    else:  # where torch 2.11 takes one scale for all rows
        one = x.new_ones((), dtype=torch.float32)
        out = float8_matmul(
            of_x.codes, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32
        )
        out = (out * of_x.scales * scales).to(x.dtype)
    return out[:, :n].reshape(*x.shape[:-1], n)
