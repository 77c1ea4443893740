"""The interpreter given up soon: what a thread that steps in pieces waits for between them."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds. A thread that computes in Python keeps the interpreter for 5 ms when others want it, and
# a piece of a step asks for it some ten times, each after a call that lets others have it.
_INTERVAL = 5e-5


class _Switches:
    """How long a thread keeps the interpreter: less while somebody asks for that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._askers = set[object]()
        self._before = self._ours = 0.0

    def ask(self, who: object) -> None:
        with self._lock:
            self._askers.add(who)
            if len(self._askers) == 1:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, _INTERVAL))
                self._ours = sys.getswitchinterval()

    def end(self, who: object) -> None:
        """Take back what was asked, if it was: Ctrl-C may have come before."""
        with self._lock:
            if who in self._askers:
                self._askers.discard(who)
                if not self._askers:
                    self._restore()

    def forget(self) -> None:
        """Begin anew in a fork, which has none of the threads that ask."""
        if self._askers:
            self._restore()
        self._lock, self._askers = threading.Lock(), set()

    def _restore(self) -> None:
        if sys.getswitchinterval() == self._ours:  # nobody else has set it
            sys.setswitchinterval(self._before)


_switches = _Switches()
os.register_at_fork(after_in_child=_switches.forget)


@contextmanager
def prompt_switches() -> Iterator[None]:
    """Let threads that compute in Python give up the interpreter within 50 us, not 5 ms.

    That is a setting of the process, which is put back when the last one that asked is done, unless
    somebody else has set it meanwhile.
    """
    who = object()
    try:
        _switches.ask(who)
        yield
    finally:
        _switches.end(who)
