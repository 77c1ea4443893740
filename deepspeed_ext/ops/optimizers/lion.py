"""Lion: one step over lists of tensors, in place, on the CPU or on CUDA."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deepspeed_ext.ops.optimizers.step_op import BETAS, WEIGHT_DECAY, State, StepOp, step_function
from deepspeed_ext.ops.optimizers.step_reference import StepReference, reference_of

LION = StepOp(
    name="lion_step_",
    library="lion",
    states=(State("exp_avg", signed=True),),
    options=(BETAS, WEIGHT_DECAY),
)


@step_function(LION)
def lion_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    scales: Sequence[Tensor] = (),
    master_params: Sequence[Tensor] = (),
    offsets: Tensor | None = None,
    slots: Tensor | None = None,
    noise: Tensor | None = None,
    lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    out: Mapping[str, Sequence[Tensor]] | None = None,
) -> None:
    """Take one Lion step for every parameter, in a single pass over memory.

    Tensors, their two forms (lists or flat buffers), dtypes and devices are as in `adam_step_`, and
    so are all arguments that are not listed here; results are bitwise independent of the device,
    the instruction set, the number of threads and how tensors are split, but for the payload of a
    NaN.

    Args:
        params: float32, bfloat16 or float16, all the same. Updated.
        grads: float32, bfloat16 or float16, all the same. Not modified.
        exp_avgs: float32, bfloat16, dtype of params, or uint8 (codes); running mean of gradients,
            at first 0. Updated.
        steps: float32; steps taken so far, at first 0. Advanced by one; Lion itself needs none.
        scales: of exp_avgs in 8-bit codes; see `adam_step_`. Updated.
        master_params: see there. Updated.
        offsets: see there.
        slots: see there.
        noise: see there.
        lr: learning rate, the change of every element; a number, or a tensor of one float32 or
            float64 on the same device.
        betas: weight of exp_avgs in the direction of the step, and decay rate of exp_avgs per step;
            each in [0, 1).
        weight_decay: decay rate per unit of lr, decoupled.
        maximize: step up the gradient instead of down.
        grad_scale: None, or one float32 or float64 that gradients are divided by first.
        found_inf: None, or one float32 or float64; when it is not 0, nothing at all is modified.
        out: see there.

    See: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, Algorithm 2. The sign
    of 0 is 0, that of NaN is NaN. ``lion_step_ref_`` is the same formula in float64.
    """


@reference_of(lion_step_, LION)
def lion_step_ref_(reference: StepReference) -> None:
    """Do what lion_step_ does, in float64 and plain torch: its definition, for tests.

    State in 8-bit codes is rounded to the nearest here, noise or not.
    """
    o = reference.options
    beta1, beta2 = o.betas

    def formula(_: float, theta: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        update = _sign(beta1 * m + (1 - beta1) * g)
        decay = o.weight_decay * theta if o.weight_decay != 0 else 0
        return theta - o.lr * (update + decay), beta2 * m + (1 - beta2) * g

    reference.run(formula)


def _sign(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), values, values.sign())  # torch.sign makes NaN 0
