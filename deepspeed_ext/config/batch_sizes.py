"""The relation of the batch sizes: two give the third."""

from typing import NamedTuple

_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"


class BatchSizes(NamedTuple):
    """What a step is made of: train = micro x steps x processes.

    Args:
        train: samples in a step, over all processes.
        micro: samples in a micro-step of one process.
        steps: micro-steps in a step.
    """

    train: int
    micro: int
    steps: int


def solve(train: int | None, micro: int | None, steps: int | None, processes: int) -> BatchSizes:
    """Return the sizes where some may be None: with one alone of the first two there is one
    micro-step.

    Raises:
        ValueError: too little is given, or it does not fit together.
    """
    if processes < 1:
        raise ValueError(f"config: processes is {processes}, expected 1 or more")
    if train is None and micro is None:
        raise ValueError(f"config: {_TRAIN} is not given, expected {_TRAIN} or {_MICRO}")
    if train is None or micro is None:
        steps = 1 if steps is None else steps
    if train is None:
        assert micro is not None and steps is not None
        train = micro * steps * processes
    elif micro is None:
        assert steps is not None
        micro = _quotient(train, f"{_STEPS} ({steps})", steps, processes)
    elif steps is None:
        steps = _quotient(train, f"{_MICRO} ({micro})", micro, processes)
    elif train != micro * steps * processes:
        raise ValueError(
            f"config: {_TRAIN} is {train}, expected {_MICRO} ({micro}) x {_STEPS} ({steps}) x"
            f" processes ({processes}) = {micro * steps * processes}; leave out one of the three"
        )
    return BatchSizes(train, micro, steps)


def _quotient(train: int, name: str, factor: int, processes: int) -> int:
    divisor = factor * processes
    if train % divisor:
        raise ValueError(
            f"config: {_TRAIN} is {train}, expected a multiple of {name} x processes"
            f" ({processes}) = {divisor}"
        )
    return train // divisor
