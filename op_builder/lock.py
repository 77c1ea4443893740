"""A lock between processes that the kernel frees when its holder dies, with a bounded wait."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import Unavailable
from .log import logger

_POLL_SECONDS = 0.05
_FIRST_WORD_SECONDS = 5.0
_DEFAULT_WAIT_SECONDS = 600.0


@contextmanager
def held(path: Path, wait: float | None = None) -> Iterator[None]:
    """Hold the lock file `path`; raise Unavailable, naming the holder, after `wait` seconds.

    The file stays: removing it would let two processes lock two different files of one name.
    """
    limit = wait_seconds() if wait is None else wait
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _acquire(descriptor, path, limit)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}".encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def wait_seconds() -> float:
    """Return how long to wait for another process: DS_EXT_LOCK_TIMEOUT or ten minutes."""
    text = os.environ.get("DS_EXT_LOCK_TIMEOUT", "")
    try:
        return float(text) if text else _DEFAULT_WAIT_SECONDS
    except ValueError:
        raise Unavailable(
            f"DS_EXT_LOCK_TIMEOUT is {text!r}, expected seconds", "set it right or unset it"
        ) from None


def _acquire(descriptor: int, path: Path, limit: float) -> None:
    started = time.monotonic()
    next_word = _FIRST_WORD_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - started
        pid, host = _holder(descriptor)
        if waited >= limit:
            raise Unavailable(
                f"process {pid} on {host} has held {path} for more than {limit:g} s",
                f"wait for it, or end it there with: kill {pid}; DS_EXT_LOCK_TIMEOUT sets the wait",
            )
        if waited >= next_word:
            logger.info("waited %.0f s for process %s on %s (%s)", waited, pid, host, path.name)
            next_word += 6 * _FIRST_WORD_SECONDS
        time.sleep(_POLL_SECONDS)


def _holder(descriptor: int) -> tuple[str, str]:
    words = os.pread(descriptor, 200, 0).decode(errors="replace").split()
    return (words[0], words[1]) if len(words) == 2 else ("<unknown>", "<unknown>")
