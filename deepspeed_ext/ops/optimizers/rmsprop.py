"""RMSprop: one step over lists of tensors, in place, on the CPU or on CUDA."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deepspeed_ext.ops.optimizers.step_op import (
    EPS,
    WEIGHT_DECAY,
    Number,
    State,
    StepOp,
    step_function,
)
from deepspeed_ext.ops.optimizers.step_reference import StepReference, reference_of

RMSPROP = StepOp(
    name="rmsprop_step_",
    library="rmsprop",
    states=(
        State("square_avg", signed=False),
        State("grad_avg", signed=True, when="centered"),
        State("momentum_buffer", signed=True, when="momentum"),
    ),
    options=(
        Number("alpha", least=0, below=1),
        EPS,
        Number("momentum", least=0),
        WEIGHT_DECAY,
    ),
)


@step_function(RMSPROP)
def rmsprop_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    square_avgs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    grad_avgs: Sequence[Tensor] = (),
    momentum_buffers: Sequence[Tensor] = (),
    scales: Sequence[Tensor] = (),
    master_params: Sequence[Tensor] = (),
    offsets: Tensor | None = None,
    slots: Tensor | None = None,
    noise: Tensor | None = None,
    lr: float | Tensor,
    alpha: float = 0.99,
    eps: float = 1e-8,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    out: Mapping[str, Sequence[Tensor]] | None = None,
) -> None:
    """Take one RMSprop step for every parameter, in a single pass over memory.

    Tensors, their two forms (lists or flat buffers), dtypes and devices are as in `adam_step_`, and
    so are all arguments that are not listed here; results are bitwise independent of the device,
    the instruction set, the number of threads and how tensors are split, but for the payload of a
    NaN.

    Args:
        params: float32, bfloat16 or float16, all the same. Updated.
        grads: float32, bfloat16 or float16, all the same. Not modified.
        square_avgs: float32, bfloat16, dtype of params, or uint8 (codes); running mean of squared
            gradients, at first 0. Updated.
        steps: float32; steps taken so far, at first 0. Advanced by one; RMSprop itself needs none.
        grad_avgs: empty, or to divide by the root of the variance of gradients, not of their mean
            square ("centered"): dtype of square_avgs; running mean of gradients, at first 0. A
            variance below 2^-22 square_avgs counts as that, as float32 does not have it. Updated.
        momentum_buffers: empty if momentum is 0; else dtype of square_avgs: decaying sum of
            quotients, at first 0. Updated.
        scales: of state in 8-bit codes, in the order of the schema; see `adam_step_`. Updated.
        master_params: see there. Updated.
        offsets: see there.
        slots: see there.
        noise: see there.
        lr: learning rate; a number, or a tensor of one float32 or float64 on the same device.
        alpha: decay rate of square_avgs and grad_avgs per step, in [0, 1).
        eps: added to the denominator, in units of the gradient.
        momentum: decay rate of momentum_buffers per step, at least 0.
        weight_decay: factor of the L2 penalty.
        maximize: step up the gradient instead of down.
        grad_scale: None, or one float32 or float64 that gradients are divided by first.
        found_inf: None, or one float32 or float64; when it is not 0, nothing at all is modified.
        out: see there.

    See: Tieleman & Hinton, "Neural Networks for Machine Learning", 2012, lecture 6.5; Graves,
    "Generating Sequences With Recurrent Neural Networks", 2013, equations 38 to 45 (centered), in
    the form of ``torch.optim.RMSprop``. ``rmsprop_step_ref_`` is the same formula in float64.
    """


@reference_of(rmsprop_step_, RMSPROP)
def rmsprop_step_ref_(reference: StepReference) -> None:
    """Do what rmsprop_step_ does, in float64 and plain torch: its definition, for tests.

    State in 8-bit codes is rounded to the nearest here, noise or not.
    """
    o = reference.options

    def formula(t: float, theta: Tensor, g: Tensor, v: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        rest = list(more)
        new = []
        if o.weight_decay != 0:
            g = g + o.weight_decay * theta
        v = o.alpha * v + (1 - o.alpha) * g**2
        variance = v
        if o.grad_avgs:
            mean = o.alpha * rest.pop(0) + (1 - o.alpha) * g
            variance = torch.maximum(v - mean**2, 2.0**-22 * v)
            new.append(mean)
        delta = g / (variance.sqrt() + o.eps)
        if o.momentum_buffers:
            delta = o.momentum * rest.pop(0) + delta
            new.append(delta)
        return theta - o.lr * delta, v, *new

    reference.run(formula)
