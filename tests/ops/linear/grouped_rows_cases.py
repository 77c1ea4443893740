"""What the tests of few rows of experts share: tokens with choices, and what results must be."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from activation_cases import ROUNDING
from quantized_linear_cases import weight_of
from samples import make
from skinny_linear_cases import assert_finished
from torch import Tensor

from deepspeed_ext.ops import (
    PackedWeight,
    grouped_linear,
    grouped_linear_ref,
    grouped_quantized_linear,
    moe_assign,
    quantized_linear,
    skinny_linear,
)

FORMS: list[dict[str, Any]] = [
    dict(activation=None, gated=False),
    dict(activation="gelu", gated=False),
    dict(activation="silu", gated=True),
]


class Tokens(NamedTuple):
    """Tokens that have chosen experts, and the rows that come of that.

    Args:
        x: of the tokens.
        slots: (tokens, k), of a routing.
        offsets: where the rows of each expert end.
        rows: what lies in the slots: a token for each row before the last offset.
    """

    x: Tensor
    slots: Tensor
    offsets: Tensor
    rows: Tensor


def tokens_of(
    tokens: int, k: int, experts: int, length: int, dtype: torch.dtype, seed: int = 0
) -> Tokens:
    """Return tokens with k random experts each, and every 7th choice dropped."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k]
    chosen = chosen.flatten()
    chosen[::7] = -1
    chosen = chosen.view(tokens, k)
    routing = moe_assign(chosen, torch.ones(tokens, k), num_experts=experts)
    x = make((tokens, length), dtype, seed)
    rows = rows_of(x, routing.slots, int(routing.offsets[-1]))
    return Tokens(x, routing.slots, routing.offsets, rows)


def rows_of(x: Tensor, slots: Tensor, end: int) -> Tensor:
    rows = x.new_zeros(end, x.shape[1])
    for token, places in enumerate(slots.tolist()):
        for place in places:
            if place >= 0:
                rows[place] = x[token]
    return rows


def parts(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the rows of each expert, at most 64 at a time."""
    begin = 0
    for expert, end in enumerate(offsets.tolist()):
        for at in range(begin, end, 64):
            yield expert, slice(at, min(at + 64, end))
        begin = end


def weights(experts: int, n: int, k: int, dtype: torch.dtype, gated: bool) -> tuple[Tensor, Tensor]:
    """Return the weights of experts, and their bias."""
    rows = 2 * n if gated else n
    weight = make((experts, rows, k), torch.float32, 1) / max(1, k) ** 0.5
    return weight.to(dtype), make((experts, rows), dtype, 2)


def assert_bits(
    got: Tensor, rows: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, **form: Any
) -> None:
    """Compare with skinny_linear, of each expert with its weight; behind the last one are zeros."""
    end = int(offsets[-1])
    assert got.is_contiguous() and got.dtype == rows.dtype and not got[end:].any()
    for expert, part in parts(offsets):
        of_expert = None if bias is None else bias[expert]
        want = skinny_linear(rows[part], weight[expert], of_expert, **form)
        assert torch.equal(got[part], want), (expert, part)


def assert_bits_of_codes(
    got: Tensor,
    rows: Tensor,
    weights: list[PackedWeight],
    offsets: Tensor,
    bias: Tensor | None,
    **form: Any,
) -> None:
    """Compare with quantized_linear, likewise."""
    end = int(offsets[-1])
    assert got.is_contiguous() and got.dtype == rows.dtype and not got[end:].any()
    for expert, part in parts(offsets):
        of_expert = None if bias is None else bias[expert]
        want = quantized_linear(rows[part], weights[expert], of_expert, **form)
        assert torch.equal(got[part], want), (expert, part)


def codes_of(
    experts: int, n: int, k: int, kind: tuple[str, bool], group_size: int
) -> tuple[PackedWeight, list[PackedWeight]]:
    """Return a weight of all experts, and of each one that of its own, with the same codes."""
    each = [weight_of(n, k, *kind, group_size, seed=expert) for expert in range(experts)]

    def joined(values: list[Tensor]) -> Tensor:
        side_by_side = torch.cat([value[:, :n] for value in values], 1)
        return F.pad(side_by_side, (0, -side_by_side.shape[1] % 4)).contiguous()

    offsets = [weight.offsets for weight in each if weight.offsets is not None]
    all_of_them = each[0]._replace(
        codes=torch.cat([weight.codes for weight in each]),
        scales=joined([weight.scales for weight in each]),
        offsets=joined(offsets) if offsets else None,
    )
    return all_of_them, each


def assert_right(given: Tokens, weight: Tensor, bias: Tensor | None, **form: Any) -> Tensor:
    """Compare with the reference in float64, element by element; return the result."""
    got = grouped_linear(given.x, weight, given.offsets, bias, slots=given.slots, **form)
    wide = [None if t is None else t.double() for t in (given.x, weight, bias)]
    want = grouped_linear_ref(*wide[:2], given.offsets, wide[2], slots=given.slots, **form)
    k = weight.shape[-1]
    roundings = min(k, 4096) / 16 + k / 4096 + 24
    for expert, part in parts(given.offsets):
        rows, factors = given.rows[part].double(), weight[expert].double()
        of_expert = None if bias is None else bias[expert].double()
        error = ROUNDING * roundings * F.linear(rows.abs(), factors.abs())
        sums = F.linear(rows, factors, of_expert)
        assert_finished(got[part], want[part], sums, error, form)
    end = int(given.offsets[-1])
    assert got.shape == want.shape and not got[end:].any() and not want[end:].any()
    return got


def quantized(given: Tokens, weight: PackedWeight, *bias: Tensor | None, **form: Any) -> Tensor:
    """Call grouped_quantized_linear on tokens."""
    return grouped_quantized_linear(
        given.x, weight, given.offsets, *bias, slots=given.slots, **form
    )
