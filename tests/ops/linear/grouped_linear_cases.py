"""What the tests of grouped_linear share: random arguments, and how far a result may be off."""

from collections.abc import Sequence

import torch
from activation_cases import ROUNDING
from samples import make
from tolerance import assert_within
from torch import Tensor

from deepspeed_ext.ops import grouped_linear, grouped_linear_ref

NAMES = ("x", "weight", "bias")


def offsets_of(counts: Sequence[int], device: str = "cpu") -> Tensor:
    """Return the ends of parts of so many rows."""
    return torch.tensor(counts, dtype=torch.int64).cumsum(0).to(device, torch.int32)


def arguments(
    counts: Sequence[int],
    n: int,
    k: int,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    behind: int = 0,
    bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return x, weight, offsets and bias, for results of a few units."""
    experts = len(counts)
    weight = make((experts, n, k), torch.float32, 1) / max(1, k) ** 0.5
    return (
        make((sum(counts) + behind, k), dtype, 0, device),
        weight.to(device, dtype),
        offsets_of(counts, device),
        make((experts, n), dtype, 2, device) if bias else None,
    )


def assert_right(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, grad: Tensor | None = None
) -> list[Tensor]:
    """Compare the result and all gradients with the reference, and return them.

    Args:
        grad: of the result, or None: that of its sum, which is expanded.
    """
    given = [x, weight] if bias is None else [x, weight, bias]
    leaves = [each.detach().requires_grad_() for each in given]
    got = grouped_linear(*leaves[:2], offsets, *leaves[2:])
    assert got.is_contiguous() and got.dtype == x.dtype and got.device == x.device
    there = torch.ones((), dtype=got.dtype, device=got.device) if grad is None else grad
    grads = torch.autograd.grad(got, leaves, there.expand_as(got))

    far = [each.detach().cpu().double().requires_grad_() for each in given]
    where, passed = offsets.cpu(), there.cpu().double().expand(got.shape)
    want = grouped_linear_ref(*far[:2], where, *far[2:])
    wanted = torch.autograd.grad(want, far, passed)

    # Sums of magnitudes bound what roundings come to: of each product, and of the sums before it.
    sizes = [each.detach().abs().requires_grad_() for each in far]
    size = grouped_linear_ref(*sizes[:2], where, *sizes[2:])
    of_sizes = torch.autograd.grad(size, sizes, passed.abs())
    rows, (n, k) = x.shape[0], weight.shape[1:]
    error = 2 * (k + 8) * ROUNDING * size.detach()
    if bias is not None:  # it may be added to what is rounded already
        error = error + torch.finfo(x.dtype).eps * size.detach()
    assert got.shape == want.shape
    assert_within("out", got.detach().cpu(), want.detach(), error)
    terms = (n, rows, rows)
    for name, found, right, bound, count in zip(
        NAMES, grads, wanted, of_sizes, terms, strict=False
    ):
        assert found.shape == right.shape and found.dtype == x.dtype
        assert_within(f"gradient of {name}", found.cpu(), right, 2 * (count + 8) * ROUNDING * bound)
    return [got.detach(), *grads]
