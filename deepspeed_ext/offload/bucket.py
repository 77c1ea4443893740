"""Parameters that travel and are stepped together: gradients out, a step in host memory, back."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from time import perf_counter

import torch
from torch import Tensor

from deepspeed_ext.dtensors import is_dtensor, local, part_for
from deepspeed_ext.io import PinnedPool
from deepspeed_ext.offload.copies import Copy, Event, Lanes
from deepspeed_ext.offload.inner import HostSteps, pieces
from deepspeed_ext.offload.stand_ins import put
from deepspeed_ext.offload.worker import Task
from deepspeed_ext.ops.optimizers.l2_norm import squared_norms
from deepspeed_ext.optim.clipping import Scaling, SquareSum
from deepspeed_ext.optim.slabs import STEP, Bucket, Work
from deepspeed_ext.optim.traits import Group

_version = attrgetter("_version")
Marks = list[tuple[int, int, int]]


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
        grads: those of the parameters, kept until they have been copied.
        marks: of the gradients, when they were taken.
        work: the parts of the step, with gradients in host memory.
        devices: the same parts where the parameters are.
        events: when the gradients of each part are there.
        squares: the sum of squares of each gradient, if it was wanted.
    """

    indices: list[int]
    grads: list[Tensor]
    marks: Marks
    work: Work
    parts: list[Work]
    devices: list[Work]
    events: list[Event | None]
    squares: Tensor | None


@dataclass
class Ahead:
    """A step that was taken before anybody asked for it, to be used if all is as it was then.

    Attributes:
        task: takes it.
        options: of the group.
        divisor: of the gradients.
        weights: marks of the parameters.
        state: versions of the slabs.
    """

    task: Task
    options: Group
    divisor: float
    weights: Marks
    state: list[int]


def marks_of(tensors: Sequence[Tensor]) -> Marks:
    """Return what changes when a tensor is written, or gets other memory."""
    parts = list(map(local, tensors))
    return [
        (t._version, part._version, part.data_ptr()) for t, part in zip(tensors, parts, strict=True)
    ]


