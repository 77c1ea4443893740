"""The steps and norms of Apex's and Colossal-AI's fused_optim, and their Adam on the CPU.

Lists are of tensors, in the order that each function names; they are on the CPU or on CUDA, and of
any dtypes that the ops take. Nothing waits for the device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops import (
    adam_step_,
    l2_norm,
    lamb_apply_,
    lamb_coefficients,
    lamb_moments_,
    sgd_step_,
)

Lists = Sequence[Sequence[Tensor]]


class MultiTensorApply:
    """Calls one of the functions below.

    Args:
        chunk_size: handed on; no function heeds it.
    """

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop_flag: Tensor, tensor_lists: Lists, *args: Any
    ) -> Any:
        """Call the function with all of this."""
        return op(self.chunk_size, noop_flag, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: bool,
    weight_decay: float,
    div_scale: float = -1.0,
) -> None:
    """Take a step of Adam, by ``adam_step_``.

    Args:
        chunk_size: not heeded.
        noop_flag: not heeded, as there; what is not finite spreads.
        tensor_lists: gradients, parameters, exp_avg, exp_avg_sq.
        lr: learning rate, and so on, as of ``adam_step_``.
        beta1: see there.
        beta2: see there.
        eps: see there.
        step: the number of this step, from 1 on.
        mode: 0 for an L2 penalty, 1 for AdamW.
        bias_correction: see there.
        weight_decay: see there.
        div_scale: what gradients are divided by, if it is more than 0. DeepSpeed's has none.
    """
    grads, params, exp_avgs, exp_avg_sqs = tensor_lists
    if not params:
        return
    adam_step_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        _steps_before(step, params),
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        decoupled=bool(mode),
        bias_correction=bool(bias_correction),
        grad_scale=_number(div_scale, params) if div_scale > 0 else None,
    )


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Take a step of SGD, by ``sgd_step_``, unless noop_flag is not 0.

    Args:
        chunk_size: not heeded.
        noop_flag: (1,), int32.
        tensor_lists: gradients, parameters, momentum buffers.
        weight_decay: see ``sgd_step_``, as the following.
        momentum: see there.
        dampening: see there.
        lr: see there.
        nesterov: see there.
        first_run: whether momentum buffers have nothing yet, and become the gradients.
        wd_after_momentum: see there.
        scale: what gradients are multiplied by.
    """
    grads, params, buffers = tensor_lists
    if not params:
        return
    sgd_step_(
        params,
        grads,
        _steps_before(1 if first_run else 2, params),
        momentum_buffers=buffers if momentum != 0 else (),
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=bool(nesterov),
        wd_after_momentum=bool(wd_after_momentum),
        grad_scale=None if scale == 1 else _number(1 / scale, params),
        found_inf=noop_flag.float(),
    )


