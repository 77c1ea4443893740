"""All functional ops in one table: what the tests that all of them share call them with.

A new op, or a form of one with a schema of its own, is a row; a test fails if it has none.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from samples import F32, make
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_ext.ops import (
    bias_activation,
    bias_dropout_residual,
    cross_entropy,
    dropout_activation,
    gated_activation,
    layer_norm,
    nhwc_bias_add,
    rms_norm,
    rope,
    rope_frequencies,
    softmax,
)
from deepspeed_ext.ops._activations import NAMES

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """One form of an op. All its arguments and results either belong to rows, the first dimension,
    or are for all rows.

    Args:
        function: takes, in this order, what the next four make; returns one tensor or several.
        of_rows: for a row of n elements, the shapes that arguments with gradients have of it.
        for_all: the shapes of those that are for all rows, with gradients.
        fixed_of_rows: given how many rows, n and a device, those without gradients.
        fixed_for_all: the same for all rows.
        twice: whether gradients have gradients.
        by_place: whether what becomes of an element depends on its number.
    """

    function: Callable[..., Any]
    of_rows: Callable[[int], Shapes]
    for_all: Callable[[int], Shapes] = lambda n: ()
    fixed_of_rows: Callable[[int, int, str], Sequence[Tensor]] = lambda rows, n, device: ()
    fixed_for_all: Callable[[int, str], Sequence[Tensor]] = lambda n, device: ()
    twice: bool = False
    by_place: bool = False


def _softmax_of_heads(x: Tensor, mask: Tensor, slopes: Tensor) -> Tensor:
    options = dict(scale=0.5, softcap=4.0, causal=True, window=(60, -1))
    return softmax(x, mask, alibi_slopes=slopes, **options)


def _halves_gated(both: Tensor) -> Tensor:
    n = both.shape[-1] // 2
    return gated_activation(both[..., :n], both[..., n:])


def _dropped_activation(x: Tensor, bias: Tensor, seed: Tensor, activation: str) -> Tensor:
    return dropout_activation(x, bias, 0.3, activation=activation, seed=seed)


def _seed(n: int, device: str) -> list[Tensor]:
    return [torch.tensor([0x123456789ABCDEF], device=device)]


def _chosen(rows: int, *sizes: int, device: str) -> Tensor:
    return (make((rows, *sizes), F32, 5) > -0.5).to(device)


def _targets(rows: int, n: int, device: str) -> Tensor:
    """Some class for each row, the first and the last among them; the third row is ignored."""
    found = torch.arange(rows) * 7919 % n
    found[-1:] = n - 1
    found[2:3] = -100
    return found.to(device)


_turned: dict[str, Any] = dict(
    fixed_of_rows=lambda rows, n, device: [torch.arange(rows, device=device) * 1001],
    fixed_for_all=lambda n, device: [rope_frequencies(n // 2 * 2).to(device)],
    twice=True,
)
_targeted = partial(cross_entropy, reduction="none", label_smoothing=0.1, z_loss=1e-3)
CASES = {
    "rms_norm": Case(rms_norm, lambda n: [(n,)], lambda n: [(n,)]),
    "rms_norm without weight": Case(rms_norm, lambda n: [(n,)]),
    "rms_norm of a sum": Case(
        lambda x, residual, weight: rms_norm(x, weight, residual=residual),
        lambda n: [(n,), (n,)],
        lambda n: [(n,)],
    ),
    "rms_norm of a sum without weight": Case(
        lambda x, residual: rms_norm(x, residual=residual), lambda n: [(n,), (n,)]
    ),
    "rms_norm of a sum that is not returned": Case(
        lambda x, residual, weight, x_bias: rms_norm(
            x, weight, residual=residual, x_bias=x_bias, weight_offset=1.0, return_sum=False
        ),
        lambda n: [(n,), (n,)],
        lambda n: [(n,), (n,)],
    ),
    "layer_norm": Case(layer_norm, lambda n: [(n,)], lambda n: [(n,), (n,)]),
    "layer_norm without weight": Case(layer_norm, lambda n: [(n,)]),
    "layer_norm of a sum": Case(
        lambda x, residual, weight, bias, x_bias: layer_norm(
            x, weight, bias, residual=residual, x_bias=x_bias
        ),
        lambda n: [(n,), (n,)],
        lambda n: [(n,), (n,), (n,)],
    ),
    "bias_activation": Case(bias_activation, lambda n: [(n,)], lambda n: [(n,)]),
    "bias_activation without bias": Case(
        partial(bias_activation, activation="gelu_tanh"), lambda n: [(n,)]
    ),
    "gated_activation": Case(gated_activation, lambda n: [(n,), (n,)]),
    "gated_activation of one tensor": Case(
        partial(gated_activation, activation="gelu", gate_last=True), lambda n: [(2 * n,)]
    ),
    "gated_activation of halves": Case(_halves_gated, lambda n: [(2 * n,)]),
    "nhwc_bias_add": Case(
        lambda x, other, bias, other_bias: nhwc_bias_add(x, bias, other, other_bias),
        lambda n: [(n,), (n,)],
        lambda n: [(n,), (n,)],
        twice=True,  # of x and other, whose gradient is that of the result
    ),
    "nhwc_bias_add of x": Case(nhwc_bias_add, lambda n: [(n,)], lambda n: [(n,)], twice=True),
    "bias_dropout_residual": Case(
        lambda x, residual, bias, seed: bias_dropout_residual(x, bias, residual, 0.3, seed=seed),
        lambda n: [(n,), (n,)],
        lambda n: [(n,)],
        fixed_for_all=_seed,
        by_place=True,
        twice=True,  # of the residual, whose gradient is that of the result
    ),
    "bias_dropout_residual of x": Case(
        lambda x, seed: bias_dropout_residual(x, p=0.3, seed=seed),
        lambda n: [(n,)],
        fixed_for_all=_seed,
        by_place=True,
    ),
    "bias_dropout_residual without dropout": Case(
        lambda x, residual, bias: bias_dropout_residual(x, bias, residual, 0),
        lambda n: [(n,), (n,)],
        lambda n: [(n,)],
        twice=True,
    ),
    "dropout_activation": Case(
        partial(_dropped_activation, activation="gelu"),
        lambda n: [(n,)],
        lambda n: [(n,)],
        fixed_for_all=_seed,
        by_place=True,
    ),
    "dropout_activation without bias": Case(
        lambda x, seed: dropout_activation(x, p=0.3, activation="gelu_tanh", seed=seed),
        lambda n: [(n,)],
        fixed_for_all=_seed,
        by_place=True,
    ),
    "rope": Case(rope, lambda n: [(4, n), (2, n)], **_turned),
    "rope of q": Case(
        lambda q, *others: rope(q, None, *others, interleaved=True, scale=0.7),
        lambda n: [(3, n)],
        **_turned,
    ),
    "softmax": Case(softmax, lambda n: [(n,)]),
    "softmax with a mask and a cap": Case(
        partial(softmax, softcap=9.0),
        lambda n: [(n,)],
        fixed_of_rows=lambda rows, n, device: [_chosen(rows, n, device=device)],
    ),
    "softmax with an added mask": Case(partial(softmax, scale=0.3), lambda n: [(n,), (n,)]),
    "softmax with a mask added to all": Case(softmax, lambda n: [(n,)], lambda n: [(n,)]),
    "softmax of heads with everything": Case(
        _softmax_of_heads,
        lambda n: [(3, 5, n)],
        fixed_of_rows=lambda rows, n, device: [_chosen(rows, 1, 5, n, device=device)],
        fixed_for_all=lambda n, device: [torch.linspace(0.5, 0.01, 3, device=device)],
    ),
    "cross_entropy": Case(
        _targeted,
        lambda n: [(n,)],
        fixed_of_rows=lambda rows, n, device: [_targets(rows, n, device)],
    ),
}

# More forms, of which only the bits are compared: what these cases run is another formula alone.
FORMULAS = {
    **{
        f"bias_activation of {name}": Case(
            partial(bias_activation, activation=name), lambda n: [(n,)], lambda n: [(n,)]
        )
        for name in NAMES
    },
    **{
        f"dropout_activation of {name}": Case(
            partial(_dropped_activation, activation=name),
            lambda n: [(n,)],
            lambda n: [(n,)],
            fixed_for_all=_seed,
        )
        for name in NAMES
    },
    **{
        f"gated_activation of {name}": Case(
            partial(gated_activation, activation=name), lambda n: [(n,), (n,)]
        )
        for name in NAMES
    },
}

# That have tests of their own for all of this: what has more rows than they take is not theirs.
WITHOUT_CASE = {
    *(f"deepspeed_ext::{op}" for op in ("quantize", "dequantize", "fake_quantize")),
    *(f"deepspeed_ext::moe_{op}" for op in ("route", "route_backward", "assign", "permute")),
    *(f"deepspeed_ext::moe_{op}" for op in ("unpermute", "unpermute_backward")),
    *(f"deepspeed_ext::grouped_linear{end}" for end in ("", ".few", "_backward")),
    *(f"deepspeed_ext::block_sparse_attention{end}" for end in ("", "_backward")),
    "deepspeed_ext::dropout_attention",
    "deepspeed_ext::dropout_attention_backward",
    *(f"deepspeed_ext::linear_cross_entropy{end}" for end in ("", "_backward", "_scaled")),
    "deepspeed_ext::grouped_quantized_products",
    *(f"deepspeed_ext::quantized_product.w{bits}" for bits in (4, 8)),
    *(f"deepspeed_ext::token_{op}" for op in ("gather", "gather_backward", "scatter")),
    "deepspeed_ext::mask_gather_bert",
    "deepspeed_ext::skinny_linear",
    "deepspeed_ext::skinny_linear_norm",
    *(
        f"deepspeed_ext::{op}.w{bits}"
        for op in (
            *("grouped_quantized_linear", "quantized_linear", "quantized_linear_norm"),
            "unpack_weight",
        )
        for bits in (4, 8)
    ),
}


@dataclass(frozen=True)
class Call:
    """The arguments of a case, and gradients for its results, which belong to rows all of them."""

    case: Case
    of_rows: list[Tensor]
    for_all: list[Tensor]
    fixed_of_rows: list[Tensor]
    fixed_for_all: list[Tensor]
    grads: list[Tensor]

    def with_rows(self, change: Callable[[Tensor], Tensor]) -> "Call":
        """Return the call with something else in the place of each tensor that belongs to rows."""
        names = ("of_rows", "fixed_of_rows", "grads")
        return replace(self, **{name: [change(t) for t in getattr(self, name)] for name in names})

    def each(self, change: Callable[[Tensor], Tensor]) -> "Call":
        """Return the call with something else in the place of every tensor."""
        call = self.with_rows(change)
        for_all = [change(tensor) for tensor in self.for_all]
        return replace(call, for_all=for_all, fixed_for_all=[*map(change, self.fixed_for_all)])

    def tensors(self) -> list[Tensor]:
        """Return all arguments."""
        return [*self.of_rows, *self.for_all, *self.fixed_of_rows, *self.fixed_for_all]

    def leaves(self) -> list[Tensor]:
        """Return the arguments that have gradients, as leaves of a graph; no copies."""
        return [t.detach().requires_grad_() for t in (*self.of_rows, *self.for_all)]

    def forward(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Return the results."""
        found = self.case.function(*leaves, *self.fixed_of_rows, *self.fixed_for_all)
        return [found] if isinstance(found, Tensor) else list(found)

    def run(self) -> list[Tensor]:
        """Return the results, then the gradients, those of what is for all rows last."""
        leaves = self.leaves()
        results = self.forward(leaves)
        grads = torch.autograd.grad(results, leaves, self.grads)
        return [*(result.detach() for result in results), *grads]

    def run_rows(self) -> list[Tensor]:
        """Return those of `run` that belong to rows."""
        found = self.run()
        return found[: len(found) - len(self.for_all)]


