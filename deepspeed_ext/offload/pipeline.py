"""Gradients out, steps, weights back: what is on its way, and what of it counts."""

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from deepspeed_ext.dtensors import is_dtensor, local, same_layout
from deepspeed_ext.io import PinnedPool
from deepspeed_ext.offload.bucket import Ahead, HostBucket
from deepspeed_ext.offload.copies import Lanes
from deepspeed_ext.offload.inner import HostSteps
from deepspeed_ext.offload.stand_ins import host_memory, remake
from deepspeed_ext.offload.worker import Task, Urgency, Worker
from deepspeed_ext.optim.clipping import Clip, Scaling, SquareSum, clip
from deepspeed_ext.optim.slabs import Bucket, cut
from deepspeed_ext.optim.traits import Group

BUCKET = 2**25  # elements of parameters that travel and are stepped together: less than a block

_NO_OPTIONS = ("params", "param_names")


class Links:
    """Which host copy stands for which parameter; a parameter that is stepped where it is, itself.

    Attributes:
        copies: by the identity of the parameter.
        owners: parameters, by the identity of the copy.
    """

    def __init__(self) -> None:
        self.copies: dict[int, Tensor] = {}
        self.owners: dict[int, Tensor] = {}

    def add(self, owner: Tensor, copy: Tensor) -> None:
        """Take note of a pair."""
        self.copies[id(owner)] = copy
        self.owners[id(copy)] = owner

    def cut(self, copies: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Put copies into buckets whose parameters are on one device; a huge one gets its own."""
        kinds: dict[tuple[torch.device, bool], list[Tensor]] = {}
        for copy in copies:
            owner = self.owners[id(copy)]
            kinds.setdefault((local(owner).device, owner is copy), []).append(copy)
        for (_, is_resident), members in kinds.items():
            yield from cut(members) if is_resident else cut(members, BUCKET)


class Pipeline:
    """The parameters of one optimizer on their devices, their host copies, and what moves between.

    It holds no reference to the optimizer, which may go at any time.

    Args:
        inner: steps the host copies.
        groups: of the optimizer, with the options that count.
        links: between parameters and copies.
        spare_bytes: most host memory for steps that are taken ahead.
    """

    def __init__(
        self, inner: HostSteps, groups: list[Group], links: Links, spare_bytes: int
    ) -> None:
        self.inner, self.groups, self.links = inner, groups, links
        self._spare_bytes = spare_bytes
        self.worker = Worker()
        self._pool = PinnedPool()
        self._lanes: dict[torch.device, Lanes] = {}
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
        self.measures = False  # gradients, as they leave
        self.counts: Counter[str] = Counter()

    # Before step(): what may be done ahead

    def note_gradient(self, param: Tensor) -> None:
        """Take note of a gradient that was accumulated; called by hooks, in threads of autograd."""
        with self._lock:
            key = id(param)
            self._hits[key] += 1
            bucket = self._bucket_of.get(key)
            if bucket is None or bucket.task is not None or not self._may_hasten(param):
                return
            if self._hits[key] > self._expected[key]:
                self._give_up(bucket)
                return
            if all(self._hits[id(p)] == self._expected[id(p)] > 0 for p in bucket.owners):
                self._hasten(bucket)

    def _may_hasten(self, param: Tensor) -> bool:
        """Return whether nobody else will write to gradients unseen, as DDP does after its hooks."""
        alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
        return alone or is_dtensor(param) or torch.distributed.get_world_size() == 1

    def _hasten(self, bucket: HostBucket) -> None:
        grads = [owner.grad for owner in bucket.owners]
        if any(grad is None or not _is_plain(grad, p) for grad, p in zip(grads, bucket.owners)):
            return
        if bucket.arrival is None or not bucket.has_arrived(grads):
            self._give_up(bucket)
            bucket.take(grads, self.measures)
            self.counts["early"] += 1
        spare, arrival = bucket.spare, bucket.arrival
        options = self._options(bucket)
        if spare is None or arrival is None or options is None or self._bites:
            return
        if bucket.was_written():
            return
        scaling = _scaling_of(self._divisor)
        run = partial(bucket.step_ahead, arrival, options, scaling, spare)
        task = Task(run, Urgency.AHEAD)
        bucket.ahead = Ahead(task, options, self._divisor, bucket.weights, bucket.state_marks())
        self.worker.submit(task)
        self.counts["ahead"] += 1

    def _give_up(self, bucket: HostBucket) -> None:
        """Forget a step that was taken ahead, and gradients that are not those of the step."""
        if bucket.ahead is not None:
            self.worker.drop(bucket.ahead.task)
            bucket.ahead = None
            self.counts["rolled back"] += 1
        bucket.arrival = None

    def forget_gradients(self) -> None:
        """Begin anew: what was accumulated is not wanted any more."""
        with self._lock:
            self._hits.clear()
            for bucket in self._buckets:
                self._give_up(bucket)

    # The step

    def step(self, scaling: Scaling, max_norm: float | None) -> Tensor | None:
        """Queue the step of all parameters that have a gradient, and return the norm if asked for.

        Raises:
            ValueError: a gradient or parameter is not as it must be; nothing was stepped.
        """
        self.finish()
        self._push_options()
        self._follow_params()
        self._place()
        with self._lock:
            for bucket in self._buckets:
                self._take_rest(bucket)
            for lanes in self._lanes.values():
                lanes.hold_back()  # whoever writes to gradients from now on
            clipped = self._decide(scaling, max_norm)
            divisor = None if clipped is None else float(clipped.divisor)
            is_skipped = clipped is not None and bool(clipped.found_inf)
            scaling_of_all = _scaling_of(divisor or 1.0)
            if not is_skipped:
                for group, bucket in self._resident:
                    self.inner.step_whole(group, bucket, scaling_of_all)
            wanted = sorted(self._buckets, key=lambda bucket: bucket.place)
            for bucket in wanted:
                if is_skipped:
                    self._give_up(bucket)
                else:
                    self._settle(bucket, 1.0 if divisor is None else divisor)
            self._expect(scaling, is_skipped, divisor)
        return None if clipped is None else clipped.norm

    def _expect(self, scaling: Scaling, is_skipped: bool, divisor: float | None) -> None:
        """Take the next step to be like this one."""
        self._expected, self._hits = self._hits, Counter()
        scale = scaling.grad_scale
        self._divisor = 1.0 if scale is None else float(scale)
        # While clipping bites, what is stepped ahead is thrown away: gradients leave early still.
        self._bites = not is_skipped and divisor is not None and divisor != self._divisor

    def _take_rest(self, bucket: HostBucket) -> None:
        grads = [owner.grad for owner in bucket.owners]
        if all(grad is None for grad in grads):
            self._give_up(bucket)
        elif not bucket.has_arrived(grads):
            self._give_up(bucket)
            bucket.take(grads, self.measures)
            self.counts["late"] += 1

    def _settle(self, bucket: HostBucket, divisor: float) -> None:
        """Make the step ahead count, or queue one."""
        arrival, ahead = bucket.arrival, bucket.ahead
        if arrival is None:
            return
        options = self._options(bucket) or _options_of(self.groups[bucket.group])
        was_written = bucket.pull()
        after = bucket.lanes.mark()
        place = bucket.place
        valid = (
            ahead is not None
            and not was_written
            and ahead.options == options
            and ahead.divisor == divisor
            and ahead.weights == bucket.weights
            and ahead.state == bucket.state_marks()
            and not (ahead.task.done and ahead.task.error)
        )
        if ahead is not None and self.worker.drop(ahead.task):  # nobody has begun it
            self.counts["ahead"] -= 1
            ahead, valid = None, False
        if valid and ahead is not None and bucket.spare is not None:
            run = partial(bucket.adopt, ahead.task, arrival, bucket.spare, after)
            bucket.task = Task(run, Urgency.RETURN, place)
            self.counts["validated"] += 1
        else:
            self.counts["rolled back"] += ahead is not None
            run = partial(bucket.step, arrival, options, _scaling_of(divisor), after)
            bucket.task = Task(run, Urgency.STEP, place)
        bucket.ahead = bucket.arrival = None
        self.worker.submit(bucket.task)

    def _decide(self, scaling: Scaling, max_norm: float | None) -> Clip | None:
        """Return what the gradients are divided by, on the host, or None if by nothing."""
        if max_norm is None and scaling == Scaling():
            return None
        squares = SquareSum()
        if max_norm is not None:
            for bucket in self._buckets:
                bucket.add_squares(squares)
            for _, bucket in self._resident:
                work = bucket.gather()
                if work is not None:
                    squares.add(work.of_this_process() if bucket.is_sharded else work)
        total = squares.total()
        clipped = clip(total, max_norm or torch.inf, scaling)
        if max_norm is None:  # as a plain step: only found_inf skips
            grad_scale, found_inf = scaling.on(total.device)
            one = torch.ones((), dtype=torch.float64, device=total.device)
            clipped = clipped._replace(
                divisor=one if grad_scale is None else grad_scale.double().reshape(()),
                found_inf=torch.zeros_like(one) if found_inf is None else found_inf.reshape(()),
            )
        numbers = torch.stack([clipped.divisor.double(), clipped.found_inf.double()]).tolist()
        divisor, found_inf = (torch.tensor(n, dtype=torch.float64) for n in numbers)
        return Clip(clipped.norm, divisor, found_inf)

    # Afterwards

    def update_copies(self) -> None:
        """Give host copies the weights that somebody else has written."""
        self._push_options()
        self._follow_params()
        for bucket in self._buckets:
            bucket.pull()

    def stats(self) -> dict[str, float]:
        """Return counts, bytes and seconds so far."""
        names = ("early", "late", "ahead", "validated", "rolled back", "bytes_out", "bytes_back")
        return {
            **{name: self.counts[name] for name in names},
            "step_seconds": sum(bucket.seconds for bucket in self._buckets),
        }

    def finish(self) -> None:
        """Wait until the last step is over, and let the current streams wait for its weights.

        Raises:
            Exception: what went wrong in the worker.
        """
        self.wait_for(self._buckets)

    def wait_for(self, buckets: Iterable[HostBucket]) -> None:
        """Do this for some buckets."""
        errors = []
        for bucket in buckets:
            if bucket.task is not None:
                self.worker.wait([bucket.task])
                task, bucket.task = bucket.task, None
                if task.error is not None:
                    errors.append(task.error)
            bucket.await_on_stream()
        if errors:
            raise errors[0]

    def before_use(self, params: Sequence[Tensor]) -> None:
        """Wait for the weights that a module is about to use, and take note of the order."""
        found = dict.fromkeys(map(self._bucket_of.get, map(id, params)))
        self.wait_for(bucket for bucket in found if bucket is not None)

    # Buckets

    def _push_options(self) -> None:
        for group, inner in zip(self.groups, self.inner.param_groups, strict=True):
            inner.update(_options_of(group))

    def _options(self, bucket: HostBucket) -> Group | None:
        """Return the options of a step as they are now, or None if that would wait for a device."""
        lr = self.groups[bucket.group]["lr"]
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            return None
        return _options_of(self.groups[bucket.group])

    def _follow_params(self) -> None:
        """Give new host copies to parameters that have got another device, dtype or layout."""
        changed = False
        for copy, owner in [(c, self.links.owners[id(c)]) for c in self._copies()]:
            look = _look_of(owner)
            if copy is not owner and self._looks.setdefault(id(owner), _look_of(copy)) != look:
                remake(copy, owner)
                changed = True
            self._looks[id(owner)] = look
        if changed:
            self.inner.forget_buckets()

    def _place(self) -> None:
        """See that all parameters with a gradient or with state are in buckets."""
        self.inner.give_state(
            [c for c in self._copies() if self.links.owners[id(c)].grad is not None]
        )
        found = self.inner.buckets()
        if [bucket for _, bucket in found] == self._known:
            return
        self._known = [bucket for _, bucket in found]
        self.forget_gradients()
        self._resident, self._buckets = [], []
        for group, bucket in found:
            owners = [self.links.owners[id(copy)] for copy in bucket.params]
            if owners[0] is bucket.params[0]:
                self._resident.append((self.inner.param_groups[group], bucket))
                continue
            device = local(owners[0]).device
            lanes = self._lanes.setdefault(device, Lanes(device))
            made = HostBucket(self.inner, group, bucket, owners, lanes, self._pool)
            made.place = len(self._buckets)
            self._buckets.append(made)
        self._bucket_of = {id(owner): b for b in self._buckets for owner in b.owners}
        left = self._spare_bytes
        for made in reversed(self._buckets):  # whose gradients come first
            left -= made.nbytes
            if left >= 0:
                made.make_spare(host_memory(made.bucket.parts()))

    def _copies(self) -> Iterator[Tensor]:
        return itertools.chain.from_iterable(g["params"] for g in self.inner.param_groups)


def _options_of(group: Group) -> Group:
    options = {key: value for key, value in group.items() if key not in _NO_OPTIONS}
    if isinstance(options["lr"], Tensor):
        options["lr"] = float(options["lr"])  # it may change while a step is under way
    return options


def _scaling_of(divisor: float) -> Scaling:
    if divisor == 1:
        return Scaling()
    return Scaling(torch.tensor(divisor, dtype=torch.float64, device="cpu"))


def _look_of(param: Tensor) -> object:
    part = local(param)
    return (part.device.type == "meta", part.dtype, part.shape, part.stride())


def _is_plain(grad: Tensor, param: Tensor) -> bool:
    """Return whether a gradient is in this process what its parameter is."""
    if is_dtensor(param):
        return is_dtensor(grad) and same_layout(grad, param)
    return grad.layout is torch.strided and not is_dtensor(grad)
