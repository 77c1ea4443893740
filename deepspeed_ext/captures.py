"""What is no part of a CUDA graph, and goes on while one is captured.

While one is captured in torch's usual mode, CUDA lets no thread wait for a stream or an event, nor
ask for one: the call fails, and the capture with it. What waits may well have nothing to do with
the graph: a thread that offloads, or the garbage collector, which runs in the middle of all. So it
says so.
"""

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: a capture elsewhere is no reason to refuse calls


@contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread do what would end the captures of others, and its own.

    What is captured is still not waited for. Nothing is done where CUDA is not in use yet.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # not in a report, nor while torch comes
    exchange = _exchange() if cuda is not None and cuda.is_initialized() else None
    mode = ctypes.c_int(_RELAXED)  # then the one from before
    if exchange is None or exchange(ctypes.byref(mode)) != 0:
        yield
        return
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _exchange() -> Callable[[object], int] | None:
    """Return what sets how captures look upon a thread, and tells how they did; None: nothing."""
    try:
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # another kind of device
        return None
    exchange.argtypes, exchange.restype = [ctypes.c_void_p], ctypes.c_int
    return exchange
