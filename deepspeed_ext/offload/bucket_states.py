"""Where the gradients and weights of a bucket are between two steps, and what may happen then.

    IDLE       nothing is under way: the gradients are the user's, the weights on the device too
    WATCHED    it is noted what the gradients were as hooks told of them, and nothing is done yet
    ARRIVING   gradients are in host memory, or on their way there
    AHEAD      a speculative step by them is taken, to shadow buffers: nobody has asked for it yet
    RETURNING  step() has asked for one, and nobody has waited for its weights yet

`RULES` says what may happen in which state. A step that nothing
starts early goes from IDLE through ARRIVING to RETURNING and back; at best the bucket is AHEAD when
step() comes. Whoever calls has the lock of
the pipeline; the worker's thread changes no state.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

from torch import Tensor

from deepspeed_ext.offload.arriving import Wait, arrive, set_out
from deepspeed_ext.offload.bucket import Arrival, HostBucket, HostBuffers
from deepspeed_ext.offload.copies import CopyStreams, Event
from deepspeed_ext.offload.gradient_sources import GradientSource
from deepspeed_ext.offload.host_optimizer import HostOptimizer, scaling_of
from deepspeed_ext.offload.param_table import Row
from deepspeed_ext.offload.seals import Question, Stamps
from deepspeed_ext.offload.worker import Run, Task, Urgency, Worker
from deepspeed_ext.op_builder.log import logger
from deepspeed_ext.optim.buckets import Bucket
from deepspeed_ext.optim.spec import Group


class BucketState(Enum):
    """See the module's docstring."""

    IDLE = auto()
    WATCHED = auto()
    ARRIVING = auto()
    AHEAD = auto()
    RETURNING = auto()


class Awaited(Enum):
    """What is waited for because something happens; all but WEIGHTS by the worker's thread."""

    GRADIENTS = "gradients, on their way to host memory"
    SPECULATION = "the speculative step"
    READERS = "what the device was given before step(), which reads the old weights"
    WEIGHTS = "the step, and weights on their way to the device: by the caller, before it calls"


class Rule(NamedTuple):
    """One thing that may happen to a bucket.

    Attributes:
        state: in which it may.
        event: the name of the method.
        next: the state after it.
        awaits: what is waited for because of it.
    """

    state: BucketState
    event: str
    next: BucketState
    awaits: frozenset[Awaited] = frozenset()


def _rules() -> tuple[Rule, ...]:
    idle, watched, arriving, ahead, returning = BucketState
    step = frozenset((Awaited.GRADIENTS, Awaited.READERS))
    return (
        Rule(idle, "watch", watched),
        Rule(idle, "take", arriving),
        Rule(watched, "take", arriving),
        Rule(arriving, "start_ahead", ahead, frozenset((Awaited.GRADIENTS,))),
        Rule(arriving, "commit", returning, step),
        Rule(ahead, "commit", returning, frozenset((Awaited.SPECULATION, Awaited.READERS))),
        Rule(returning, "returned", idle, frozenset((Awaited.WEIGHTS,))),
        # What is on its way then goes on, and is of no use to anybody.
        Rule(idle, "discard", idle),
        Rule(watched, "discard", idle),
        Rule(arriving, "discard", idle),
        Rule(ahead, "discard", idle),
        Rule(returning, "discard", returning),  # what was asked for is no speculation
    )


RULES = _rules()
_NEXT = {(rule.state, rule.event): rule.next for rule in RULES}


@dataclass
class SpeculativeStep:
    """A step that is taken before anybody asks for it, to be committed if all is as it was then.

    Attributes:
        task: takes it.
        shadow: buffers that it writes to.
        options: of the group.
        divisor: of the gradients.
        weights: version stamps of the parameters.
        state: version stamps of the flat buffers.
    """

    task: Task
    shadow: HostBuffers
    options: Group
    divisor: float
    weights: Stamps | None
    state: list[int]

    def is_of(
        self, options: Group, divisor: float, weights: Stamps | None, state: list[int]
    ) -> bool:
        """Return whether it has not failed, and is the step that is to be taken now."""
        now = (options, divisor, weights, state)
        known = (self.options, self.divisor, self.weights, self.state)
        return self.task.error is None and now == known


