"""Cross entropy of logits and class numbers, without the probabilities in memory."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops._library import (
    call_recording_nothing,
    check_numbers,
    define,
    refuse_tangents,
)
from deepspeed_ext.torch_internals.dispatch import is_in_transform
from deepspeed_ext.torch_internals.tensors import base_of

_LIBRARIES = {"cpu": "cpu_cross_entropy", "cuda": "fused_cross_entropy"}
_OPTIONS = "*, int ignore_index, float label_smoothing, float z_loss"
_REDUCTIONS = ("none", "mean", "sum")  # by their numbers in the schemas

_backward_op = define(
    "cross_entropy_backward(Tensor grad_loss, Tensor logits, Tensor target, Tensor stats,"
    f" Tensor divisor, {_OPTIONS}) -> Tensor",
    _LIBRARIES,
    fake=lambda grad_loss, logits, *others, **options: logits.new_empty(logits.shape),
)
scale_op_ = define(
    "cross_entropy_scale_(Tensor(a!) grad, Tensor grad_loss, Tensor magnification) -> ()",
    _LIBRARIES,
)


def _loss_fake(logits: Tensor, target: Tensor, reduction: int) -> Tensor:
    return logits.new_empty(() if reduction else target.shape, dtype=torch.float32)


def _fake(
    logits: Tensor, target: Tensor, *, reduction: int, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    stats = logits.new_empty((2, target.numel()), dtype=torch.float32)
    return _loss_fake(logits, target, reduction), stats, stats.new_empty(())


def _save(
    ctx: Any,
    inputs: tuple[Tensor, Tensor],
    keyword_only_inputs: Any,
    output: tuple[Tensor, Tensor, Tensor],
) -> None:
    _, stats, divisor = output
    ctx.mark_non_differentiable(stats, divisor)
    ctx.save_for_backward(*inputs, stats, divisor)
    ctx.options = {name: keyword_only_inputs[name] for name in keyword_only_inputs}
    del ctx.options["reduction"]


def _backward(
    ctx: Any, grad_loss: Tensor | None, *others: Tensor | None
) -> tuple[Tensor | None, None]:
    if grad_loss is None:
        return None, None
    return _backward_op(grad_loss, *ctx.saved_tensors, **ctx.options), None


loss_op = define(
    f"cross_entropy(Tensor logits, Tensor target, {_OPTIONS}, int reduction)"
    " -> (Tensor loss, Tensor stats, Tensor divisor)",
    _LIBRARIES,
    fake=_fake,
    backward=_backward,
    setup_context=_save,
)
loss_and_gradient_op_ = define(
    f"cross_entropy_(Tensor(a!) logits, Tensor target, {_OPTIONS}, int reduction)"
    " -> (Tensor loss, Tensor magnification)",
    _LIBRARIES,
    fake=lambda logits, target, *, reduction, **options: (
        _loss_fake(logits, target, reduction),
        logits.new_empty((), dtype=torch.float32),
    ),
)


class _InPlace(torch.autograd.Function):
    """Forward leaves gradients where the logits were; saved, so that torch sees later writes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: dict[str, Any]) -> Tensor:
        is_traced = torch.compiler.is_compiling()
        # The compiler makes no copy unless there are later writes, of which it would be told last.
        grad = logits.clone() if is_traced else logits.detach()
        loss: Tensor
        loss, magnification = call_recording_nothing(loss_and_gradient_op_, grad, target, **options)
        if not is_traced:
            torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(grad, magnification)
        ctx.set_materialize_grads(False)
        ctx.is_handed_over = False
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad_loss is None:
            return None, None, None
        if torch.is_grad_enabled():  # what is handed over depends on nothing
            raise RuntimeError(
                "cross_entropy: backward is called with create_graph=True, expected False, as with"
                " inplace gradients have no graph; leave inplace out"
            )
        if ctx.is_handed_over:
            raise RuntimeError(
                "cross_entropy: backward is called a second time, expected once, as with inplace"
                " the gradients of the logits are handed over"
            )
        grad, magnification = ctx.saved_tensors
        ctx.is_handed_over = True
        call_recording_nothing(scale_op_, grad, grad_loss, magnification)
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(grad)
        return grad, None, None


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    inplace: bool = False,
) -> Tensor:
    """Return the cross entropy of each row of logits and its target, their mean or their sum.

    Log-softmax and loss in one pass over the logits, the gradient in another; of each row, two
    numbers are kept. With inplace, both come from one pass that reads the logits once and writes
    their gradients over them, which halves the traffic of memory, and no second tensor of this size
    exists: the logits must not be used afterwards, and backward can be called once. It multiplies
    the gradients by that of the loss only where that is not 1. Those of float16 wait for it times a
    power of two, so that a loss scale finds the small ones still there, and are multiplied in any
    case. A write to the logits before backward, or to what they share memory with, another call in
    place included, is torch's error "modified by an inplace operation"; one that counts no version,
    as through `.data`, a collective or a kernel of one's own, is not seen, and spoils the
    gradients. Compiled, logits that are an input of the graph are copied, and a write within the
    graph does no harm.

    A row has the same bits alone, in any batch and at any place in it; on the CPU also with any
    number of threads and any instruction set. Gradients too, and with inplace the same as without
    where that of the loss is 1, or any power of two, and none is below the normal numbers of its
    dtype; else they are rounded once more. Arithmetic is in float32; how many rows count is found
    out on the device. A row with NaN or inf among its logits, or only -inf, has the loss NaN, and
    so are its gradients. There is no gradient of a gradient.

    Args:
        logits: (..., classes), float32, bfloat16 or float16, on the CPU or on CUDA. Rows that lie
            in one piece each, at equal distances, are read as they lie; other layouts are copied
            first.
        target: (...), int64, a class for each row. On the CPU one that is out of range is an
            error; on CUDA, where nobody waits for it, its row has the loss NaN, and NaN gradients.
        ignore_index: the target of rows that do not count: their loss and gradients are 0.
        reduction: "mean" over the rows that count (NaN if none does), "sum" or "none".
        label_smoothing: how much of the target's probability goes to all classes alike, 0 to 1.
        z_loss: adds z_loss * log(sum of e^logit)^2 to the loss of each row.
        inplace: see above. Logits that are a leaf and require a gradient are refused, and views of
            one.

    Returns:
        float32: a number, or with reduction="none" the shape of target.

    Raises:
        RuntimeError: backward is called again after inplace, or is to make a graph then.

    See: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016, section
    7, for label smoothing, as torch.nn.functional.cross_entropy has it; Chowdhery et al., "PaLM",
    2022, section 5, for z_loss. ``cross_entropy_ref`` is the same in float64.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(
            f"cross_entropy: reduction is {reduction!r}, expected 'mean', 'sum' or 'none'"
        )
    if type(label_smoothing) is not float or type(z_loss) is not float:
        check_numbers("cross_entropy", label_smoothing=label_smoothing, z_loss=z_loss)
    options = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "reduction": _REDUCTIONS.index(reduction),
    }
    if not inplace:
        found: tuple[Tensor, ...] = loss_op(logits, target, **options)
        return found[0]
    # What is compiled writes to copies.
    base = None if torch.compiler.is_compiling() else base_of(logits)
    for tensor, what in ((logits, "a leaf"), (base, "a view of a leaf")):
        if tensor is not None and tensor.requires_grad and tensor.is_leaf:
            raise ValueError(
                f"cross_entropy: logits is {what} that requires a gradient, expected the result of"
                " an op, as inplace overwrites it; leave inplace out"
            )
    refuse_tangents("cross_entropy", {"logits": logits})
    if is_in_transform():
        raise RuntimeError(
            "cross_entropy: logits is within a transform of torch.func, expected none with inplace,"
            " which writes to it; leave inplace out"
        )
    loss: Tensor = _InPlace.apply(logits, target, options)  # type: ignore[no-untyped-call]
    return loss


def cross_entropy_ref(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    inplace: bool = False,
) -> Tensor:
    """Do what cross_entropy does, in float64 and plain torch: its definition, for tests."""
    wide = logits.double()
    counts = target != ignore_index
    log_probability = wide.log_softmax(-1)
    of_target = log_probability.gather(-1, target.where(counts, 0)[..., None])[..., 0]
    loss = -(1 - label_smoothing) * of_target - label_smoothing * log_probability.mean(-1)
    loss = loss + z_loss * wide.logsumexp(-1).square()
    loss = loss.where(counts, 0)
    if reduction == "none":
        return loss
    return loss.sum() / (counts.sum() if reduction == "mean" else 1)
