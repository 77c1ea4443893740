"""Memory that no thread and no system call gets into until it is released (userfaultfd).

A request whose tensor lies there is in flight for as long as a test wants, in every backend. The
tensor begins at an odd address, so that what stops is the engine's copy to or from its own pages,
with no lock of the kernel held.
"""

import ctypes
import fcntl
import mmap
import os
import select
import struct
from types import TracebackType

import pytest
import torch

_SYSCALL = {"x86_64": 323, "aarch64": 282}
_PATIENCE = 30.0  # seconds for a request to get to the memory
_VERSION, _MISSING, _USER_MODE_ONLY = 0xAA, 1, 1
_API, _REGISTER, _COPY = 0xC018AA3F, 0xC020AA00, 0xC028AA03  # requests of ioctl


def _open() -> int:
    """Return a descriptor; who has no right to stop the kernel too, stops this process only."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = _SYSCALL.get(os.uname().machine, -1)
    for flags in (0, _USER_MODE_ONLY):
        descriptor = int(libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | flags))
        if descriptor >= 0:
            return descriptor
    pytest.skip(f"userfaultfd is refused here: {os.strerror(ctypes.get_errno())}")


class HeldMemory:
    """Some present pages, then pages that stop whoever touches them.

    Args:
        nbytes: bytes of the tensor, whole pages: what is left over would go to the kernel as it is.
        present: bytes at its front that may be used right away, whole pages.
    """

    def __init__(self, nbytes: int, present: int = 0) -> None:
        self._descriptor = _open()
        self.nbytes = nbytes
        length = (nbytes // mmap.PAGESIZE + 1) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_NOHUGEPAGE)  # or the first touch would bring all pages
        self.memory[:present] = bytes(present)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + present
        self._range = (first, length - present)
        self._control(_API, "QQQ", _VERSION, 0, 0)
        self._control(_REGISTER, "QQQQ", *self._range, _MISSING, 0)

    def _control(self, request: int, layout: str, *values: int) -> None:
        fcntl.ioctl(self._descriptor, request, bytearray(struct.pack(layout, *values)))

    def tensor(self) -> torch.Tensor:
        """Return the memory; only a request in flight may use what is held."""
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=self.nbytes, offset=1)

    def wait_until_touched(self) -> None:
        """Return when a request has come to the pages that are held."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        assert poll.poll(_PATIENCE * 1000), "no request came to the memory"

    def release(self, content: bytes | None = None) -> None:
        """Let all go on; a tensor without present bytes has this content, or is zero."""
        if self._descriptor < 0:
            return
        if content is not None:
            address, nbytes = self._range
            source = ctypes.create_string_buffer(b"\0" + content, nbytes)
            self._control(_COPY, "QQQQq", address, ctypes.addressof(source), nbytes, 0, 0)
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)  # which ends the hold

    def __enter__(self) -> "HeldMemory":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
