"""What is no part of a CUDA graph, and goes on while one is captured.

While a thread captures one, CUDA lets no thread wait for a stream or an event, or ask for one:
the call fails, and the capture with it. What waits may well have nothing to do with the graph: a
thread that offloads, or the garbage collector, which runs in the middle of all. So it says so.
"""

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: calls are refused for what they are alone


@contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread do what would end the captures of others, and its own.

    A stream that is captured is still not waited for.
    """
    torch = sys.modules.get("torch")  # a report works without
    exchange = _exchange() if torch is not None and torch.cuda.is_initialized() else None
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
