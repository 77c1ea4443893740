"""System calls that the kernel refuses, as a container or a sandbox has it (seccomp)."""

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest

T = TypeVar("T")
_NUMBERS = {
    "x86_64": {"io_setup": 206, "io_uring_setup": 425},
    "aarch64": {"io_setup": 0, "io_uring_setup": 425},
}
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # instructions of the kernel's packet filter
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000


def where_refused(refused: Mapping[str, int], run: Callable[[], T]) -> T:
    """Return what a function returns in a thread whose system calls fail with these errnos."""
    outcome: list[T | BaseException] = []

    def inside() -> None:
        try:
            _install(refused)
            outcome.append(run())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _install(refused: Mapping[str, int]) -> None:
    """Filter the calls of this thread and of those that it starts."""
    numbers = _NUMBERS.get(os.uname().machine)
    if numbers is None:
        pytest.skip(f"the numbers of system calls on {os.uname().machine} are not known here")
    steps = [(_LOAD, 0, 0, 0)]
    for name, code in refused.items():
        steps += [(_IF_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _ERRNO | code)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if libc.prctl(_SET_SECCOMP, _FILTER, program, 0, 0):
        pytest.skip(f"seccomp is refused here: {os.strerror(ctypes.get_errno())}")
