"""LAMB: a step in two passes over lists of tensors, in place, on the CPU or on CUDA.

Each parameter has a learning rate of its own, which depends on the norms of the whole parameter and
of its whole update. So the first pass brings the moments up to date and returns these norms; they
can then be summed over the processes that hold shards of a parameter; the second pass updates.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from deepspeed_ext.ops.optimizers.step_op import (
    BETAS,
    EPS,
    WEIGHT_DECAY,
    Flag,
    State,
    StepOp,
    step_function,
)
from deepspeed_ext.ops.optimizers.step_reference import StepReference, reference_of

_STATES = (State("exp_avg", signed=True), State("exp_avg_sq", signed=False))
_OPTIONS = (BETAS, EPS, WEIGHT_DECAY, Flag("eps_inside_sqrt"), Flag("bias_correction"))
LAMB_MOMENTS = StepOp(
    name="lamb_moments_",
    library="lamb",
    states=_STATES,
    options=_OPTIONS,
    lacks=("coefficients", "lr"),
    reads=("params", "grads", "master_params"),
    measures=True,
)
LAMB_APPLY = StepOp(
    name="lamb_apply_",
    library="lamb",
    states=_STATES,
    options=_OPTIONS,
    lacks=("grads", "noise", "maximize", "grad_scale"),
    reads=("exp_avgs", "exp_avg_sqs", "scales", "steps"),
)


@step_function(LAMB_MOMENTS)
def lamb_moments_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    scales: Sequence[Tensor] = (),
    master_params: Sequence[Tensor] = (),
    offsets: Tensor | None = None,
    slots: Tensor | None = None,
    noise: Tensor | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    eps_inside_sqrt: bool = False,
    bias_correction: bool = True,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    out: Mapping[str, Sequence[Tensor]] | None = None,
) -> Tensor:
    """Take the first half of a LAMB step: advance the moments, and measure parameters and updates.

    Tensors, their two forms (lists or flat buffers), dtypes and devices are as in `adam_step_`, and
    so are all arguments that are not listed here. Moments are bitwise independent of the device,
    the instruction set, the number of threads and how tensors are split. The sums are in float64;
    on the CPU they depend neither on the number of threads nor on the instruction set, on CUDA they
    are the same in every run. Nothing waits for the device. The result does not require grad,
    whatever params do.

    Args:
        params: float32, bfloat16 or float16, all the same. Not modified.
        grads: float32, bfloat16 or float16, all the same. Not modified.
        exp_avgs: see `adam_step_`. Updated.
        exp_avg_sqs: see there. Updated.
        steps: float32; steps taken so far, at first 0. Advanced by one before they are used.
        scales: see there. Updated.
        master_params: see there; the originals of params, which are measured instead of them. Not
            modified.
        offsets: see there.
        slots: see there.
        noise: see there.
        betas: decay rates of exp_avgs and exp_avg_sqs per step, each in [0, 1).
        eps: added to the denominator of the update, in units of the gradient.
        weight_decay: the part of the parameter that is added to its update.
        eps_inside_sqrt: add eps to the second moment, before the root is taken.
        bias_correction: divide the running means by 1 - beta^step, as the paper does.
        maximize: step up the gradient instead of down.
        grad_scale: None, or one float32 or float64 that gradients are divided by first.
        found_inf: None, or one float32 or float64; when it is not 0, nothing is modified, and all
            sums are 0.
        out: see there; the second half then takes the moments from where they were written.

    Returns:
        float64 (n, 2) on the device of params: for each parameter the sum of squares of its
        elements, and of those of its update, worked out from the moments as they were stored.

    See: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
    2020, Algorithm 2. ``lamb_moments_ref_`` is the same formula in float64.
    """
    return torch.zeros(0, 2, dtype=torch.float64)


def lamb_coefficients(
    squares: Tensor, min_coefficient: float = 0.01, max_coefficient: float = 10.0
) -> Tensor:
    """Return for each parameter the factor of its learning rate, without waiting for the device.

    Args:
        squares: float64 (n, 2), what `lamb_moments_` returned, of whole parameters.
        min_coefficient: the least factor, from 0 on.
        max_coefficient: the largest factor, not below it.

    Returns:
        float32 (n,) on the device of squares: the norm of the parameter divided by that of its
        update, within the bounds; 1 if either is 0.

    See: You et al. 2020, Algorithm 2, with clamping of the quotient for the function phi.
    """
    if not 0 <= min_coefficient <= max_coefficient:
        raise ValueError(
            f"lamb_coefficients: min_coefficient is {min_coefficient}, expected"
            f" 0 <= min_coefficient <= {max_coefficient}"
        )
    norms = squares.sqrt()
    quotient = (norms[:, 0] / norms[:, 1]).clamp(min_coefficient, max_coefficient)
    return quotient.masked_fill((squares == 0).any(1), 1).float()


@step_function(LAMB_APPLY)
def lamb_apply_(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    coefficients: Tensor,
    *,
    scales: Sequence[Tensor] = (),
    master_params: Sequence[Tensor] = (),
    offsets: Tensor | None = None,
    slots: Tensor | None = None,
    lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    eps_inside_sqrt: bool = False,
    bias_correction: bool = True,
    found_inf: Tensor | None = None,
    out: Mapping[str, Sequence[Tensor]] | None = None,
) -> None:
    """Take the second half of a LAMB step: subtract the update, which the moments say.

    Arguments are those of `lamb_moments_`, with the same values, but for the following. Results are
    bitwise independent of the device, the instruction set, the number of threads and how tensors
    are split, but for the payload of a NaN.

    Args:
        params: as for `lamb_moments_`. Updated.
        exp_avgs: as it left them. Not modified.
        exp_avg_sqs: as it left them. Not modified.
        steps: as it left them, this step counted. Not modified.
        coefficients: float32 (n,), contiguous, on the device of params: the factor of lr for each
            parameter, as `lamb_coefficients` returns.
        scales: as it left them. Not modified.
        master_params: as for `lamb_moments_`. Updated.
        offsets: as for `lamb_moments_`, like all that follow, but for lr.
        slots: see there.
        lr: learning rate; a number, or a tensor of one float32 or float64 on the same device.
        betas: see there.
        eps: see there.
        weight_decay: see there.
        eps_inside_sqrt: see there.
        bias_correction: see there.
        found_inf: see there.
        out: see `adam_step_`.

    See: You et al. 2020, Algorithm 2. ``lamb_apply_ref_`` is the same formula in float64.
    """


def _update(o: SimpleNamespace, step: float, theta: Tensor, m: Tensor, v: Tensor) -> Tensor:
    """Return the update of a parameter, before its learning rate: both ops' common definition."""
    if o.bias_correction:
        m = m / (1 - o.betas[0] ** step)
        v = v / (1 - o.betas[1] ** step)
    root = (v + o.eps).sqrt() if o.eps_inside_sqrt else v.sqrt() + o.eps
    decay = o.weight_decay * theta if o.weight_decay != 0 else 0
    update: Tensor = m / root + decay
    return update


@reference_of(lamb_moments_, LAMB_MOMENTS)
def lamb_moments_ref_(reference: StepReference) -> Tensor:
    """Do what lamb_moments_ does, in float64 and plain torch: its definition, for tests.

    State in 8-bit codes is rounded to the nearest here, noise or not.
    """
    o = reference.options
    beta1, beta2 = o.betas
    taken: list[float] = []

    def formula(t: float, theta: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        taken.append(t)
        return theta, beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2

    reference.run(formula)
    params = reference.params
    squares = torch.zeros(len(params), 2, dtype=torch.float64, device=params[0].device)
    for i, t in enumerate(taken):
        theta = reference.original(i)
        update = _update(o, t, theta, *reference.state(i))
        squares[i] = torch.stack([theta.square().sum(), update.square().sum()])
    return squares


@reference_of(lamb_apply_, LAMB_APPLY)
def lamb_apply_ref_(reference: StepReference) -> None:
    """Do what lamb_apply_ does, in float64 and plain torch: its definition, for tests."""
    o = reference.options
    rates = iter(o.lr * o.coefficients.double())

    def formula(t: float, theta: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (theta - next(rates) * _update(o, t, theta, m, v),)

    reference.run(formula)
