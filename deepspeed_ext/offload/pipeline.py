"""Gradients out, steps, weights back: what is on its way, and what of it counts."""

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.offload.bucket_states import BucketState, OffloadedBucket
from deepspeed_ext.offload.changes import follow_groups, follow_params, rows_of
from deepspeed_ext.offload.copies import Events, Recorder, await_copy
from deepspeed_ext.offload.gradient_intake import Intake
from deepspeed_ext.offload.gradient_sources import (
    DeviceGradients,
    GradientSource,
    SummedGradients,
    is_plain,
)
from deepspeed_ext.offload.hooks import is_final_in_hook
from deepspeed_ext.offload.host_optimizer import HostOptimizer, options_of
from deepspeed_ext.offload.host_tensors import host_memory
from deepspeed_ext.offload.in_place import StepsInPlace
from deepspeed_ext.offload.memory import Memory
from deepspeed_ext.offload.param_table import ParamTable, Row
from deepspeed_ext.offload.tiers.disk_state import DiskState
from deepspeed_ext.offload.tiers.nvme import NvmeBucket
from deepspeed_ext.offload.tiers.ring import Ring, refusal
from deepspeed_ext.offload.verdict import Decision, decide
from deepspeed_ext.offload.worker import Worker
from deepspeed_ext.op_builder import load
from deepspeed_ext.optim.buckets import Bucket
from deepspeed_ext.optim.clipping import Scaling
from deepspeed_ext.optim.spec import Group
from deepspeed_ext.torch_internals.tensors import past_torch_function


