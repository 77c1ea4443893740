"""The weights of experts, of which each row of hidden states is multiplied with some."""

from dataclasses import dataclass
from typing import TypedDict

from torch import Tensor

from deepspeed_ext.inference.weights.linear import Linear
from deepspeed_ext.ops import (
    PackedWeight,
    Routing,
    grouped_linear,
    grouped_quantized_linear,
)


class _Options(TypedDict):
    """Where rows come from, and what is done to products on the way."""

    slots: Tensor | None
    activation: str | None
    gated: bool


@dataclass(frozen=True)
class ExpertLinear:
    """x @ weight.T + bias, with the weight of the expert that each row of x is for.

    Args:
        weight: (experts, out, in), or what ``pack_weight`` returned for all their rows.
        bias: (experts, out), or None.
        input_format: as of ``quantized_linear``.
        order: (in,), int64, as of `Linear`, the same for all experts.
    """

    weight: Tensor | PackedWeight
    bias: Tensor | None = None
    input_format: str | None = None
    order: Tensor | None = None

    def __call__(
        self,
        x: Tensor,
        routing: Routing,
        *,
        of_tokens: bool = False,
        activation: str | None = None,
        gated: bool = False,
    ) -> Tensor:
        """Return activation(x @ weight.T + bias), a row for each choice, sorted by expert.

        Args:
            x: such rows, or with of_tokens the tokens themselves, of which each choice has one.
        """
        x = x if self.order is None else x.index_select(-1, self.order)
        options: _Options = dict(
            slots=routing.slots if of_tokens else None, activation=activation, gated=gated
        )
        if isinstance(self.weight, PackedWeight):
            kind = self.input_format
            where = routing.offsets, self.bias
            return grouped_quantized_linear(x, self.weight, *where, **options, input_format=kind)
        return grouped_linear(x, self.weight, routing.offsets, self.bias, **options)


@dataclass(frozen=True)
class SharedExpert:
    """An expert that all tokens go to.

    Args:
        gate: to the logit of what its results are multiplied by; None: they are not.
    """

    up: Linear
    down: Linear
    gate: Linear | None


@dataclass(frozen=True)
class ExpertWeights:
    """What a layer has in place of one feed-forward block; see `Experts` of policies."""

    router: Linear
    up: ExpertLinear
    down: ExpertLinear
    shared: SharedExpert | None
