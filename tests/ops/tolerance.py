"""How far an op that computes in float32 may be from its reference in float64, per element."""

from typing import Any

import torch
from torch import Tensor

_ROUNDING = torch.finfo(torch.float32).eps / 2  # relative error of one float32 operation


def assert_within(name: str, got: Tensor, want: Tensor, error: Tensor) -> None:
    """Fail unless `got` is `want`, computed with at most `error`, and rounded to got's dtype.

    Rounding to the nearest is off by half of the spacing: relative, or that of subnormals.
    """
    stored = torch.finfo(got.dtype)
    reached = want.abs() + error
    bound = error + stored.eps / 2 * torch.clamp(reached, min=stored.smallest_normal)
    off = (got.double() - want).abs()
    wrong = ~(off <= bound)  # also where something is NaN
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, the first at {at}:"
            f" {got[at].item()!r}, expected {want[at].item()!r} +- {bound[at].item():.1e}"
        )


def adam_errors(
    before: dict[str, Tensor], after: dict[str, Tensor], step: float, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Bound what float32 arithmetic does to one Adam step, for each tensor it writes.

    `before` and `after` are the tensors of one parameter in float64, by argument name, as the
    reference was given them and left them. Every operation adds at most `_ROUNDING` of its
    result, and every constant that of itself; the counts below are of both, rounded up. Terms that
    may cancel count by magnitude. Errors pass on through the derivative of what follows: through
    a root as d / sqrt(v), which holds for any size of d, and through a quotient a / b as
    da / b + a db / b^2, with the least that b can be.
    """
    beta1, beta2 = options["betas"]
    decoupled = options.get("decoupled", True)
    weight_decay, lr, eps = options["weight_decay"], float(options["lr"]), options["eps"]
    corrected = options.get("bias_correction", True)
    correction1 = 1 - beta1**step if corrected else 1.0
    root_correction2 = (1 - beta2**step) ** 0.5 if corrected else 1.0

    original = before.get("master_params", before["params"]).abs()
    grad = before["grads"].abs() / float(options.get("grad_scale", 1))
    grad = grad + (0 if decoupled else weight_decay) * original
    exp_avg = beta1 * before["exp_avgs"].abs() + (1 - beta1) * grad
    exp_avg_error = 8 * _ROUNDING * exp_avg
    exp_avg_sq = beta2 * before["exp_avg_sqs"] + (1 - beta2) * grad**2
    exp_avg_sq_error = 16 * _ROUNDING * exp_avg_sq

    second = after.get("max_exp_avg_sqs", after["exp_avg_sqs"])
    root_error = exp_avg_sq_error / torch.maximum(second, exp_avg_sq_error).sqrt().clamp(min=1e-30)
    divisor = second.sqrt() / root_correction2 + eps
    divisor_error = root_error / root_correction2 + 4 * _ROUNDING * divisor
    update = lr / correction1 * after["exp_avgs"].abs() / divisor
    update_error = lr / correction1 * exp_avg_error / (divisor - divisor_error)
    update_error += update * (divisor_error / (divisor - divisor_error) + 4 * _ROUNDING)
    decay = (lr * weight_decay if decoupled else 0) * original
    param = after.get("master_params", after["params"]).abs()
    param_error = update_error + _ROUNDING * (update + 4 * decay + param)
    return {
        "params": param_error,
        "master_params": param_error,
        "exp_avgs": exp_avg_error,
        "exp_avg_sqs": exp_avg_sq_error,
        "max_exp_avg_sqs": exp_avg_sq_error,
    }


def lion_errors(
    before: dict[str, Tensor], after: dict[str, Tensor], step: float, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Bound the same for one Lion step: see `adam_errors`.

    Where the argument of the sign is within its own error of 0, the sign may be any.
    """
    beta1, beta2 = options["betas"]
    weight_decay, lr = options["weight_decay"], float(options["lr"])
    original = before.get("master_params", before["params"]).abs()
    scale = float(options.get("grad_scale", 1))
    grad = before["grads"] / (-scale if options.get("maximize") else scale)
    direction = beta1 * before["exp_avgs"] + (1 - beta1) * grad
    magnitude = beta1 * before["exp_avgs"].abs() + (1 - beta1) * grad.abs()
    undecided = direction.abs() <= 8 * _ROUNDING * magnitude
    exp_avg = beta2 * before["exp_avgs"].abs() + (1 - beta2) * grad.abs()
    param = after.get("master_params", after["params"]).abs()
    param_error = 2 * lr * undecided
    param_error = param_error + _ROUNDING * (4 * lr + 6 * lr * weight_decay * original + param)
    return {
        "params": param_error,
        "master_params": param_error,
        "exp_avgs": 8 * _ROUNDING * exp_avg,
    }


def adagrad_errors(
    before: dict[str, Tensor], after: dict[str, Tensor], step: float, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Bound the same for one Adagrad step: see `adam_errors`."""
    original = before.get("master_params", before["params"]).abs()
    grad = before["grads"].abs() / float(options.get("grad_scale", 1))
    grad = grad + options["weight_decay"] * original
    sum_error = 16 * _ROUNDING * (before["sums"] + grad**2)
    root_error = sum_error / torch.maximum(after["sums"], sum_error).sqrt().clamp(min=1e-30)
    divisor = after["sums"].sqrt() + options["eps"]
    divisor_error = root_error + 4 * _ROUNDING * divisor
    rate = float(options["lr"]) / (1 + (step - 1) * options["lr_decay"])
    update = rate * grad / (divisor - divisor_error)
    update_error = update * (divisor_error / divisor + 8 * _ROUNDING)
    param = after.get("master_params", after["params"]).abs()
    param_error = update_error + _ROUNDING * (update + param)
    return {"params": param_error, "master_params": param_error, "sums": sum_error}


def sgd_errors(
    before: dict[str, Tensor], after: dict[str, Tensor], step: float, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Bound the same for one SGD step: see `adam_errors`."""
    momentum, dampening = options["momentum"], options["dampening"]
    original = before.get("master_params", before["params"]).abs()
    penalty = options["weight_decay"] * original
    late = options.get("wd_after_momentum", False)
    grad = before["grads"].abs() / float(options.get("grad_scale", 1))
    grad = grad if late else grad + penalty
    buffer = grad
    if "momentum_buffers" in before and step > 1:
        buffer = momentum * before["momentum_buffers"].abs() + (1 - dampening) * grad
    update = grad + momentum * buffer if options.get("nesterov") else buffer
    update = float(options["lr"]) * (update + penalty if late else update)
    param = after.get("master_params", after["params"]).abs()
    param_error = _ROUNDING * (16 * update + param)
    return {
        "params": param_error,
        "master_params": param_error,
        "momentum_buffers": 8 * _ROUNDING * buffer,
    }


def rmsprop_errors(
    before: dict[str, Tensor], after: dict[str, Tensor], step: float, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Bound the same for one RMSprop step: see `adam_errors`."""
    alpha, momentum = options["alpha"], options.get("momentum", 0)
    original = before.get("master_params", before["params"]).abs()
    grad = before["grads"].abs() / float(options.get("grad_scale", 1))
    grad = grad + options["weight_decay"] * original
    square_error = 16 * _ROUNDING * (alpha * before["square_avgs"] + (1 - alpha) * grad**2)
    mean = torch.zeros_like(grad)
    if "grad_avgs" in before:
        mean = alpha * before["grad_avgs"].abs() + (1 - alpha) * grad
    mean_error = 8 * _ROUNDING * mean
    variance = after["square_avgs"]
    if "grad_avgs" in before:
        exact = after["square_avgs"] - after["grad_avgs"] ** 2
        variance = torch.maximum(exact, 2.0**-22 * after["square_avgs"])
    variance_error = square_error + 2 * mean * mean_error + _ROUNDING * (mean**2 + square_error)
    least = (variance - variance_error).clamp(min=0)
    root, least_root = variance.sqrt(), least.sqrt()
    root_error = torch.maximum(root - least_root, (variance + variance_error).sqrt() - root)
    divisor = root + options["eps"]
    divisor_error = root_error + 4 * _ROUNDING * divisor
    ratio = grad / (least_root + options["eps"])
    ratio_error = ratio * (divisor_error / divisor + 12 * _ROUNDING)
    delta, delta_error = ratio, ratio_error
    if "momentum_buffers" in before:
        delta = momentum * before["momentum_buffers"].abs() + ratio
        delta_error = ratio_error + 4 * _ROUNDING * delta
    lr = float(options["lr"])
    param = after.get("master_params", after["params"]).abs()
    param_error = lr * delta_error + _ROUNDING * (4 * lr * delta + param)
    return {
        "params": param_error,
        "master_params": param_error,
        "square_avgs": square_error,
        "grad_avgs": mean_error,
        "momentum_buffers": delta_error,
    }


def lamb_errors(
    before: dict[str, Tensor], after: dict[str, Tensor], step: float, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Bound the same for the moments of a LAMB step: see `adam_errors`."""
    beta1, beta2 = options["betas"]
    grad = before["grads"].abs() / float(options.get("grad_scale", 1))
    return {
        "exp_avgs": 8 * _ROUNDING * (beta1 * before["exp_avgs"].abs() + (1 - beta1) * grad),
        "exp_avg_sqs": 16 * _ROUNDING * (beta2 * before["exp_avg_sqs"] + (1 - beta2) * grad**2),
    }


def lamb_update(
    tensors: dict[str, Tensor], step: float, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the update of one parameter for the moments that it has, and how far it may be off."""
    beta1, beta2 = options["betas"]
    corrected = options.get("bias_correction", True)
    exp_avg = tensors["exp_avgs"] / (1 - beta1**step if corrected else 1)
    exp_avg_sq = tensors["exp_avg_sqs"] / (1 - beta2**step if corrected else 1)
    inside = options.get("eps_inside_sqrt", False)
    eps = options["eps"]
    ratio = exp_avg / ((exp_avg_sq + eps).sqrt() if inside else exp_avg_sq.sqrt() + eps)
    decay = options["weight_decay"] * tensors.get("master_params", tensors["params"])
    return ratio + decay, _ROUNDING * (12 * ratio.abs() + 4 * decay.abs())


def lamb_apply_errors(
    before: dict[str, Tensor],
    after: dict[str, Tensor],
    step: float,
    coefficient: float,
    options: dict[str, Any],
) -> dict[str, Tensor]:
    """Bound the same for the second half of a LAMB step: see `adam_errors`."""
    update, error = lamb_update(before, step, options)
    rate = float(options["lr"]) * coefficient
    param = after.get("master_params", after["params"]).abs()
    # Two terms of the update may have cancelled; what they were is in its error.
    param_error = rate * (2 * error + 4 * _ROUNDING * update.abs()) + _ROUNDING * param
    return {"params": param_error, "master_params": param_error}


def lars_apply_errors(
    before: dict[str, Tensor],
    after: dict[str, Tensor],
    step: float,
    coefficient: float,
    options: dict[str, Any],
) -> dict[str, Tensor]:
    """Bound the same for one LARS step: see `adam_errors`."""
    original = before.get("master_params", before["params"]).abs()
    grad = before["grads"].abs() / float(options.get("grad_scale", 1))
    delta = float(options["lr"]) * coefficient * (grad + options["weight_decay"] * original)
    if "momentum_buffers" in before:
        delta = delta + options["momentum"] * before["momentum_buffers"].abs()
    param = after.get("master_params", after["params"]).abs()
    param_error = _ROUNDING * (10 * delta + param)
    return {
        "params": param_error,
        "master_params": param_error,
        "momentum_buffers": 8 * _ROUNDING * delta,
    }
