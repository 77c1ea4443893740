"""The thread that steps: what can be done now in the order of urgency, else what can be next."""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import partial

import torch

from deepspeed_ext.captures import beside_captures
from deepspeed_ext.offload.copies import Event
from deepspeed_ext.op_builder.log import logger
from deepspeed_ext.processors import Share
from deepspeed_ext.threads import AwaitedThread, is_awaited, is_ending
from deepspeed_ext.torch_internals.tensors import past_torch_function

_SLICE = 1.0  # seconds


Run = Callable[[], None]


class Urgency(IntEnum):
    """What goes first; tasks of one urgency go by their place, then in the order they came in."""

    ADD = 0  # gradients, of which the others are
    RETURN = 1  # weights that are known, to the device
    STEP = 2  # what step() has asked for
    SPECULATIVE = 3  # what step() may ask for


def _always() -> bool:
    return True


class Task:
    """A piece of work for the worker.

    Attributes:
        run: does it, in the worker's thread.
        urgency: how soon.
        place: among those of the same urgency.
        events: of the device, that it has to wait for.
        needs: other tasks that have to be over before.
        has_room: False while it would be queued behind too many others of the device.
        done: whether it is over, in whatever way.
        error: what it raised.
    """

    def __init__(
        self,
        run: Run,
        urgency: Urgency,
        place: int = 0,
        events: Sequence[Event | None] = (),
        needs: Sequence["Task"] = (),
        has_room: Callable[[], bool] = _always,
    ) -> None:
        self.run = run
        self.urgency, self.place = urgency, place
        self._events = [event for event in events if event is not None]
        self._needs, self._has_room = needs, has_room
        self.done = False
        self.error: BaseException | None = None

    def is_possible(self) -> bool:
        """Return whether it can begin, if only to wait for a device."""
        return all(task.done for task in self._needs)

    def is_due(self) -> bool:
        """Return whether it has nothing to wait for but room."""
        if not self.is_possible():
            return False
        while self._events and self._events[0].query():
            del self._events[0]
        return not self._events

    def is_ready(self) -> bool:
        """Return whether it has nothing to wait for."""
        return self.is_due() and self._has_room()

    def end(self) -> None:
        """Be over, and let go of all that it holds: others may hold it for long."""
        self.run, self._events, self._needs, self._has_room = _nothing, [], (), _always
        self.done = True


class ThisProcess:
    """The process that made it, of which there may be forks."""

    def __init__(self) -> None:
        self._number = os.getpid()

    def is_foreign(self) -> bool:
        """Return whether this is a fork of it."""
        return self._number != os.getpid()

    def check(self) -> None:
        """Raise RuntimeError if this is a fork of it."""
        if self.is_foreign():
            raise RuntimeError(
                "OffloadOptimizer: this process is a fork of the one that made it, expected the "
                "same; make one here, or call synchronize() before the fork to read weights"
            )


