"""What the self-checks of all families share."""

import torch


def compare(what: str, got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    """Raise unless each element is within a relative error of `bound`."""
    found = got.cpu().double().flatten()
    wrong = ~((found - want.flatten()).abs() <= bound * want.flatten().abs())
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise RuntimeError(
            f"{what} has {found[i].item()!r} at {i}, expected {want.flatten()[i].item()!r}"
        )
