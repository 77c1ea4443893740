"""Whether tensors are what they were: version stamps may deny it, only fingerprints confirm it.

Much writes to a tensor without a trace: DTensors, `_foreach_*`, collectives, kernels of others and
`.data` count no version, and an address is used again. So a speculative step counts only where
the bits are those that it was taken with.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.dtensors import local
from deepspeed_ext.offload.copies import sleep_until
from deepspeed_ext.ops.optimizers.fingerprint import fingerprints
from deepspeed_ext.torch_internals.tensors import version_of

Stamps = list[tuple[int, int, int] | None]


class Seal(NamedTuple):
    """What tensors were at some time.

    Attributes:
        stamps: of their versions; None where there was none.
        prints: fingerprints of those that there were.
    """

    stamps: Stamps
    prints: Tensor


class Question(NamedTuple):
    """Whether what this process holds of some tensors has still the fingerprints that it had."""

    parts: list[Tensor]
    prints: Tensor


def stamps_of(tensors: Sequence[Tensor | None]) -> Stamps:
    """Return what changes with some of the writes to a tensor, and when it gets other memory."""
    return [None if t is None else (version_of(t), *_stamp_of_part(local(t))) for t in tensors]


def _stamp_of_part(part: Tensor) -> tuple[int, int]:
    return version_of(part), part.data_ptr()


def parts_of(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return what this process holds of those that are there."""
    return [local(t).detach() for t in tensors if t is not None]


def seal(tensors: Sequence[Tensor | None]) -> Seal:
    """Take note of what tensors are, behind what the current stream was given so far.

    Args:
        tensors: of one device; None where there is none.
    """
    return Seal(stamps_of(tensors), fingerprints(parts_of(tensors)))


def compare(questions: Sequence[Question]) -> list[Tensor]:
    """Return for each part of each question if it differs, on its device; nothing waits."""
    answers: dict[int, Tensor] = {}
    by_device: dict[torch.device, list[int]] = {}
    for i, question in enumerate(questions):
        by_device.setdefault(question.prints.device, []).append(i)
    for places in by_device.values():
        now = fingerprints([part for i in places for part in questions[i].parts])
        differs = now != torch.cat([questions[i].prints for i in places])
        sizes = [len(questions[i].parts) for i in places]
        answers.update(zip(places, differs.split(sizes), strict=True))
    return [answers[i] for i in range(len(questions))]


def read(values: Sequence[Tensor]) -> list[list[float]]:
    """Return the elements of small tensors; each of their devices is waited for once."""
    found: dict[int, list[float]] = {}
    by_device: dict[torch.device, list[int]] = {}
    for i, value in enumerate(values):
        by_device.setdefault(value.device, []).append(i)
    for device, places in by_device.items():
        flat = torch.cat([values[i].double().reshape(-1) for i in places])
        sleep_until(device)
        numbers = flat.tolist()
        for i in places:
            found[i], numbers = numbers[: values[i].numel()], numbers[values[i].numel() :]
    return [found[i] for i in range(len(values))]
