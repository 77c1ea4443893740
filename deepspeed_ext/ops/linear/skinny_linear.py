"""A skinny GEMM: what a linear layer is while text is generated."""

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from deepspeed_ext.ops._activations import number_of
from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops._library import define
from deepspeed_ext.ops.linear.few_rows import (
    are_few,
    by_torch,
    check_many,
    flops,
    grad_of_sums,
    linear_ref,
    without_autocast,
)
from deepspeed_ext.ops.linear.norms_around import (
    NextNorm,
    Undivided,
    divided_ref,
    fake_results,
    next_norm_ref,
    options_of,
)

_LIBRARIES = {"cpu": "cpu_skinny_linear", "cuda": "fused_skinny_linear"}


def _fake(x: Tensor, weight: Tensor, *others: Tensor | None, gated: bool, **options: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // (2 if gated else 1))


def _fake_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    squares: Tensor | None,
    norm_weight: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_results(_fake(x, weight, gated=options["gated"]), norm_weight)


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = dict(keyword_only_inputs)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients by torch's multiplications, and work out again what was activated."""
    x, weight, bias = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad
    options = ctx.options
    grad = grad_of_sums(grad_out, x, weight, bias, options["activation"], options["gated"])
    rows = grad.reshape(-1, grad.shape[-1])
    return (
        grad @ weight if needs_x else None,
        rows.t() @ x.reshape(-1, x.shape[-1]) if needs_weight else None,
        rows.sum(0) if needs_bias else None,
        grad_out if needs_residual else None,
    )


_op = define(
    "skinny_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, *, int? activation,"
    " bool gated) -> Tensor",
    _LIBRARIES,
    fake=_fake,
    backward=_backward,
    setup_context=_save,
)
_norm_op = define(
    "skinny_linear_norm(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? squares,"
    " Tensor? norm_weight, *, int? activation, bool gated, float eps, float weight_offset)"
    " -> (Tensor, Tensor, Tensor)",
    _LIBRARIES,
    fake=_fake_norm,
)


@register_flop_formula([_op.overloadpacket, _norm_op.overloadpacket])
def _flops(x: Any, weight: Any, *others: Any, out_shape: Any = None, **options: Any) -> int:
    return flops(x, weight[0])


def skinny_linear(
    x: Tensor | Undivided,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Return residual + activation(x @ weight.T + bias): a skinny GEMM, if x has few rows.

    With `gated`, weight has the rows of a gate and behind them as many of what it is for, as a
    packed projection of a feed-forward block has them: activation(gate) * up is returned, of which
    both come from one pass over weight. For SwiGLU the activation is "silu".

    A row of x has the same bits alone and among up to 63 others, at any place, whatever these hold;
    on the CPU also with any number of threads and any instruction set. The sums are float32, in an
    order that depends on k only; bias, activation and residual are applied to them, and the result
    is rounded once. No memory is taken but for the result.

    With over 64 rows, or where torch.compile does not know that there are fewer, torch multiplies:
    `F.linear`, then ``bias_activation`` or ``gated_activation``, then the sum, each rounded to the
    dtype, and nothing is promised about bits. `torch.compiler.mark_dynamic(x, 0, max=64)` lets it
    know. Gradients are by torch's multiplications; for them the arguments are kept. Under autocast
    nothing is cast, neither x nor the others: dtypes that differ are refused, so cast them to one.
    A backward that is called inside of autocast casts, as that of torch's layer does.

    Args:
        x: (..., k), float32, bfloat16 or float16, on the CPU, or on CUDA with compute capability
            8.0 or newer. Rows that lie in one piece each, at equal distances, are read as they lie;
            other layouts are copied first. Or what ``skinny_linear_norm`` or
            ``quantized_linear_norm`` has left of a norm, of up to 64 rows: the sums are divided by
            the rms before bias is added. There are no gradients then.
        weight: (n, k), with `gated` (2 n, k), of the dtype of x. Its rows lie in one piece each, at
            equal distances: another layout is refused, as a copy in each call would cost more than
            the multiplication. Rows that begin at multiples of 16 bytes are read fastest.
        bias: None, or (n,), with `gated` (2 n,), of the same dtype.
        activation: None, or one that ``bias_activation`` knows: "gelu", "gelu_tanh", "gelu_quick",
            "relu", "silu".
        gated: whether weight has the rows of a gate first; needs an activation.
        residual: None, or (..., n), of the same dtype: added in the end.

    Returns:
        (..., n), contiguous, of the dtype of x.

    Raises:
        RuntimeError: the compute capability is below 8.0, or torch refuses the arguments.

    See: ``gated_activation`` for gates. ``skinny_linear_ref`` is the same in float64.
    """
    number = None if activation is None else number_of("skinny_linear", activation)
    if isinstance(x, Undivided):
        return _with_norms(x, weight, bias, residual, None, number, gated)[0]
    if type(x) is not Tensor:
        check_kinds("skinny_linear", x=(x, Tensor))
    if are_few(x):
        out: Tensor = _op(x, weight, bias, residual, activation=number, gated=gated)
        return out
    _check_weight(x, weight)
    check_many("skinny_linear", x, "weight", weight, x.dtype, bias, activation, gated, residual)
    with without_autocast(x):
        product = partial(F.linear, x, weight)
        return by_torch(product, bias, activation, gated, residual)


def skinny_linear_norm(
    x: Tensor | Undivided,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: NextNorm,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Undivided]:
    """Do a skinny GEMM as skinny_linear does, and begin the RMS norm that comes after it.

    In place of `rms_norm(out, norm.weight, eps=norm.eps)` the second result goes to the layers that
    read the norm's: to ``skinny_linear``, ``quantized_linear``, or these with a norm after them.
    That takes no kernel of its own, and rounds as often: out * norm.weight once, where the norm
    rounds its result once. A row has the same bits alone and in any batch, as without a norm.

        h, normed = skinny_linear_norm(mixed, out_weight, residual=h, norm=NextNorm(g, eps=1e-5))
        h = skinny_linear(skinny_linear(normed, up_weight, activation="gelu"), down, residual=h)

    Args:
        x, weight, bias, activation, residual: as of ``skinny_linear``; x has up to 64 rows, and is
            float32 or bfloat16, as float16 may be too small for what is not divided yet. n is a
            multiple of 8.
        norm: its weight has shape (n,).

    Returns:
        What skinny_linear returns, and that on its way through the norm. A row whose squares are
        more than float32 holds, of an rms of 1e19 or more, is NaN where it arrives, as one that is
        not finite. Below 1e-19, with an eps that is smaller still, squares vanish.

    Raises:
        ValueError: an argument breaks a rule above, or that of ``skinny_linear``.
        RuntimeError: a gradient is wanted, or the compute capability is below 8.0.

    See: ``rms_norm``. ``skinny_linear_norm_ref`` is the same in float64.
    """
    number = None if activation is None else number_of("skinny_linear", activation)
    out, scaled, squares = _with_norms(x, weight, bias, residual, norm, number, False)
    return out, Undivided(scaled, squares, norm.eps)


def _check_weight(x: Tensor, weight: Tensor) -> None:
    """Refuse with many rows a weight that a skinny GEMM refuses: see skinny_linear_ops.h."""
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"skinny_linear: weight has shape {list(weight.shape)}, expected two dimensions, the"
            f" last one of {x.shape[-1]}"
        )
    if weight.shape[1] > 1 and weight.stride(1) != 1:
        raise ValueError(
            f"skinny_linear: weight has strides {list(weight.stride())}, expected 1 along the last"
            " dimension; call .contiguous() once, not in each call"
        )


def _with_norms(
    x: Tensor | Undivided,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: NextNorm | None,
    activation: int | None,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, squares = (x.x, x.squares) if isinstance(x, Undivided) else (x, None)
    results: tuple[Tensor, Tensor, Tensor] = _norm_op(
        rows,
        weight,
        bias,
        residual,
        squares,
        None if norm is None else norm.weight,
        activation=activation,
        gated=gated,
        **options_of("skinny_linear_norm", x, norm),
    )
    return results


def skinny_linear_ref(
    x: Tensor | Undivided,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Do what skinny_linear does, in float64 and plain torch: its definition, for tests."""
    return linear_ref(divided_ref(x), weight, bias, activation, gated, residual)


def skinny_linear_norm_ref(
    x: Tensor | Undivided,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: NextNorm,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Undivided]:
    """Do what skinny_linear_norm does, in float64 and plain torch: its definition, for tests."""
    out = skinny_linear_ref(x, weight, bias, activation=activation, residual=residual)
    return out, next_norm_ref(out, norm)