class HostBucket:
    """One bucket of the optimizer that steps host copies, and the parameters that it is for.

    Args:
        inner: steps the copies.
        group: the number of its group.
        bucket: of the inner optimizer; its parameters are the copies.
        owners: the parameters themselves.
        lanes: to their device.
        pool: has memory for gradients.
    """

    def __init__(
        self,
        inner: HostSteps,
        group: int,
        bucket: Bucket,
        owners: list[Tensor],
        lanes: Lanes,
        pool: PinnedPool,
    ) -> None:
        self.inner, self.group, self.bucket, self.owners = inner, group, bucket, owners
        self.lanes, self._pool = lanes, pool
        self.arrival: Arrival | None = None
        self.ahead: Ahead | None = None
        self.spare: Side | None = None
        self.task: Task | None = None  # what step() has asked for and nobody has waited for yet
        self.place = 0  # among the buckets whose weights are wanted next
        self.returned: Event | None = None
        self.awaited: set[int] = set()  # streams that have waited for that
        self.weights = marks_of(owners)
        self.numel = sum(local(owner).numel() for owner in owners)
        self.seconds = 0.0  # of steps in host memory
        self.spans: list[tuple[float, float]] = []

    # Gradients

    def take(self, grads: Sequence[Tensor | None], measures: bool) -> Arrival:
        """Begin to copy gradients; None where a parameter has none.

        Args:
            grads: of the parameters.
            measures: whether their norms are wanted.
        """
        indices = [i for i, grad in enumerate(grads) if grad is not None]
        taken = [grad for grad in grads if grad is not None]
        owners = [self.owners[i] for i in indices]
        params = list(map(local, owners))
        sources = [
            _laid_out(part_for(grad, owner), param)
            for grad, owner, param in zip(taken, owners, params, strict=True)
        ]
        bucket = self.bucket
        whole = Work(
            self._copies(),
            self._copies(),
            bucket.slabs,
            list(bucket.scales.values()),
            bucket.offsets,
            bucket.slots,
            bucket.noise,
            bucket.params,
        )
        work = whole.part(indices)._replace(grads=self._host_grads(sources))
        there = work._replace(params=params, grads=sources)
        marks = marks_of(taken)
        parts, devices = pieces(work), pieces(there)
        events = [
            self.lanes.fetch(list(map(Copy, part.grads, device.grads)))
            for part, device in zip(parts, devices, strict=True)
        ]
        squares = squared_norms(sources) if measures else None
        self.arrival = Arrival(indices, taken, marks, work, parts, devices, events, squares)
        return self.arrival

    def _host_grads(self, sources: list[Tensor]) -> list[Tensor]:
        buffer = self._pool.take(sum(source.nbytes for source in sources)).tensor()
        views, begin = [], 0
        for source in sorted(sources, key=lambda source: -source.element_size()):
            flat = buffer[begin : begin + source.nbytes].view(source.dtype)
            views.append((source, flat.as_strided(source.shape, source.stride())))
            begin += source.nbytes
        by_source = {id(source): view for source, view in views}
        return [by_source[id(source)] for source in sources]

    def has_arrived(self, grads: Sequence[Tensor | None]) -> bool:
        """Return whether exactly these gradients, as they are now, are the ones that were taken."""
        arrival = self.arrival
        if arrival is None:
            return False
        taken = [grad for grad in grads if grad is not None]
        indices = [i for i, grad in enumerate(grads) if grad is not None]
        return (
            indices == arrival.indices
            and all(map(lambda a, b: a is b, taken, arrival.grads))
            and marks_of(taken) == arrival.marks
        )

    def _copies(self) -> list[Tensor]:
        """Return the host memory of the weights, as it is now."""
        return [part.detach() for part in self.bucket.parts()]

    def add_squares(self, squares: SquareSum) -> None:
        """Add the squares of the gradients that were taken, if there are any."""
        arrival = self.arrival
        if arrival is not None:
            if arrival.squares is None:
                arrival.squares = squared_norms(list(map(local, arrival.grads)))
            squares.add_squares(arrival.squares, [self.owners[i] for i in arrival.indices])

    # Steps in host memory; these run in the worker's thread

    def step_ahead(self, arrival: Arrival, options: Group, scaling: Scaling, spare: Side) -> None:
        """Take a step whose results are in other memory."""
        work = arrival.work._replace(params=[spare.weights[i] for i in arrival.indices])
        for part, target, event in zip(arrival.parts, pieces(work), arrival.events, strict=True):
            out = self.inner.out_of(target.params, spare.slabs, list(spare.scales.values()))
            self._step_part(part, event, options, scaling, out)

    def step(self, arrival: Arrival, options: Group, scaling: Scaling, after: Event | None) -> None:
        """Take a step, and send the weights back part by part."""
        self._await_returned()
        self.bucket.refresh_masters()
        counts = self.bucket.slabs[STEP][0]
        # A parameter in several parts has its step counted once, when all of them are done.
        counted = counts.clone()
        for part, there, event in zip(arrival.parts, arrival.devices, arrival.events, strict=True):
            slabs = {**self.bucket.slabs, STEP: [counted]}
            out = self.inner.out_of(part.params, slabs, part.scales)
            self._step_part(part, event, options, scaling, out)
            self._send(list(map(Copy, there.params, part.params)), after)
        counts.copy_(counted)
        self.bucket.note_own_write()
        self._note_sent(arrival)

    def adopt(self, task: Task, arrival: Arrival, spare: Side, after: Event | None) -> None:
        """Make what a step ahead has written the state, and send its weights."""
        if task.error is not None:
            raise task.error
        self._await_returned()
        self.bucket.refresh_masters()
        old = Side(self._copies(), self.bucket.slabs, self.bucket.scales, self._entries())
        for copy, weight in zip(self.bucket.params, spare.weights, strict=True):
            put(copy, weight)
        self.bucket.take(spare.slabs, spare.scales)
        if spare.shown is None:
            spare.shown = [self.bucket.shown(i) for i in range(len(self.owners))]
        for copy, shown in zip(self.bucket.params, spare.shown, strict=True):
            self.inner.state[copy].renew(shown)
        self.spare = old
        self._send(list(map(Copy, map(local, self.owners), self._copies())), after)
        self._note_sent(arrival)

    def _entries(self) -> list[dict[str, Tensor]]:
        keys = self.bucket.shown(0).keys()
        states = [self.inner.state[copy] for copy in self.bucket.params]
        return [{key: state[key] for key in keys} for state in states]

    def _step_part(
        self,
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
        self.seconds += perf_counter() - begin

    def _await_returned(self) -> None:
        if self.returned is not None:  # the weights that are overwritten now
            self.returned.synchronize()

    def _send(self, copies: list[Copy], after: Event | None) -> None:
        self.returned = self.lanes.send(copies, after)
        self.awaited = set()

    def _note_sent(self, arrival: Arrival) -> None:
        if is_dtensor(self.owners[0]):  # copies count as writes, but of the local parts
            torch.autograd.graph.increment_version(self.owners)
        self.weights = marks_of(self.owners)

    def await_on_stream(self) -> None:
        """Let the current stream wait for the weights that were sent, if it has not yet."""
        if self.returned is not None:
            stream = torch.cuda.current_stream(self.lanes.device).cuda_stream
            if stream not in self.awaited:
                self.lanes.await_on_stream(self.returned)
                self.awaited.add(stream)

    # Weights

    def was_written(self) -> bool:
        """Return whether somebody else has written weights."""
        return marks_of(self.owners) != self.weights

    def pull(self) -> bool:
        """Copy weights that somebody else has written; return whether there were any."""
        now = marks_of(self.owners)
        changed = [i for i, (a, b) in enumerate(zip(now, self.weights, strict=True)) if a != b]
        if not changed:
            return False
        self._await_returned()
        copies, owners = self._copies(), list(map(local, self.owners))
        event = self.lanes.fetch([Copy(copies[i], owners[i]) for i in changed])
        if event is not None:
            event.synchronize()
        self.weights = now
        return True

    def make_spare(self, weights: list[Tensor]) -> None:
        """Get memory for steps that are taken ahead."""
        bucket = self.bucket
        slabs = {key: [torch.zeros_like(slab)] for key, [slab] in bucket.slabs.items()}
        scales = {key: torch.zeros_like(slab) for key, slab in bucket.scales.items()}
        self.spare = Side(weights, slabs, scales)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory for weights and state."""
        return Side(self._copies(), self.bucket.slabs, self.bucket.scales).nbytes

    def state_marks(self) -> list[int]:
        """Return what changes when state is written."""
        slabs = [slab for [slab] in self.bucket.slabs.values()]
        return list(map(_version, (*slabs, *self.bucket.scales.values())))


def _laid_out(grad: Tensor, param: Tensor) -> Tensor:
    """Return a gradient in the layout and on the device of its parameter."""
    if grad.stride() == param.stride() and grad.device == param.device:
        return grad.detach()
    made = torch.empty_strided(param.shape, param.stride(), dtype=grad.dtype, device=param.device)
    return made.copy_(grad)
