"""A lock between processes that the kernel frees when its holder dies, with a bounded wait."""

import fcntl
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import trust
from .errors import Unavailable
from .log import logger

_POLL_SECONDS = 0.05
_FIRST_WORD_SECONDS = 5.0
_DEFAULT_WAIT_SECONDS = 600.0


_OPEN: set[int] = set()  # descriptors of the locks that this process holds or waits for
_OPENING = threading.RLock()


def _close_in_child() -> None:
    """Leave the parent's locks to it: through a child's copies they would outlive it."""
    for descriptor in _OPEN:
        os.close(descriptor)
    _OPEN.clear()
    _OPENING.release()


os.register_at_fork(
    before=_OPENING.acquire,
    after_in_parent=_OPENING.release,
    after_in_child=_close_in_child,
)


@contextmanager
def held(path: Path, wait: float | None = None) -> Iterator[None]:
    """Hold the lock file `path`; raise Unavailable, naming the holder, after `wait` seconds.

    The file stays: removing it would let two processes lock two different files of one name. Nobody
    else can open it: whoever can, can lock it.
    """
    limit = wait_seconds() if wait is None else wait
    trust.check(path)
    with _OPENING:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _OPEN.add(descriptor)
    owner = os.getpid()
    try:
        os.fchmod(descriptor, 0o600)  # it may be of an older version
        _acquire(descriptor, path, limit)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{owner} {socket.gethostname()}".encode(), 0)
        try:
            yield
        finally:
            if os.getpid() == owner:
                os.ftruncate(descriptor, 0)
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        if os.getpid() == owner:
            _OPEN.discard(descriptor)
            os.close(descriptor)


def check_process(owner: int) -> None:
    """Raise in a child that a fork has put into the middle of its parent's build."""
    if os.getpid() != owner:
        raise RuntimeError(
            f"process {os.getpid()} is a fork of process {owner} from the middle of compiling an"
            " op; the parent goes on with that: load the op again"
        )


def wait_seconds() -> float:
    """Return how long to wait for another process: DS_EXT_LOCK_TIMEOUT or ten minutes."""
    text = os.environ.get("DS_EXT_LOCK_TIMEOUT", "")
    try:
        seconds = float(text) if text else _DEFAULT_WAIT_SECONDS
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise Unavailable(
            f"DS_EXT_LOCK_TIMEOUT is {text!r}, expected seconds", "set it right or unset it"
        )
    return seconds


def _acquire(descriptor: int, path: Path, limit: float) -> None:
    owner = os.getpid()
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
        check_process(owner)


def _holder(descriptor: int) -> tuple[str, str]:
    words = os.pread(descriptor, 200, 0).decode(errors="replace").split()
    return (words[0], words[1]) if len(words) == 2 else ("<unknown>", "<unknown>")
