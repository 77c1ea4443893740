"""What a tensor store holds under a name, and the requests that move it."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from deepspeed_ext.io.engine.future import Future, Mailbox
from deepspeed_ext.io.store.manifest import TensorInfo
from deepspeed_ext.io.store.space import Slot

_FOREVER = 1e9  # seconds


@dataclass(eq=False)
class Record:
    """What one put wrote, or is writing."""

    name: str
    info: TensorInfo
    slot: Slot | None  # a tensor without bytes has none
    writing: "StoreJob | None" = None

    @property
    def offset(self) -> int:
        """Where its bytes start in the file."""
        return self.slot.extent.offset if self.slot else 0


class StoreJob:
    """A request of a store, as a Future waits for it: in the books before anybody is told.

    It exists before the engine has the request, so that others can wait for it from then on.

    Args:
        name: of the tensor.
        verb: put or get.
        settle: enters its end into the books; may be called more than once.
    """

    record: Record  # what is moved; it has one when it is in the books

    def __init__(self, name: str, verb: str, settle: Callable[["StoreJob"], None]) -> None:
        self.name = name
        self.verb = verb
        self.error: BaseException | None = None
        self.settled = False
        self._settle: Callable[[StoreJob], None] | None = settle
        # Not an Event: Ctrl-C may leave its lock taken, and the same thread would wait for itself.
        self._start, self._is_started = threading.Condition(), False
        self._inner: Future | None = None

    def start(self, inner: Future | None, error: BaseException | None = None) -> None:
        """Say what the engine made of it.

        Args:
            inner: the transfer; None: there is nothing to wait for.
            error: why the request is worthless, however the transfer ends.
        """
        self._inner = inner
        if error is not None:
            text = f"TensorStore: {self.verb} of {self.name!r} was given up: {error!r}"
            self.error = RuntimeError(text)
        self._is_started = True
        with self._start:
            self._start.notify_all()

    def wait(self, seconds: float = _FOREVER) -> bool:
        """Wait at most so long and tell whether it is done."""
        end = time.monotonic() + seconds
        if not self._is_started:
            with self._start:
                if not self._start.wait_for(lambda: self._is_started, max(seconds, 0.0)):
                    return False
        inner, settle = self._inner, self._settle
        if inner is not None:
            if not inner.wait(max(end - time.monotonic(), 0.0)):
                return False
            self.error = self.error or self._named(inner.exception())
        if settle is not None:
            settle(self)
        self._inner = self._settle = None  # a Future that is kept keeps no file open
        return True

    def done(self) -> bool:
        """Tell whether it is done."""
        if self.settled:
            return True
        inner = self._inner
        return self._is_started and (inner is None or inner.done()) and self.wait(0)

    def begun(self) -> bool:
        """Tell that it is in the books from the start."""
        return True

    def cancel(self) -> bool:
        """Tell that it is not taken back."""
        return False

    def tell(self, mailbox: Mailbox, number: int) -> None:
        """Put the number there once its transfer is done, be it now."""
        inner = self._inner
        if inner is None:
            mailbox.put(number)
        else:
            inner.tell(mailbox, number)

    def check(self) -> None:
        """Raise what went wrong with it."""
        if self.error is not None:
            raise self.error.with_traceback(None)  # or it keeps every caller before alive

    def _named(self, failure: BaseException | None) -> BaseException | None:
        if not isinstance(failure, OSError):
            return failure
        text = f"TensorStore: {self.verb} of {self.name!r} failed: {failure.strerror}"
        named = OSError(failure.errno, text)
        named.__cause__ = failure
        return named
