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
