"""What is left of floats after they have been low-bit codes, with a gradient."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops._library import call_on_tensors, define
from deepspeed_ext.ops.quantization.dequantize import dequantize_ref
from deepspeed_ext.ops.quantization.formats import number_of
from deepspeed_ext.ops.quantization.quantize import LIBRARIES, quantize_ref, seed_of

_OPTIONS = "int format, bool symmetric, int? group_size, int? group_rows, SymInt? seed"


def _backward(ctx: Any, grad_out: Tensor) -> Tensor:
    return grad_out


_op = define(
    f"fake_quantize(Tensor x, *, {_OPTIONS}) -> Tensor",
    LIBRARIES,
    fake=lambda x, **options: x.new_empty(x.shape),
    backward=_backward,
)
_op_ = define(f"fake_quantize_(Tensor(a!) x, *, {_OPTIONS}) -> ()", LIBRARIES)


def fake_quantize(
    x: Tensor,
    format: str = "int8",
    *,
    group_size: int | None = None,
    group_rows: int | None = 1,
    symmetric: bool = True,
    seed: int | None = None,
) -> Tensor:
    """Return what the codes that ``quantize`` would make of a tensor stand for, without making any.

    The bits are those of ``dequantize`` after ``quantize``. The gradient goes straight through: it
    is that of the result.

    Args:
        x: as in quantize, and so are the others.
        format: "int8", "int4", "nf4", "fp8_e4m3" or "fp8_e5m2".
        group_size: elements along a row that share a scale; None: the whole row.
        group_rows: rows that share a scale; None: all of them.
        symmetric: False: with an offset; "int8" and "int4" only.
        seed: None: to the nearest. A number: at random; "int8" and "int4" only.

    Returns:
        The shape of x, contiguous, of its dtype.

    Raises:
        ValueError: an argument breaks a rule of quantize.

    See: Bengio, Leonard & Courville, "Estimating or propagating gradients through stochastic
    neurons for conditional computation", 2013, section 4. ``fake_quantize_ref`` is the same in
    float64.
    """
    out: Tensor = _op(
        x,
        format=number_of("fake_quantize", format),
        symmetric=symmetric,
        group_size=group_size,
        group_rows=group_rows,
        seed=seed_of("fake_quantize", seed),
    )
    return out


def fake_quantize_(x: Tensor, format: str, *, symmetric: bool, seed: int | None) -> None:
    """Write what the codes of each row of a contiguous tensor stand for over them."""
    call_on_tensors(
        _op_,
        x,
        format=number_of("fake_quantize_", format),
        symmetric=symmetric,
        group_size=None,
        group_rows=1,
        seed=seed,
    )
    torch.autograd.graph.increment_version(x)


def fake_quantize_ref(
    x: Tensor,
    format: str = "int8",
    *,
    group_size: int | None = None,
    group_rows: int | None = 1,
    symmetric: bool = True,
) -> Tensor:
    """Do what fake_quantize does without a seed, in float64: its definition, for tests."""
    groups: dict[str, Any] = dict(group_size=group_size, group_rows=group_rows)
    made = quantize_ref(x, format, symmetric=symmetric, **groups)
    return dequantize_ref(*made, format=format, length=x.shape[-1], **groups)