def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: bool,
    weight_decay: float,
    grad_averaging: bool,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool = False,
) -> None:
    """Take a step of LAMB, by ``lamb_moments_`` and ``lamb_apply_``.

    Gradients stay as they are; theirs leaves updates there.

    Args:
        chunk_size: not heeded.
        noop_flag: not heeded, as there.
        tensor_lists: gradients, parameters, exp_avg, exp_avg_sq.
        lr: see ``lamb_apply_``, as the following.
        beta1: see there.
        beta2: see there.
        eps: see there.
        step: the number of this step, from 1 on.
        bias_correction: see there.
        weight_decay: see there; part of the update, as with mode 1.
        grad_averaging: True: a gradient counts 1 - beta1 in the mean.
        mode: 1; or 0, an L2 penalty, where weight_decay is 0.
        global_grad_norm: of all gradients, one float32.
        max_grad_norm: gradients are divided by what their norm is more than this; 0 for no bound.
        use_nvlamb: whether the rate of each parameter is adapted also where weight_decay is 0.

    Raises:
        ValueError: grad_averaging is False, or mode is 0 with weight_decay.
    """
    if not grad_averaging:
        raise ValueError("multi_tensor_lamb: grad_averaging is False, expected True")
    if mode == 0 and weight_decay != 0:
        raise ValueError(
            f"multi_tensor_lamb: mode is 0, expected 1 with weight_decay {weight_decay}"
        )
    grads, params, exp_avgs, exp_avg_sqs = tensor_lists
    if not params:
        return
    steps = _steps_before(step, params)
    options: dict[str, Any] = dict(
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        bias_correction=bool(bias_correction),
    )
    excess = None
    if max_grad_norm > 0:
        excess = (global_grad_norm.float() / max_grad_norm).clamp_min(1).view(())
    squares = lamb_moments_(
        params, grads, exp_avgs, exp_avg_sqs, steps, **options, grad_scale=excess
    )
    if use_nvlamb or weight_decay != 0:
        coefficients = lamb_coefficients(squares, 0.0, torch.inf)
    else:
        coefficients = torch.ones(len(params), device=squares.device)
    lamb_apply_(params, exp_avgs, exp_avg_sqs, steps, coefficients, lr=lr, **options)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the norm of all elements of one list, by ``l2_norm``.

    Args:
        chunk_size: not heeded.
        noop_flag: (1,), int32; becomes 1 if an element is not finite.
        tensor_lists: one list.
        per_tensor: whether the norm of each tensor is wanted, too.

    Returns:
        float32: (1,), and (n,), or nothing, (0,).
    """
    found = l2_norm(tensor_lists[0])
    _note(noop_flag, found.found_inf)
    each = found.per_tensor if per_tensor else found.per_tensor.new_empty(0)
    return found.norm.view(1), each


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float
) -> None:
    """Write elements times a number to other tensors, or to the same; in float32, rounded once.

    Args:
        chunk_size: not heeded.
        noop_flag: (1,), int32; becomes 1 if an element of the first list is not finite.
        tensor_lists: what is read, and what is written.
        scale: the number.
    """
    sources, targets = tensor_lists
    if not sources:
        return
    _note(noop_flag, l2_norm(sources).found_inf)
    scaled = torch._foreach_mul([source.float() for source in sources], scale)
    torch._foreach_copy_(list(targets), scaled)


class CPUAdamOptimizer:
    """Colossal-AI's Adam on the CPU, by ``adam_step_``.

    Args:
        lr: not heeded, as the four that follow: each step has its own.
        beta1: likewise.
        beta2: likewise.
        eps: likewise.
        weight_decay: likewise.
        adamw_mode: whether weight_decay is apart from gradients, as in AdamW.
    """

    def __init__(
        self,
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
    ) -> None:
        self._mode = int(adamw_mode)

    def step(
        self,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        params: Tensor,
        grads: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        loss_scale: float = -1.0,
    ) -> None:
        """Take a step for one parameter, as ``multi_tensor_adam`` does for lists.

        Args:
            step: its number, from 1 on.
            lr: see there, as all that is not listed.
            loss_scale: what gradients are divided by, if it is more than 0.
        """
        lists = [grads], [params], [exp_avg], [exp_avg_sq]
        numbers = lr, beta1, beta2, eps, step, self._mode, bias_correction, weight_decay
        multi_tensor_adam(0, params.new_zeros(1), lists, *numbers, loss_scale)


def _steps_before(step: int, params: Sequence[Tensor]) -> list[Tensor]:
    """Return how many steps each parameter has taken before this one, as ops take it."""
    before = torch.full((len(params),), step - 1, dtype=torch.float32, device=params[0].device)
    return list(before.split(1))


def _number(value: float, params: Sequence[Tensor]) -> Tensor:
    return torch.full((), value, dtype=torch.float64, device=params[0].device)


def _note(noop_flag: Tensor, found_inf: Tensor) -> None:
    noop_flag.masked_fill_(found_inf.to(noop_flag.device) != 0, 1)
