"""Adagrad: one step over lists of tensors, in place, on the CPU or on CUDA."""

from collections.abc import Mapping, Sequence

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

ADAGRAD = StepOp(
    name="adagrad_step_",
    library="adagrad",
    states=(State("sum", signed=False),),
    options=(Number("lr_decay", least=0), EPS, WEIGHT_DECAY),
)


@step_function(ADAGRAD)
def adagrad_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sums: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    scales: Sequence[Tensor] = (),
    master_params: Sequence[Tensor] = (),
    offsets: Tensor | None = None,
    slots: Tensor | None = None,
    noise: Tensor | None = None,
    lr: float | Tensor,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    out: Mapping[str, Sequence[Tensor]] | None = None,
) -> None:
    """Take one Adagrad step for every parameter, in a single pass over memory.

    Tensors, their two forms (lists or flat buffers), dtypes and devices are as in `adam_step_`, and
    so are all arguments that are not listed here; results are bitwise independent of the device,
    the instruction set, the number of threads and how tensors are split, but for the payload of a
    NaN.

    Args:
        params: float32, bfloat16 or float16, all the same. Updated.
        grads: float32, bfloat16 or float16, all the same. Not modified.
        sums: float32, bfloat16, dtype of params, or uint8 (codes); sum of squared gradients, at
            first 0 or more. Updated.
        steps: float32; steps taken so far, at first 0. Advanced by one before they are used.
        scales: of sums in 8-bit codes; see `adam_step_`. Updated.
        master_params: see there. Updated.
        offsets: see there.
        slots: see there.
        noise: see there.
        lr: learning rate; a number, or a tensor of one float32 or float64 on the same device.
        lr_decay: step t, the first being 1, takes lr / (1 + (t - 1) * lr_decay).
        eps: added to the denominator, in units of the gradient.
        weight_decay: factor of the L2 penalty.
        maximize: step up the gradient instead of down.
        grad_scale: None, or one float32 or float64 that gradients are divided by first.
        found_inf: None, or one float32 or float64; when it is not 0, nothing at all is modified.
        out: see there.

    See: Duchi, Hazan & Singer, "Adaptive Subgradient Methods", 2011, Figure 1 (diagonal matrices),
    with the options of ``torch.optim.Adagrad``. ``adagrad_step_ref_`` is the same formula in
    float64.
    """


@reference_of(adagrad_step_, ADAGRAD)
def adagrad_step_ref_(reference: StepReference) -> None:
    """Do what adagrad_step_ does, in float64 and plain torch: its definition, for tests.

    State in 8-bit codes is rounded to the nearest here, noise or not.
    """
    o = reference.options

    def formula(t: float, theta: Tensor, g: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        if o.weight_decay != 0:
            g = g + o.weight_decay * theta
        total = total + g**2
        return theta - o.lr / (1 + (t - 1) * o.lr_decay) * g / (total.sqrt() + o.eps), total

    reference.run(formula)
