"""The ops of a linear layer on few rows, whatever its weight is stored as."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from deepspeed_ext.ops._library import define
from deepspeed_ext.ops.linear.few_rows import grad_of_activated
from deepspeed_ext.ops.linear.norms_around import NextNorm, Undivided, fake_results, options_of


class LinearOps:
    """An op without norms around it, with gradients, and its like with them.

    Args:
        name: of the first; the other's ends in "_norm".
        overload: of both.
        weight: the tensors of the weight in the schemas, of which the first has its rows.
        options: the rest of the schemas, with "int? activation" and "bool gated".
        libraries: as of ``define``.
        floats: takes x, the tensors of the weight and the options; returns what is multiplied.
        without_gradient: as of ``define``.
    """

    def __init__(
        self,
        name: str,
        *,
        overload: str = "",
        weight: str,
        options: str,
        libraries: Mapping[str, str],
        floats: Callable[[Tensor, list[Tensor], dict[str, Any]], tuple[Tensor, Tensor]],
        without_gradient: Sequence[str] = (),
    ) -> None:
        end = f".{overload}" if overload else ""
        tensors = f"Tensor x, {weight}, Tensor? bias, Tensor? residual"
        self._floats = floats
        self._norm_name = f"{name}_norm"
        self.plain = define(
            f"{name}{end}({tensors}, *, {options}) -> Tensor",
            libraries,
            fake=_fake,
            backward=self._backward,
            setup_context=_save,
            without_gradient=without_gradient,
        )
        self.with_norms = define(
            f"{name}_norm{end}({tensors}, Tensor? squares, Tensor? norm_weight, *, {options},"
            " float eps, float weight_offset) -> (Tensor, Tensor, Tensor)",
            libraries,
            fake=_fake_norm,
        )

    def between_norms(
        self,
        x: Tensor | Undivided,
        weight: Sequence[Tensor | None],
        bias: Tensor | None,
        residual: Tensor | None,
        norm: NextNorm | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call the op with the norm that x is on its way through, and one after it."""
        rows, squares = (x.x, x.squares) if isinstance(x, Undivided) else (x, None)
        norm_weight = None if norm is None else norm.weight
        results: tuple[Tensor, Tensor, Tensor] = self.with_norms(
            *(rows, *weight, bias, residual, squares, norm_weight),
            **options,
            **options_of(self._norm_name, x, norm),
        )
        return results

    def count_flops(self) -> None:
        """Tell torch how many FLOPs the ops have; once for all overloads."""
        packets = [self.plain.overloadpacket, self.with_norms.overloadpacket]
        register_flop_formula(packets)(_flops)

    def _backward(self, ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients by torch's multiplications."""
        x, *weight, bias = ctx.saved_tensors
        needs_x, needs_weight, *_, needs_bias, needs_residual = ctx.needs_input_grad
        x, floats = self._floats(x, weight, ctx.options)
        activation, gated = ctx.options["activation"], ctx.options["gated"]
        grad = _grad_of_sums(grad_out, x, floats, bias, activation, gated)
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            grad @ floats if needs_x else None,
            rows.t() @ x.reshape(-1, x.shape[-1]) if needs_weight else None,
            *(None for _ in weight[1:]),
            rows.sum(0) if needs_bias else None,
            grad_out if needs_residual else None,
        )


def _fake(x: Tensor, weight: Tensor, *others: Tensor | None, gated: bool, **options: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // (2 if gated else 1))


def _fake_norm(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_results(_fake(*tensors, gated=options["gated"]), tensors[-1])


def _flops(x: Any, weight: Any, *others: Any, out_shape: Any = None, **options: Any) -> int:
    return int(2 * math.prod(x) * weight[0])


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Tensor) -> None:
    *saved, _ = inputs  # the residual is not needed
    ctx.save_for_backward(*saved)
    ctx.options = dict(keyword_only_inputs)


def _grad_of_sums(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: int | None,
    gated: bool,
) -> Tensor:
    """Return the gradient of x @ weight.T + bias, and work out again what was activated."""
    if activation is None:
        return grad_out
    return grad_of_activated(grad_out, F.linear(x, weight, bias), activation, gated)
