"""SwiGLU: the gated activation between the matrices of a feed-forward block."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops._library import define

_LIBRARIES = {"cpu": "cpu_swiglu", "cuda": "fused_swiglu"}

_swiglu_backward_op = define(
    "swiglu_backward(Tensor grad_out, Tensor gate, Tensor up)"
    " -> (Tensor grad_gate, Tensor grad_up)",
    _LIBRARIES,
    fake=lambda grad_out, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
)
_swiglu_packed_backward_op = define(
    "swiglu_backward.packed(Tensor grad_out, Tensor gate_up) -> Tensor",
    _LIBRARIES,
    fake=lambda grad_out, gate_up: gate_up.new_empty(gate_up.shape),
)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_swiglu_op = define(
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    _LIBRARIES,
    fake=lambda gate, up: gate.new_empty(gate.shape),
    backward=lambda ctx, grad_out: _swiglu_backward_op(grad_out, *ctx.saved_tensors),
    setup_context=_save,
)
_swiglu_packed_op = define(
    "swiglu.packed(Tensor gate_up) -> Tensor",
    _LIBRARIES,
    fake=lambda gate_up: gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2),
    backward=lambda ctx, grad_out: _swiglu_packed_backward_op(grad_out, *ctx.saved_tensors),
    setup_context=_save,
)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, in one pass over memory, where silu(a) is a / (1 + exp(-a)).

    On the CPU the bits are the same with any number of threads and any instruction set; on CUDA, in
    every run. Nothing is kept for the gradients but the arguments, and both come from one pass.
    There is no gradient of a gradient. Arithmetic is in float32.

    Args:
        gate: (..., n), float32, bfloat16 or float16, on the CPU or on CUDA. Rows that lie in one
            piece each, at equal distances, are read as they lie, so halves of one tensor are no
            copies; other layouts are copied first.
        up: the shape of gate, any of these dtypes. None if gate holds both, as a fused projection
            returns them: (..., 2 n), gate in the first half of each row, up in the second. Its
            gradient is then one tensor too.

    Returns:
        (..., n), contiguous, of the dtype of gate.

    Raises:
        ValueError: an argument breaks a rule above; the text names it, its value and the rule.
        BuildError: the native library of the device could not be built or loaded.

    See: Shazeer, "GLU Variants Improve Transformer", 2020, equation 5 (Swish with beta 1).
    ``swiglu_ref`` is the same in float64.
    """
    out: Tensor = _swiglu_packed_op(gate) if up is None else _swiglu_op(gate, up)
    return out


def swiglu_ref(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Do what swiglu does, in float64 and plain torch: its definition, for tests."""
    gate, up = gate.double().chunk(2, -1) if up is None else (gate.double(), up.double())
    return gate * torch.sigmoid(gate) * up
