"""Gated activations, SwiGLU among them: between the matrices of a feed-forward block."""

from typing import Any

from torch import Tensor

from deepspeed_ext.ops._activations import number_of, reference
from deepspeed_ext.ops._library import define

_LIBRARIES = {"cpu": "cpu_gated_activation", "cuda": "fused_gated_activation"}

_backward_op = define(
    "gated_activation_backward(Tensor grad_out, Tensor gate, Tensor up, *, int activation)"
    " -> (Tensor grad_gate, Tensor grad_up)",
    _LIBRARIES,
    fake=lambda grad_out, gate, up, **options: (
        gate.new_empty(gate.shape),
        up.new_empty(up.shape),
    ),
)
_packed_backward_op = define(
    "gated_activation_backward.packed(Tensor grad_out, Tensor gate_up, *, int activation,"
    " bool gate_last) -> Tensor",
    _LIBRARIES,
    fake=lambda grad_out, gate_up, **options: gate_up.new_empty(gate_up.shape),
)


def _save(
    ctx: Any, inputs: tuple[Tensor, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = keyword_only_inputs


_op = define(
    "gated_activation(Tensor gate, Tensor up, *, int activation) -> Tensor",
    _LIBRARIES,
    fake=lambda gate, up, **options: gate.new_empty(gate.shape),
    backward=lambda ctx, grad_out: _backward_op(grad_out, *ctx.saved_tensors, **ctx.options),
    setup_context=_save,
)
_packed_op = define(
    "gated_activation.packed(Tensor gate_up, *, int activation, bool gate_last) -> Tensor",
    _LIBRARIES,
    fake=lambda gate_up, **options: gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2),
    backward=lambda ctx, grad_out: _packed_backward_op(grad_out, *ctx.saved_tensors, **ctx.options),
    setup_context=_save,
)


def gated_activation(
    gate: Tensor, up: Tensor | None = None, *, activation: str = "silu", gate_last: bool = False
) -> Tensor:
    """Return activation(gate) * up, in one pass over memory.

    On the CPU the bits are the same with any number of threads and any instruction set; on CUDA, in
    every run. Nothing is kept for the gradients but the arguments, and both come from one pass.
    There is no gradient of a gradient. Arithmetic is in float32. As in torch, a gate of -inf gives
    NaN, but for "relu".

    Args:
        gate: (..., n), float32, bfloat16 or float16, on the CPU or on CUDA. Rows that lie in one
            piece each, at equal distances, are read as they lie, so halves of one tensor are no
            copies; other layouts are copied first.
        up: the shape of gate, any of these dtypes. None if gate holds both, as a fused projection
            returns them: (..., 2 n), gate in the first half of each row, up in the second. Its
            gradient is then one tensor too.
        activation: "silu" (SwiGLU), "gelu" (GEGLU), "relu" (ReGLU); "gelu_tanh" or "gelu_quick",
            the approximations of gelu that ``bias_activation`` describes.
        gate_last: whether gate is in the second half of a tensor that holds both.

    Returns:
        (..., n), contiguous, of the dtype of gate.

    See: Shazeer, "GLU Variants Improve Transformer", 2020, equations 5 and 6. The reference,
    ``gated_activation_ref``, is the same in float64.
    """
    number = number_of("gated_activation", activation)
    if up is None:
        out: Tensor = _packed_op(gate, activation=number, gate_last=gate_last)
        return out
    if gate_last:
        raise ValueError(
            "gated_activation: gate_last is True, expected False, as up is a tensor of its own"
        )
    out = _op(gate, up, activation=number)
    return out


def gated_activation_ref(
    gate: Tensor, up: Tensor | None = None, *, activation: str = "silu", gate_last: bool = False
) -> Tensor:
    """Do what gated_activation does, in float64 and plain torch: its definition, for tests."""
    if up is None:
        gate, up = gate.chunk(2, -1)[:: -1 if gate_last else 1]
    return reference(activation, gate.double()) * up.double()


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, where silu(a) is a / (1 + exp(-a)): ``gated_activation`` by its name.

    Args:
        gate: as there.
        up: as there.

    Returns:
        As there.

    Raises:
        ValueError: as there.
        BuildError: as there.

    See: Shazeer, "GLU Variants Improve Transformer", 2020, equation 5 (Swish with beta 1).
    ``swiglu_ref`` is the same in float64.
    """
    return gated_activation(gate, up)


def swiglu_ref(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Do what swiglu does, in float64 and plain torch: its definition, for tests."""
    return gated_activation_ref(gate, up)
