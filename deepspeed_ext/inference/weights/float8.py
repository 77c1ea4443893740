"""Linear layers whose weight is in 8-bit floats, as CUDA's tensor cores multiply them."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed_ext.ops import bias_activation, gated_activation
from deepspeed_ext.quantization.float8 import float8_linear
from deepspeed_ext.quantization.layout import WeightLayout

ROWS = 64  # that fewer are padded to


class Float8Weight(NamedTuple):
    """A weight in 8-bit floats, with a scale for each row.

    Args:
        codes: (out, in), uint8, both sizes padded.
        scales: (1, out padded), float32.
        layout: of both.
    """

    codes: Tensor
    scales: Tensor
    layout: WeightLayout


def float8_layer(
    x: Tensor,
    weight: Float8Weight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Return residual + activation(x @ weight.T + bias), x rounded to e4m3 row by row.

    Batch-invariant: fewer rows than 64 are padded to 64, so that the library that multiplies goes
    the same way for a row that is alone and for one of a batch.

    Args:
        x: (..., in), float32, bfloat16 or float16.
        weight: of n rows, with `gated` of 2 n, gates first.
        bias: (n,) or (2 n,), or None.
        activation: as of ``skinny_linear``, as are gated and residual.

    Returns:
        (..., n), of the dtype of x.
    """
    rows = x.reshape(-1, x.shape[-1])
    padded = F.pad(rows, (0, 0, 0, max(0, ROWS - len(rows))))
    out = float8_linear(padded, weight.codes, weight.scales, bias, weight.layout)[: len(rows)]
    if gated:
        out = gated_activation(out, activation=activation or "silu")
    elif activation is not None:
        out = bias_activation(out, activation=activation)
    out = out.view(*x.shape[:-1], out.shape[-1])
    return out if residual is None else out + residual


def check_device(device: torch.device) -> None:
    """Refuse a device without fast products of 8-bit floats.

    Raises:
        ValueError: it is the CPU, or a GPU of a compute capability below 8.9.
    """
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= (8, 9):
            return
        what = f"compute capability {capability[0]}.{capability[1]}"
    else:
        what = "no products of 8-bit floats"
    raise ValueError(
        f"init_inference: {device} has {what}, expected 8.9 or newer for quantize='fp8'; use 'int8'"
    )
