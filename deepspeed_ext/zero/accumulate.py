"""Micro-steps: several backwards whose gradients make one step."""

import sys
from collections.abc import Iterator

from torch import nn

from deepspeed_ext.zero.calls import Loop
from deepspeed_ext.zero.sharding import Sharding, sharding_of


def accumulate(model: nn.Module, steps: int) -> Iterator[int]:
    """Go through the micro-steps of one step, so that each stage sends what its table says.

        for i in zero.accumulate(model, steps=4):
            loss = loss_of(model, batches[i]) / 4
            loss.backward()
        optimizer.step()

    There is one backward in each pass of the loop. Between passes parameters are shards, as ever:
    they may be written, frozen and thawed. But in stage 3, weights stay gathered beside them until
    the last backward; each forward compares the bits of shards with what was gathered of them, and
    all processes gather anew where one has other ones, or gradients are off. A step before the last
    backward is refused.

    Gradients are added up, and in stages 0 and 1 are reduced in the last pass only, as are sums of
    replicas. Until then `.grad` is there and has no numbers: to read it is an error, to set it to
    None or to zeros, as zero_grad does, drops what was added up. A loop that is left before the
    backward of the last pass is over leaves no gradients, and says so. An error in a forward that
    is caught inside leaves those there are; one in a backward drops them, as half of one cannot be
    told from the others. Both have to come in all processes: what one of them alone goes on with
    ends in an error, or in the timeout of the process group.

    Args:
        model: that zero.shard was called on.
        steps: how many micro-steps, at least 1.

    Yields:
        0 to steps - 1.

    Raises:
        ValueError: model is not sharded, or steps is less than 1.
        RuntimeError: the loop is inside of another one for the same model; or it has come to its
            end and some pass had a backward, but not the last one; or a gradient was read between
            passes; or replicas have a sum of other gradients of a block.

    See: FSDPModule.set_requires_gradient_sync, set_reshard_after_backward and, on two-dimensional
        meshes, set_requires_all_reduce, which this calls.
    """
    sharding = sharding_of("zero.accumulate", model)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"zero.accumulate: steps is {steps!r}, expected a whole number above 0")
    return _micro_steps(sharding, steps)


class Accumulation:
    """Micro-steps whose number is not known beforehand; `accumulate` is for the others.

        micro_steps = zero.Accumulation(model)
        for batch, is_last in batches:
            micro_steps.begin(is_last)
            loss_of(model, batch).backward()
            if is_last:
                micro_steps.end()
                optimizer.step()

    What holds between passes of `accumulate` holds between two `begin`.

    Args:
        model: that zero.shard was called on.

    Raises:
        ValueError: model is not sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._sharding = sharding_of("zero.Accumulation", model)
        self._loop: Loop | None = None

    @property
    def is_open(self) -> bool:
        """Whether a micro-step has begun since the last `end`."""
        return self._loop is not None

    @property
    def is_broken(self) -> bool:
        """Whether an error has ended a backward since the last `begin`; `end` drops the rest."""
        return self._loop is not None and self._sharding.is_broken()

    @property
    def backwards(self) -> int:
        """How many backwards are over since the first `begin` after an `end`."""
        done = None if self._loop is None else self._loop.last_backward
        return 0 if done is None else done + 1

    def begin(self, is_last: bool) -> None:
        """Begin a micro-step, before or after its forward; again before its backward, say so anew.

        Args:
            is_last: the backward that comes reduces the gradients of all of them.

        Raises:
            RuntimeError: the model is between micro-steps of somebody else.
        """
        if self._loop is None:
            loop = Loop(None)
            self._sharding.begin(loop)
            self._loop = loop
        if self._loop.last_backward == self._loop.at:
            self._loop.at += 1
        self._loop.ends = is_last
        self._sharding.micro_step(self._loop, self._loop.at)

    def end(self, is_whole: bool = True) -> None:
        """End the micro-steps; gradients are there if the last one had a backward.

        Args:
            is_whole: False drops gradients instead of an error where the last one had none.

        Raises:
            RuntimeError: only micro-steps before the last one had a backward.
        """
        if self._loop is not None:
            loop, self._loop = self._loop, None
            self._sharding.end(loop, is_whole)


def _micro_steps(sharding: Sharding, steps: int) -> Iterator[int]:
    loop = Loop(steps)
    sharding.begin(loop)
    is_whole = False
    try:
        for i in range(steps):
            loop.caller = sys._getframe(1)
            sharding.micro_step(loop, i)
            yield i
        is_whole = True
    finally:
        loop.caller = None
        sharding.end(loop, is_whole)
