"""Gradients between micro-steps: what stands in for them says whether they are dropped."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.torch_internals.dispatch import FOREACH_ZERO_, is_in_backward
from deepspeed_ext.torch_internals.fully_shard import (
    drop_partial_sum,
    drop_unreduced,
    has_partial_sum,
    is_unreduced,
)
from deepspeed_ext.torch_internals.tensors import make_wrapper_subclass

_ADD = torch.ops.aten.add_.Tensor  # of autograd, to the gradient that is there
_ZEROS = (torch.ops.aten.zero_.default, FOREACH_ZERO_)


class Unreduced(Tensor):
    """Stand in, as the gradient of a shard, for what processes have not added up yet.

    Whoever takes it away, or fills it with zeros, drops that. It has no numbers.

    Args:
        shard: whose gradient it is.

    Attributes:
        is_dropped: it was filled with zeros.
        added: what a backward through the shard itself has added since.
    """

    is_dropped: bool
    added: Tensor | None

    def __new__(cls, shard: Tensor) -> "Unreduced":
        """Make one of the shape of a shard."""
        made: Unreduced = make_wrapper_subclass(
            cls, shard.shape, dtype=shard.dtype, device=shard.device
        )
        made.begin()
        return made

    def begin(self) -> None:
        """Stand in anew."""
        self.is_dropped, self.added = False, None

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Unreduced(of {list(self.shape)}, until the backward of the last micro-step)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Take zeros, and what a backward adds, and refuse all else."""
        if func in _ZEROS:
            several = isinstance(args[0], list)
            for grad in args[0] if several else args[:1]:
                if isinstance(grad, Unreduced):
                    grad.is_dropped, grad.added = True, None
                else:
                    grad.zero_()
            return None if several else args[0]
        if func is _ADD and isinstance(args[0], Unreduced) and is_in_backward():
            grad, more = args
            grad.added = more.clone() if grad.added is None else grad.added + more
            return grad
        raise RuntimeError(
            "zero.accumulate: a gradient is read between micro-steps, expected after the backward"
            " of the last one, which reduces it"
        )


class _Mark:
    """An `Unreduced` that is put in its place after a backward, until the last one begins."""

    def __init__(self, param: Any) -> None:
        self.param = param
        self.is_placed = False
        self._grad = Unreduced(param.sharded_param)

    @property
    def is_dropped(self) -> bool:
        """Whether what it stands for was dropped."""
        return self.is_placed and (self.shard.grad is not self._grad or self._grad.is_dropped)

    def place(self) -> None:
        """Stand in for what there is."""
        self.is_placed, self.shard = True, self.param.sharded_param
        self._earlier = self.shard.grad  # than the loop
        self._grad.begin()
        self.shard.grad = self._grad

    def release(self) -> None:
        """Put back what was there, less what was dropped, and what was added since."""
        grad = self._grad
        if self.shard.grad is grad:
            kept, added = None if grad.is_dropped else self._earlier, grad.added
            both = kept is not None and added is not None
            self.shard.grad = kept + added if both else added if kept is None else kept
        self.is_placed, self._earlier, grad.added = False, None, None


class Marks:
    """Of one group of parameters that is reduced as one.

    Args:
        group: of fully_shard.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._marks = [_Mark(param) for param in group.fsdp_params]

    def place(self) -> None:
        """Stand in for the gradients of the group that are not added up."""
        has_sum = has_partial_sum(self._group)
        for mark in self._marks:
            trained = has_sum and mark.param.sharded_param.requires_grad
            if not mark.is_placed and (trained or is_unreduced(mark.param)):
                mark.place()

    def release(self) -> None:
        """Put back what was there."""
        for mark in self._marks:
            if mark.is_placed:
                mark.release()

    def collect(self, is_last: bool) -> set[int]:
        """Drop what was dropped, and put back what was there.

        Args:
            is_last: nothing is to stand in any longer. Else what was not dropped does.

        Returns:
            ids of shards that were dropped of a sum which has others too, and is not; or none.
        """
        dropped = [mark for mark in self._marks if mark.is_dropped]
        is_part = len(dropped) < sum(mark.is_placed for mark in self._marks)
        for mark in dropped:
            mark.release()
            drop_unreduced(mark.param)
        if is_last:
            self.release()
        if dropped and has_partial_sum(self._group):
            if is_part:
                return {id(mark.shard) for mark in dropped}
            drop_partial_sum(self._group)
        return set()
