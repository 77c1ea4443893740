"""What a class of optimizers takes and keeps: a table, from which checks and state follow."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops.optimizers.step_op import Flag, Number, StepOp
from deepspeed_ext.optim.buckets import Bucket, Zeros, cut, zeros
from deepspeed_ext.optim.formats import MASTER, REMAINDER

Group = dict[str, Any]


def _as_found(group: Group, values: Mapping[str, Any]) -> Mapping[str, Any]:
    return values


@dataclass(frozen=True)
class OptimizerSpec:
    """What is known of a class of optimizers.

    Attributes:
        op: that takes its steps; of a step in two, the one that has all states.
        devices: types of those that its parameters may be on.
        elsewhere: for other types the class that takes such parameters.
        options: of a group, beside lr, maximize and those of the op.
        unsaved: state that torch's class of this kind does not keep.
        completed: returns state of a parameter as it was found, given the options of its group,
            with what it lacks and must not begin as zeros.
        grad_layouts: of gradients.
        cut: puts parameters of one group, device and dtype, in their order, into buckets.
        zeros: makes the flat buffers of a bucket.
        bucket: makes a bucket.
    """

    op: StepOp
    devices: tuple[str, ...] = ("cpu", "cuda")
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    options: tuple[Number | Flag, ...] = ()
    unsaved: frozenset[str] = frozenset()
    completed: Callable[[Group, Mapping[str, Any]], Mapping[str, Any]] = _as_found
    grad_layouts: tuple[torch.layout, ...] = (torch.strided,)
    cut: Callable[[Sequence[Tensor]], Iterator[list[Tensor]]] = cut
    zeros: Zeros = zeros
    bucket: Callable[..., Bucket] = Bucket

    @property
    def all_options(self) -> tuple[Number | Flag, ...]:
        """All options of a group."""
        return (Number("lr", least=0), *self.op.options, *self.options, Flag("maximize"))

    def state_keys(self, group: Group) -> list[str]:
        """Return the keys of state that has an element for each of a parameter's of this group."""
        return [s.key for s in self.op.states if s.when is None or group[s.when]]

    def defaults(self, given: Mapping[str, Any], **renamed: object) -> Group:
        """Return the options of a group.

        Args:
            given: among the arguments of a constructor.
            renamed: those that have other names there.
        """
        return {
            option.key: renamed[option.key] if option.key in renamed else given[option.key]
            for option in self.all_options
        }

    def may_lack(self, key: str) -> bool:
        """Return whether the state of a parameter may be without this in a checkpoint."""
        sometimes = {state.key for state in self.op.states if state.when is not None}
        return key in {MASTER, REMAINDER, *sometimes, *self.unsaved}

    @property
    def signed(self) -> frozenset[str]:
        """The keys of state that may be negative."""
        return frozenset(state.key for state in self.op.states if state.signed)
