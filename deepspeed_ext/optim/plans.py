"""The cache between an optimizer's state and its op: which parameters step together, and where."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.dtensors import Agreement, is_dtensor, local
from deepspeed_ext.optim.buckets import STEP, Bucket
from deepspeed_ext.optim.checks import (
    check_entry,
    check_kind,
    check_no_capture,
    check_param,
    check_state,
)
from deepspeed_ext.optim.formats import is_of_format
from deepspeed_ext.optim.owner import Owner
from deepspeed_ext.optim.state_entry import StateEntry
from deepspeed_ext.optim.state_values import StateValidation

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


class Change(Enum):
    """What somebody may have changed from outside, as `Plans.changes` finds it."""

    VALUES = "a value in the state of a parameter"
    STATE = "the state of a parameter as a whole"
    GROUPS = "the list of groups, or of the parameters of one"
    OPTIONS = "an option that says which state there is, or in which dtype"
    LOOKS = "what a parameter of a bucket looks like"
    WEIGHTS = "a parameter that has a master weight"


class Plans:
    """A plan for each group, made again when state, groups or parameters were changed from outside.

    `changes` is what finds that out. Keeps no reference to the optimizer: a cycle would hold its
    memory until the next garbage collection.
    """

    def __init__(self) -> None:
        self._plans: list[Plan] | None = None
        self._entries: list[object] = []
        self._ready: list[Bucket] = []  # which may hold what is being loaded

    def drop(self) -> None:
        """Forget everything, flat buffers included; the state still has views of them."""
        self._plans = None

    def add_group(self, group: dict[str, Any]) -> None:
        """Take note of a group that was added to the optimizer."""
        if self._plans is not None:
            self._plans.append(Plan(group, []))

    def current(self, optimizer: Owner) -> list[Plan]:
        """Return plans that hold every parameter with a gradient or with state.

        Whether the parameters of a bucket still look the same is for `changes` to say, bucket by
        bucket.
        """
        if self.changes(optimizer) is not None:
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

    def is_current(self, optimizer: Owner) -> bool:
        """Return whether `current` has nothing to do."""
        if self.changes(optimizer) is not None:
            return False
        return all(param.grad is None for plan in self._plans or () for param in plan.idle)

    def changes(self, optimizer: Owner, bucket: Bucket | None = None) -> Change | None:
        """Return what was changed from outside since the plans were made, the first that is found.

        The checks stand in the order of what they cost: the first nothing, as state tells of
        itself; the next three about a tenth of a microsecond for each parameter, once a step, for
        what cannot tell, by identity; the last two somewhat more, right before the step of each
        bucket, so that its parameters are still in the processor's cache then. What one of them
        sees is not looked for by those after it. WEIGHTS wants new master weights, all others new
        plans.

        Args:
            optimizer: whose plans they are.
            bucket: of a plan that is current but for what this looks for; None: look at all else.
        """
        if bucket is not None:
            if not bucket.fits():
                return Change.LOOKS
            return Change.WEIGHTS if bucket.is_written() else None
        if self._plans is None:
            return Change.VALUES
        if self._has_other_state(optimizer):
            return Change.STATE
        if self._has_other_groups(self._plans, optimizer):
            return Change.GROUPS
        return Change.OPTIONS if self._wants_other_state(self._plans, optimizer) else None

    def _has_other_state(self, optimizer: Owner) -> bool:
        """Return whether state of a parameter was put in the place of other, added or taken away.

        Values in it are not looked at: a `StateEntry` calls `drop` before one of them goes.
        Nobody sees what is written into a tensor, which is in the flat buffer then and needs no
        notice, nor a tensor that gets other memory through `.data =` or `set_`.
        """
        return _differ(self._entries, optimizer.state.values())

    def _has_other_groups(self, plans: list[Plan], optimizer: Owner) -> bool:
        """Return whether groups, or parameters in one, were added, taken away or moved.

        Options are not looked at here, nor what a parameter is like.
        """
        groups = optimizer.param_groups
        return len(plans) != len(groups) or any(
            _differ(plan.params, group["params"]) for group, plan in zip(groups, plans, strict=True)
        )

    def _wants_other_state(self, plans: list[Plan], optimizer: Owner) -> bool:
        """Return whether options of a group, such as amsgrad, want state that buckets do not have.

        All other options are read in each step.
        """
        return any(
            bucket.dtypes != dtypes_of(optimizer, group, bucket.dtype)
            for group, plan in zip(optimizer.param_groups, plans, strict=True)
            for bucket in plan.buckets
        )

    def rebuild(self, optimizer: Owner) -> None:
        """Copy all state into flat buffers.

        Raises:
            ValueError: some state does not fit; nothing was changed.
        """
        self._build(optimizer, None, lambda: None)

    def load(self, optimizer: Owner, agreement: Agreement, old: "Plans") -> None:
        """Copy state of unknown origin into buffers, but for what is in those of old plans already.

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

        validation = StateValidation(optimizer.spec.signed)
        self._ready = [bucket for plan in old._plans or () for bucket in plan.buckets]
        self._build(optimizer, validation, agree)
        self._ready = []
        validation.check(optimizer)
        agree()

    def _build(
        self, optimizer: Owner, validation: StateValidation | None, agree: Callable[[], None]
    ) -> None:
        groups, state = optimizer.param_groups, optimizer.state
        follow_shapes(optimizer)
        stateful = [
            [param for param in group["params"] if _has_state(optimizer, group, param)]
            for group in groups
        ]
        if validation is not None:
            for param in (param for group in groups for param in group["params"]):
                check_kind(optimizer, param, state.get(param, {}))
        agree()  # before elements are exchanged
        self._plans, self._entries = None, []  # so that an old buffer goes when its last state does
        plans = [
            Plan(group, self._make_buckets(optimizer, group, params, validation))
            for group, params in zip(groups, stateful, strict=True)
        ]
        self._plans, self._entries = plans, list(state.values())

    def _make_buckets(
        self,
        optimizer: Owner,
        group: dict[str, Any],
        params: Sequence[Tensor],
        validation: StateValidation | None = None,
    ) -> list[Bucket]:
        """Put parameters of one group into buckets, with the state that they have, if any."""
        by_kind: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
        for param in params:
            check_param(optimizer, param)
            kind = (local(param).device, param.dtype, is_dtensor(param))
            by_kind.setdefault(kind, []).append(param)
        keys, spec = self._noise_keys(optimizer), optimizer.spec
        look = None if validation is None else validation.look_at_source
        buckets = []
        for (device, dtype, _), members in by_kind.items():
            check_no_capture(optimizer, device, "step before, which creates the state")
            dtypes = dtypes_of(optimizer, group, dtype)
            for part in spec.cut(members):
                noise_keys = [keys[id(param)] for param in part] if keys else None
                given = [spec.completed(group, optimizer.state.get(p, {})) for p in part]
                ready = next((b for b in self._ready if b.holds(part, dtypes, given)), None)
                may_move = len(spec.devices) > 1
                bucket = ready or spec.bucket(
                    part, dtypes, spec.signed, noise_keys, may_move, spec.zeros
                )
                for i, (param, values) in enumerate(zip(part, given, strict=True)):
                    others = {k: v for k, v in values.items() if not is_of_format(k, dtypes)}
                    state = bucket.shown(i) if ready else bucket.fill(i, values, look)
                    entry = {**others, **state}
                    optimizer.state[param] = StateEntry(
                        entry, param.shape, weakref.WeakMethod(self.drop)
                    )
                buckets.append(bucket)
                if validation is not None:
                    validation.look_at(bucket)
        return buckets

    def _noise_keys(self, optimizer: Owner) -> dict[int, int]:
        """Return the key of the random bits of every parameter, by its identity."""
        if not optimizer.state_format.rounds_at_random:
            return {}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return {id(param): optimizer.state_format.key_of(i) for i, param in enumerate(params)}

    def _merge_small_buckets(self, optimizer: Owner, group: dict[str, Any], plan: Plan) -> None:
        """Keep the calls per step few when parameters get their first gradients one by one."""
        small = [bucket for bucket in plan.buckets if bucket.is_small]
        if len(small) > _MAX_SMALL_BUCKETS:
            params = [param for bucket in small for param in bucket.params]
            plan.buckets = [bucket for bucket in plan.buckets if not bucket.is_small]
            plan.buckets += self._make_buckets(optimizer, group, params)


def dtypes_of(
    optimizer: Owner, group: dict[str, Any], param_dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """Return the dtype of each flat buffer for parameters of a group, except that of steps."""
    return optimizer.state_format.dtypes(optimizer.spec.state_keys(group), param_dtype)


def follow_shapes(optimizer: Owner) -> None:
    """Give state the shapes of parameters that have got others, as by `p.data = p.data.view(-1)`.

    A DTensor's is another sharding too: its state does not follow.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            entry = optimizer.state.get(param)
            if (
                isinstance(entry, StateEntry)
                and entry.shape != param.shape
                and not is_dtensor(param)
            ):
                entry.take_shape(param, dtypes_of(optimizer, group, param.dtype))


def _has_state(optimizer: Owner, group: dict[str, Any], param: Tensor) -> bool:
    """Return whether a parameter has state, after checking that it is right."""
    return is_state(optimizer, group, param, optimizer.state.get(param, {}))


def is_state(
    optimizer: Owner,
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
