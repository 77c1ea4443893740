"""What computes in Python beside a contender: a thread of this process, or another process."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack

_ENDLESS = "while True: pass"


def beside_thread(run: Callable[[], object], stack: ExitStack) -> Callable[[], None]:
    """Return what runs beside a thread that computes in Python without pause."""
    goes_on, is_over = threading.Event(), threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            goes_on.wait()
            for _ in range(1000):
                pass

    thread = threading.Thread(target=compute)
    thread.start()
    stack.callback(thread.join)
    stack.callback(goes_on.set)
    stack.callback(is_over.set)

    def both() -> None:
        goes_on.set()
        run()
        goes_on.clear()

    return both


def beside_process(run: Callable[[], object], stack: ExitStack) -> Callable[[], None]:
    """Return what runs beside a process that does the same: it takes a processor, and no more."""
    other = subprocess.Popen([sys.executable, "-c", _ENDLESS])
    stack.callback(other.wait)
    stack.callback(other.kill)
    os.kill(other.pid, signal.SIGSTOP)

    def both() -> None:
        os.kill(other.pid, signal.SIGCONT)
        run()
        os.kill(other.pid, signal.SIGSTOP)

    return both
