"""The cache between an optimizer's state and its op: which parameters step together, and where."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import is_not
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepspeed_ext.dtensors import Agreement, is_dtensor, local
from deepspeed_ext.optim.checks import (
    check_entry,
    check_kind,
    check_no_capture,
    check_param,
    check_state,
)
from deepspeed_ext.optim.formats import is_of_format
from deepspeed_ext.optim.slabs import STEP, Bucket
from deepspeed_ext.optim.state_entry import Entry
from deepspeed_ext.optim.state_values import Numbers

if TYPE_CHECKING:
    from deepspeed_ext.optim.base import SlabOptimizer

_MAX_SMALL_BUCKETS = 16  # of a group; more are merged


class Plan:
    """One parameter group as the last step left it.

    Attributes:
        params: a copy of the group's list, to notice when somebody edits that.
        idle: those that had no gradient so far, so no state either.
        buckets: the others.
    """

    def __init__(self, group: dict[str, Any], buckets: list[Bucket]) -> None:
        self.params: list[Tensor] = list(group["params"])
        placed = {id(param) for bucket in buckets for param in bucket.params}
        self.idle = [param for param in self.params if id(param) not in placed]
        self.buckets = buckets


class Plans:
    """A plan for each group, made again when state, groups or parameters were changed from outside.

    There are three ways of finding out, and what each sees is for the others to leave alone:

    - State tells of itself. The state of a parameter is an `Entry`, a dict that calls `drop` before
      one of its values is replaced or goes, so that no value is compared before a step.
    - Plans compare by identity, once a step, what cannot tell: the entries of `state`, the list of
      each group's parameters, and the dtypes that a group's options ask for (`_is_current`); and
      each bucket compares what its parameters look like, right before its step (`Bucket.fits`).
      A change found there, or told by an entry, makes all plans again: `rebuild`.
    - Masters know when the parameter that they are the original of was written, by its version
      counter and address (`Bucket.refresh_masters`). That makes no new plan, but a new original.

    The second costs about a tenth of a microsecond per parameter and step. Keeps no reference to
    the optimizer: a cycle would hold its memory until the next garbage collection.
    """

    def __init__(self) -> None:
        self._plans: list[Plan] | None = None
        self._entries: list[object] = []
        self._ready: list[Bucket] = []  # which may hold what is being loaded

    def drop(self) -> None:
        """Forget everything, slabs included; the state still has views of them."""
        self._plans = None

    def add_group(self, group: dict[str, Any]) -> None:
        """Take note of a group that was added to the optimizer."""
        if self._plans is not None:
            self._plans.append(Plan(group, []))

    def current(self, optimizer: "SlabOptimizer") -> list[Plan]:
        """Return plans that hold every parameter with a gradient or with state.

        Whether the parameters of a bucket still look the same is for the bucket to say: see `fits`.
        """
        if self._plans is None or not self._is_current(self._plans, optimizer):
            self.rebuild(optimizer)
        plans = self._plans or []
        for group, plan in zip(optimizer.param_groups, plans, strict=True):
            fresh = [param for param in plan.idle if param.grad is not None]
            if fresh:
                for param in fresh:
                    _has_state(optimizer, group, param)
                if any(map(is_dtensor, fresh)):
                    # Alike in all processes, also where one of them has rebuilt its plans: LAMB
                    # and LARS exchange norms bucket by bucket.
                    idle = {id(param) for param in plan.idle if param.grad is None}
                    placed = [param for param in plan.params if id(param) not in idle]
                    plan.buckets = self._make_buckets(optimizer, group, placed)
                else:
                    plan.buckets += self._make_buckets(optimizer, group, fresh)
                    self._merge_small_buckets(optimizer, group, plan)
                plan.idle = [param for param in plan.idle if param.grad is None]
                self._entries = list(optimizer.state.values())
        return plans

    def _is_current(self, plans: list[Plan], optimizer: "SlabOptimizer") -> bool:
        groups = optimizer.param_groups
        if _differ(self._entries, optimizer.state.values()) or len(plans) != len(groups):
            return False
        return all(
            not _differ(plan.params, group["params"])
            and all(b.dtypes == dtypes_of(optimizer, group, b.dtype) for b in plan.buckets)
            for group, plan in zip(groups, plans, strict=True)
        )

    def rebuild(self, optimizer: "SlabOptimizer") -> None:
        """Copy all state into slabs.

        Raises:
            ValueError: some state does not fit; nothing was changed.
        """
        self._build(optimizer, None, lambda: None)

    def load(self, optimizer: "SlabOptimizer", agreement: Agreement, old: "Plans") -> None:
        """Copy state of unknown origin into slabs, but for what is in those of old plans already.

        Raises:
            ValueError: some state does not fit, or holds numbers that would destroy, here or in
                another process.
        """

        def agree() -> None:
            if not agreement.go_on():
                title = type(optimizer).__name__
                raise ValueError(
                    f"{title}: state is refused by another process, expected by none; "
                    "its error says why"
                )

        numbers = Numbers(optimizer.traits.signed)
        self._ready = [bucket for plan in old._plans or () for bucket in plan.buckets]
        self._build(optimizer, numbers, agree)
        self._ready = []
        numbers.check(optimizer)
        agree()

    def _build(
        self, optimizer: "SlabOptimizer", numbers: Numbers | None, agree: Callable[[], None]
    ) -> None:
        groups, state = optimizer.param_groups, optimizer.state
        follow_shapes(optimizer)
        stateful = [
            [param for param in group["params"] if _has_state(optimizer, group, param)]
            for group in groups
        ]
        if numbers is not None:
            for param in (param for group in groups for param in group["params"]):
                check_kind(optimizer, param, state.get(param, {}))
        agree()  # before elements are exchanged
        self._plans, self._entries = None, []  # so that an old slab goes when its last state moves
        plans = [
            Plan(group, self._make_buckets(optimizer, group, params, numbers))
            for group, params in zip(groups, stateful, strict=True)
        ]
        self._plans, self._entries = plans, list(state.values())

    def _make_buckets(
        self,
        optimizer: "SlabOptimizer",
        group: dict[str, Any],
        params: Sequence[Tensor],
        numbers: Numbers | None = None,
    ) -> list[Bucket]:
        """Put parameters of one group into buckets, with the state that they have, if any."""
        by_kind: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
        for param in params:
            check_param(optimizer, param)
            kind = (local(param).device, param.dtype, is_dtensor(param))
            by_kind.setdefault(kind, []).append(param)
        keys, traits = self._noise_keys(optimizer), optimizer.traits
        buckets = []
        for (device, dtype, _), members in by_kind.items():
            check_no_capture(optimizer, device, "step before, which creates the state")
            dtypes = dtypes_of(optimizer, group, dtype)
            for part in traits.cut(members):
                noise_keys = [keys[id(param)] for param in part] if keys else None
                given = [traits.completed(group, optimizer.state.get(p, {})) for p in part]
                ready = next((b for b in self._ready if b.holds(part, dtypes, given)), None)
                may_move = len(traits.devices) > 1
                bucket = ready or Bucket(
                    part, dtypes, traits.signed, noise_keys, may_move, traits.zeros
                )
                for i, (param, values) in enumerate(zip(part, given, strict=True)):
                    others = {k: v for k, v in values.items() if not is_of_format(k, dtypes)}
                    state = bucket.shown(i) if ready else bucket.fill(i, values, numbers)
                    entry = {**others, **state}
                    optimizer.state[param] = Entry(
                        entry, param.shape, weakref.WeakMethod(self.drop)
                    )
                buckets.append(bucket)
                if numbers is not None:
                    numbers.look_at(bucket)
        return buckets

    def _noise_keys(self, optimizer: "SlabOptimizer") -> dict[int, int]:
        """Return the key of the random bits of every parameter, by its identity."""
        if not optimizer.state_format.rounds_at_random:
            return {}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return {id(param): optimizer.state_format.key_of(i) for i, param in enumerate(params)}

    def _merge_small_buckets(
        self, optimizer: "SlabOptimizer", group: dict[str, Any], plan: Plan
    ) -> None:
        """Keep the calls per step few when parameters get their first gradients one by one."""
        small = [bucket for bucket in plan.buckets if bucket.is_small]
        if len(small) > _MAX_SMALL_BUCKETS:
            params = [param for bucket in small for param in bucket.params]
            plan.buckets = [bucket for bucket in plan.buckets if not bucket.is_small]
            plan.buckets += self._make_buckets(optimizer, group, params)


def dtypes_of(
    optimizer: "SlabOptimizer", group: dict[str, Any], param_dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """Return the dtype of each slab for parameters of a group, except that of steps."""
    return optimizer.state_format.dtypes(optimizer.traits.state_keys(group), param_dtype)


def follow_shapes(optimizer: "SlabOptimizer") -> None:
    """Give state the shapes of parameters that have got others, as by `p.data = p.data.view(-1)`.

    A DTensor's is another sharding too: its state does not follow.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            entry = optimizer.state.get(param)
            if isinstance(entry, Entry) and entry.shape != param.shape and not is_dtensor(param):
                entry.take_shape(param, dtypes_of(optimizer, group, param.dtype))


def _has_state(optimizer: "SlabOptimizer", group: dict[str, Any], param: Tensor) -> bool:
    """Return whether a parameter has state, after checking that it is right."""
    return is_state(optimizer, group, param, optimizer.state.get(param, {}))


def is_state(
    optimizer: "SlabOptimizer",
    group: dict[str, Any],
    param: Tensor,
    entry: dict[str, Any],
    *,
    or_meta: bool = False,
) -> bool:
    """Return whether this has state of a parameter in it, after checking that it is right."""
    check_entry(optimizer, param, entry)
    if not entry:
        return False
    dtypes = dtypes_of(optimizer, group, param.dtype)
    if STEP not in entry and dtypes.keys().isdisjoint(entry):
        return False  # only what somebody else keeps there
    check_param(optimizer, param)
    check_state(optimizer, param, entry, dtypes, or_meta=or_meta)
    return True


def _differ(old: Sequence[object], new: Iterable[object]) -> bool:
    """Return whether two sequences hold different objects (tensors are not compared by value)."""
    new = list(new)
    return len(old) != len(new) or any(map(is_not, old, new))
