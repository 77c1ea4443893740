"""The rows of some tokens of each sample."""

from typing import Any

from torch import Tensor

from deepspeed_ext.ops._library import define

LIBRARIES = {"cpu": "cpu_random_ltd", "cuda": "fused_random_ltd"}


def tokens_like(x: Tensor, ids: Tensor, tokens: int, batch_first: bool) -> Tensor:
    """Return a new tensor with so many tokens of each sample, for fakes."""
    samples = ids.shape[0]
    return x.new_empty(
        (samples, tokens, x.shape[2]) if batch_first else (tokens, samples, x.shape[2])
    )


def _gathered(x: Tensor, ids: Tensor, batch_first: bool) -> Tensor:
    return tokens_like(x, ids, ids.shape[1], batch_first)


def _added(grad: Tensor, ids: Tensor, tokens: int, batch_first: bool) -> Tensor:
    return tokens_like(grad, ids, tokens, batch_first)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ids, ctx.batch_first = inputs
    ctx.tokens = x.shape[1 if ctx.batch_first else 0]
    ctx.save_for_backward(ids)


def _save_of_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ids, _, ctx.batch_first = inputs
    ctx.save_for_backward(ids)


def _backward_of_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return gather_op(grad, *ctx.saved_tensors, ctx.batch_first), None, None, None


_backward_op = define(
    "token_gather_backward(Tensor grad, Tensor ids, SymInt tokens, bool batch_first) -> Tensor",
    LIBRARIES,
    fake=_added,
    backward=_backward_of_gradient,
    setup_context=_save_of_gradient,
)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return _backward_op(grad, *ctx.saved_tensors, ctx.tokens, ctx.batch_first), None, None


gather_op = define(
    "token_gather(Tensor x, Tensor ids, bool batch_first) -> Tensor",
    LIBRARIES,
    fake=_gathered,
    backward=_backward,
    setup_context=_save,
)


def token_gather(x: Tensor, ids: Tensor, batch_first: bool = True) -> Tensor:
    """Return the rows of some tokens of each sample.

    The gradient of a token is that of its row, 0 if no id names it, and the sum of all of them, in
    the order of ids in float32, if several do. Gradients have gradients. The bits are the same on
    both devices.

    Args:
        x: (samples, tokens, n), or (tokens, samples, n), of any dtype, on the CPU or on CUDA. Rows
            that lie in one piece each are read as they lie; other layouts are copied first. With a
            gradient float32, bfloat16, float16 or float64.
        ids: (samples, kept), int32, numbers of tokens in any order; it is an error on the CPU if
            one is none. On CUDA, where nobody waits for them, its row is zeros then.
        batch_first: whether x begins with samples.

    Returns:
        (samples, kept, n), or (kept, samples, n), of the dtype of x.

    See: ``token_gather_ref`` is the same in plain torch.
    """
    found: Tensor = gather_op(x, ids, batch_first)
    return found


def token_gather_ref(x: Tensor, ids: Tensor, batch_first: bool = True) -> Tensor:
    """Do what token_gather does, in plain torch: its definition, for tests."""
    along = 1 if batch_first else 0
    return x.gather(along, rows_of(x, ids, batch_first))


def rows_of(x: Tensor, ids: Tensor, batch_first: bool) -> Tensor:
    """Return ids as torch's gather and scatter want them, one for each element."""
    long = ids.long() if batch_first else ids.long().t()
    return long[..., None].expand(*long.shape, x.shape[2])
