"""What every program here does about its output: nothing, when nobody reads it any more."""

import functools
import os
import select
import sys
from collections.abc import Callable
from typing import TextIO

_STATUS = 141  # as a shell reports a program that SIGPIPE has ended


def program(main: Callable[[list[str] | None], int]) -> Callable[..., int]:
    """Make `main` end without a traceback when the reader of its output has gone, as in `| head`.

    Work that was under way ends as by any other error, so that what must be put away is.

    Args:
        main: takes the command line, None for that of this process, and returns the exit status.
    """

    @functools.wraps(main)
    def run(arguments: list[str] | None = None) -> int:
        try:
            return main(arguments)
        except BrokenPipeError:
            if not any(_has_no_reader(stream) for stream in (sys.stdout, sys.stderr)):
                raise  # it was another pipe
            return _STATUS
        finally:
            for stream in (sys.stdout, sys.stderr):
                _drop_what_nobody_reads(stream)

    return run


def _drop_what_nobody_reads(stream: TextIO | None) -> None:
    """Write what is left, to nowhere if need be: Python, when it ends, would complain."""
    if stream is None:
        return
    try:
        stream.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _has_no_reader(stream: TextIO | None) -> bool:
    if stream is None:
        return False
    try:
        descriptor = stream.fileno()
    except OSError:  # a stream in memory
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