def call_of(
    case: Case,
    rows: int,
    n: int,
    dtype: torch.dtype,
    device: str,
    *,
    others: torch.dtype | None = None,
    scale: float = 1.0,
) -> Call:
    """Make arguments; the first is of this dtype, and of `others` those behind it."""
    shapes = [(rows, *shape) for shape in case.of_rows(n)]
    dtypes = [dtype, *[others or dtype] * 9]
    made = [
        make(shape, kind, i, device) * scale
        for i, (shape, kind) in enumerate(zip([*shapes, *case.for_all(n)], dtypes, strict=False))
    ]
    fixed = list(case.fixed_of_rows(rows, n, device)), list(case.fixed_for_all(n, device))
    call = Call(case, made[: len(shapes)], made[len(shapes) :], *fixed, grads=[])
    with torch.no_grad():
        results = call.forward(made)
    grads = [make(tuple(t.shape), t.dtype, 50 + i, device) for i, t in enumerate(results)]
    return replace(call, grads=grads)


class Recorder(TorchDispatchMode):
    """Notes the calls of our ops, and keeps their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self.results: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.namespace == "deepspeed_ext":
            self.calls.append((func, args, dict(kwargs or {})))
            self.results += [found] if isinstance(found, Tensor) else found or ()
        return found


def recorded(call: Call) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Yield the ops that a call comes to, with what they get; whole, then each gradient alone."""
    leaves = call.leaves()
    with Recorder() as recorder:
        results = call.forward(leaves)
        torch.autograd.grad(results, leaves, call.grads, retain_graph=True)
        for leaf in leaves:
            torch.autograd.grad(results, leaf, call.grads, retain_graph=True)
    yield from recorder.calls
