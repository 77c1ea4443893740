"""Adam and AdamW: one step over lists of tensors, in place, on the CPU or on CUDA."""

from collections.abc import Mapping, Sequence

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

ADAM = StepOp(
    name="adam_step_",
    library="adam",
    states=(
        State("exp_avg", signed=True),
        State("exp_avg_sq", signed=False),
        State("max_exp_avg_sq", signed=False, when="amsgrad"),
    ),
    options=(
        BETAS,
        EPS,
        WEIGHT_DECAY,
        Flag("decoupled", "decoupled_weight_decay"),
        Flag("bias_correction"),
    ),
)


@step_function(ADAM)
def adam_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    max_exp_avg_sqs: Sequence[Tensor] = (),
    scales: Sequence[Tensor] = (),
    master_params: Sequence[Tensor] = (),
    offsets: Tensor | None = None,
    slots: Tensor | None = None,
    noise: Tensor | None = None,
    lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    bias_correction: bool = True,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    out: Mapping[str, Sequence[Tensor]] | None = None,
) -> None:
    """Take one Adam (or AdamW) step for every parameter, in a single pass over memory.

    Item i of `params` and `grads` belongs to parameter i. The other tensors are state, in one of
    two forms. As lists: item i has the shape and strides of parameter i, and `steps[i]` has one
    element. As flat buffers, when `offsets` and `slots` are given: each argument is a list of one
    flat tensor, in which parameter i takes the elements from `offsets[i]` on, in the order in which
    the parameter lies in memory, and `steps[0][slots[i]]` is its step. Handling a list costs more
    than the arithmetic of a small tensor, so flat buffers make a step over many small parameters
    much faster.

    All other tensors are on one device, and no written one shares memory with another. Parameters
    have any dense layout (contiguous, transposed, channels_last: no gaps, no overlap). Arithmetic
    is in float32; results are bitwise independent of the device, the instruction set, the number
    of threads and how tensors are split, but for the payload of a NaN. The call can be captured in
    a CUDA graph as it is.

    Args:
        params: float32, bfloat16 or float16, all the same. Updated.
        grads: float32, bfloat16 or float16, all the same; shape of the parameter, any layout
            (copied first when it differs from the parameter's). Not modified.
        exp_avgs: float32, bfloat16, dtype of params, or uint8 (codes, see scales); running mean of
            gradients, at first 0. Updated.
        exp_avg_sqs: dtype of exp_avgs; running mean of squared gradients, at first 0. Updated.
        steps: float32; steps taken so far, at first 0. Advanced by one before they are used.
        max_exp_avg_sqs: empty, or for AMSGrad, dtype of exp_avgs: the largest exp_avg_sqs so far,
            at first 0. Updated.
        scales: empty, or with state in 8-bit codes (`encode_blocks`) float32 scales of its blocks
            of 256 elements, at first 0, then the powers of two that steps write (with others, which
            no class loads, bits depend on the instruction set). As lists: for each parameter those
            of exp_avgs, (blocks,), then for each those of exp_avg_sqs, and so on. As flat buffers:
            one for each state argument, in which parameter i begins at offsets[i] / 256, a whole
            number. Updated.
        master_params: empty, or float32 originals of 16-bit params: the step is computed on them,
            and params receive them rounded. Or int16: the lower halves of originals of which
            bfloat16 params are the upper ones (`split_float32`). Updated.
        offsets: None, or where each parameter begins in the flat buffers, in elements, ascending:
            (n,), int64, on the CPU.
        slots: None, or the place of each parameter in the flat buffer of steps, as offsets.
        noise: None: state is rounded to the nearest. Or int64 on the CPU, (n, 2): for each
            parameter a key, and the index of its first element here in the whole parameter. State
            in bfloat16 or codes is then rounded up or down at random, with the exact expected
            value (but for codes of what is never negative: what is below the first step becomes
            the first step), by a hash of key, step and index of the element.
        lr: learning rate; a number, or a tensor of one float32 or float64 on the same device.
        betas: decay rates of exp_avgs and exp_avg_sqs per step, each in [0, 1).
        eps: added to the denominator, in units of the gradient.
        weight_decay: decay rate per unit of lr (AdamW), or factor of the L2 penalty (Adam).
        decoupled: True for AdamW, False for Adam.
        bias_correction: divide the running means by 1 - beta^step, as the papers do.
        maximize: step up the gradient instead of down.
        grad_scale: None, or one float32 or float64 that gradients are divided by first, such as
            the loss scale.
        found_inf: None, or one float32 or float64; when it is not 0, nothing at all is modified.
        out: None, or what to write to instead of arguments that are updated, by their names: lists
            like theirs, of tensors with the same shapes, strides and dtypes (flat buffers may be
            longer). Each is the very memory of its argument or shares none with anything. What is
            left out is updated in place. When found_inf is not 0, what was read is copied. A step
            of a part of a parameter is one of views, in any cut (of state in codes at multiples of
            256 elements), with the index of its first element in `noise`; its bits are the same.

    See: Kingma & Ba, "Adam", 2015, Algorithm 1; Loshchilov & Hutter, "Decoupled Weight Decay
    Regularization", 2019, Algorithm 2; Reddi, Kale & Kumar, "On the Convergence of Adam and
    Beyond", 2018, Algorithm 2 (with the maximum taken before the bias correction, as in
    ``torch.optim``). ``adam_step_ref_`` is the same formula in float64.
    """


@reference_of(adam_step_, ADAM)
def adam_step_ref_(reference: StepReference) -> None:
    """Do what adam_step_ does, in float64 and plain torch: its definition, for tests.

    State in 8-bit codes is rounded to the nearest here, noise or not.
    """
    o = reference.options
    beta1, beta2 = o.betas

    def formula(
        t: float, theta: Tensor, g: Tensor, m: Tensor, v: Tensor, *largest: Tensor
    ) -> tuple[Tensor, ...]:
        if o.weight_decay != 0 and not o.decoupled:
            g = g + o.weight_decay * theta
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        largest = tuple(torch.maximum(old, v) for old in largest)
        m_unbiased, v_unbiased = m, largest[0] if largest else v
        if o.bias_correction:
            m_unbiased = m_unbiased / (1 - beta1**t)
            v_unbiased = v_unbiased / (1 - beta2**t)
        decay = o.lr * o.weight_decay * theta if o.weight_decay != 0 and o.decoupled else 0
        theta = theta - decay - o.lr * m_unbiased / (v_unbiased.sqrt() + o.eps)
        return theta, m, v, *largest

    reference.run(formula)
