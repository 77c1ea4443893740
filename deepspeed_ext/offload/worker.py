"""The thread that steps: tasks in the order of their urgency, errors kept for who waits."""

import heapq
import itertools
import os
import threading
from collections.abc import Callable, Iterable
from enum import IntEnum

import torch


class Urgency(IntEnum):
    """What goes first; tasks of one urgency go by their place, then in the order they came in."""

    ADD = 0  # gradients, of which the others are
    RETURN = 1  # weights that are known already
    STEP = 2  # what step() has asked for
    AHEAD = 3  # what step() may ask for


class Task:
    """A piece of work for the worker.

    Attributes:
        run: does it, in the worker's thread.
        done: whether it is over, in whatever way.
        error: what it raised.
    """

    def __init__(self, run: Callable[[], None], urgency: Urgency, place: int = 0) -> None:
        self.run = run
        self.urgency = urgency
        self.place = place
        self.done = False
        self.dropped = False
        self.error: BaseException | None = None


class Worker:
    """One thread, started by the first task. It sleeps while there is nothing to do.

    It knows none of the objects whose tasks it runs, so that they can go, and close it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: list[tuple[Urgency, int, int, Task]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._process = os.getpid()

    def submit(self, task: Task) -> Task:
        """Queue a task.

        Raises:
            RuntimeError: the worker is closed, or belongs to the parent of this process.
        """
        if self._process != os.getpid():
            raise RuntimeError(
                "OffloadOptimizer: this process is a fork of the one that made it, expected the "
                "same; make an optimizer here"
            )
        with self._changed:
            if self._closing:
                raise RuntimeError("OffloadOptimizer: it is closed, expected to be open")
            heapq.heappush(self._queue, (task.urgency, task.place, next(self._numbers), task))
            if self._thread is None:
                threads = torch.get_num_threads()
                self._thread = threading.Thread(
                    target=self._work, args=(threads,), name="deepspeed_ext-offload", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        return task

    def drop(self, task: Task) -> bool:
        """Take a task back if nobody has begun it; return whether that was so."""
        with self._changed:
            for i, item in enumerate(self._queue):
                if item[-1] is task:
                    del self._queue[i]
                    heapq.heapify(self._queue)
                    task.done = task.dropped = True
                    self._changed.notify_all()
                    return True
        return False

    def wait(self, tasks: Iterable[Task]) -> None:
        """Return when all of these are over; their errors are left in them."""
        if self._process != os.getpid():
            return
        with self._changed:
            for task in tasks:
                while not task.done:
                    self._changed.wait()

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
                task = heapq.heappop(self._queue)[-1]
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


def _nothing() -> None:
    pass
