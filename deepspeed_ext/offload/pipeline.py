"""Gradients out, steps, weights back: what is on its way, and what of it counts."""

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.dtensors import is_dtensor, local
from deepspeed_ext.offload.bucket import Ahead, HostBucket, go_on, is_plain, use
from deepspeed_ext.offload.copies import Event, Lanes, Recorder, await_copy
from deepspeed_ext.offload.host_copies import Links, look_of
from deepspeed_ext.offload.host_gradients import Sums
from deepspeed_ext.offload.host_optimizer import HostSteps, options_of
from deepspeed_ext.offload.host_tensors import host_memory, remake
from deepspeed_ext.offload.verdict import Decision, decide, scaling_of
from deepspeed_ext.offload.worker import Task, Urgency, Worker
from deepspeed_ext.op_builder import load
from deepspeed_ext.optim.clipping import Scaling
from deepspeed_ext.optim.slabs import Bucket
from deepspeed_ext.optim.spec import Group


class Memory(NamedTuple):
    """Most bytes of host memory for this and that.

    Attributes:
        spare: for steps that are taken ahead.
        gradients: for gradients on their way; None: for all of them.
    """

    spare: int
    gradients: int | None = None


class Pipeline:
    """The parameters of one optimizer on their devices, their host copies, and what moves between.

    It holds no reference to the optimizer, which may go at any time.

    Args:
        inner: steps the host copies.
        groups: of the optimizer, with the options that count.
        links: between parameters and copies.
        memory: that it may take beside weights and state.
        free_grads: gradients are added up in host memory, and leave the device at once.
    """

    def __init__(
        self,
        inner: HostSteps,
        groups: list[Group],
        links: Links,
        memory: Memory,
        free_grads: bool,
    ) -> None:
        self.inner, self.groups, self.links = inner, groups, links
        self._memory, self._free_grads = memory, free_grads
        self.worker = Worker(links.share, partial(load, inner.traits.op.libraries["cpu"]))
        self._lanes: dict[torch.device, Lanes] = {}
        self._sums = Sums(self.worker)  # of gradients that left the device at once
        self._buckets: list[HostBucket] = []
        self._resident: list[tuple[Group, Bucket]] = []
        self._known: list[Bucket] = []  # of the inner optimizer, that the former are for
        self._bucket_of: dict[int, HostBucket] = {}
        self._looks: dict[int, object] = {}
        self._lock = threading.RLock()  # autograd has threads of its own
        self._hits: Counter[int] = Counter()  # gradients accumulated since the last step
        self._expected: Counter[int] = Counter()  # the same when the last step was taken
        self._divisor = 1.0  # which the next step will divide by, if it is like the last one
        self._bites = False  # clipping did, in the last step
        self.counts: Counter[str] = Counter()

    def _locked(self) -> AbstractContextManager[object]:
        """Keep other threads out. A fork has none, but may have been made while one was in."""
        return nullcontext() if self.worker.is_foreign() else self._lock

    # Before step(): what may be done ahead

    def note_gradient(self, param: Tensor) -> None:
        """Take note of a gradient that was accumulated; called by hooks, in threads of autograd."""
        with self._locked(), torch._C.DisableTorchFunctionSubclass():  # it waits for no weight
            await_copy(param.grad)
            self._hits[id(param)] += 1
            if not self._may_hasten(param):
                return
            bucket = self._bucket_of.get(id(param))
            try:
                if self._frees(param):
                    self._send_away(param)
                if bucket is not None and bucket.task is None:
                    self._advance(bucket, param)
            except Exception:  # it would end backward; if it persists, step() raises it
                if bucket is not None:
                    self._give_up(bucket)

    def _frees(self, param: Tensor) -> bool:
        """Return whether the gradient of a parameter does not stay on the device."""
        grad, copy = param.grad, self.links.copies.get(id(param), param)
        return self._free_grads and copy is not param and is_plain(grad, param)

    def _advance(self, bucket: HostBucket, param: Tensor) -> None:
        """Do what can be done about a gradient of a bucket now."""
        if self._hits[id(param)] > self._expected[id(param)]:
            self._give_up(bucket)
        elif all(self._hits[id(p)] == self._expected[id(p)] > 0 for p in bucket.owners):
            self._hasten(bucket)

    def _may_hasten(self, param: Tensor) -> bool:
        """Return whether nobody else is known to write to gradients after hooks, as DDP does.

        What is written to one that has left is lost, so none of those leaves early.
        """
        alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
        if alone or is_dtensor(param):
            return True
        return not self._free_grads and torch.distributed.get_world_size() == 1

    def _send_away(self, param: Tensor) -> None:
        """Take a gradient from the device, and have it added to others in host memory."""
        bucket = self._bucket_of.get(id(param))
        if bucket is not None and (task := bucket.task) is not None:
            self.worker.wait([task])  # it may read the sum still
            if task.error is None:  # else that is for who can raise it
                self.wait_for([bucket])
        known = self._sums.of(param)
        known.follow()
        source = known.more()
        if source is None:
            return
        if not self._has_room(source.nbytes):
            self._sums.finish()
        self._sums.take(known, source, self._lanes_of(param))

    def _lanes_of(self, param: Tensor) -> Lanes:
        device = local(param).device
        if device not in self._lanes:
            self._lanes[device] = Lanes(device)
        return self._lanes[device]

    def _hasten(self, bucket: HostBucket) -> None:
        if not self._arrives_early(bucket):
            return
        spare, arrival = bucket.spare, bucket.arrival
        options = self._options(bucket)
        if spare is None or arrival is None or options is None or self._bites:
            return
        if bucket.looks_written():
            return
        run = partial(bucket.step_ahead, arrival, options, scaling_of(self._divisor), spare)
        # What arrives last is wanted first: the rest can hide behind the next forward.
        task = Task(run, Urgency.AHEAD, bucket.place, arrival.events[:1], arrival.needs)
        bucket.ahead = Ahead(task, options, self._divisor, bucket.weights, bucket.state_marks())
        self.worker.submit(task)
        self.counts["ahead"] += 1

    def _arrives_early(self, bucket: HostBucket) -> bool:
        """See that all gradients of a bucket are on their way, if they can be and there is room."""
        if bucket.sums is not None:
            if not bucket.is_steady or not all(known.count for known in bucket.sums):
                return False
            bucket.take_sums(bucket.sums)
            self.counts["early"] += 1
            return True
        grads = bucket.grads()
        if not all(map(is_plain, grads, bucket.owners)):
            return False
        if bucket.arrival is None or not bucket.looks_sealed(grads):
            self._give_up(bucket)
            if bucket.is_steady and not self._has_room(bucket.grad_bytes()):
                return False
            bucket.seal(grads)
            if not bucket.is_steady:  # only to learn whether it would have been
                return False
            bucket.take(grads)
            self.counts["early"] += 1
        return True

    def _has_room(self, nbytes: int) -> bool:
        """Return whether gradients fit beside those that are in host memory."""
        most = self._memory.gradients
        if most is None:
            return True
        in_use = sum(lanes.staged_bytes for lanes in self._lanes.values())
        return not in_use or in_use + nbytes <= most

    def _give_up(self, bucket: HostBucket) -> None:
        """Forget a step that was taken ahead, and gradients that are not those of the step."""
        if bucket.ahead is not None:
            self.worker.drop(bucket.ahead.task)
            bucket.ahead = None
            self.counts["rolled back"] += 1
        bucket.arrival = bucket.sealed = None

    def forget_gradients(self) -> None:
        """Begin anew: what was accumulated is not wanted any more."""
        with self._locked():
            self._hits.clear()
            for bucket in self._buckets:
                self._give_up(bucket)
            self._sums.forget()

    # The step

    def is_dry_step(self) -> bool:
        """Make the state, and return whether that is all; see `SlabOptimizer.step`."""
        self._prepare()
        if self._sums.has_any():
            return False
        return self.inner.changes_nothing(list(self.links.owners.values()))

    def _prepare(self) -> None:
        self._sums.follow()
        self._follow_groups()
        self._follow_params()
        self._place()

    def step(self, scaling: Scaling, max_norm: float | None) -> Tensor | None:
        """Queue the step of all parameters that have a gradient, and return the norm if asked for.

        Raises:
            ValueError: a gradient or parameter is not as it must be; nothing was stepped.
        """
        self.worker.check()
        self.finish()
        self._prepare()
        with self._locked():
            after = {device: lanes.mark() for device, lanes in self._lanes.items()}
            for bucket in self._buckets:
                bucket.check_grads()
                self._drop_outdated(bucket)
            if max_norm is not None:
                self._sums.finish()  # the norm is one of sums
                self._sums.check()
            decision = self._decide(scaling, max_norm)
            if decision.is_skip:
                self.counts["skipped"] += max_norm is not None
                for bucket in self._buckets:
                    self._give_up(bucket)
            else:
                self._queue(decision.divisor, after)
                self._bites = decision.divisor != decision.scale
            # The next step is taken to be like this one.
            self._expected, self._hits = self._hits, Counter()
            self._divisor = decision.scale
            self._sums.forget()
        return decision.norm

    def _decide(self, scaling: Scaling, max_norm: float | None) -> Decision:
        """Ask the devices what the step has to know, once, and give up what was done in vain."""
        sealed = {b: asked for b in self._buckets if (asked := b.of_gradients())}
        stepped = [b for b in self._buckets if any(grad is not None for grad in b.grads())]
        sent = {b: asked for b in stepped if (asked := b.of_weights())}
        resident = [bucket for _, bucket in self._resident]
        questions = [*sealed.values(), *sent.values()]
        decision = decide(scaling, max_norm, self._buckets, resident, questions)
        for bucket, differs in zip(sealed, decision.answers, strict=False):
            bucket.is_steady = not any(differs)
            if not bucket.is_steady:
                self._give_up(bucket)
        for bucket, differs in zip(sent, decision.answers[len(sealed) :], strict=True):
            bucket.written = differs
        return decision

    def _queue(self, divisor: float, after: dict[torch.device, Event | None]) -> None:
        """Queue the step of all that has gradients."""
        try:
            for group, resident in self._resident:
                self.inner.step_whole(group, resident, scaling_of(divisor))
            for bucket in self._buckets:  # by place
                self._take_rest(bucket)
                self._settle(bucket, divisor, after[bucket.lanes.device])
        finally:  # what was queued before an error, too, reads gradients
            for lanes in self._lanes.values():
                lanes.hold_back()  # whoever writes to them from now on

    def _drop_outdated(self, bucket: HostBucket) -> None:
        """Forget what is there of gradients of which it shows that they are not those of now."""
        if bucket.sums is not None:
            left = [known.param for known in bucket.sums if known.has_more()]
            bucket.is_steady = not left
            for owner in left:
                self._send_away(owner)
            there = [i for i, known in enumerate(bucket.sums) if known.count]
            if left or (bucket.arrival is not None and bucket.arrival.indices != there):
                self._give_up(bucket)
        elif bucket.sealed is not None and not bucket.looks_sealed(bucket.grads()):
            bucket.is_steady = False
            self._give_up(bucket)

    def _take_rest(self, bucket: HostBucket) -> None:
        """See that the gradients of a bucket are on their way, when there is room for them."""
        if bucket.arrival is not None:
            return
        if bucket.sums is not None:
            if any(known.count for known in bucket.sums):
                bucket.take_sums(bucket.sums)
                self.counts["late"] += 1
            return
        grads = bucket.grads()
        if any(grad is not None for grad in grads):
            for other in self._buckets:
                if self._has_room(bucket.grad_bytes()):
                    break
                if other.task is not None:
                    self.worker.wait([other.task])
            bucket.take(grads)
            self.counts["late"] += 1

    def _settle(self, bucket: HostBucket, divisor: float, after: Event | None) -> None:
        """Make the step ahead count, or queue one."""
        arrival, ahead = bucket.arrival, bucket.ahead
        if arrival is None:
            return
        options = self._options(bucket) or options_of(self.groups[bucket.group])
        was_written = bucket.pull()
        if was_written:
            bucket.aim(arrival)
        if ahead is not None and self.worker.drop(ahead.task):  # nobody has begun it
            self.counts["ahead"] -= 1
            ahead = None
        step = partial(bucket.step, arrival, options, scaling_of(divisor), after)
        send = partial(bucket.send_rest, arrival, after)
        await_room = bucket.lanes.await_room
        if (
            ahead is not None
            and bucket.spare is not None
            and not was_written
            and ahead.task.error is None
            and ahead.is_of(options, divisor, bucket.weights, bucket.state_marks())
        ):
            taken, adopt = ahead.task, partial(bucket.adopt, bucket.spare, after)
            run = partial(use, taken, await_room, adopt, step, send)
            self.counts["validated"] += 1
        else:
            taken = Task(step, Urgency.STEP, bucket.place, arrival.events[:1], arrival.needs)
            run = partial(go_on, taken, await_room, send)
            self.counts["rolled back"] += ahead is not None
        is_seen = bucket.set_out(arrival, partial(self.wait_for, (bucket,)))
        if ahead is None or taken is not ahead.task:
            bucket.task = self.worker.submit(taken)
        arrival.release()
        bucket.ahead = bucket.arrival = bucket.sealed = None
        bucket.is_state_shown = False
        room = bucket.lanes.has_room
        task = Task(run, Urgency.RETURN, bucket.place, [after], [taken], room)
        bucket.task = self.worker.submit(task)  # if that fails, there is nothing to wait for
        if not is_seen:
            self.wait_for([bucket])

    # Afterwards

    def show_state(self, param: Tensor) -> None:
        """Take note that the user is shown the state of a parameter."""
        bucket = self._bucket_of.get(id(param))
        if bucket is not None:
            with self._locked():
                bucket.show_state()

    def update_copies(self) -> None:
        """Give host copies the weights that somebody else has written, in whatever way."""
        self._follow_groups()
        self._follow_params()
        for bucket in self._buckets:
            self._give_up(bucket)
            bucket.distrust()
            bucket.pull()
        self.links.update_others(owner for bucket in self._buckets for owner in bucket.owners)

    def stats(self) -> dict[str, Any]:
        """Return counts, bytes and seconds so far, and where the steps are taken."""
        names = ("early", "late", "ahead", "validated", "rolled back")
        return {
            **{name: self.counts[name] for name in names},
            "bytes_out": self._sums.bytes_out + sum(b.bytes_out for b in self._buckets),
            "bytes_back": sum(bucket.bytes_back for bucket in self._buckets),
            "step_seconds": sum(bucket.seconds for bucket in self._buckets),
            "threads": self.worker.threads,
            "processors": sorted(self.worker.share.processors),
        }

    def record(self, recorder: Recorder | None) -> None:
        """Tell a recorder of copies and steps from now on; None ends that."""
        for lanes in self._lanes.values():
            lanes.recorder = recorder

    def finish(self) -> None:
        """Wait until the last step is over, and let the current streams wait for its weights.

        Raises:
            Exception: what went wrong in the worker.
        """
        self.wait_for(self._buckets)

    def end(self) -> None:
        """Finish what is queued, and end the thread: then all weights are there, for any stream."""
        self.worker.close()
        if not self.worker.is_foreign():
            for bucket in self._buckets:
                bucket.end()

    def wait_for(self, buckets: Iterable[HostBucket]) -> None:
        """Do this for some buckets."""
        errors = []
        for bucket in buckets:
            task = bucket.task
            if task is not None:
                self.worker.wait([task])
                if task.error is not None:
                    errors.append(task.error)
            bucket.await_on_stream()
            with self._locked():  # another thread may have stepped since, or is about to
                if bucket.task is task:
                    bucket.arrive()
        if errors:
            raise errors[0]

    def before_use(self, params: Sequence[Tensor]) -> None:
        """Wait for the weights that a module is about to use, and take note of the order."""
        found = dict.fromkeys(map(self._bucket_of.get, map(id, params)))
        self.wait_for(bucket for bucket in found if bucket is not None)

    # Buckets

    def _follow_groups(self) -> None:
        """Take options and parameters that have come into groups, and let go of others."""
        for group, inner in zip(self.groups, self.inner.param_groups, strict=True):
            copies = self.links.copies_of(group["params"])
            if list(map(id, copies)) != list(map(id, inner["params"])):
                inner["params"] = copies
                self.links.move_state(group["params"], self.inner.state)
            inner.update(options_of(group))
        for key in self.links.forget(self.groups, self.inner.state):
            self._sums.drop(key)
            for kept in (self._looks, self._hits, self._expected):
                kept.pop(key, None)

    def _options(self, bucket: HostBucket) -> Group | None:
        """Return the options of a step as they are now, or None if that would wait for a device."""
        lr = self.groups[bucket.group]["lr"]
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            return None
        return options_of(self.groups[bucket.group])

    def _follow_params(self) -> None:
        """Give new host copies to parameters that have got another device, dtype or layout."""
        changed = False
        for copy, owner in [(c, self.links.owners[id(c)]) for c in self._copies()]:
            look = look_of(owner)
            if copy is not owner and self._looks.setdefault(id(owner), look_of(copy)) != look:
                remake(copy, owner, self.links.share)
                changed = True
            self._looks[id(owner)] = look
        if changed:
            self.inner.forget_buckets()

    def _place(self) -> None:
        """See that all parameters with a gradient or with state are in buckets."""
        both = [(copy, self.links.owners[id(copy)]) for copy in self._copies()]
        self.inner.give_state([c for c, p in both if p.grad is not None or self._sums.has(p)])
        stay = all(bucket.stays() for bucket in self._buckets)
        if not stay or not all(bucket.fits() for _, bucket in self._resident):
            self.inner.forget_buckets()
        found = self.inner.buckets()
        if [bucket for _, bucket in found] == self._known:
            return
        self._known = [bucket for _, bucket in found]
        for made in self._buckets:
            self._give_up(made)
        self._resident, self._buckets = [], []
        for group, bucket in found:
            owners = [self.links.owners[id(copy)] for copy in bucket.params]
            if owners[0] is bucket.params[0]:
                self._resident.append((self.inner.param_groups[group], bucket))
                continue
            lanes = self._lanes_of(owners[0])
            made = HostBucket(self.inner, group, bucket, owners, lanes)
            made.place = len(self._buckets)
            if self._free_grads:
                self._sums.finish()
                made.sums = list(map(self._sums.of, owners))
                for known, owner in zip(made.sums, owners, strict=True):
                    known.lie_as(owner)
            self._buckets.append(made)
        self._bucket_of = {id(owner): b for b in self._buckets for owner in b.owners}
        left = self._memory.spare
        for made in reversed(self._buckets):  # whose gradients come first
            left -= made.nbytes
            if left >= 0:
                made.make_spare(host_memory(made.bucket.parts(), self.links.share))

    def _copies(self) -> Iterator[Tensor]:
        return itertools.chain.from_iterable(g["params"] for g in self.inner.param_groups)
