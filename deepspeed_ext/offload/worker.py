"""The thread that steps: what can be done now in the order of urgency, else what can be next."""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum

import torch

from deepspeed_ext.offload.copies import Event

_SLICE = 1.0  # seconds


class Urgency(IntEnum):
    """What goes first; tasks of one urgency go by their place, then in the order they came in."""

    ADD = 0  # gradients, of which the others are
    RETURN = 1  # weights that are known
    STEP = 2  # what step() has asked for
    AHEAD = 3  # what step() may ask for


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
        run: Callable[[], None],
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
        while self._events and self._events[0].query():
            del self._events[0]
        return not self._events and self.is_possible()

    def is_ready(self) -> bool:
        """Return whether it has nothing to wait for."""
        return self.is_due() and self._has_room()


class Worker:
    """One thread, started by the first task. It sleeps while there is nothing to do.

    It knows none of the objects whose tasks it runs, so that they can go, and close it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: list[Task] = []
        self._thread: threading.Thread | None = None
        self._closing = False
        self._process = os.getpid()

    def submit(self, task: Task) -> Task:
        """Queue a task.

        Raises:
            RuntimeError: the worker is closed, or belongs to the parent of this process.
        """
        self.check_process()
        with self._changed:
            if self._closing:
                raise RuntimeError("OffloadOptimizer: it is closed, expected to be open")
            self._queue.append(task)
            if self._thread is None:
                threads = torch.get_num_threads()
                self._thread = threading.Thread(
                    target=self._work, args=(threads,), name="deepspeed_ext-offload", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        return task

    def check_process(self) -> None:
        """Raise RuntimeError if this is a fork of the process that has the thread."""
        if self._process != os.getpid():
            raise RuntimeError(
                "OffloadOptimizer: this process is a fork of the one that made it, expected the "
                "same; make an optimizer here"
            )

    def drop(self, task: Task) -> bool:
        """Take a task back if nobody has begun it; return whether that was so."""
        with self._changed:
            if task not in self._queue:
                return False
            self._queue.remove(task)
            task.done = True
            self._changed.notify_all()
        return True

    def wait(self, tasks: Iterable[Task]) -> None:
        """Return when all of these are over; their errors are left in them."""
        if self._process != os.getpid():
            return
        with self._changed:
            for task in tasks:
                while not task.done:
                    # In slices: a signal that comes right before a wait is seen only after it.
                    self._changed.wait(_SLICE)

    def close(self) -> None:
        """Finish what is queued and end the thread. May be called again."""
        if self._process != os.getpid():
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _work(self, threads: int) -> None:
        torch.set_num_threads(threads)  # a new thread begins with the number of processors
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                task = self._next()
                self._queue.remove(task)
            try:
                with torch.no_grad():
                    task.run()
            except BaseException as error:
                task.error = error
            with self._changed:
                task.done = True
                task.run = _nothing  # and what it holds may go
                self._changed.notify_all()
            del task

    def _next(self) -> Task:
        """Return what to do next.

        If all wait for a device, that is what was queued first: its gradients come first.
        """
        by_urgency = sorted(self._queue, key=lambda task: (task.urgency, task.place))
        for can_begin in (Task.is_ready, Task.is_due):
            found = next(filter(can_begin, by_urgency), None)
            if found is not None:
                return found
        waiting = (task for task in self._queue if task.urgency != Urgency.RETURN)
        return next(filter(Task.is_possible, waiting), None) or next(
            filter(Task.is_possible, by_urgency)
        )


def _nothing() -> None:
    pass
