"""FreshPages: memory to read into, of huge pages unless they come slowly."""

import contextlib
import mmap
import time
from collections.abc import Callable
from typing import Any

import torch

from deepspeed_ext.io._native import native

_HUGE = 2 << 20
_PROBES = 2  # one alone may have been interrupted
# Seconds for a huge page. Clearing one takes 0.1 to 0.5 ms. A hypervisor that has taken free memory
# back gives it again in 4 to 8 ms: it takes back what lies free in large blocks, which is what huge
# pages are made of, while small ones mostly come from blocks that were in use a moment ago.
_SLOW = 1.5e-3


class FreshPages:
    """Gives memory for one job, which is to be filled at the speed of a disk.

    Direct transfers into huge pages are faster (on one machine twice as fast), but where each comes
    at a few milliseconds, the first read takes 2.5 times as long as into small pages. Nothing tells
    before, so the first ones of each piece of memory are touched and timed.

    Args:
        huge: gives a buffer of so many bytes in huge pages; None: the I/O engine does.
    """

    def __init__(self, huge: Callable[[int], Any] | None = None) -> None:
        self._huge, self._give = True, huge

    def take(self, nbytes: int) -> Any:
        """Return a writable buffer that begins on a page, and whose bytes are undefined."""
        if not self._huge:
            return _small_pages(nbytes)
        pages = native().Pages(nbytes) if self._give is None else self._give(nbytes)
        if nbytes >= _PROBES * _HUGE and _seconds_of_a_page(pages) > _SLOW:
            self._huge = False
            return _small_pages(nbytes)
        return pages


def _seconds_of_a_page(pages: Any) -> float:
    memory, least = torch.frombuffer(pages, dtype=torch.uint8), float("inf")
    for offset in range(0, _PROBES * _HUGE, _HUGE):
        begin = time.perf_counter()
        memory[offset] = 0
        least = min(least, time.perf_counter() - begin)
    return least


def _small_pages(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