class Worker:
    """One thread, started by the first task. It sleeps while there is nothing to do.

    It knows none of the objects whose tasks it runs, so that they can go, and close it. Python
    waits for it when it ends; what comes after that is done by whoever submits it.

    Args:
        share: where it runs, with its team.
        load: gets what tasks will need, before the thread goes there: compilers may take all
            processors. Whatever it raises a task will raise.
    """

    def __init__(self, share: Share, load: Callable[[], object]) -> None:
        self.share, self._load = share, load
        self._threads: int | None = None
        # `with` takes it in one go; Ctrl-C may come between a Condition's having it and the block.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: list[Task] = []
        self._thread: threading.Thread | None = None
        self._closing = False
        self._process = ThisProcess()

    def submit(self, task: Task) -> Task:
        """Queue a task.

        Raises:
            RuntimeError: the worker is closed, or belongs to the parent of this process.
        """
        self.check()
        with self._lock:
            self.check()
            self._queue.append(task)
            has_nobody = self._thread is None
            if has_nobody and is_awaited():
                self._start()
                has_nobody = False
            elif has_nobody:
                self._thread = threading.current_thread()
            self._changed.notify_all()
        if has_nobody:
            self._work()
        return task

    @property
    def threads(self) -> int:
        """How many step, or would if it began now."""
        return self._threads or self.share.threads(torch.get_num_threads())

    def _start(self) -> None:
        threads = self._threads = self.threads
        logger.info("OffloadOptimizer: threads that step: %d, on %s", threads, self.share)

        def work() -> None:
            with suppress(Exception):
                self._load()
            self.share.enter(threads)
            with past_torch_function():  # it waits for no weight: it writes them
                self._work()

        self._thread = AwaitedThread(work, "deepspeed_ext-offload", self._wake, self._drop_all)
        self._thread.start()

    def _wake(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def _drop_all(self) -> None:
        """Leave what nobody has begun undone, as the user does not want to wait for it."""
        with self._lock:
            for task in self._queue:
                task.error = RuntimeError("OffloadOptimizer: the end of Python was interrupted")
                task.end()
            self._queue.clear()
            self._changed.notify_all()

    def check(self) -> None:
        """Raise RuntimeError if it is closed, or this is a fork of the process with the thread."""
        self._process.check()
        if self._closing:
            raise RuntimeError("OffloadOptimizer: it is closed, expected to be open")

    def check_process(self) -> None:
        """Raise RuntimeError if this is a fork of the process with the thread."""
        self._process.check()

    def is_foreign(self) -> bool:
        """Return whether this is a fork of the process that has the thread."""
        return self._process.is_foreign()

    def drop(self, task: Task) -> bool:
        """Take a task back if nobody has begun it; return whether that was so."""
        if self.is_foreign():  # the thread may have held the lock as it was forked
            return False
        with self._lock:
            if task not in self._queue:
                return False
            self._queue.remove(task)
            task.end()
            self._changed.notify_all()
        return True

    def wait(self, tasks: Iterable[Task]) -> None:
        """Return when all of these are over; their errors are left in them.

        Raises:
            RuntimeError: one is not, and this is a fork of the process with the thread.
        """
        if self.is_foreign():
            if not all(task.done for task in tasks):
                self.check()
            return
        with self._lock:
            for task in tasks:
                while not task.done:
                    # In slices: a signal that comes right before a wait is seen only after it.
                    self._changed.wait(_SLICE)

    def close(self) -> None:
        """Finish what is queued and end the thread. May be called again."""
        if self.is_foreign():
            return
        with self._lock:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _work(self) -> None:
        while (task := self._take()) is not None:
            try:
                with torch.no_grad(), beside_captures():
                    task.run()
            except BaseException as error:
                task.error = error
            with self._lock:
                task.end()
                self._changed.notify_all()
            del task

    def _take(self) -> Task | None:
        """Wait for a task, and return it; None when there will be no more for this thread."""
        with self._lock:
            while not (self._queue or self._closing or is_ending()):
                self._changed.wait()
            if not self._queue:
                self._thread = None
                return None
            with beside_captures():  # again, as CUDA may not have been in use when the thread began
                task = self._next()
            self._queue.remove(task)
            return task

    def _next(self) -> Task:
        """Return what to do next.

        If all wait for a device, that is what was queued first: its gradients come first.
        """
        by_urgency = sorted(self._queue, key=lambda task: (task.urgency, task.place))
        for can_begin in (Task.is_ready, Task.is_due):
            found = next((task for task in by_urgency if _asked(task, can_begin)), None)
            if found is not None:
                return found
        waiting = (task for task in self._queue if task.urgency != Urgency.RETURN)
        return next(filter(Task.is_possible, waiting), None) or next(
            filter(Task.is_possible, by_urgency)
        )


def _asked(task: Task, can_begin: Callable[[Task], bool]) -> bool:
    """Return whether a task can begin; if a device fails that is asked for it, it does, to fail."""
    try:
        return can_begin(task)
    except Exception as error:
        task.run = partial(_fail, error)
        return True


def _fail(error: Exception) -> None:
    raise error


def _nothing() -> None:
    pass
