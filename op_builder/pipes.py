"""What every program here does about output that cannot be written: end, and say why in a line.

Where nobody reads it any more, as in `| head`, there is nothing to say.
"""

import functools
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

_UNREAD = 141  # as a shell reports a program that SIGPIPE has ended
_UNWRITTEN = 1


def program(main: Callable[[list[str] | None], int]) -> Callable[..., int]:
    """Make `main` end without a traceback, and with a status, when its output cannot be written.

    When its reader has gone, as in `| head`, the status is 141. When the disk is full, or standard
    output is closed, one line on standard error says so, and the status is 1. If `main` returns
    another one, it is that. Work that was under way ends as by any other error, so that what must
    be put away is.

    Args:
        main: takes the command line, None for that of this process, and returns the exit status.
    """

    @functools.wraps(main)
    def run(arguments: list[str] | None = None) -> int:
        if sys.stdout is None:  # print would drop all, and the next file be standard output
            return _say("is closed, expected an open one; send it to /dev/null to drop it")
        output, end = _Output(sys.stdout), None
        sys.stdout = cast(TextIO, output)
        try:
            status = main(arguments)
        except SystemExit as error:  # after --help, of which argparse ignores how it is written
            end, status = error, 0
        except BrokenPipeError:
            if not output.failure and not any(map(_has_no_reader, (output.stream, sys.stderr))):
                raise  # it was another pipe
            status = 0 if output.failure else _UNREAD
        finally:
            sys.stdout = output.stream
            _drop_what_cannot_be_written(output)
            _drop_what_cannot_be_written(sys.stderr)
        failure = output.failure
        if failure is None and end is not None:
            raise end
        if isinstance(failure, BrokenPipeError):
            return status or _UNREAD
        if failure is not None:
            said = _say(f"cannot be written, {failure.strerror}, expected room for all of it")
            return status or said
        return status

    return run


class _Unwritable(BrokenPipeError):
    """Standard output cannot be written. Programs let it pass, as that nobody reads it."""


class _Output:
    """Standard output, which remembers why it could not be written: not everybody minds."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.failure: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write text."""
        with self._remembered():
            return self.stream.write(text)

    def flush(self) -> None:
        """Write what is left."""
        with self._remembered():
            self.stream.flush()

    @contextmanager
    def _remembered(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error
            if isinstance(error, BrokenPipeError):
                raise
            raise _Unwritable(error.errno, error.strerror) from error


def _say(text: str) -> int:
    """Say in a line what is the matter with standard output, and return the status for it."""
    if sys.stderr is not None:
        sys.stderr.write(f"standard output {text}\n")
        _drop_what_cannot_be_written(sys.stderr)
    return _UNWRITTEN


def _drop_what_cannot_be_written(stream: Any) -> None:
    """Write what is left, to nowhere if need be: Python, when it ends, would complain."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
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
