"""All tokens with the rows of some of them replaced."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops._library import define
from deepspeed_ext.ops.random_ltd.token_gather import LIBRARIES, gather_op, rows_of


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ids, ctx.batch_first = inputs
    ctx.save_for_backward(ids)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    (ids,) = ctx.saved_tensors
    needs_all, needs_part, *_ = ctx.needs_input_grad
    return (
        _op(grad, None, ids, ctx.batch_first) if needs_all else None,
        gather_op(grad, ids, ctx.batch_first) if needs_part else None,
        None,
        None,
    )


_op = define(
    "token_scatter(Tensor all_tokens, Tensor? part, Tensor ids, bool batch_first) -> Tensor",
    LIBRARIES,
    fake=lambda all_tokens, part, ids, batch_first: all_tokens.new_empty(all_tokens.shape),
    backward=_backward,
    setup_context=_save,
)
_op_ = define(
    "token_scatter_(Tensor(a!) all_tokens, Tensor part, Tensor ids, bool batch_first) -> ()",
    LIBRARIES,
)


def token_scatter(
    all_tokens: Tensor, part: Tensor | None, ids: Tensor, batch_first: bool = True
) -> Tensor:
    """Return all tokens with the rows of some of them replaced, in one pass over memory.

    The gradient of a row that is replaced is 0, and that of a row of the part is its token's.
    Gradients have gradients.

    Args:
        all_tokens: (samples, tokens, n), or (tokens, samples, n), of any dtype, on the CPU or on
            CUDA; see ``token_gather``.
        part: (samples, kept, n), or (kept, samples, n), of this dtype: the rows that come in the
            places of the ids. None: zeros.
        ids: (samples, kept), int32, numbers of tokens, those of a sample all different; it is an
            error on the CPU if they are not. On CUDA, where nobody waits for them, one that is no
            token is left out, and of several that are the same the first counts.
        batch_first: whether tensors begin with samples.

    Returns:
        The shape of all_tokens, of its dtype, contiguous.

    See: ``token_scatter_ref`` is the same in plain torch.
    """
    found: Tensor = _op(all_tokens, part, ids, batch_first)
    return found


def token_scatter_(
    all_tokens: Tensor, part: Tensor, ids: Tensor, batch_first: bool = True
) -> Tensor:
    """Replace the rows of some tokens in place, and return all tokens.

    Args:
        all_tokens: as ``token_scatter`` takes it, its rows in one piece each. No gradient is to
            pass through it.
        part: see there; without a gradient too. Of several ids on CUDA that are the same, one
            counts, which is not said.
        ids: see there.
        batch_first: see there.

    Raises:
        RuntimeError: a tensor requires a gradient.

    See: ``token_scatter_ref_``.
    """
    _op_(all_tokens, part, ids, batch_first)
    torch.autograd.graph.increment_version(all_tokens)
    return all_tokens


def token_scatter_ref(
    all_tokens: Tensor, part: Tensor | None, ids: Tensor, batch_first: bool = True
) -> Tensor:
    """Do what token_scatter does, in plain torch: its definition, for tests."""
    along, rows = 1 if batch_first else 0, rows_of(all_tokens, ids, batch_first)
    if part is None:
        return all_tokens.scatter(along, rows, 0)
    return all_tokens.scatter(along, rows, part)


def token_scatter_ref_(
    all_tokens: Tensor, part: Tensor, ids: Tensor, batch_first: bool = True
) -> Tensor:
    """Do what token_scatter_ does, in plain torch: its definition, for tests."""
    return all_tokens.copy_(token_scatter_ref(all_tokens, part, ids, batch_first))
