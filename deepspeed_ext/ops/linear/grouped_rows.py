"""What layers of experts do around their products: copies of tokens, and activations."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_ext.ops.linear.few_rows import check_like, is_known, linear_ref

MOST_ROWS = 512  # that the kernels take: see grouped_rows.h


def are_few(x: Tensor, offsets: Tensor, slots: Tensor | None, libraries: Mapping[str, str]) -> bool:
    """Tell whether kernels take a call, by what is known of its rows; if it is not, they do not."""
    if x.device.type not in libraries or x.dim() == 0 or offsets.numel() == 0:
        return False
    if slots is None and x.dim() != 2:
        return False
    return is_known(x.shape[0] if slots is None else slots.numel(), lambda n: n <= MOST_ROWS)


def fake_results(x: Tensor, n: int, slots: Tensor | None, *, gated: bool, **options: Any) -> Tensor:
    """Return what kernels return, without values; n is how many rows an expert's weight has."""
    rows = x.shape[0] if slots is None else slots.numel()
    return x.new_empty(rows, n // (2 if gated else 1))


def unpermuted(grad: Tensor, slots: Tensor | None, offsets: Tensor) -> Tensor:
    """Return the gradient of x of those of the rows: of a token the sum of its copies'."""
    if slots is None:
        return grad
    import deepspeed_ext.ops.moe.permute  # noqa: F401  # it defines the op

    of_x: Tensor = torch.ops.deepspeed_ext.moe_unpermute(grad, slots, offsets, None)
    return of_x


def check_options(
    op: str, x: Tensor, slots: Tensor | None, activation: str | None, gated: bool, n: int
) -> None:
    """Refuse what does not fit together before anything is multiplied.

    Args:
        n: rows of an expert's weight.

    Raises:
        ValueError: an argument does not fit; in the words of grouped_rows_ops.h.
    """
    if gated and activation is None:
        raise ValueError(f"{op}: gated is True, expected an activation beside it")
    if gated and n % 2:
        raise ValueError(
            f"{op}: weight has {n} rows for each expert, expected an even number, as gated is True"
        )
    if slots is None:
        return
    if slots.dim() == 0 or x.dim() == 0 or x.shape[:-1] != slots.shape[:-1]:
        raise ValueError(
            f"{op}: slots has shape {list(slots.shape)}, expected {[*x.shape[:-1], 'k']} beside"
            f" x with shape {list(x.shape)}".replace("'", "")
        )
    check_like(op, "slots", slots, x, slots.shape, torch.int64)


def permuted(x: Tensor, slots: Tensor | None, offsets: Tensor) -> Tensor:
    """Return the rows of the experts: x, or copies of its tokens at their slots."""
    if slots is None:
        return x
    import deepspeed_ext.ops.moe.permute  # noqa: F401  # it defines the op

    rows: Tensor = torch.ops.deepspeed_ext.moe_permute(x, slots, offsets, rows=slots.numel())
    return rows


def activated(sums: Tensor, activation: str | None, gated: bool) -> Tensor:
    """Return what activation, if there is one, makes of rounded products; zeros stay zeros."""
    from deepspeed_ext.ops.elementwise.bias_activation import bias_activation
    from deepspeed_ext.ops.elementwise.gated_activation import gated_activation

    if activation is None:
        return sums
    if gated:
        return gated_activation(sums, activation=activation)
    return bias_activation(sums, activation=activation)


def grouped_ref(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    slots: Tensor | None,
    activation: str | None,
    gated: bool,
) -> Tensor:
    """Return the results of all rows in float64."""
    rows = x.double() if slots is None else _permuted_ref(x.double(), slots)
    ends: list[int] = offsets.tolist()
    found = [
        linear_ref(
            *(rows[begin:end], weight[expert], None if bias is None else bias[expert]),
            *(activation, gated, None),
        )
        for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    last = ends[-1] if ends else 0
    rest = rows.new_zeros(rows.shape[0] - last, weight.shape[1] // (2 if gated else 1))
    return torch.cat([*found, rest])


def _permuted_ref(x: Tensor, slots: Tensor) -> Tensor:
    rows = slots.numel()
    copies = x[..., None, :].expand(*slots.shape, x.shape[-1]).flatten(end_dim=-2)
    places = slots.flatten()
    room = F.pad(copies.new_zeros(rows, x.shape[-1]), (0, 0, 0, 1))
    return room.index_copy(0, places.where(places >= 0, rows), copies)[:rows]
