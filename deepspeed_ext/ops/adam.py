"""Adam and AdamW: one step over lists of tensors, in place, on the CPU or on CUDA."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_ext.ops._library import check_one_device, define

_adam_step_op = define(
    "adam_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs,"
    " Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] master_params,"
    " Tensor(f!)[] steps, Tensor? offsets, Tensor? slots, float lr, Tensor? lr_tensor, float beta1,"
    " float beta2, float eps, float weight_decay, bool decoupled, bool maximize,"
    " bool bias_correction, Tensor? grad_scale, Tensor? found_inf) -> ()",
    {"cpu": "cpu_adam", "cuda": "fused_adam"},
)


def adam_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    max_exp_avg_sqs: Sequence[Tensor] = (),
    master_params: Sequence[Tensor] = (),
    offsets: Tensor | None = None,
    slots: Tensor | None = None,
    lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    maximize: bool = False,
    bias_correction: bool = True,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Take one Adam (or AdamW) step for every parameter, in a single pass over memory.

    Item i of `params` and `grads` belongs to parameter i. The other tensors are state, in one of
    two forms. As lists: item i has the shape and strides of parameter i, and `steps[i]` has one
    element. As slabs, when `offsets` and `slots` are given: each argument is a list of one flat
    tensor, in which parameter i takes the elements from `offsets[i]` on, in the order in which the
    parameter lies in memory, and `steps[0][slots[i]]` is its step. Handling a list costs more than
    the arithmetic of a small tensor, so slabs make a step over many small parameters much faster.

    All other tensors are on one device, and no written one shares memory with another. Parameters
    have any dense layout (contiguous, transposed, channels_last: no gaps, no overlap). Arithmetic
    is in float32; results are bitwise independent of the device, the instruction set, the number
    of threads and how tensors are split, but for the payload of a NaN. The call can be captured in
    a CUDA graph as it is.

    Args:
        params: float32, bfloat16 or float16, all the same. Updated.
        grads: float32, bfloat16 or float16, all the same; shape of the parameter, any layout
            (copied first when it differs from the parameter's). Not modified.
        exp_avgs: float32 or dtype of params; running mean of gradients, at first 0. Updated.
        exp_avg_sqs: dtype of exp_avgs; running mean of squared gradients, at first 0. Updated.
        steps: float32; steps taken so far, at first 0. Advanced by one before they are used.
        max_exp_avg_sqs: empty, or for AMSGrad, dtype of exp_avgs: the largest exp_avg_sqs so far,
            at first 0. Updated.
        master_params: empty, or float32 originals of 16-bit params: the step is computed on them,
            and params receive them rounded. Updated.
        offsets: None, or where each parameter begins in the slabs, in elements, ascending: (n,),
            int64, on the CPU.
        slots: None, or the place of each parameter in the slab of steps, as offsets.
        lr: learning rate; a number, or a tensor of one float32 or float64 on the same device.
        betas: decay rates of exp_avgs and exp_avg_sqs per step, each in [0, 1).
        eps: added to the denominator, in units of the gradient.
        weight_decay: decay rate per unit of lr (AdamW), or factor of the L2 penalty (Adam).
        decoupled: True for AdamW, False for Adam.
        maximize: step up the gradient instead of down.
        bias_correction: divide the running means by 1 - beta^step, as the papers do.
        grad_scale: None, or one float32 or float64 that gradients are divided by first, such as
            the loss scale.
        found_inf: None, or one float32 or float64; when it is not 0, nothing at all is modified.

    Raises:
        ValueError: an argument breaks a rule above; the text names it, its value and the rule.
        BuildError: the native library of the device could not be built or loaded.

    See: Kingma & Ba, "Adam", 2015, Algorithm 1; Loshchilov & Hutter, "Decoupled Weight Decay
    Regularization", 2019, Algorithm 2; Reddi, Kale & Kumar, "On the Convergence of Adam and
    Beyond", 2018, Algorithm 2 (with the maximum taken before the bias correction, as in
    ``torch.optim``). ``adam_step_ref_`` is the same formula in float64.
    """
    if not params and not grads:  # no tensor, so no device to dispatch on
        return
    lr_number, lr_tensor = (0.0, lr) if isinstance(lr, Tensor) else (lr, None)
    _adam_step_op(
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, master_params, steps,
        offsets, slots, lr_number, lr_tensor, *betas, eps, weight_decay, decoupled, maximize,
        bias_correction, grad_scale, found_inf,
    )  # fmt: skip
    # Native ops do not count their writes. Without the count, a backward that saved a parameter
    # before the step would use the new values without an error.
    for written in (params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, master_params, steps):
        torch.autograd.graph.increment_version(written)


def _adam_step_fake(*args: object) -> None:
    """Infer nothing, as the op returns nothing."""
    check_one_device(_adam_step_op, args, on_host=("offsets", "slots"))


torch.library.register_fake("deepspeed_ext::adam_step_", _adam_step_fake)


def adam_step_ref_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    max_exp_avg_sqs: Sequence[Tensor] = (),
    master_params: Sequence[Tensor] = (),
    offsets: Tensor | None = None,
    slots: Tensor | None = None,
    lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    maximize: bool = False,
    bias_correction: bool = True,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Do what adam_step_ does, in float64 and plain torch: its definition, for tests."""
    if found_inf is not None and found_inf.item() != 0:
        return
    lr = float(lr)
    beta1, beta2 = betas
    scale = 1.0 if grad_scale is None else float(grad_scale)

    def piece(state: Sequence[Tensor], i: int) -> Tensor:
        if offsets is None:
            return state[i]
        slab = state[0]
        start = slab.storage_offset() + int(offsets[i])
        return slab.as_strided(params[i].shape, params[i].stride(), start)

    with torch.no_grad():
        for i, target in enumerate(params):
            originals = piece(master_params, i) if master_params else target
            step = steps[i] if slots is None else steps[0][slots[i]]
            step += 1
            t = float(step)

            theta = originals.double()
            g = grads[i].double() / scale
            if maximize:
                g = -g
            if weight_decay != 0 and not decoupled:
                g = g + weight_decay * theta
            m = beta1 * piece(exp_avgs, i).double() + (1 - beta1) * g
            v = beta2 * piece(exp_avg_sqs, i).double() + (1 - beta2) * g**2
            largest_v = v
            if max_exp_avg_sqs:
                largest_v = torch.maximum(piece(max_exp_avg_sqs, i).double(), v)
                piece(max_exp_avg_sqs, i).copy_(largest_v)
            m_unbiased, v_unbiased = m, largest_v
            if bias_correction:
                m_unbiased = m / (1 - beta1**t)
                v_unbiased = largest_v / (1 - beta2**t)
            decay = lr * weight_decay * theta if weight_decay != 0 and decoupled else 0
            theta = theta - decay - lr * m_unbiased / (v_unbiased.sqrt() + eps)

            originals.copy_(theta)
            if master_params:
                target.copy_(originals)
            piece(exp_avgs, i).copy_(m)
            piece(exp_avg_sqs, i).copy_(v)
