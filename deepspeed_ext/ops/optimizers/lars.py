"""LARS: a step in two passes over lists of tensors, in place, on the CPU or on CUDA.

Each parameter has a learning rate of its own, which depends on the norms of the whole parameter and
of its whole gradient. So the first pass returns these norms; they can then be summed over the
processes that hold shards of a parameter; the second pass updates.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deepspeed_ext.ops.optimizers.step_op import WEIGHT_DECAY, Number, State, StepOp, step_function
from deepspeed_ext.ops.optimizers.step_reference import StepReference, reference_of

LARS_NORMS = StepOp(
    name="lars_norms",
    library="lars",
    states=(),
    options=(),
    lacks=("scales", "steps", "noise", "coefficients", "lr", "maximize", "found_inf"),
    reads=("params", "grads", "master_params"),
    measures=True,
)
LARS_APPLY = StepOp(
    name="lars_apply_",
    library="lars",
    states=(State("momentum_buffer", signed=True, when="momentum"),),
    options=(Number("momentum", least=0, below=1), WEIGHT_DECAY),
    lacks=(),
)


@step_function(LARS_NORMS)
def lars_norms(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    master_params: Sequence[Tensor] = (),
    offsets: Tensor | None = None,
    slots: Tensor | None = None,
    grad_scale: Tensor | None = None,
) -> Tensor:
    """Return the sums of squares of each parameter and of its gradient, for `lars_coefficients`.

    Arguments are those of `lars_apply_`, with the same values; nothing is modified. The sums are in
    float64; on the CPU they depend neither on the number of threads nor on the instruction set, on
    CUDA they are the same in every run. Nothing waits for the device. The result does not require
    grad, whatever params do.

    Args:
        params: as for `lars_apply_`.
        grads: as there.
        master_params: as there; the originals of params, which are measured instead of them.
        offsets: as there.
        slots: as there.
        grad_scale: None, or one float32 or float64 that gradients are divided by first.

    Returns:
        float64 (n, 2) on the device of params: for each parameter the sum of squares of its
        elements, and of those of its gradient.

    See: ``lars_norms_ref`` is the same in plain torch.
    """
    return torch.zeros(0, 2, dtype=torch.float64)


def lars_coefficients(
    squares: Tensor, eeta: float = 1e-3, weight_decay: float = 0.0, epsilon: float = 0.0
) -> Tensor:
    """Return for each parameter the factor of its learning rate, without waiting for the device.

    Args:
        squares: float64 (n, 2), what `lars_norms` returned, of whole parameters.
        eeta: how far a parameter may move for its size, in one step at lr 1: the paper's eta.
        weight_decay: as for `lars_apply_`.
        epsilon: added to the divisor.

    Returns:
        float32 (n,) on the device of squares: eeta * |w| / (|g| + weight_decay * |w| + epsilon); 1
        if either norm is 0.

    See: You, Gitman & Ginsburg, "Large Batch Training of Convolutional Networks", 2017, Equation 6.
    """
    norms = squares.sqrt()
    params, grads = norms[:, 0], norms[:, 1]
    quotient = eeta * params / (grads + weight_decay * params + epsilon)
    quotient = quotient.clamp(max=torch.finfo(torch.float32).max)  # of a vanishing gradient
    return quotient.masked_fill((squares == 0).any(1), 1).float()


@step_function(LARS_APPLY)
def lars_apply_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    steps: Sequence[Tensor],
    coefficients: Tensor,
    *,
    momentum_buffers: Sequence[Tensor] = (),
    scales: Sequence[Tensor] = (),
    master_params: Sequence[Tensor] = (),
    offsets: Tensor | None = None,
    slots: Tensor | None = None,
    noise: Tensor | None = None,
    lr: float | Tensor,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    out: Mapping[str, Sequence[Tensor]] | None = None,
) -> None:
    """Take one LARS step for every parameter, at a learning rate for each.

    Tensors, their two forms (lists or flat buffers), dtypes and devices are as in `adam_step_`, and
    so are all arguments that are not listed here; results are bitwise independent of the device,
    the instruction set, the number of threads and how tensors are split, but for the payload of a
    NaN.

    Args:
        params: float32, bfloat16 or float16, all the same. Updated.
        grads: float32, bfloat16 or float16, all the same. Not modified.
        steps: float32; steps taken so far, at first 0. Advanced by one before they are used.
        coefficients: float32 (n,), contiguous, on the device of params: the factor of lr for each
            parameter, as `lars_coefficients` returns.
        momentum_buffers: empty if momentum is 0; else float32, bfloat16, dtype of params, or uint8
            (codes): decaying sum of what was subtracted, at first 0. Updated.
        scales: of momentum_buffers in 8-bit codes; see `adam_step_`. Updated.
        master_params: see there. Updated.
        offsets: see there.
        slots: see there.
        noise: see there.
        lr: learning rate; a number, or a tensor of one float32 or float64 on the same device.
        momentum: decay rate of momentum_buffers per step, in [0, 1).
        weight_decay: factor of the L2 penalty.
        maximize: step up the gradient instead of down.
        grad_scale: None, or one float32 or float64 that gradients are divided by first.
        found_inf: None, or one float32 or float64; when it is not 0, nothing at all is modified.
        out: see there.

    See: You, Gitman & Ginsburg, "Large Batch Training of Convolutional Networks", 2017,
    Algorithm 1. ``lars_apply_ref_`` is the same formula in float64.
    """


@reference_of(lars_norms, LARS_NORMS)
def lars_norms_ref(reference: StepReference) -> Tensor:
    """Do what lars_norms does, in float64 and plain torch: its definition, for tests."""
    rows = [
        torch.stack([reference.original(i).square().sum(), reference.grad(i).square().sum()])
        for i in range(len(reference.grads))
    ]
    return torch.stack(rows).detach()


@reference_of(lars_apply_, LARS_APPLY)
def lars_apply_ref_(reference: StepReference) -> None:
    """Do what lars_apply_ does, in float64 and plain torch: its definition, for tests.

    State in 8-bit codes is rounded to the nearest here, noise or not.
    """
    o = reference.options
    rates = iter(o.lr * o.coefficients.double())

    def formula(t: float, theta: Tensor, g: Tensor, *buffers: Tensor) -> tuple[Tensor, ...]:
        delta = next(rates) * (g + o.weight_decay * theta if o.weight_decay != 0 else g)
        for buffer in buffers:
            delta = o.momentum * buffer + delta if o.momentum != 0 else delta
        return theta - delta, *([delta] if buffers else [])

    reference.run(formula)
