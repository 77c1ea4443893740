"""The loss of a chunk of rows at a time, of logits that are made and dropped with it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.dtypes import DTYPES
from deepspeed_ext.ops.linear.few_rows import check_like, check_memory, named, without_autocast
from deepspeed_ext.ops.softmax_and_loss.cross_entropy import (
    loss_and_gradient_op_,
    loss_op,
    scale_op_,
)

_NAME = "linear_cross_entropy"
_NONE = 0  # the number of this reduction in the schemas
_LEAST_CHUNK = 64  # rows


class Gradients(NamedTuple):
    """Of the sum of the losses; those of weight and bias are in float32; None: not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def by_chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    grad_losses: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Gradients]:
    """Return the loss of each row, and the gradients of their sum, weighted by grad_losses.

    Of a chunk, `logits` become their gradients in place.
    """
    rows = hidden.reshape(hidden.shape[:-1].numel(), hidden.shape[-1])
    dtype = options["dtype"]
    of_rows, (classes, n) = targets.reshape(-1), weight.shape
    losses = torch.empty_like(of_rows, dtype=torch.float32)
    gradients = _zeros(rows, weight, bias, options)
    is_wanted = any(each is not None for each in gradients)
    chunk = options["chunk"] or _rows_of_chunk(len(rows), classes, n, options["wants_weight"])
    with without_autocast(rows):
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        room = rows.new_empty(min(chunk, len(rows)), classes, dtype=dtype)
        for part in _parts(len(rows), chunk):
            x, logits = rows[part].to(dtype), room[: part.stop - part.start]
            if bias is None:
                torch.mm(x, weight.t(), out=logits)
            else:
                torch.addmm(bias, x, weight.t(), out=logits)
            factors = None if grad_losses is None else grad_losses[part]
            losses[part], grad = _loss(logits, of_rows[part], factors, is_wanted, options)
            _add(gradients, part, grad, x, weight)
    hidden_grad = gradients.hidden
    if hidden_grad is not None:
        gradients = gradients._replace(hidden=hidden_grad.view(hidden.shape))
    return losses, gradients


def _parts(rows: int, chunk: int) -> Iterator[slice]:
    return (slice(begin, min(begin + chunk, rows)) for begin in range(0, rows, chunk))


def _rows_of_chunk(rows: int, classes: int, n: int, wants_weight: bool) -> int:
    """Return how many rows have logits of the size that the docstring says."""
    found = max(rows * n // classes, n if wants_weight else 0, _LEAST_CHUNK)
    return -(-found // _LEAST_CHUNK) * _LEAST_CHUNK


def _zeros(rows: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> Gradients:
    def summed(vector: Tensor) -> Tensor:
        return torch.zeros_like(vector, dtype=torch.float32, memory_format=torch.contiguous_format)

    return Gradients(
        rows.new_empty(rows.shape) if options["wants_hidden"] else None,
        summed(weight) if options["wants_weight"] else None,
        summed(bias) if bias is not None and options["wants_bias"] else None,
    )


def _loss(
    logits: Tensor,
    targets: Tensor,
    factors: Tensor | None,
    is_wanted: bool,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return the losses of a chunk, and the gradients of its logits, if wanted."""
    softcap, turned = options["softcap"], logits
    if softcap:
        turned = logits.div_(softcap).tanh_()
        logits = turned * softcap
    rules = {name: options[name] for name in ("ignore_index", "label_smoothing", "z_loss")}
    if not is_wanted:
        losses: Tensor = loss_op(logits, targets, **rules, reduction=_NONE)[0]
        return losses, logits
    losses, magnification = loss_and_gradient_op_(logits, targets, **rules, reduction=_NONE)
    if factors is not None or logits.dtype == torch.float16:
        ones = torch.ones_like(losses) if factors is None else factors
        scale_op_(logits, ones, magnification)
    if softcap:
        torch.ops.aten.tanh_backward.grad_input(logits, turned, grad_input=logits)
    return losses, logits


def _add(gradients: Gradients, part: slice, grad: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add what comes of the gradients of a chunk of logits."""
    if gradients.hidden is not None:
        out = gradients.hidden[part]
        if out.dtype == grad.dtype:
            torch.mm(grad, weight, out=out)
        else:
            out.copy_(torch.mm(grad, weight))
    of_weight = gradients.weight
    if of_weight is not None:
        if grad.dtype == torch.float32:
            of_weight.addmm_(grad.t(), x)
        elif grad.is_cuda:
            torch.addmm(of_weight, grad.t(), x, out_dtype=torch.float32, out=of_weight)
        else:  # where torch would round each chunk's product
            of_weight.addmm_(grad.t().float(), x.float())
    if gradients.bias is not None:
        gradients.bias.add_(grad.sum(0, dtype=torch.float32))


def check_arguments(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    options: dict[str, Any],
) -> None:
    """Refuse what torch would broadcast, promote or not name."""
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{_NAME}: {name} is {named(tensor.dtype)}, expected float32, bfloat16 or float16"
            )
    if hidden.dim() == 0:
        raise ValueError(f"{_NAME}: hidden has shape [], expected one dimension at least")
    n = hidden.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != n or weight.shape[0] == 0:
        raise ValueError(
            f"{_NAME}: weight has shape {list(weight.shape)}, expected [classes, {n}], and one"
            " class at least"
        )
    check_like(_NAME, "weight", weight, hidden, weight.shape, weight.dtype)
    check_like(_NAME, "targets", targets, hidden, hidden.shape[:-1], torch.int64)
    if bias is not None:
        check_like(_NAME, "bias", bias, hidden, weight.shape[:1], weight.dtype)
    smoothing, z_loss, softcap = (options[k] for k in ("label_smoothing", "z_loss", "softcap"))
    if not 0 <= smoothing <= 1:
        raise ValueError(f"{_NAME}: label_smoothing is {smoothing}, expected a number from 0 to 1")
    for name, number in (("z_loss", z_loss), ("softcap", softcap)):
        if not 0 <= number <= torch.finfo(torch.float32).max:
            raise ValueError(f"{_NAME}: {name} is {number}, expected a finite float32, 0 or more")
    check_memory(_NAME, hidden=hidden, weight=weight, targets=targets, bias=bias)
    if not targets.is_cuda:
        _check_targets(targets.reshape(-1), weight.shape[0], options["ignore_index"])


def _check_targets(targets: Tensor, classes: int, ignored: int) -> None:
    wrong = ((targets < 0) | (targets >= classes)) & (targets != ignored)
    if wrong.any():
        row = int(wrong.int().argmax())
        raise ValueError(
            f"{_NAME}: targets has {int(targets[row])} as its element number {row}, expected 0 to"
            f" {classes - 1}, or {ignored} for a row that is ignored"
        )
