"""The linear layers of an engine: weights as floats or quantized, whole or in parts."""

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from deepspeed_ext.inference.weights.float8 import Float8Weight, float8_layer
from deepspeed_ext.ops import (
    NextNorm,
    PackedWeight,
    Undivided,
    bias_activation,
    gated_activation,
    quantized_linear,
    quantized_linear_norm,
    skinny_linear,
    skinny_linear_norm,
)


class _Options(TypedDict):
    """What is done to products on the way."""

    activation: str | None
    gated: bool
    residual: Tensor | None


@dataclass(frozen=True)
class Stack:
    """A weight whose rows are those of several, one below another, which are stored apart.

    Args:
        parts: two or more, with their biases.
    """

    parts: tuple["Linear", ...]

    def __call__(self, x: Tensor | Undivided) -> Tensor:
        """Return the products of all parts, side by side."""
        return torch.cat([part(x) for part in self.parts], -1)


@dataclass(frozen=True)
class Linear:
    """x @ weight.T + bias, with the weight as floats or quantized.

    Args:
        weight: (out, in), or what ``pack_weight`` returned for it, or it in 8-bit floats, or parts.
        bias: (out,), or None, as of parts, which have their own.
        input_format: as of ``quantized_linear``.
        order: (in,), int64, of a quantized weight: column i belongs to element order[i] of x; None:
            to i.
    """

    weight: Tensor | PackedWeight | Float8Weight | Stack
    bias: Tensor | None = None
    input_format: str | None = None
    order: Tensor | None = None

    @property
    def fuses_norms(self) -> bool:
        """Whether RMS norms around it are fused into it, as a skinny GEMM."""
        if isinstance(self.weight, Stack):
            return all(part.fuses_norms for part in self.weight.parts)
        return not isinstance(self.weight, Float8Weight)

    def __call__(
        self,
        x: Tensor | Undivided,
        *,
        activation: str | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return residual + activation(x @ weight.T + bias)."""
        options: _Options = dict(activation=activation, gated=gated, residual=residual)
        if isinstance(self.weight, Stack):
            return _finished(self.weight(x), **options)
        x = self._in_order(x)
        if isinstance(self.weight, PackedWeight):
            kind = self.input_format
            return quantized_linear(x, self.weight, self.bias, **options, input_format=kind)
        if isinstance(self.weight, Float8Weight):
            assert isinstance(x, Tensor), "it fuses no norms"
            return float8_layer(x, self.weight, self.bias, **options)
        return skinny_linear(x, self.weight, self.bias, **options)

    def before_norm(
        self, x: Tensor, norm: NextNorm, residual: Tensor | None
    ) -> tuple[Tensor, Undivided]:
        """Return residual + x @ weight.T + bias, and what the norm of it is up to a division.

        Only if it fuses norms, with up to 64 rows.
        """
        if isinstance(self.weight, PackedWeight):
            return quantized_linear_norm(
                self._in_order(x),
                self.weight,
                self.bias,
                norm=norm,
                residual=residual,
                input_format=self.input_format,
            )
        assert isinstance(self.weight, Tensor), "it fuses no norms"
        return skinny_linear_norm(x, self.weight, self.bias, norm=norm, residual=residual)

    def _in_order(self, x: Tensor | Undivided) -> Tensor | Undivided:
        """Return x as the columns of the weight are."""
        if self.order is None:
            return x
        if isinstance(x, Undivided):
            return x._replace(x=x.x.index_select(-1, self.order))
        return x.index_select(-1, self.order)


def _finished(out: Tensor, activation: str | None, gated: bool, residual: Tensor | None) -> Tensor:
    """Return residual + activation(out)."""
    if gated:
        out = gated_activation(out, activation=activation or "silu")
    elif activation is not None:
        out = bias_activation(out, activation=activation)
    return out if residual is None else residual + out
