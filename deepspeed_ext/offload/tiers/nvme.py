"""A bucket whose state rests on disk: step() takes it piece by piece through a ring of memory."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.offload.bucket import Arrival, HostBucket
from deepspeed_ext.offload.bucket_states import OffloadedBucket
from deepspeed_ext.offload.copies import REQUESTED, Copy, Event
from deepspeed_ext.offload.host_optimizer import flat_range
from deepspeed_ext.offload.seals import Question, seal, stamps_of
from deepspeed_ext.offload.tiers.disk_state import DiskState
from deepspeed_ext.offload.tiers.prompt_switches import prompt_switches
from deepspeed_ext.offload.tiers.ring import Ring, views_in
from deepspeed_ext.optim.buckets import STEP, BucketView, follow
from deepspeed_ext.optim.clipping import Scaling
from deepspeed_ext.optim.formats import MASTER, SCALE
from deepspeed_ext.optim.spec import Group


class Stretch(NamedTuple):
    """The elements of one parameter whose state is in one piece.

    Attributes:
        number: of the parameter among those of the step.
        begin: the first of them.
        elements: how many of them.
        offset: of their state in the piece.
    """

    number: int
    begin: int
    elements: int
    offset: int


class NvmeBucket(OffloadedBucket):
    """See OffloadedBucket, and the module's docstring.

    Nothing is stepped before step(), and gradients stay where they are until then: a step ahead
    would want a third copy of the state, and one that is dropped would have been written for
    nothing. Only reads run ahead.
    """

    bucket: DiskState

    def __init__(self, *args: Any, ring: Ring) -> None:
        super().__init__(*args)
        self._ring = ring
        self._is_whole = True  # the step that is under way, or was the last: nothing of it is done

    def fetch(self) -> Arrival:
        """Return the step by the gradients that there are; they stay where they are until then."""
        taken = self.gradients.take()
        work, there = self._work(taken.indices, taken.sources, taken.sources)
        return _Waiting(taken.indices, work, [], there, [], [], taken.needs)

    def aim(self, arrival: Arrival) -> None:
        """See HostBucket.aim."""
        arrival.there = arrival.there._replace(params=self._parts(arrival.indices))

    def step(self, arrival: Arrival, options: Group, scaling: Scaling, after: Event | None) -> None:
        """Take a step piece by piece; weights and state go back while others come."""
        arrival.check()
        try:
            with prompt_switches():
                self._step_pieces(arrival, options, scaling, after)
        except BaseException as error:
            if self._is_whole:  # as in host memory, what was wrong can be put right
                self._ring.put_back()
            else:
                self._ring.fail(error)
            raise
        finally:
            arrival.there = arrival.there._replace(grads=[])
            arrival.work = arrival.work._replace(grads=[])

    def _step_pieces(
        self, arrival: Arrival, options: Group, scaling: Scaling, after: Event | None
    ) -> None:
        state, work = self.bucket, arrival.there
        counts = state.buffers[STEP][0]
        counted = counts.clone()  # a parameter in several pieces is counted once
        stretches = self._stretches(work)
        for number, k in enumerate(sorted(stretches)):
            self._is_whole = False
            slab = self._ring.take((state, k))
            self._is_whole = number == 0
            there, here = self._brought(slab, stretches[k], work, after)
            values = state.values(k, slab)
            self._follow(arrival.indices, stretches[k], here.params, values)
            for part in _of_one_dtype(here._replace(**self._places(values, counts))):
                buffers = {**part.buffers, STEP: [counted]}
                out = self.host_optimizer.out_of(part.params, buffers, part.scales)
                self._step_part(REQUESTED, part, None, options, scaling, out)
                self._is_whole = False
            sent = None
            if there is not None:
                self._send(list(map(Copy, there.params, here.params)), after)
                sent = self._sent[0] if self._sent is not None else None
            self._ring.give_back((state, k), slab, sent)
        counts.copy_(counted)
        state.stale -= set(arrival.indices)

    def _places(self, values: dict[str, Tensor], counts: Tensor) -> dict[str, Any]:
        state = self.bucket
        buffers = {STEP: [counts], **{key: [values[key]] for key in state.dtypes}}
        return {"buffers": buffers, "scales": [values[key + SCALE] for key in state.scales]}

    def _stretches(self, work: BucketView) -> dict[int, list[Stretch]]:
        """Return what is stepped of which piece, by its number."""
        size = self.bucket.shape.elements
        found: dict[int, list[Stretch]] = {}
        for number, (offset, param) in enumerate(
            zip(work.offsets.tolist(), work.params, strict=True)
        ):
            end = offset + param.numel()
            if offset == end:  # its step counts, too
                k = min(offset // size, self.bucket.count - 1)
                found.setdefault(k, []).append(Stretch(number, 0, 0, offset - k * size))
            while offset < end:
                k, inside = divmod(offset, size)
                count = min(end - offset, size - inside)
                begin = param.numel() - (end - offset)
                found.setdefault(k, []).append(Stretch(number, begin, count, inside))
                offset += count
        return found

    def _brought(
        self, slab: Tensor, stretches: Sequence[Stretch], work: BucketView, after: Event | None
    ) -> tuple[BucketView | None, BucketView]:
        """Return the work on some elements where they are, if that is elsewhere, and in memory."""
        numbers = [one.number for one in stretches]
        some = work.part(numbers)
        offsets = torch.tensor([one.offset for one in stretches], device="cpu")
        noise = some.noise
        if noise is not None:
            noise = noise + torch.tensor([[0, one.begin] for one in stretches], device="cpu")
        there = some._replace(
            params=_ranges(some.params, stretches),
            grads=_ranges(some.grads, stretches),
            offsets=offsets,
            noise=noise,
        )
        if self.streams.device.type == "cpu":
            return None, there
        params, end = views_in(slab, self.bucket.shape.nbytes, there.params)
        copies = list(map(Copy, params, there.params))
        grads = there.grads
        if any(grad.is_cuda for grad in grads):  # widest first: so all are aligned
            order = sorted(range(len(grads)), key=lambda i: -grads[i].element_size())
            end = -(-end // 8) * 8
            views, _ = views_in(slab, end, [grads[i] for i in order])
            here = dict(zip(order, views, strict=True))
            grads = [here[i] for i in range(len(grads))]
            copies += map(Copy, grads, there.grads)
        event = self.streams.fetch(copies, after)
        if event is not None:
            event.synchronize()
        return there, there._replace(params=params, grads=grads)

    def _follow(
        self,
        indices: Sequence[int],
        stretches: Sequence[Stretch],
        params: Sequence[Tensor],
        values: dict[str, Tensor],
    ) -> None:
        """Give master weights the values of parameters that somebody has written."""
        if MASTER not in values:
            return
        for one, param in zip(stretches, params, strict=True):
            if indices[one.number] in self.bucket.stale:
                follow(values[MASTER][one.offset : one.offset + one.elements], param)

    # Weights

    def of_weights(self) -> Question | None:
        """See HostBucket.of_weights: also of weights at rest, as a step reads them in pieces."""
        return HostBucket.of_weights(self)

    def pull(self) -> bool:
        """Take note of weights that somebody has written: a step brings all of them anyway."""
        now, known = stamps_of(self.owners), self.weights
        if known is None:
            changed = set(range(len(now)))
        else:
            both = enumerate(zip(now, known, self._written, strict=True))
            changed = {i for i, (a, b, written) in both if written or a != b}
        if not changed:
            return False
        self.await_returned()
        self.weights, self.prints = seal(self.owners)
        self.bucket.stale |= changed
        return True

    def show_state(self) -> None:
        """See OffloadedBucket.show_state."""
        self._worker.check_process()
        if len(self.bucket.exposed) < self.bucket.count:
            self._ring.settle()
            self.pull()
            self.bucket.follow_stale()
            self.bucket.expose()
        super().show_state()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory, beside the ring."""
        return 0


class _Waiting(Arrival):
    """A step whose gradients are still where they were made."""

    def release(self) -> None:
        """Keep them: the step lets them go."""


def _ranges(tensors: Sequence[Tensor], stretches: Sequence[Stretch]) -> list[Tensor]:
    both = zip(tensors, stretches, strict=True)
    return [flat_range(tensor, one.begin, one.elements) for tensor, one in both]


def _of_one_dtype(work: BucketView) -> list[BucketView]:
    if len({grad.dtype for grad in work.grads}) == 1:
        return [work]
    return work.split_by_grad_dtype()
