"""What a step has to know before it counts: what divides the gradients, and if it is skipped."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from deepspeed_ext.offload.bucket import HostBucket
from deepspeed_ext.offload.seals import Question, compare, read
from deepspeed_ext.optim.buckets import Bucket
from deepspeed_ext.optim.clipping import Scaling, SquareSum, clip


class Decision(NamedTuple):
    """What a step needs to know that the devices had to be asked for.

    Attributes:
        norm: of the gradients, if they are clipped.
        scale: of the gradients, as GradScaler has set it.
        divisor: of the gradients; that scale if they are not clipped.
        is_skip: nothing may be stepped.
        answers: to each question, for each part if it differs.
    """

    norm: Tensor | None
    scale: float
    divisor: float
    is_skip: bool
    answers: list[list[bool]]


def decide(
    scaling: Scaling,
    max_norm: float | None,
    buckets: Sequence[HostBucket],
    kept_on_device: Sequence[Bucket],
    questions: Sequence[Question],
) -> Decision:
    """Return what the gradients are divided by, and what has changed since speculative steps began.

    Waits for the devices once, or not at all if there is nothing to ask them.

    Args:
        scaling: as GradScaler has set it.
        max_norm: the largest norm to leave as it is; None: gradients are not clipped.
        buckets: of parameters that are stepped in host memory.
        kept_on_device: of those that are stepped there.
        questions: about gradients and weights.
    """
    differing = compare(questions)
    given = [value for value in (scaling.grad_scale, scaling.found_inf) if value is not None]
    clipped = None
    if max_norm is not None:
        clipped = clip(_sum_squares(buckets, kept_on_device), max_norm, scaling)
        given += [clipped.divisor, clipped.found_inf]
    found = read([*differing, *given])
    answers = [list(map(bool, answer)) for answer in found[: len(differing)]]
    numbers = [number for [number] in found[len(differing) :]]
    scale = 1.0 if scaling.grad_scale is None else numbers[0]
    if clipped is not None:
        divisor, found_inf = numbers[-2:]
        return Decision(clipped.norm, scale, divisor, found_inf != 0, answers)
    is_skip = scaling.found_inf is not None and numbers[-1] != 0
    return Decision(None, scale, scale, is_skip, answers)


def _sum_squares(buckets: Sequence[HostBucket], kept_on_device: Sequence[Bucket]) -> Tensor:
    squares = SquareSum()
    for away in buckets:
        away.add_squares(squares)
    for bucket in kept_on_device:
        work = bucket.gather()
        if work is not None:
            squares.add(work.of_this_process() if bucket.is_sharded else work)
    return squares.total()
