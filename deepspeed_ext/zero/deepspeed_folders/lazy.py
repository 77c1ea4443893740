"""Lazy: a tensor whose parts are found when they are asked for."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_MOST = 1 << 23  # elements of a small part
Parts = Callable[[int, int], Iterator[Tensor]]


@dataclass(frozen=True)
class Lazy:
    """A tensor whose parts are found when they are asked for.

    Args:
        described: the same on meta.
        parts: returns elements from one to before another: flat tensors that follow one another,
            which may be mapped memory of a file.
    """

    described: Tensor
    parts: Parts

    def small_parts(self, begin: int = 0, end: int | None = None) -> Iterator[Tensor]:
        """Return the same, or all of it, in parts none of which takes much memory."""
        end = self.described.numel() if end is None else end
        for low in range(begin, end, _MOST):
            yield from self.parts(low, min(low + _MOST, end))

    def read(self) -> Tensor:
        """Return all of it, which may be mapped memory of a file."""
        parts = list(self.small_parts()) or [
            torch.empty(0, dtype=self.described.dtype, device="cpu")
        ]
        return joined(parts).view(self.described.shape)


def lazy(shape: torch.Size, dtype: torch.dtype, parts: Parts) -> Lazy:
    """Return a tensor of this kind."""
    return Lazy(torch.empty(shape, dtype=dtype, device="meta"), parts)


def lazy_number(value: float) -> Lazy:
    """Return a number as optimizers keep a step."""
    one = torch.tensor([value], dtype=torch.float32, device="cpu")
    return lazy(torch.Size(), torch.float32, lambda begin, end: iter([one[begin:end]]))


def joined(parts: Iterable[Tensor]) -> Tensor:
    """Return flat tensors as one, copied if they are several."""
    listed = list(parts)
    return listed[0] if len(listed) == 1 else torch.cat(listed)


def cut(flats: Iterable[Tensor], begin: int, end: int) -> Iterator[Tensor]:
    """Return elements from one to before another of flat tensors that follow one another."""
    at = 0
    for flat in flats:
        if at >= end:
            return
        part = flat[max(begin - at, 0) : end - at]
        at += flat.numel()
        if part.numel():
            yield part
