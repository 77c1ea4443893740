"""Lion: one step over lists of tensors, in place, on the CPU or on CUDA."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_ext.ops._library import define
from deepspeed_ext.ops.optimizers._step import (
    ON_HOST,
    StepReference,
    count_writes,
    number_or_tensor,
)

_lion_step_op = define(
    "lion_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] scales,"
    " Tensor(d!)[] master_params, Tensor(e!)[] steps, Tensor? offsets, Tensor? slots,"
    " Tensor? noise, float lr, Tensor? lr_tensor, float beta1, float beta2, float weight_decay,"
    " bool maximize, Tensor? grad_scale, Tensor? found_inf) -> ()",
    {"cpu": "cpu_lion", "cuda": "fused_lion"},
    on_host=ON_HOST,
)


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
) -> None:
    """Take one Lion step for every parameter, in a single pass over memory.

    Tensors, their two forms (lists or slabs), dtypes and devices are as in `adam_step_`, and so are
    all arguments that are not listed here; results are bitwise independent of the device, the
    instruction set, the number of threads and how tensors are split, but for the payload of a NaN.

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

    Raises:
        ValueError: an argument breaks a rule above; the text names it, its value and the rule.
        BuildError: the native library of the device could not be built or loaded.

    See: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, Algorithm 2. The sign
    of 0 is 0, that of NaN is NaN. ``lion_step_ref_`` is the same formula in float64.
    """
    if not params and not grads:  # no tensor, so no device to dispatch on
        return
    _lion_step_op(
        params, grads, exp_avgs, scales, master_params, steps, offsets, slots, noise,
        *number_or_tensor(lr), *betas, weight_decay, maximize, grad_scale, found_inf,
    )  # fmt: skip
    count_writes(params, exp_avgs, scales, master_params, steps)


def lion_step_ref_(
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
) -> None:
    """Do what lion_step_ does, in float64 and plain torch: its definition, for tests.

    State in 8-bit codes is rounded to the nearest here, noise or not.
    """
    reference = StepReference(
        params, grads, [exp_avgs], (True,), scales, master_params, steps, offsets, slots,
        maximize, grad_scale, found_inf,
    )  # fmt: skip
    rate = float(lr)
    beta1, beta2 = betas

    def formula(_: float, theta: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        update = _sign(beta1 * m + (1 - beta1) * g)
        decay = weight_decay * theta if weight_decay != 0 else 0
        return theta - rate * (update + decay), beta2 * m + (1 - beta2) * g

    reference.run(formula)


def _sign(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), values, values.sign())  # torch.sign makes NaN 0
