"""Where the elements of a parameter lie in the flat tensors of the processes.

See: DeepSpeed 0.19, what utils/zero_to_fp32.py reads: stages 1 and 2 lay the parameters of a group
one after another and cut that into a part for each process; stage 3 cuts each parameter.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Span:
    """Elements that follow one another in a flat tensor of a process, and in a parameter.

    Args:
        process: whose tensor it is.
        start: index of the first element in the tensor.
        length: how many they are.
    """

    process: int
    start: int
    length: int


@dataclass(frozen=True)
class Place:
    """Where a parameter lies.

    Args:
        shape: of the parameter.
        flat: index of the flat tensor, in each process.
        spans: in the order of its elements.
    """

    shape: torch.Size
    flat: int
    spans: tuple[Span, ...]


def alignment(processes: int) -> int:
    """Return the number of elements of which stages 1 and 2 make flat groups a multiple."""
    return 2 * processes


def places_across(
    flat: int,
    shapes: Mapping[str, torch.Size],
    paddings: Sequence[int],
    size: int,
    processes: Sequence[int],
) -> dict[str, Place]:
    """Return places of stages 1 and 2, in which a parameter may lie in several processes.

    Args:
        flat: index of the group.
        shapes: of its parameters, in their order.
        paddings: elements that follow each parameter and are not its own.
        size: elements of each process but the last ones.
        processes: that share the group out.
    """
    found, begin = {}, 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        spans, at, end = [], begin, begin + math.prod(shape)
        while at < end:
            process, start = divmod(at, size)
            length = min(end - at, size - start)
            spans.append(Span(processes[process], start, length))
            at += length
        found[name] = Place(shape, flat, tuple(spans))
        begin = end + padding
    return found


def places_in_each(
    sizes: Sequence[int], shapes: Mapping[str, torch.Size], processes: int
) -> dict[str, Place]:
    """Return places of stage 3, in which each process has an equal part of each parameter.

    Args:
        sizes: elements of the flat tensors (sub-groups), the same in each process.
        shapes: of all parameters, in their order.
        processes: their number.

    Raises:
        ValueError: a parameter does not end where its sub-group does, or there are elements too
            many; the text says which, and has no file in it.
    """
    found, flat, start = {}, 0, 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = part_of(numel, processes)
        while flat < len(sizes) - 1 and start == sizes[flat]:
            flat, start = flat + 1, 0
        left = sizes[flat] - start if sizes else 0
        if part > left:
            raise ValueError(
                f"{left} elements left for {name!r} in flat tensor {flat}, expected {part} for"
                f" shape {list(shape)} on {processes} processes"
            )
        spans = (Span(i, start, min(part, numel - i * part)) for i in range(processes))
        found[name] = Place(shape, flat, tuple(span for span in spans if span.length > 0))
        start += part
    left = sum(sizes[flat:]) - start
    if left:
        raise ValueError(f"{left} elements after all parameters, expected none")
    return found


def part_of(numel: int, processes: int) -> int:
    """Return the elements that a process has of a parameter in stage 3, padding included."""
    return -(-numel // processes)
