"""What a step has to know before it counts: what divides the gradients, and if it is skipped."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.offload.bucket import HostBucket
from deepspeed_ext.offload.copies import sleep_until
from deepspeed_ext.optim.clipping import Scaling, SquareSum, clip
from deepspeed_ext.optim.slabs import Bucket


class Decision(NamedTuple):
    """What a step needs to know that the devices had to be asked for.

    Attributes:
        norm: of the gradients, if they are clipped.
        divisor: of the gradients.
        is_skip: nothing may be stepped.
    """

    norm: Tensor | None
    divisor: float
    is_skip: bool


def decide(
    scaling: Scaling,
    max_norm: float | None,
    buckets: Sequence[HostBucket],
    resident: Sequence[Bucket],
) -> Decision | None:
    """Return what the gradients are divided by, or None if by nothing.

    Waits for the devices, once.

    Args:
        scaling: as GradScaler has set it.
        max_norm: the largest norm to leave as it is; None: gradients are not clipped.
        buckets: of parameters that are stepped in host memory.
        resident: of those that are stepped where they are.
    """
    if max_norm is not None:
        clipped = clip(_sum_squares(buckets, resident), max_norm, scaling)
        both = torch.stack([clipped.divisor.double(), clipped.found_inf.double()])
        sleep_until(both.device)
        divisor, found_inf = both.tolist()
        return Decision(clipped.norm, divisor, found_inf != 0)
    if scaling == Scaling():
        return None
    grad_scale, found_inf = scaling.grad_scale, scaling.found_inf
    divisor = 1.0 if grad_scale is None else float(grad_scale)
    return Decision(None, divisor, found_inf is not None and float(found_inf) != 0)


def _sum_squares(buckets: Sequence[HostBucket], resident: Sequence[Bucket]) -> Tensor:
    squares = SquareSum()
    for away in buckets:
        away.add_squares(away.grads(), squares)
    for bucket in resident:
        work = bucket.gather()
        if work is not None:
            squares.add(work.of_this_process() if bucket.is_sharded else work)
    return squares.total()
