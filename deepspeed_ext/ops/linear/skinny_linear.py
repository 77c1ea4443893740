"""A skinny GEMM: what a linear layer is while text is generated."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from deepspeed_ext.ops._activations import number_of
from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops.linear.few_rows import (
    are_few,
    by_torch,
    check_many,
    linear_ref,
    without_autocast,
)
from deepspeed_ext.ops.linear.linear_ops import LinearOps
from deepspeed_ext.ops.linear.norms_around import (
    NextNorm,
    Undivided,
    divided_ref,
    next_norm_ref,
)

_OPS = LinearOps(
    "skinny_linear",
    weight="Tensor weight",
    options="int? activation, bool gated",
    libraries={"cpu": "cpu_skinny_linear", "cuda": "fused_skinny_linear"},
    floats=lambda x, weight, options: (x, weight[0]),
)
_OPS.count_flops()


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
        return _OPS.between_norms(
            x, [weight], bias, residual, None, activation=number, gated=gated
        )[0]
    if type(x) is not Tensor:
        check_kinds("skinny_linear", x=(x, Tensor))
    if are_few(x):
        out: Tensor = _OPS.plain(x, weight, bias, residual, activation=number, gated=gated)
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
    out, scaled, squares = _OPS.between_norms(
        x, [weight], bias, residual, norm, activation=number, gated=False
    )
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
