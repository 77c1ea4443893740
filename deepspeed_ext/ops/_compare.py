"""What the self-checks of all families share."""

import torch


def compare(
    what: str, got: torch.Tensor, want: torch.Tensor, bound: float, of_largest: float = 0.0
) -> None:
    """Raise unless each element is within `bound` of itself and `of_largest` of the largest one."""
    found = got.cpu().double().flatten()
    size = want.flatten().abs()
    allowed = bound * size + of_largest * size.max()
    wrong = ~((found - want.flatten()).abs() <= allowed)
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise RuntimeError(
            f"{what} has {found[i].item()!r} at {i}, expected {want.flatten()[i].item()!r}"
        )
