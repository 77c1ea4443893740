"""Parameters that travel and are stepped together: gradients out, a step in host memory, back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from time import perf_counter

import torch
from torch import Tensor

from deepspeed_ext.dtensors import is_dtensor, local, same_layout
from deepspeed_ext.offload.arriving import Wait, arrive, set_out
from deepspeed_ext.offload.copies import AHEAD, ASKED, Copy, Event, Lanes
from deepspeed_ext.offload.host_gradients import Sum, source_of
from deepspeed_ext.offload.host_optimizer import HostSteps, pieces
from deepspeed_ext.offload.host_tensors import put
from deepspeed_ext.offload.param_table import Row
from deepspeed_ext.offload.seals import Marks, Question, Seal, marks_of, parts_of, seal
from deepspeed_ext.offload.sent_gradients import sent
from deepspeed_ext.offload.worker import Task
from deepspeed_ext.op_builder.log import logger
from deepspeed_ext.ops.optimizers.fingerprint import fingerprints
from deepspeed_ext.ops.optimizers.l2_norm import squared_norms
from deepspeed_ext.optim.clipping import Scaling, SquareSum
from deepspeed_ext.optim.slabs import STEP, Bucket, Work
from deepspeed_ext.optim.spec import Group

_version = attrgetter("_version")
Run = Callable[[], None]


@dataclass
class Side:
    """Host memory for the weights of a bucket and for their state.

    Attributes:
        weights: of each parameter, in its layout.
        slabs: state, as a Bucket has it.
        scales: of state in codes.
        shown: for each parameter its state as users see it.
    """

    weights: list[Tensor]
    slabs: dict[str, list[Tensor]]
    scales: dict[str, Tensor]
    shown: list[dict[str, Tensor]] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        slabs = [slab for [slab] in self.slabs.values()]
        return sum(t.nbytes for t in (*self.weights, *slabs, *self.scales.values()))


@dataclass
class Arrival:
    """Gradients that are in host memory, or on their way there.

    Attributes:
        indices: of the parameters that had one.
        work: the step, with gradients in host memory.
        parts: of the step.
        there: the same step where the parameters are; it holds gradients until they are copied.
        devices: parts of that.
        events: when the gradients of each part are in host memory.
        needs: what adds up the gradients, where that is done in host memory.
        stepped: weights that are to be sent.
    """

    indices: list[int]
    work: Work
    parts: list[Work]
    there: Work
    devices: list[Work]
    events: list[Event | None]
    needs: Sequence[Task] = ()
    stepped: list[Copy] = field(default_factory=list)

    def check(self) -> None:
        """Raise what went wrong as gradients were added up."""
        for task in self.needs:
            if task.error is not None:
                raise task.error

    def release(self) -> None:
        """Let gradients on the device go: what has asked for them to be copied has come first."""
        self.there = self.there._replace(grads=[])
        self.devices = [part._replace(grads=[]) for part in self.devices]


@dataclass
class Ahead:
    """A step that was taken before anybody asked for it, to be used if all is as it was then.

    Attributes:
        task: takes it.
        options: of the group.
        divisor: of the gradients.
        weights: marks of the parameters.
        state: marks of the slabs.
    """

    task: Task
    options: Group
    divisor: float
    weights: Marks | None
    state: list[int]

    def is_of(
        self, options: Group, divisor: float, weights: Marks | None, state: list[int]
    ) -> bool:
        """Return whether it is the step that is to be taken now."""
        now = (options, divisor, weights, state)
        return now == (self.options, self.divisor, self.weights, self.state)


class HostBucket:
    """One bucket of the optimizer that steps host copies, and the parameters that it is for.

    Args:
        inner: steps the copies.
        group: the number of its group.
        bucket: of the inner optimizer; its parameters are the copies.
        rows: of the parameters themselves, in their order.
        lanes: to their device.
    """

    def __init__(
        self,
        inner: HostSteps,
        group: int,
        bucket: Bucket,
        rows: "list[Row[HostBucket]]",
        lanes: Lanes,
    ) -> None:
        self.inner, self.group, self.bucket = inner, group, bucket
        self.rows, self.owners, self.lanes = rows, [row.param for row in rows], lanes
        self.arrival: Arrival | None = None
        self.sums: list[Sum] | None = None  # of gradients that do not stay on the device
        self.ahead: Ahead | None = None
        # Others may write to gradients after hooks have told of them, as DDP does in each step.
        self.is_steady = True  # nobody did so, the last time
        self.sealed: Seal | None = None  # gradients, when hooks told that all are there
        self.spare: Side | None = None
        self.task: Task | None = None  # what step() has asked for and nobody has waited for yet
        self.underway: list[Tensor] = []  # parameters whose weights have not been waited for
        self.place = 0  # among the buckets whose weights are wanted next
        self.returned: tuple[Event, set[int]] | None = None  # and streams that have waited for it
        # Of the parameters, when they were what their host copies are; None: nobody knows.
        self.weights: Marks | None = None
        self.prints: Tensor | None = None
        self.written: list[bool] = []  # which of them are not what they were then
        self.is_state_shown = False  # to the user, since the last step()
        self.seconds = 0.0  # of steps in host memory
        self.bytes_out = self.bytes_back = 0

    # Gradients

    def grads(self) -> list[Tensor | None]:
        """Return the gradients of the parameters as they are now."""
        if self.sums is None:
            return [owner.grad for owner in self.owners]
        return [known.value if known.count else None for known in self.sums]

    def check_grads(self) -> None:
        """Raise ValueError if a gradient is not one that a step takes."""
        grads = [(row, row.param.grad) for row in self.rows]
        here = [(row, g) for row, g in grads if g is not None and sent(g) is None]
        if all(g.layout is torch.strided and g.shape == row.param.shape for row, g in here):
            return
        copies = [row.copy for row, _ in here]
        self.inner.refuse([row.param for row, _ in here], [g for _, g in here], copies)

    def grad_bytes(self) -> int:
        """Return how many bytes of host memory the gradients take."""
        return sum(local(grad).nbytes for grad in self.grads() if grad is not None)

    def seal(self, grads: Sequence[Tensor | None]) -> None:
        """Take note of what gradients are, before anything is done with them."""
        self.sealed = seal(grads)

    def take(self, grads: Sequence[Tensor | None]) -> None:
        """Begin to copy gradients; None where a parameter has none."""
        indices = [i for i, grad in enumerate(grads) if grad is not None]
        sources = self._sources(grads)
        work, there = self._work(indices, self.lanes.staged(sources), sources)
        parts, devices = pieces(work), pieces(there)
        events = [
            self.lanes.fetch(list(map(Copy, part.grads, device.grads)))
            for part, device in zip(parts, devices, strict=True)
        ]
        self.bytes_out += sum(source.nbytes for source in sources)
        self.arrival = Arrival(indices, work, parts, there, devices, events)

    def take_sums(self, sums: Sequence[Sum]) -> None:
        """Go on with gradients that are added up in host memory."""
        indices = [i for i, known in enumerate(sums) if known.count]
        values = [sums[i].value for i in indices]
        work, there = self._work(indices, values, values)
        parts, devices = pieces(work), pieces(there)
        events: list[Event | None] = [None] * len(parts)
        needs = [task for i in indices if (task := sums[i].last) is not None]
        self.arrival = Arrival(indices, work, parts, there, devices, events, needs)

    def _sources(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Return what this process holds of gradients, where the parameters are."""
        if self.sums is not None:  # which are of that already, in host memory
            return [grad.to(self.lanes.device) for grad in grads if grad is not None]
        both = zip(grads, self.owners, strict=True)
        return [source_of(grad, owner) for grad, owner in both if grad is not None]

    def _work(
        self, indices: list[int], grads: list[Tensor], sources: list[Tensor]
    ) -> tuple[Work, Work]:
        """Return the work on some parameters in host memory, and the same where they are."""
        bucket, copies = self.bucket, self._copies()
        scales = list(bucket.scales.values())
        places = (bucket.slabs, scales, bucket.offsets, bucket.slots, bucket.noise)
        work = Work(copies, copies, *places, bucket.params).part(indices)._replace(grads=grads)
        return work, work._replace(params=self._parts(indices), grads=sources)

    def _parts(self, indices: Sequence[int]) -> list[Tensor]:
        """Return the memory that parameters have now."""
        return parts_of([self.owners[i] for i in indices])

    def aim(self, arrival: Arrival) -> None:
        """Let the weights of a step go to the memory that the parameters have now."""
        arrival.there = arrival.there._replace(params=self._parts(arrival.indices))
        arrival.devices = pieces(arrival.there)

    def looks_sealed(self, grads: Sequence[Tensor | None]) -> bool:
        """Return whether nothing shows that these are not the gradients that were sealed."""
        return self.sealed is not None and self.sealed.marks == marks_of(grads)

    def of_gradients(self) -> Question | None:
        """Return what shows whether gradients are the ones that were sealed."""
        return None if self.sealed is None else Question(parts_of(self.grads()), self.sealed.prints)

    def add_squares(self, squares: SquareSum) -> None:
        """Add the squares of gradients."""
        grads = self.grads()
        owners = [p for p, grad in zip(self.owners, grads, strict=True) if grad is not None]
        if owners:
            squares.add_squares(squared_norms(self._sources(grads)), owners)

    def _copies(self) -> list[Tensor]:
        """Return the host memory of the weights, as it is now."""
        return [part.detach() for part in self.bucket.parts()]

    # Steps in host memory; these run in the worker's thread

    def step_ahead(self, arrival: Arrival, options: Group, scaling: Scaling, spare: Side) -> None:
        """Take a step whose results are in other memory."""
        arrival.check()
        work = arrival.work._replace(params=[spare.weights[i] for i in arrival.indices])
        for part, target, event in zip(arrival.parts, pieces(work), arrival.events, strict=True):
            out = self.inner.out_of(target.params, spare.slabs, list(spare.scales.values()))
            self._step_part(AHEAD, part, event, options, scaling, out)

    def step(self, arrival: Arrival, options: Group, scaling: Scaling, after: Event | None) -> None:
        """Take a step; weights go back as soon as nobody needs the old ones any more."""
        arrival.check()
        self.await_returned()
        self.bucket.refresh_masters()
        counts = self.bucket.slabs[STEP][0]
        # A parameter in several parts has its step counted once, when all of them are done.
        counted = counts.clone()
        for part, there, event in zip(arrival.parts, arrival.devices, arrival.events, strict=True):
            slabs = {**self.bucket.slabs, STEP: [counted]}
            out = self.inner.out_of(part.params, slabs, part.scales)
            self._step_part(ASKED, part, event, options, scaling, out)
            arrival.stepped += map(Copy, there.params, part.params)
            if after is None or after.query():
                self._send(arrival.stepped, after)
                arrival.stepped = []
        counts.copy_(counted)
        self.bucket.note_own_write()

    def send_rest(self, arrival: Arrival, after: Event | None) -> None:
        """Send the weights of a step that have not been sent."""
        if arrival.stepped:
            self._send(arrival.stepped, after)
        self._note_sent(arrival.indices, arrival.there.params)

    def adopt(self, spare: Side, after: Event | None) -> None:
        """Make what a step ahead has written the state, and send its weights."""
        self.await_returned()
        self.bucket.refresh_masters()
        # Without the version counter, which goes on with the parameter.
        weights = [copy.data for copy in self._copies()]
        old = Side(weights, self.bucket.slabs, self.bucket.scales, self._entries())
        for copy, weight in zip(self.bucket.params, spare.weights, strict=True):
            put(copy, weight)
        self.bucket.take(spare.slabs, spare.scales)
        if spare.shown is None:
            spare.shown = [self.bucket.shown(i) for i in range(len(self.owners))]
        for copy, shown in zip(self.bucket.params, spare.shown, strict=True):
            self.inner.state[copy].renew(shown)
        self.spare = old
        everywhere = range(len(self.owners))
        parts = self._parts(everywhere)
        self._send(list(map(Copy, parts, self._copies())), after)
        self._note_sent(everywhere, parts)

    def _entries(self) -> list[dict[str, Tensor]]:
        keys = self.bucket.shown(0).keys()
        states = [self.inner.state[copy] for copy in self.bucket.params]
        return [{key: state[key] for key in keys} for state in states]

    def _step_part(
        self,
        name: str,
        part: Work,
        event: Event | None,
        options: Group,
        scaling: Scaling,
        out: dict[str, list[Tensor]],
    ) -> None:
        if event is not None:
            event.synchronize()
        begin = perf_counter()
        self.inner.step_part(options, part, scaling, out)
        end = perf_counter()
        self.seconds += end - begin
        if self.lanes.recorder is not None:
            self.lanes.recorder.note(name, begin, end)

    def await_returned(self) -> None:
        """Wait for the weights that were sent: only then may their host memory be written."""
        if self.returned is not None:
            self.returned[0].synchronize()

    def _send(self, copies: list[Copy], after: Event | None) -> None:
        event = self.lanes.send(copies, after)
        self.returned = None if event is None else (event, set())
        self.bytes_back += sum(copy.source.nbytes for copy in copies)

    def _note_sent(self, indices: Sequence[int], parts: list[Tensor]) -> None:
        """Take note of what some parameters are, when all of the copies to them are queued."""
        if is_dtensor(self.owners[0]):  # copies count as writes, but of the local parts
            torch.autograd.graph.increment_version(self.owners)
        others = self.prints if len(indices) < len(self.owners) else None
        self.prints, event = self.lanes.fingerprint_sent(parts, indices, others)
        if event is not None:
            self.returned = (event, set())
        self.weights = marks_of(self.owners)

    def await_on_stream(self) -> None:
        """Let the current stream wait for the weights that were sent, if it has not yet."""
        if self.returned is not None:
            self.lanes.await_on_stream(*self.returned)

    # Weights on their way

    def set_out(self, arrival: Arrival, wait: Wait) -> bool:
        """Let whoever touches a weight of a step wait; False: it has to be waited for at once."""
        self.underway = [self.owners[i] for i in arrival.indices]
        # They count as written from now on: a backward that has saved one would take either value.
        torch.autograd.graph.increment_version(self.underway)
        self.weights = marks_of(self.owners)
        return set_out(self.underway, wait)

    def arrive(self) -> None:
        """Let weights that are there be touched: by this stream, and by the one of step()."""
        self.task = None
        arrive(self.underway)
        self.underway = []

    def end(self) -> None:
        """Let weights be touched for good, by any stream; what has failed, nobody can raise."""
        self.await_returned()
        task = self.task
        if task is not None and task.error is not None:
            logger.error("OffloadOptimizer: its last step failed", exc_info=task.error)
        if task is None or task.done:  # else this is the thread that is to do it
            self.arrive()

    # Weights

    def stays(self) -> bool:
        """Return whether the parameters are where the lanes lead to."""
        return all(local(owner).device == self.lanes.device for owner in self.owners)

    def looks_written(self) -> bool:
        """Return whether it shows that somebody else has written weights; it need not."""
        return marks_of(self.owners) != self.weights

    def of_weights(self) -> Question | None:
        """Return what shows whether somebody else has written weights."""
        if self.prints is None:
            return None
        return Question(parts_of(self.owners), self.prints)

    def distrust(self) -> None:
        """Take all weights for written by somebody else."""
        self.weights = self.prints = None

    def pull(self) -> bool:
        """Copy weights that somebody else has written; return whether there were any."""
        now, known = marks_of(self.owners), self.weights
        if known is None:
            changed = list(range(len(now)))
        else:
            both = zip(now, known, self.written, strict=True)
            changed = [i for i, (a, b, written) in enumerate(both) if written or a != b]
        if not changed:
            return False
        self.await_returned()
        copies, owners = self._copies(), parts_of(self.owners)
        self.weights, self.prints = seal(self.owners)
        event = self.lanes.fetch([Copy(copies[i], owners[i]) for i in changed])
        if event is not None:
            event.synchronize()
        return True

    def make_spare(self, weights: list[Tensor]) -> None:
        """Get memory for steps that are taken ahead."""
        bucket = self.bucket
        # Written to at once: the first touch of so much memory would be in the middle of a step.
        slabs = {key: [self._zeros_like(slab)] for key, [slab] in bucket.slabs.items()}
        scales = {key: self._zeros_like(slab) for key, slab in bucket.scales.items()}
        self.spare = Side(weights, slabs, scales)

    def _zeros_like(self, slab: Tensor) -> Tensor:
        return self.inner.traits.zeros(slab.numel(), slab.dtype, slab.device)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory for weights and state."""
        return Side(self._copies(), self.bucket.slabs, self.bucket.scales).nbytes

    def state_marks(self) -> list[int]:
        """Return what changes when state is written: versions, and all of it if it was shown.

        Nobody but who was shown it can write to it, and looking at all of it takes time.
        """
        slabs = [slab for [slab] in self.bucket.slabs.values()]
        slabs += self.bucket.scales.values()
        marks = list(map(_version, slabs))
        return marks + fingerprints(slabs).tolist() if self.is_state_shown else marks

    def show_state(self) -> None:
        """Be ready for writes to state that no version tells of, until step() is called."""
        if self.is_state_shown:
            return
        before = self.state_marks()
        self.is_state_shown = True
        if self.ahead is not None and self.ahead.state == before:
            self.ahead.state = self.state_marks()


def is_plain(grad: Tensor | None, param: Tensor) -> bool:
    """Return whether there is a gradient, and in this process what its parameter is."""
    if grad is None:
        return False
    if is_dtensor(param):
        return is_dtensor(grad) and same_layout(grad, param)
    return grad.layout is torch.strided and not is_dtensor(grad)


def use(ahead: Task, await_room: Run, adopt: Run, step: Run, send: Run) -> None:
    """Make a step ahead count; one that has failed was speculation, and is taken anew."""
    await_room()
    if ahead.error is None:
        adopt()
    else:
        step()
        send()


def go_on(step: Task, await_room: Run, send: Run) -> None:
    """Send what a step has made."""
    if step.error is not None:
        raise step.error
    await_room()
    send()
