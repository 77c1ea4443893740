"""Parameters that travel and are stepped together: gradients out, a step in host memory, back."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from deepspeed_ext.dtensors import is_dtensor, local
from deepspeed_ext.offload.copies import REQUESTED, SPECULATIVE, Copy, CopyStreams, Event
from deepspeed_ext.offload.gradient_sources import GradientSource
from deepspeed_ext.offload.host_optimizer import HostOptimizer, pieces
from deepspeed_ext.offload.host_tensors import put
from deepspeed_ext.offload.seals import Question, Stamps, parts_of, seal, stamps_of
from deepspeed_ext.offload.sent_gradients import sent
from deepspeed_ext.offload.streamed import are_apart, home_of, move
from deepspeed_ext.offload.worker import Task
from deepspeed_ext.ops.optimizers.fingerprint import fingerprints
from deepspeed_ext.ops.optimizers.l2_norm import squared_norms
from deepspeed_ext.optim.buckets import STEP, Bucket, BucketView
from deepspeed_ext.optim.clipping import Scaling, SquareSum
from deepspeed_ext.optim.spec import Group
from deepspeed_ext.torch_internals.tensors import version_of


@dataclass
class HostBuffers:
    """Host memory for the weights of a bucket and for their state.

    Attributes:
        weights: of each parameter, in its layout.
        buffers: state, as a Bucket has it.
        scales: of state in codes.
        shown: for each parameter its state as users see it.
        prints: fingerprints of weights that a speculative step has left here; None: there are none.
    """

    weights: list[Tensor]
    buffers: dict[str, list[Tensor]]
    scales: dict[str, Tensor]
    shown: list[dict[str, Tensor]] | None = None
    prints: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        buffers = [buffer for [buffer] in self.buffers.values()]
        return sum(t.nbytes for t in (*self.weights, *buffers, *self.scales.values()))


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
    work: BucketView
    parts: list[BucketView]
    there: BucketView
    devices: list[BucketView]
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


class HostBucket:
    """One bucket of the optimizer that steps host copies, and the parameters that it is for.

    Args:
        host_optimizer: steps the copies.
        group: the number of its group.
        bucket: of the host optimizer; its parameters are the copies.
        owners: the parameters themselves.
        streams: of their device.
        gradients: of the parameters.
    """

    def __init__(
        self,
        host_optimizer: HostOptimizer,
        group: int,
        bucket: Bucket,
        owners: list[Tensor],
        streams: CopyStreams,
        gradients: GradientSource,
    ) -> None:
        self.host_optimizer, self.group = host_optimizer, group
        self.bucket, self.owners = bucket, owners
        self.streams, self.gradients = streams, gradients
        self.shadow: HostBuffers | None = None  # what a speculative step writes to
        # When the weights that were sent are there, and streams that have waited for that.
        self._sent: tuple[Event, set[int]] | None = None
        # Of the parameters, when they were what their host copies are; None: nobody knows.
        self.weights: Stamps | None = None
        self.prints: Tensor | None = None
        self._written = [False] * len(owners)  # which of them are not what they were then
        self.seconds = 0.0  # of steps in host memory
        self.bytes_back = 0

    # Gradients

    def check_grads(self) -> None:
        """Raise ValueError if a gradient is not one that a step takes."""
        both = zip(self.owners, self.bucket.params, strict=True)
        given = [(param, param.grad, copy) for param, copy in both]
        here = [(p, g, copy) for p, g, copy in given if g is not None and sent(g) is None]
        if any(g.layout is not torch.strided or g.shape != p.shape for p, g, _ in here):
            self.host_optimizer.refuse(
                [p for p, *_ in here], [g for _, g, _ in here], [c for *_, c in here]
            )

    def fetch(self) -> Arrival:
        """Begin to move gradients to host memory, and return the step by them."""
        taken = self.gradients.take()
        host = self.gradients.stage(taken.sources)
        work, there = self._work(taken.indices, host, taken.sources)
        parts, devices = pieces(work), pieces(there)
        both = zip(parts, devices, strict=True)
        events = [self.gradients.fetch(part.grads, device.grads) for part, device in both]
        return Arrival(taken.indices, work, parts, there, devices, events, taken.needs)

    def _work(
        self, indices: list[int], grads: list[Tensor], sources: list[Tensor]
    ) -> tuple[BucketView, BucketView]:
        """Return the work on some parameters in host memory, and the same where they are."""
        bucket, copies = self.bucket, self._copies()
        scales = list(bucket.scales.values())
        places = (bucket.buffers, scales, bucket.offsets, bucket.slots, bucket.noise)
        work = (
            BucketView(copies, copies, *places, bucket.params).part(indices)._replace(grads=grads)
        )
        return work, work._replace(params=self._parts(indices), grads=sources)

    def _parts(self, indices: Sequence[int]) -> list[Tensor]:
        """Return the memory that parameters have now."""
        return parts_of([self.owners[i] for i in indices])

    def aim(self, arrival: Arrival) -> None:
        """Let the weights of a step go to the memory that the parameters have now."""
        arrival.there = arrival.there._replace(params=self._parts(arrival.indices))
        arrival.devices = pieces(arrival.there)

    def add_squares(self, squares: SquareSum) -> None:
        """Add the squares of gradients."""
        both = zip(self.owners, self.gradients.current(), strict=True)
        owners = [param for param, grad in both if grad is not None]
        if owners:
            squares.add_squares(squared_norms(self.gradients.on_device()), owners)

    def _copies(self) -> list[Tensor]:
        """Return the host memory of the weights, as it is now."""
        return [part.detach() for part in self.bucket.parts()]

    # Steps in host memory; these run in the worker's thread

    def step_speculatively(
        self, arrival: Arrival, options: Group, scaling: Scaling, shadow: HostBuffers
    ) -> None:
        """Take a step whose results are in shadow buffers."""
        arrival.check()
        shadow.prints = None
        work = arrival.work._replace(params=[shadow.weights[i] for i in arrival.indices])
        for part, target, event in zip(arrival.parts, pieces(work), arrival.events, strict=True):
            out = self.host_optimizer.out_of(
                target.params, shadow.buffers, list(shadow.scales.values())
            )
            self._step_part(SPECULATIVE, part, event, options, scaling, out)
        if self.is_at_rest():  # beside backward, as nobody else has this memory: forward would wait
            shadow.prints = fingerprints(shadow.weights)

    def step(self, arrival: Arrival, options: Group, scaling: Scaling, after: Event | None) -> None:
        """Take a step; weights go back as soon as nobody needs the old ones any more."""
        arrival.check()
        self.await_returned()
        self.count_unseen_writes()
        self.bucket.refresh_master_weights()
        counts = self.bucket.buffers[STEP][0]
        # A parameter in several parts has its step counted once, when all of them are done.
        counted = counts.clone()
        for part, there, event in zip(arrival.parts, arrival.devices, arrival.events, strict=True):
            buffers = {**self.bucket.buffers, STEP: [counted]}
            out = self.host_optimizer.out_of(part.params, buffers, part.scales)
            self._step_part(REQUESTED, part, event, options, scaling, out)
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

    def adopt(self, shadow: HostBuffers, after: Event | None) -> None:
        """Make what a speculative step has written the state, and send its weights."""
        self.await_returned()
        self.bucket.refresh_master_weights()
        # Without the version counter, which goes on with the parameter.
        weights = [copy.data for copy in self._copies()]
        old = HostBuffers(weights, self.bucket.buffers, self.bucket.scales, self._entries())
        for i, (copy, weight) in enumerate(zip(self.bucket.params, shadow.weights, strict=True)):
            if self._keeps_memory(i):
                weights[i].copy_(weight)
                weights[i] = weight
            else:
                put(copy, weight)
        self.bucket.take(shadow.buffers, shadow.scales)
        if shadow.shown is None:
            shadow.shown = [self.bucket.shown(i) for i in range(len(self.owners))]
        for copy, shown in zip(self.bucket.params, shadow.shown, strict=True):
            self.host_optimizer.state[copy].renew(shown)
        self.shadow = old
        everywhere = range(len(self.owners))
        self._bring_home(everywhere)
        parts = self._parts(everywhere)
        self._send(list(map(Copy, parts, self._copies())), after)
        self._note_sent(everywhere, parts, shadow.prints)

    def _keeps_memory(self, i: int) -> bool:
        home = home_of(self.owners[i])
        return home is not None and home.keeps_memory

    def _entries(self) -> list[dict[str, Tensor]]:
        keys = self.bucket.shown(0).keys()
        states = [self.host_optimizer.state[copy] for copy in self.bucket.params]
        return [{key: state[key] for key in keys} for state in states]

    def _step_part(
        self,
        name: str,
        part: BucketView,
        event: Event | None,
        options: Group,
        scaling: Scaling,
        out: dict[str, list[Tensor]],
    ) -> None:
        if event is not None:
            event.synchronize()
        begin = perf_counter()
        self.host_optimizer.step_part(options, part, scaling, out)
        end = perf_counter()
        self.seconds += end - begin
        if self.streams.recorder is not None:
            self.streams.recorder.note(name, begin, end)

    def await_returned(self) -> None:
        """Wait for the weights that were sent: only then may their host memory be written."""
        if self._sent is not None:
            self._sent[0].synchronize()

    def _send(self, copies: list[Copy], after: Event | None) -> None:
        copies = [copy for copy in copies if are_apart(*copy)]  # those that are streamed are home
        event = self.streams.send(copies, after)
        self._sent = None if event is None else (event, set())
        self.bytes_back += sum(copy.source.nbytes for copy in copies)

    def _note_sent(
        self, indices: Sequence[int], parts: list[Tensor], prints: Tensor | None = None
    ) -> None:
        """Take note of what some parameters are, when all of the copies to them are queued.

        Args:
            indices: of the parameters.
            parts: of these, that were sent.
            prints: fingerprints of all, where they are known and nothing had to be sent.
        """
        if is_dtensor(self.owners[0]):  # copies count as writes, but of the local parts
            torch.autograd.graph.increment_version(self.owners)
        others = self.prints if len(indices) < len(self.owners) else None
        if prints is None:
            prints, event = self.streams.fingerprint_sent(parts, indices, others)
            if event is not None:
                self._sent = (event, set())
        self.prints = prints
        self.weights = stamps_of(self.owners)

    def await_on_stream(self) -> None:
        """Let the current stream wait for the weights that were sent, if it has not yet."""
        if self._sent is not None:
            self.streams.await_on_stream(*self._sent)

    def count_write(self, params: list[Tensor]) -> None:
        """Let some parameters count as written, as they will be.

        A backward that has saved one would take either value.
        """
        torch.autograd.graph.increment_version(params)
        self.weights = stamps_of(self.owners)

    # Weights

    def is_on_device(self) -> bool:
        """Return whether the parameters are on the device of the copy streams."""
        return all(local(owner).device == self.streams.device for owner in self.owners)

    def looks_written(self) -> bool:
        """Return whether it shows that somebody else has written weights; it need not."""
        return stamps_of(self.owners) != self.weights

    def of_weights(self) -> Question | None:
        """Return what shows whether somebody else has written weights."""
        if self.prints is None:
            return None
        return Question(parts_of(self.owners), self.prints)

    def is_at_rest(self) -> bool:
        """Return whether all weights rest in host memory, which their copies share."""
        return all(home_of(owner) is not None for owner in self.owners)

    def count_unseen_writes(self) -> bool:
        """Let weights at rest count as written that are not what they were, in the worker's thread.

        It takes as long as reading them all: whoever calls step() does not wait for that.

        Returns:
            Whether there are any.
        """
        if self.prints is None or not self.is_at_rest():
            return False
        differs = (fingerprints(self._copies()) != self.prints).nonzero().flatten().tolist()
        torch.autograd.graph.increment_version([self.bucket.params[i] for i in differs])
        return bool(differs)

    def note_written(self, differs: list[bool]) -> None:
        """Take note of which weights somebody else has written, by the answers to that."""
        self._written = differs

    def distrust(self) -> None:
        """Take all weights for written by somebody else."""
        self.weights = self.prints = None

    def pull(self) -> bool:
        """Copy weights that somebody else has written; return whether there were any."""
        now, known = stamps_of(self.owners), self.weights
        if known is None:
            changed = list(range(len(now)))
        else:
            both = zip(now, known, self._written, strict=True)
            changed = [i for i, (a, b, written) in enumerate(both) if written or a != b]
        if not changed:
            return False
        self.await_returned()
        copies, owners, before = self._copies(), parts_of(self.owners), self.prints
        self.weights, self.prints = seal(self.owners)
        if before is not None and self.is_at_rest():  # nobody has asked yet
            unseen = (before != self.prints).nonzero().flatten().tolist()
            changed = sorted({*changed, *unseen})
        apart = [i for i in changed if are_apart(copies[i], owners[i])]
        event = self.streams.fetch([Copy(copies[i], owners[i]) for i in apart])
        if event is not None:
            event.synchronize()
        # A streamed parameter has the memory of its copy, which does not count its writes.
        torch.autograd.graph.increment_version([self.bucket.params[i] for i in changed])
        if self._bring_home(apart):
            self.weights = stamps_of(self.owners)
        return True

    def _bring_home(self, indices: Iterable[int]) -> bool:
        """Give streamed parameters the memory of their copies; return whether any had another."""
        streamed = [i for i in indices if home_of(self.owners[i]) is not None]
        for i in streamed:
            move(self.owners[i], self.bucket.params[i].data)
        return bool(streamed)

    def make_shadow(self, weights: list[Tensor]) -> None:
        """Get shadow buffers, for speculative steps."""
        bucket = self.bucket
        # Written to at once: the first touch of so much memory would be in the middle of a step.
        buffers = {key: [self._zeros_like(buffer)] for key, [buffer] in bucket.buffers.items()}
        scales = {key: self._zeros_like(buffer) for key, buffer in bucket.scales.items()}
        self.shadow = HostBuffers(weights, buffers, scales)

    def _zeros_like(self, buffer: Tensor) -> Tensor:
        return self.host_optimizer.spec.zeros(buffer.numel(), buffer.dtype, buffer.device)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory for weights and state."""
        return HostBuffers(self._copies(), self.bucket.buffers, self.bucket.scales).nbytes

    def state_stamps(self, has_prints: bool) -> list[int]:
        """Return what changes when state is written by who counts versions, or by anybody."""
        buffers = [buffer for [buffer] in self.bucket.buffers.values()]
        buffers += self.bucket.scales.values()
        stamps = list(map(version_of, buffers))
        return stamps + fingerprints(buffers).tolist() if has_prints else stamps