class OffloadedBucket(HostBucket):
    """A bucket that is in one of the states above. The rules' events are its methods.

    Args:
        host_optimizer: steps the host copies.
        group: the number of its group.
        bucket: of the host optimizer; its parameters are the copies.
        rows: of the parameters themselves, in their order.
        streams: of their device.
        gradients: of the parameters.
        worker: takes the steps.
        counts: of speculative steps: `ahead`, `committed` and `discarded`; others count there,
            too.
        place: among the buckets whose weights are wanted next.
    """

    def __init__(
        self,
        host_optimizer: HostOptimizer,
        group: int,
        bucket: Bucket,
        rows: "list[Row[OffloadedBucket]]",
        streams: CopyStreams,
        gradients: GradientSource,
        worker: Worker,
        counts: Counter[str],
        place: int,
    ) -> None:
        owners = [row.param for row in rows]
        super().__init__(host_optimizer, group, bucket, owners, streams, gradients)
        self.rows, self.place = rows, place
        self._worker, self._counts = worker, counts
        self._state = BucketState.IDLE
        self._arrival: Arrival | None = None
        self._speculative: SpeculativeStep | None = None
        self._task: Task | None = None
        self._underway: list[Tensor] = []  # parameters whose weights have not been waited for
        self._is_state_shown = False  # to the user, since the last step()

    @property
    def state(self) -> BucketState:
        """Where it is."""
        return self._state

    @property
    def task(self) -> Task | None:
        """What step() has asked for, and nobody has waited for yet."""
        return self._task

    @property
    def speculative_task(self) -> Task | None:
        """What takes the speculative step, if there is one."""
        return None if self._speculative is None else self._speculative.task

    @property
    def has_taken(self) -> bool:
        """Whether gradients are in host memory, or on their way there."""
        return self._arrival is not None

    def _next(self, event: str) -> BucketState:
        """Return the state after an event.

        Raises:
            RuntimeError: that may not happen now.
        """
        after = _NEXT.get((self._state, event))
        if after is None:
            states = [rule.state.name for rule in RULES if rule.event == event]
            raise RuntimeError(
                f"OffloadOptimizer: {event} of a bucket is called when it is {self._state.name},"
                f" expected {' or '.join(states)}; call synchronize() and zero_grad() to begin anew"
            )
        return after

    # Before step()

    def watch(self) -> None:
        """Take note of what gradients are, before anything is done with them."""
        after = self._next("watch")
        self.gradients.watch()
        self._state = after

    def take(self) -> None:
        """Begin to move gradients to host memory."""
        after = self._next("take")
        self._arrival = self.fetch()
        self._state = after

    def start_ahead(self, options: Group, divisor: float) -> bool:
        """Start a speculative step, if there is memory for it and no sign against it.

        Args:
            options: of the group.
            divisor: of the gradients, as step() is likely to want it.

        Returns:
            Whether it did; if not, the state is what it was.
        """
        after, arrival, shadow = self._next("start_ahead"), self._arrival, self.shadow
        assert arrival is not None
        if shadow is None or self.looks_written():
            return False
        run = partial(self.step_speculatively, arrival, options, scaling_of(divisor), shadow)
        # What arrives last is wanted first: the rest can hide behind the next forward.
        task = Task(run, Urgency.SPECULATIVE, self.place, arrival.events[:1], arrival.needs)
        made = SpeculativeStep(task, shadow, options, divisor, self.weights, self._state_stamps())
        self._worker.submit(task)
        self._speculative, self._state = made, after
        self._counts["ahead"] += 1
        return True

    def discard(self) -> None:
        """Drop a speculative step, and gradients that are not those of the step."""
        after = self._next("discard")
        if self._speculative is not None:
            self._worker.drop(self._speculative.task)
            self._counts["discarded"] += 1
        self._clear()
        self._state = after

    def _clear(self) -> None:
        self._speculative = self._arrival = None
        self.gradients.forget()

    def discard_changed(self, were_late: bool) -> None:
        """Do that if it shows that the gradients are not the ones that were noted or taken.

        Args:
            were_late: some were not in their sums yet.
        """
        taken = None if self._arrival is None else self._arrival.indices
        if self.gradients.have_changed(taken, were_late):
            self.discard()

    def discard_differing(self, differs: Sequence[bool]) -> None:
        """Do that if one differs, by the answers to the question about them."""
        if not self.gradients.answer(differs):
            self.discard()

    # The step

    def commit(self, options: Group, divisor: float, after: Event | None, wait: Wait) -> bool:
        """Commit the speculative step if it is the one that is asked for now, or queue that one.

        Args:
            options: of the group.
            divisor: of the gradients.
            after: what reads the weights that there are.
            wait: returns when `returned` was called.

        Returns:
            Whether all who touch a weight will wait by themselves; else it is to be waited for now.
        """
        state, arrival = self._next("commit"), self._arrival
        assert arrival is not None
        was_written = self.pull()
        if was_written:
            self.aim(arrival)
        speculative = self._begun()
        step = partial(self.step, arrival, options, scaling_of(divisor), after)
        send = partial(self.send_rest, arrival, after)
        await_room = self.streams.await_room
        if (
            speculative is not None
            and not was_written
            and speculative.is_of(options, divisor, self.weights, self._state_stamps())
        ):
            taken = speculative.task
            adopt = partial(self.adopt, speculative.shadow, after)
            run = partial(_commit, taken, await_room, self._begin_again, adopt, step, send)
            self._counts["committed"] += 1
        else:
            taken = Task(step, Urgency.STEP, self.place, arrival.events[:1], arrival.needs)
            run = partial(_go_on, taken, await_room, send)
            self._counts["discarded"] += speculative is not None
            speculative = None
        self._clear()
        self._is_state_shown = False
        self._state = state  # whatever fails from here on, weights may be under way
        waits = self._set_out(arrival, wait)
        if speculative is None:
            self._ask(taken)
        arrival.release()
        room = self.streams.has_room
        # To return what rests is to read it, and that of others' weights would come first.
        urgency = Urgency.STEP if self.is_at_rest() else Urgency.RETURN
        self._ask(Task(run, urgency, self.place, [after], [taken], room))
        return waits

    def of_weights(self) -> Question | None:
        """See HostBucket.of_weights; the worker asks that of weights at rest."""
        return None if self.is_at_rest() else super().of_weights()

    def _begin_again(self) -> bool:
        """Return whether a speculative step is not to be committed, as weights were written."""
        if not self.count_unseen_writes():
            return False
        self._counts["committed"] -= 1
        self._counts["discarded"] += 1
        return True

    def _ask(self, task: Task) -> None:
        """Queue a task of a step; if that fails, there is nothing more to wait for."""
        self._task = self._worker.submit(task)
        # When Python ends, that has run it: and as it touched a weight, it has waited for itself.
        self._state = BucketState.RETURNING

    def _begun(self) -> SpeculativeStep | None:
        """Return the speculative step if it was begun, or else take it back."""
        speculative = self._speculative
        if speculative is not None and self._worker.drop(speculative.task):
            self._counts["ahead"] -= 1
            return None
        return speculative

    def _set_out(self, arrival: Arrival, wait: Wait) -> bool:
        """Let whoever touches a weight of a step wait; False: it has to be waited for at once."""
        self._underway = [self.owners[i] for i in arrival.indices]
        self.count_write(self._underway)
        return set_out(self._underway, wait)

    def returned(self) -> None:
        """Let weights that are there be touched: by this stream, and by the one of step()."""
        after = self._next("returned")
        if self._task is not None and not self._task.done:
            raise RuntimeError(
                f"OffloadOptimizer: returned of a bucket is called when it is {self._state.name},"
                " and its step not over, expected one that was waited for"
            )
        self._task = None
        arrive(self._underway)
        self._underway = []
        self._state = after

    def end(self) -> None:
        """Let weights be touched for good, by any stream; what has failed, nobody can raise."""
        self.await_returned()
        task = self._task
        if task is not None and task.error is not None:
            logger.error("OffloadOptimizer: its last step failed", exc_info=task.error)
        is_over = task is None or task.done  # else this is the thread that is to do it
        if is_over and self._state is BucketState.RETURNING:
            self.returned()

    # State that users are shown

    def show_state(self) -> None:
        """Be ready for writes to state that no version tells of, until step() is called."""
        if self._is_state_shown:
            return
        before = self._state_stamps()
        self._is_state_shown = True
        if self._speculative is not None and self._speculative.state == before:
            self._speculative.state = self._state_stamps()

    def _state_stamps(self) -> list[int]:
        """Return what changes when state is written: versions, and all of it if it was shown.

        Nobody but who was shown it can write to it, and looking at all of it takes time.
        """
        return self.state_stamps(has_prints=self._is_state_shown)


def _commit(
    task: Task,
    await_room: Run,
    begins_again: Callable[[], bool],
    adopt: Run,
    step: Run,
    send: Run,
) -> None:
    """Commit a speculative step; one that has failed, or of other weights, is taken anew."""
    await_room()
    if task.error is None and not begins_again():
        adopt()
    else:
        step()
        send()


def _go_on(task: Task, await_room: Run, send: Run) -> None:
    """Send what a step has made."""
    if task.error is not None:
        raise task.error
    await_room()
    send()
