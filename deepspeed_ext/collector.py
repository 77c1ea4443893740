"""What is to be done when the garbage collector takes an object that has something under way.

The collector runs wherever memory is asked for: in any thread, in the middle of what others wait
for, and with locks held that are not to be had again. So what it calls may wait for nothing, and
may change nothing that somebody goes through. An object whose last reference goes is another case:
that is in a place that the program has chosen.
"""

import _thread
import atexit
import gc
import os
import threading
from collections.abc import Callable
from typing import Any

from deepspeed_ext.threads import AwaitedThread, is_awaited

_here: int | None = None  # the thread that collects; it is one at a time
_under_way: set[AwaitedThread] = set()


def is_collecting() -> bool:
    """Return whether the garbage collector has called this."""
    return _here == threading.get_ident()


def end_outside(end: Callable[[], object]) -> None:
    """Call a function that may wait: now, or in a thread of its own if the collector calls this.

    The main thread waits for none when Python ends, and nobody waits for it: then it is now, too.
    """
    if not (is_collecting() and is_awaited()):
        end()
        return
    thread = AwaitedThread(end, "deepspeed_ext-collected")
    _under_way.add(thread)
    # Thread.start() takes locks of threading, which the current thread may be in the middle of.
    try:
        _thread.start_new_thread(_run, (thread,))
    except BaseException:
        _under_way.discard(thread)
        raise


def await_collected() -> None:
    """Wait until all is over that was left to threads: what it held is free then."""
    for thread in list(_under_way):
        thread.await_end()


def _run(thread: AwaitedThread) -> None:
    try:
        thread.start()
    except RuntimeError:  # there can be no more threads, but this one is there
        thread.run()
    thread.await_end()
    _under_way.discard(thread)


def _note(phase: str, _: Any) -> None:
    global _here
    _here = threading.get_ident() if phase == "start" else None


gc.callbacks.append(_note)
atexit.register(await_collected)  # one may not have started when Python waits for threads
os.register_at_fork(after_in_child=_under_way.clear)