class Pipeline:
    """The parameters of one optimizer on their devices, their host copies, and what moves between.

    It holds no reference to the optimizer, which may go at any time.

    Args:
        host_optimizer: steps the host copies.
        groups: of the optimizer, with the options that count.
        table: of the parameters.
        memory: that it may take beside weights and state.
        free_grads: gradients are added up in host memory, and leave the device at once.
        ring: by which state on disk comes and goes; None: there is none.
    """

    def __init__(
        self,
        host_optimizer: HostOptimizer,
        groups: list[Group],
        table: ParamTable[OffloadedBucket],
        memory: Memory,
        free_grads: bool,
        ring: Ring | None = None,
    ) -> None:
        self.ring = ring
        if ring is not None:
            host_optimizer.settle = partial(_before_state_moves, weakref.ref(self))
        self.host_optimizer, self.groups, self.table = host_optimizer, groups, table
        self._memory, self._free_grads = memory, free_grads
        self.worker = Worker(table.share, partial(load, host_optimizer.spec.op.libraries["cpu"]))
        self._intake = Intake(self.worker, memory)
        self._streams = self._intake.streams
        self._buckets: list[OffloadedBucket] = []
        self._in_place = StepsInPlace(host_optimizer, self.worker)
        self._known: list[Bucket] = []  # of the host optimizer, that the former are for
        self._lock = threading.RLock()  # autograd has threads of its own
        self._divisor = 1.0  # which the next step will divide by, if it is like the last one
        self._bites = False  # clipping did, in the last step
        self._broken_off: BaseException | None = None  # what a step was, of which not all is queued
        self.counts: Counter[str] = Counter()

    def _locked(self) -> AbstractContextManager[object]:
        """Keep other threads out. A fork has none, but may have been made while one was in."""
        return nullcontext() if self.worker.is_foreign() else self._lock

    # Before step(): what may be started early

    def note_gradient(self, param: Tensor) -> None:
        """Take note of a gradient that was accumulated; called by hooks, in threads of autograd."""
        with self._locked(), past_torch_function():  # it waits for no weight
            await_copy(param.grad)
            row = self.table.get(param)
            if row is None:  # it has come into a group, and is known from the next step on
                return
            row.hits += 1
            if not is_final_in_hook(param, self._free_grads):
                return
            bucket = row.bucket
            try:
                if self._free_grads and row.is_copied and is_plain(param.grad, param):
                    self._send_away(row)
                if bucket is not None and bucket.task is None:
                    self._advance(bucket, row)
            except Exception:  # it would end backward; if it persists, step() raises it
                if bucket is not None:
                    bucket.discard()

    def take_gradient(self, param: Tensor, grad: Tensor) -> bool:
        """Take a gradient of a streamed parameter, in its layout, from the device; in backward.

        Returns:
            Whether it is taken; if not, it is for the parameter itself.
        """
        with self._locked(), past_torch_function():
            row = self.table.get(param)
            if row is None or not row.is_copied:
                return False
            row.hits += 1
            self._send_away(row)  # what the parameter has from others
            self._intake.add(row, grad)
            bucket = row.bucket
            if bucket is not None and bucket.task is None:
                try:
                    self._advance(bucket, row)
                except Exception:  # it would end backward; if it persists, step() raises it
                    bucket.discard()
        return True

    def _advance(self, bucket: OffloadedBucket, row: Row[OffloadedBucket]) -> None:
        """Do what can be done about a gradient of a bucket now."""
        if row.hits > row.expected:
            bucket.discard()
        elif all(row.hits == row.expected > 0 for row in bucket.rows):
            self._start_early(bucket)

    def _send_away(self, row: Row[OffloadedBucket]) -> None:
        """Take a gradient from the device, and have it added to others in host memory."""
        bucket = row.bucket
        if bucket is not None and (task := bucket.task) is not None:
            self.worker.wait([task])  # it may read the sum still
            if task.error is None:  # else that is for who can raise it
                self.wait_for([bucket])
        self._intake.send_away(row)

    def _start_early(self, bucket: OffloadedBucket) -> None:
        """Take gradients that are all there, and start a speculative step if nothing forbids it."""
        if not self._takes_early(bucket):
            return
        options = self._options(bucket)
        if options is not None and not self._bites:
            bucket.start_ahead(options, self._divisor)

    def _takes_early(self, bucket: OffloadedBucket) -> bool:
        """See that all gradients of a bucket are on their way, if they can be and there is room."""
        gradients = bucket.gradients
        if isinstance(bucket, NvmeBucket):
            assert self.ring is not None
            self.ring.run_ahead()
            return False
        if not gradients.are_complete():
            return False
        bucket.discard()
        if gradients.are_final and not self._intake.has_room(gradients.staged_bytes()):
            return False
        bucket.watch()
        if not gradients.are_final:  # it is watched only to learn whether they would have been
            return False
        bucket.take()
        self.counts["early"] += 1
        return True

    def forget_gradients(self) -> None:
        """Begin anew: what was accumulated is not wanted any more."""
        with self._locked():
            for row in self.table:
                row.hits = 0
            for bucket in self._buckets:
                bucket.discard()
            self._forget_sums()

    def _forget_sums(self) -> None:
        # Without a wait for weights, should they be on their way.
        with past_torch_function():
            for known in self.table.sums():
                known.forget()

    # The step

    def is_dry_step(self) -> bool:
        """Make the state, and return whether that is all; see `FlatStateOptimizer.step`."""
        self._prepare()
        if any(known.count or known.has_more() for known in self.table.sums()):
            return False
        return self.host_optimizer.changes_nothing([row.param for row in self.table])

    def _prepare(self) -> None:
        for known in self.table.sums():
            known.follow()
        self.follow()
        self.place()

    def step(self, scaling: Scaling, max_norm: float | None) -> Tensor | None:
        """Queue the step of all parameters that have a gradient, and return the norm if asked for.

        Raises:
            ValueError: a gradient or parameter is not as it must be; nothing was stepped.
        """
        self.worker.check()
        self.finish()
        self._prepare()
        with self._locked():
            after = {device: streams.event_now() for device, streams in self._streams.items()}
            for bucket in self._buckets:
                bucket.check_grads()
                self._drop_outdated(bucket)
            if max_norm is not None:
                self._intake.finish()  # the norm is one of sums
                for known in self.table.sums():
                    known.check()
            decision = self._decide(scaling, max_norm)
            if decision.is_skip:
                self.counts["skipped"] += max_norm is not None
                for bucket in self._buckets:
                    bucket.discard()
            else:
                self._queue(decision.divisor, after)
                self._bites = decision.divisor != decision.scale
            # The next step is taken to be like this one.
            for row in self.table:
                row.expected, row.hits = row.hits, 0
            self._divisor = decision.scale
            self._forget_sums()
        return decision.norm

    def _decide(self, scaling: Scaling, max_norm: float | None) -> Decision:
        """Ask the devices what the step has to know, once, and discard what was done in vain."""
        sealed = {b: asked for b in self._buckets if (asked := b.gradients.question())}
        stepped = [b for b in self._buckets if any(g is not None for g in b.gradients.current())]
        sent = {b: asked for b in stepped if (asked := b.of_weights())}
        kept = [bucket for _, bucket in self._in_place.buckets]
        questions = [*sealed.values(), *sent.values()]
        decision = decide(scaling, max_norm, self._buckets, kept, questions)
        for bucket, differs in zip(sealed, decision.answers, strict=False):
            bucket.discard_differing(differs)
        for bucket, differs in zip(sent, decision.answers[len(sealed) :], strict=True):
            bucket.note_written(differs)
        return decision

    def _queue(self, divisor: float, after: Events) -> None:
        """Queue the step of all that has gradients."""
        left, has_begun = list(self._buckets), bool(self._in_place.buckets)
        try:
            self._in_place.step(divisor)
            while left:  # by place
                self._take_rest(left[0])
                has_begun = has_begun or left[0].has_taken
                waits = not left[0].has_taken or self._commit(left[0], divisor, after)
                bucket = left.pop(0)
                if not waits:
                    self.wait_for([bucket])
        except BaseException as error:
            if has_begun and left and not isinstance(error, Exception):
                self._broken_off = error  # Ctrl-C: some are queued, others are not
            raise
        finally:  # what was queued before an error, too, reads gradients
            for streams in self._streams.values():
                streams.hold_back()  # whoever writes to them from now on
            if self.ring is not None:
                self._await_disk(self.ring)

    def _await_disk(self, ring: Ring) -> None:
        """Wait for steps that read gradients where they are, which are the user's again then.

        Ctrl-C is raised after that; if it comes again, the step is broken off.
        """
        tasks = [b.task for b in self._buckets if isinstance(b, NvmeBucket) and b.task is not None]
        try:
            self.worker.wait(tasks)
        except BaseException:
            try:
                self.worker.wait(tasks)
            except BaseException as again:
                ring.fail(again)
                raise
            raise
        finally:
            ring.start_anew()

    def _drop_outdated(self, bucket: OffloadedBucket) -> None:
        """Forget what is there of gradients of which it shows that they are not those of now."""
        late = bucket.gradients.late()
        for row in late:
            self._send_away(row)
        bucket.discard_changed(were_late=bool(late))

    def _take_rest(self, bucket: OffloadedBucket) -> None:
        """See that the gradients of a bucket are on their way, when there is room for them."""
        gradients = bucket.gradients
        if bucket.has_taken or all(grad is None for grad in gradients.current()):
            return
        for other in () if isinstance(bucket, NvmeBucket) else self._buckets:
            if self._intake.has_room(gradients.staged_bytes()):
                break
            if other.task is not None:
                self.worker.wait([other.task])
        bucket.take()
        self.counts["late"] += 1

    def _commit(self, bucket: OffloadedBucket, divisor: float, after: Events) -> bool:
        """Queue the step of a bucket; return whether users of its weights can wait for it."""
        options = self._options(bucket) or options_of(self.groups[bucket.group])
        moment = after[bucket.streams.device]
        return bucket.commit(options, divisor, moment, partial(self.wait_for, (bucket,)))

    # Afterwards

    def show_state(self, param: Tensor) -> None:
        """Take note that the user is shown the state of a parameter."""
        if self.ring is not None:
            self.ring.check_open()
        row = self.table.get(param)
        if row is not None and row.bucket is not None:
            with self._locked(), torch.no_grad():
                row.bucket.show_state()

    def update_copies(self) -> None:
        """Give host copies the weights that somebody else has written, in whatever way."""
        if self.ring is not None:
            self.ring.settle()
        self.follow()
        for bucket in self._buckets:
            bucket.discard()
            bucket.distrust()
            bucket.pull()
        self.table.update_others()

    def stats(self) -> dict[str, Any]:
        """Return counts, bytes and seconds so far, and where the steps are taken."""
        names = ("early", "late", "ahead", "committed", "discarded")
        return {
            **{name: self.counts[name] for name in names},
            "bytes_out": self._intake.bytes_out + sum(b.gradients.bytes_out for b in self._buckets),
            "bytes_back": sum(bucket.bytes_back for bucket in self._buckets),
            "step_seconds": self._in_place.seconds + sum(b.seconds for b in self._buckets),
            "threads": self.worker.threads,
            "processors": sorted(self.worker.share.processors),
            **({} if self.ring is None else self.ring.stats()),
        }

    def record(self, recorder: Recorder | None) -> None:
        """Tell a recorder of copies, transfers and steps from now on; None ends that."""
        for streams in self._streams.values():
            streams.recorder = recorder
        self._in_place.recorder = recorder
        if self.ring is not None:
            self.ring.records.record(recorder)

    def finish(self) -> None:
        """Wait until the last step is over, and let the current streams wait for its weights.

        Raises:
            Exception: what went wrong in the worker, or with state on disk, as far as is known.
        """
        self.wait_for(self._buckets)
        if self._broken_off is not None:
            raise refusal(self._broken_off) from self._broken_off
        if self.ring is not None:
            self.ring.check()

    def finish_disk(self) -> None:
        """Wait until all state that rests on disk is there.

        Raises:
            RuntimeError: it is not.
        """
        if self.ring is not None:
            self.ring.finish()
            self.ring.check()

    def end(self) -> None:
        """Finish what is queued, and end the thread: then all weights are there, for any stream."""
        self.worker.close()
        if self.worker.is_foreign():
            return
        with self._lock:  # others may wait for weights
            for bucket in self._buckets:
                bucket.end()
        if self.ring is not None:
            self.ring.close()

    def wait_for(self, buckets: Iterable[OffloadedBucket]) -> None:
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
                if bucket.task is task and bucket.state is BucketState.RETURNING:
                    bucket.returned()
        if errors:
            raise errors[0]

    def before_use(self, params: Sequence[Tensor]) -> None:
        """Wait for the weights that a module is about to use, and take note of the order."""
        found = dict.fromkeys(row.bucket for row in map(self.table.get, params) if row is not None)
        self.wait_for(bucket for bucket in found if bucket is not None)

    # Buckets

    def follow(self) -> None:
        """Take what has changed of groups, and of what parameters look like."""
        follow_groups(self.groups, self.host_optimizer, self.table)
        follow_params(self.host_optimizer, self.table)

    def _options(self, bucket: OffloadedBucket) -> Group | None:
        """Return the options of a step as they are now, or None if that would wait for a device."""
        lr = self.groups[bucket.group]["lr"]
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            return None
        return options_of(self.groups[bucket.group])

    @torch.no_grad()
    def place(self) -> None:
        """See that all parameters with a gradient or with state are in buckets."""
        rows = rows_of(self.host_optimizer, self.table)
        stepped = [row.copy for row in rows if row.param.grad is not None or row.has_sum]
        self.host_optimizer.give_state(stepped)
        are_there = all(bucket.is_on_device() for bucket in self._buckets)
        if not are_there or not all(bucket.fits() for _, bucket in self._in_place.buckets):
            self.host_optimizer.forget_buckets()
        self.follow_buckets()

    def follow_buckets(self) -> None:
        """Take over the buckets that the host optimizer has now."""
        found = self.host_optimizer.buckets()
        if [bucket for _, bucket in found] == self._known:
            return
        self._known = []  # until all is done: Ctrl-C may come in between
        for made in self._buckets:
            made.discard()
        for row in self.table:
            row.bucket = None
        self._in_place.buckets, self._buckets = [], []
        for group, bucket in found:
            rows = list(map(self.table.of_copy, bucket.params))
            if not rows[0].is_copied:
                self._in_place.buckets.append((group, bucket))
                continue
            made = self._made(group, bucket, rows)
            self._buckets.append(made)
            for row in rows:
                row.bucket = made
        if self.ring is not None:
            on_disk = (made.bucket for made in self._buckets if isinstance(made, NvmeBucket))
            self.ring.follow([(state, k) for state in on_disk for k in range(state.count)])
        left = self._memory.shadow
        in_memory = [made for made in self._buckets if not isinstance(made, NvmeBucket)]
        for made in reversed(in_memory):  # whose gradients come first
            left -= made.nbytes
            if left >= 0:
                made.make_shadow(host_memory(made.bucket.parts(), self.table.share))
        self._known = [bucket for _, bucket in found]

    def before_state_moves(self) -> None:
        """See that all state is on the disk, and that its old place there goes with its views."""
        assert self.ring is not None
        self.ring.settle()
        for made in self._buckets:
            made.discard()
        self._buckets, self._in_place.buckets, self._known = [], [], []
        self.ring.follow([])

    def _made(
        self, group: int, bucket: Bucket, rows: list[Row[OffloadedBucket]]
    ) -> OffloadedBucket:
        """Return the bucket of some parameters, to come behind those that there are."""
        streams = self._intake.streams_of(rows[0].param)
        gradients: GradientSource
        if self._free_grads:
            self._intake.finish()
            gradients = SummedGradients(rows, streams.device)
        else:
            gradients = DeviceGradients([row.param for row in rows], streams)
        ours = (self.worker, self.counts, len(self._buckets))
        given = (self.host_optimizer, group, bucket, rows, streams, gradients, *ours)
        if isinstance(bucket, DiskState):
            assert self.ring is not None
            return NvmeBucket(*given, ring=self.ring)
        return OffloadedBucket(*given)


def _before_state_moves(pipeline: "weakref.ref[Pipeline]") -> None:
    """Tell it: what it knows is not to hold it."""
    if (known := pipeline()) is not None:
        known.before_state_moves()
