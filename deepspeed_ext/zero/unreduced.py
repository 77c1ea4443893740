"""Gradients between micro-steps: what stands in for them says whether they are dropped."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.torch_internals.dispatch import FOREACH_ZERO_
from deepspeed_ext.torch_internals.fully_shard import (
    drop_partial_sum,
    drop_unreduced,
    has_partial_sum,
    is_unreduced,
    whole_of,
)
from deepspeed_ext.torch_internals.tensors import make_wrapper_subclass

_ZEROS = (torch.ops.aten.zero_.default, FOREACH_ZERO_)


class Unreduced(Tensor):
    """Stand in, as the gradient of a shard, for what processes have not added up yet.

    Whoever takes it away, or fills it with zeros, drops that. It has no numbers.

    Args:
        shard: whose gradient it is.
    """

    is_dropped: bool

    def __new__(cls, shard: Tensor) -> "Unreduced":
        """Make one of the shape of a shard."""
        made: Unreduced = make_wrapper_subclass(
            cls, shard.shape, dtype=shard.dtype, device=shard.device
        )
        made.is_dropped = False
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Unreduced(of {list(self.shape)}, until the backward of the last micro-step)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Take zeros, and refuse all else."""
        if func not in _ZEROS:
            raise RuntimeError(
                "zero.accumulate: a gradient is read between micro-steps, expected after the"
                " backward of the last one, which reduces it"
            )
        several = isinstance(args[0], list)
        for grad in args[0] if several else args[:1]:
            if isinstance(grad, Unreduced):
                grad.is_dropped = True
            else:
                grad.zero_()
        return None if several else args[0]


class _Mark:
    """An `Unreduced` in its place, from one backward to where the next one adds to the gradient."""

    def __init__(self, param: Any) -> None:
        self.shard: Tensor = param.sharded_param
        self.is_dropped = False
        self._param = param
        self._earlier = self.shard.grad  # than the loop
        self._grad: Unreduced | None = Unreduced(self.shard)
        self.shard.grad = self._grad
        # The first to come, whether by a whole parameter or by a loss of the shard itself.
        adding = [t for t in (self.shard, whole_of(param)) if t is not None and t.requires_grad]
        self._hooks = [tensor.register_hook(self.collect) for tensor in adding]

    def release(self) -> bool:
        """Put back what was there, or nothing if it was dropped; tell whether it stood in."""
        grad, self._grad = self._grad, None
        if grad is None:
            return False
        for hook in self._hooks:
            hook.remove()
        self.is_dropped = self.shard.grad is not grad or grad.is_dropped
        if not self.is_dropped:
            self.shard.grad = self._earlier
        elif self.shard.grad is grad:
            self.shard.grad = None
        return True

    def collect(self, *_: object) -> None:
        """Do the same, and drop the gradient that it stood in for."""
        if self.release() and self.is_dropped:
            drop_unreduced(self._param)


class Marks:
    """Of one group of parameters that is reduced as one.

    Args:
        group: of fully_shard.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._has_sum = has_partial_sum(group)
        self._marks = [
            _Mark(param)
            for param in group.fsdp_params
            if is_unreduced(param) or (self._has_sum and param.sharded_param.requires_grad)
        ]

    def release(self) -> None:
        """Put back what was there."""
        for mark in self._marks:
            mark.release()

    def collect(self) -> set[int]:
        """Do the same, and drop what was dropped.

        Returns:
            ids of shards that were dropped of a sum which has others too, and is not; or none.
        """
        for mark in self._marks:
            mark.collect()
        dropped = {id(mark.shard) for mark in self._marks if mark.is_dropped}
        if self._has_sum and dropped:
            if len(dropped) < len(self._marks):
                return dropped
            drop_partial_sum(self._group)
        return set()
