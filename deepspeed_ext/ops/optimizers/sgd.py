"""SGD with momentum: one step over lists of tensors, in place, on the CPU or on CUDA."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from deepspeed_ext.ops.optimizers.step_op import (
    WEIGHT_DECAY,
    Flag,
    Number,
    State,
    StepOp,
    step_function,
)
from deepspeed_ext.ops.optimizers.step_reference import StepReference, reference_of

SGD = StepOp(
    name="sgd_step_",
    library="sgd",
    states=(State("momentum_buffer", signed=True, when="momentum"),),
    options=(
        Number("momentum", least=0),
        Number("dampening"),
        WEIGHT_DECAY,
        Flag("nesterov"),
        Flag("wd_after_momentum"),
    ),
)


@step_function(SGD)
def sgd_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    momentum_buffers: Sequence[Tensor] = (),
    scales: Sequence[Tensor] = (),
    master_params: Sequence[Tensor] = (),
    offsets: Tensor | None = None,
    slots: Tensor | None = None,
    noise: Tensor | None = None,
    lr: float | Tensor,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    wd_after_momentum: bool = False,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    out: Mapping[str, Sequence[Tensor]] | None = None,
) -> None:
    """Take one step of stochastic gradient descent for every parameter, in a single pass.

    Tensors, their two forms (lists or flat buffers), dtypes and devices are as in `adam_step_`, and
    so are all arguments that are not listed here; results are bitwise independent of the device,
    the instruction set, the number of threads and how tensors are split, but for the payload of a
    NaN.

    Args:
        params: float32, bfloat16 or float16, all the same. Updated.
        grads: float32, bfloat16 or float16, all the same. Not modified.
        steps: float32; steps taken so far, at first 0. Advanced by one before they are used.
        momentum_buffers: empty if momentum is 0; else float32, bfloat16, dtype of params, or uint8
            (codes): decaying sum of gradients. Step 1 does not read it. Updated.
        scales: of momentum_buffers in 8-bit codes; see `adam_step_`. Updated.
        master_params: see there. Updated.
        offsets: see there.
        slots: see there.
        noise: see there.
        lr: learning rate; a number, or a tensor of one float32 or float64 on the same device.
        momentum: decay rate of momentum_buffers per step.
        dampening: the part of a gradient that momentum_buffers leave out, but at step 1.
        weight_decay: factor of the L2 penalty.
        nesterov: step along the gradient plus momentum times the buffer, not along the buffer.
        wd_after_momentum: the penalty acts on this step only, and not through the buffer.
        maximize: step up the gradient instead of down.
        grad_scale: None, or one float32 or float64 that gradients are divided by first.
        found_inf: None, or one float32 or float64; when it is not 0, nothing at all is modified.
        out: see there.

    See: Sutskever et al., "On the importance of initialization and momentum in deep learning",
    2013, Equations 3 and 4, in the form of ``torch.optim.SGD``. ``sgd_step_ref_`` is the same
    formula in float64.
    """


@reference_of(sgd_step_, SGD)
def sgd_step_ref_(reference: StepReference) -> None:
    """Do what sgd_step_ does, in float64 and plain torch: its definition, for tests.

    State in 8-bit codes is rounded to the nearest here, noise or not.
    """
    o = reference.options

    def formula(t: float, theta: Tensor, g: Tensor, *buffers: Tensor) -> tuple[Tensor, ...]:
        if o.weight_decay != 0 and not o.wd_after_momentum:
            g = g + o.weight_decay * theta
        buffers = tuple(g if t == 1 else o.momentum * b + (1 - o.dampening) * g for b in buffers)
        for buffer in buffers:
            g = g + o.momentum * buffer if o.nesterov else buffer
        if o.weight_decay != 0 and o.wd_after_momentum:
            g = g + o.weight_decay * theta
        return theta - o.lr * g, *buffers

    reference.run(formula)
