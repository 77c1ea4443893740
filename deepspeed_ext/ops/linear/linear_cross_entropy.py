"""The head of a language model and its loss, by chunks of rows, without the logits in memory."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from deepspeed_ext.dtensors import is_dtensor
from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops._library import check_numbers, define
from deepspeed_ext.ops.linear.few_rows import check_like
from deepspeed_ext.ops.linear.loss_by_chunks import by_chunks, check_arguments
from deepspeed_ext.ops.softmax_and_loss.cross_entropy import cross_entropy_ref

_NAME = "linear_cross_entropy"
_REDUCTIONS = ("none", "mean", "sum")  # by their numbers in the schemas
_NONE, _MEAN = 0, 1
_OPTIONS = (
    "*, int ignore_index, float label_smoothing, float z_loss, float softcap, int chunk,"
    " ScalarType dtype, bool wants_hidden, bool wants_weight, bool wants_bias"
)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """Return the cross entropy of hidden @ weight.T + bias and targets, without the logits.

    Rows are taken a chunk at a time: their logits, the loss, and at once the gradients, so that the
    logits of one chunk are all that there is. Backward multiplies the gradients by that of the loss
    and by one over the count of rows, and can be called again. With reduction="none" rows may have
    gradients of their own, so backward makes the logits of each chunk anew. Gradients that nobody
    wants are not worked out; with none at all there is one product of three. The host never waits
    for CUDA, and a call is one op under torch.compile.

    In memory are, beside the results: the logits of a chunk, with softcap twice; the gradient of
    hidden, in its dtype; that of weight in float32, from forward to backward. Without `chunk` the
    logits of one take as much as hidden does, or with a gradient of weight as much as weight, if
    that is more: then they take less than its gradient in two dtypes, as backward has it, and each
    chunk, which reads and writes that gradient once, multiplies long enough to hide it. A chunk has
    64 rows at least. On the CPU a chunk of logits and hidden is in float32 too where their dtype is
    another.

    Products are torch's, and nothing is promised of the bits of a row among others. Logits are
    rounded to the dtype of the products, as a linear layer does it, and so are their gradients and
    a chunk's gradient of hidden; the gradients of weight and bias are added up in float32 and
    rounded once, after they were multiplied in backward. Of a row, loss and gradient of logits are
    those of ``cross_entropy``. A row that is ignored has a gradient of zeros, which is NaN times
    weight where hidden is not finite, as in torch. Under autocast products are in its dtype, and
    gradients still in those of hidden and weight. There is no gradient of a gradient.

    Args:
        hidden: (..., n), float32, bfloat16 or float16, on the CPU or on CUDA.
        weight: (classes, n), of the dtype of hidden, but under autocast. Whole: a DTensor is
            refused. It may be that of an embedding too; gradients then add up.
        targets: (...), int64, a class for each row. On the CPU one that is out of range is an
            error; on CUDA its row has the loss NaN, and NaN gradients.
        bias: None, or (classes,), of the dtype of weight.
        ignore_index: the target of rows that do not count: their loss and gradients are 0.
        reduction: "mean" over the rows that count (NaN if none does, with gradients of 0), "sum" or
            "none".
        label_smoothing: how much of the target's probability goes to all classes alike, 0 to 1.
        z_loss: adds z_loss * log(sum of e^logit)^2 to the loss of each row.
        softcap: 0 for none, or what logits are capped by: softcap * tanh(logit / softcap).
        chunk: rows at a time; None: see above.

    Returns:
        float32: a number, or with reduction="none" the shape of targets.

    Raises:
        RuntimeError: backward is to make a graph.

    See: ``cross_entropy`` for formulas and papers. ``linear_cross_entropy_ref`` is the same in
    float64.
    """
    check_kinds(_NAME, hidden=(hidden, Tensor), weight=(weight, Tensor), targets=(targets, Tensor))
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{_NAME}: reduction is {reduction!r}, expected 'mean', 'sum' or 'none'")
    if not type(label_smoothing) is type(z_loss) is type(softcap) is float:
        numbers = dict(label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap)
        check_numbers(_NAME, **numbers)
    if chunk is not None:
        check_numbers(_NAME, True, chunk=chunk)
        if chunk < 1:
            raise ValueError(f"{_NAME}: chunk is {chunk}, expected 1 row at least")
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is not None and is_dtensor(tensor):
            raise ValueError(
                f"{_NAME}: {name} is a DTensor, expected a whole tensor; call it within the forward"
                " of the module that has it, where fully_shard has gathered it, or use"
                " full_tensor()"
            )
    device = hidden.device.type
    dtype = weight.dtype
    if not hidden.is_meta and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    elif hidden.dtype != dtype:
        check_like(_NAME, "weight", weight, hidden, weight.shape, hidden.dtype)
    are_recorded = torch.is_grad_enabled()
    loss: Tensor = _OP(
        *(hidden, weight, targets, bias),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        chunk=chunk or 0,
        dtype=dtype,
        wants_hidden=are_recorded and hidden.requires_grad,
        wants_weight=are_recorded and weight.requires_grad,
        wants_bias=are_recorded and bias is not None and bias.requires_grad,
        reduction=_REDUCTIONS.index(reduction),
    )[0]
    return loss


def _kernel(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    *,
    reduction: int,
    **options: Any,
) -> tuple[Tensor, ...]:
    check_arguments(hidden, weight, targets, bias, options)
    if reduction == _NONE:  # backward does the rest
        options |= dict(wants_hidden=False, wants_weight=False, wants_bias=False)
    losses, gradients = by_chunks(hidden, weight, targets, bias, None, options)
    count = losses.new_ones(())
    if reduction == _MEAN:
        count = (targets != options["ignore_index"]).sum().float()
    loss = losses.view(targets.shape)
    if reduction != _NONE:
        loss = (losses.sum(dtype=torch.float64) / count).float()
    return loss, count, *(losses.new_empty(0) if g is None else g for g in gradients)


def _backward_kernel(
    grad_loss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    **options: Any,
) -> tuple[Tensor, ...]:
    check_arguments(hidden, weight, targets, bias, options)
    check_like(_NAME, "grad_loss", grad_loss, hidden, targets.shape, torch.float32)
    _, gradients = by_chunks(hidden, weight, targets, bias, grad_loss.reshape(-1), options)
    dtypes = hidden.dtype, weight.dtype, weight.dtype
    empty = hidden.new_empty(0)
    pairs = zip(gradients, dtypes, strict=True)
    return tuple(empty if g is None else g.to(dtype) for g, dtype in pairs)


def _scaled_kernel(grad: Tensor, grad_loss: Tensor, count: Tensor, *, dtype: torch.dtype) -> Tensor:
    factor = grad_loss / count.clamp(min=1)  # where no row counts, gradients are 0
    return torch.mul(grad, factor, out=torch.empty_like(grad, dtype=dtype))


def _fake(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    *,
    reduction: int,
    **options: Any,
) -> tuple[Tensor, ...]:
    loss = hidden.new_empty(() if reduction else targets.shape, dtype=torch.float32)
    if reduction == _NONE:
        options |= dict(wants_hidden=False, wants_weight=False, wants_bias=False)
    given = (hidden, weight, bias)
    names = ("wants_hidden", "wants_weight", "wants_bias")
    dtypes = (hidden.dtype, torch.float32, torch.float32)
    grads = (
        loss.new_empty(0) if tensor is None or not options[name]
        else tensor.new_empty(tensor.shape, dtype=dtype)
        for tensor, name, dtype in zip(given, names, dtypes, strict=True)
    )  # fmt: skip
    return loss, loss.new_empty(()), *grads


def _backward_fake(
    grad_loss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    **options: Any,
) -> tuple[Tensor, ...]:
    names = ("wants_hidden", "wants_weight", "wants_bias")
    return tuple(
        hidden.new_empty(0) if tensor is None or not options[name]
        else tensor.new_empty(tensor.shape)
        for tensor, name in zip((hidden, weight, bias), names, strict=True)
    )  # fmt: skip


def _save(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: tuple[Tensor, ...]
) -> None:
    hidden, weight, _, bias = inputs
    ctx.options = {name: keyword_only_inputs[name] for name in keyword_only_inputs}
    ctx.reduction = ctx.options.pop("reduction")
    named_inputs = {"hidden": (0, hidden), "weight": (1, weight), "bias": (3, bias)}
    for name, (number, _) in named_inputs.items():
        if ctx.needs_input_grad[number] and not ctx.options[f"wants_{name}"]:
            raise RuntimeError(
                f"{_NAME}: {name} requires a gradient, expected none, as wants_{name} is False"
            )
    ctx.mark_non_differentiable(*output[1:])
    ctx.dtypes = [None if tensor is None else tensor.dtype for _, tensor in named_inputs.values()]
    ctx.save_for_backward(*(inputs if ctx.reduction == _NONE else output[1:]))


def _backward(
    ctx: Any, grad_loss: Tensor | None, *others: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return None, None, None, None
    if torch.is_grad_enabled():  # what was worked out in forward depends on nothing
        raise RuntimeError(
            f"{_NAME}: backward is called with create_graph=True, expected False, as gradients have"
            f" no graph; for gradients of gradients use {_NAME}_ref, which is plain torch"
        )
    wanted = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    found: list[Tensor | None]
    if ctx.reduction == _NONE:
        found = [*_BACKWARD_OP(grad_loss, *ctx.saved_tensors, **ctx.options)]
    else:
        count, *grads = ctx.saved_tensors
        found = [
            _SCALED_OP(grad, grad_loss, count, dtype=dtype) if is_wanted else None
            for grad, dtype, is_wanted in zip(grads, ctx.dtypes, wanted, strict=True)
        ]
    of_hidden, of_weight, of_bias = (g if w else None for g, w in zip(found, wanted, strict=True))
    return of_hidden, of_weight, None, of_bias


_TENSORS = "Tensor hidden, Tensor weight, Tensor targets, Tensor? bias"
_BACKWARD_OP = define(
    f"{_NAME}_backward(Tensor grad_loss, {_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    {"cpu": _backward_kernel, "cuda": _backward_kernel},
    fake=_backward_fake,
)
_SCALED_OP = define(
    f"{_NAME}_scaled(Tensor grad, Tensor grad_loss, Tensor count, *, ScalarType dtype) -> Tensor",
    {"cpu": _scaled_kernel, "cuda": _scaled_kernel},
    fake=lambda grad, grad_loss, count, *, dtype: grad.new_empty(grad.shape, dtype=dtype),
)
_OP = define(
    f"{_NAME}({_TENSORS}, {_OPTIONS}, int reduction)"
    " -> (Tensor loss, Tensor count, Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)",
    {"cpu": _kernel, "cuda": _kernel},
    fake=_fake,
    backward=_backward,
    setup_context=_save,
)


def _flops(hidden: Any, weight: Any, *others: Any, reduction: int = _MEAN, **options: Any) -> int:
    """Return the FLOPs of a call, given shapes."""
    products = 1
    if reduction != _NONE:
        products += options["wants_hidden"] + options["wants_weight"]
    return int(2 * products * math.prod(hidden) * weight[0])


def _backward_flops(grad_loss: Any, hidden: Any, weight: Any, *others: Any, **options: Any) -> int:
    return _flops(hidden, weight, **options)


_COUNTED: Any = register_flop_formula(_OP.overloadpacket)(_flops)
_COUNTED_BACKWARD: Any = register_flop_formula(_BACKWARD_OP.overloadpacket)(_backward_flops)


def linear_cross_entropy_ref(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """Do what linear_cross_entropy does, in float64 and plain torch: its definition, for tests."""
    logits = hidden.double() @ weight.double().t()
    logits = logits if bias is None else logits + bias.double()
    logits = softcap * (logits / softcap).tanh() if softcap else logits
    rules: Any = dict(label_smoothing=label_smoothing, z_loss=z_loss, reduction=reduction)
    return cross_entropy_ref(logits, targets, ignore_index=ignore_index, **rules)
