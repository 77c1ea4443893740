"""What the I/O engine finds on this machine, one line of text for each thing.

The native module is asked in a child process, so that a bad one cannot crash the caller, and only
where it is built already: nothing is compiled for a report.
"""

import errno
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from deepspeed_ext.io._native import native
from deepspeed_ext.io.engine.arguments import Settings
from deepspeed_ext.io.tuning.settings import device_of, saved
from deepspeed_ext.op_builder import loading
from deepspeed_ext.op_builder.registry import spec_of

_SECONDS = 10.0  # for the child


def backends() -> str:
    """Say of each backend that it works, or with which errno it does not."""
    found: dict[str, int] = _ask(_probe_backends)
    return ", ".join(f"{name} {_answer(code)}" for name, code in found.items())


def direct_io() -> str:
    """Say whether data passes by the page cache where this process puts scratch files."""
    path = scratch_path()
    granule, memory = _ask(_probe_direct_io)
    if granule:
        how = f"in units of {granule} bytes, from addresses that are multiples of {memory}"
    else:
        how = "none: everything goes through the page cache"
    return f"{how}; {path} is {device_of(path).file_system}"


def settings() -> str:
    """Say with which settings `io.tuned` answers for the scratch path."""
    path = scratch_path()
    found = saved(path)
    chosen = found or Settings()
    text = (
        f"blocks of {chosen.block_size >> 10} KiB, depth {chosen.queue_depth},"
        f" {chosen.threads} thread{'s' * (chosen.threads > 1)}, {chosen.backend}"
    )
    source = device_of(path).source
    if found:
        return f"{text}; tuned for {source}"
    return f"{text}; the defaults: python -m deepspeed_ext.io tune {path} finds better ones"


def scratch_path() -> str:
    """Return where scratch files go unless somebody says otherwise: TMPDIR or this folder."""
    return os.environ.get("TMPDIR") or os.getcwd()


def _answer(code: int) -> str:
    if code == 0:
        return "works"
    return f"does not: {errno.errorcode.get(code, str(code))} ({os.strerror(code)})"


def _probe_backends() -> dict[str, int]:
    return dict(native().probe_backends())


def _probe_direct_io() -> tuple[int, int]:
    """Return the alignment of file offsets and of memory; 0 where nothing is direct."""
    file = native().File.scratch(scratch_path())
    return (file.offset_alignment if file.direct else 0), file.memory_alignment


def _ask(question: Callable[[], Any]) -> Any:
    """Answer a question in a child process.

    Raises:
        RuntimeError: the module is not built, or the child failed.
    """
    library, _ = loading.status(spec_of("async_io"))
    if library is None:
        raise RuntimeError("async_io is not built; run: ds_report --build async_io")
    context = multiprocessing.get_context("fork")  # this process may have loaded much already
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer_and_send, args=(question, sender), daemon=True)
    child.start()
    sender.close()
    try:
        if not receiver.poll(_SECONDS):
            raise RuntimeError(f"async_io did not answer within {_SECONDS:g} s")
        answer = receiver.recv()
    except EOFError:
        child.join()
        raise RuntimeError(f"async_io ended its process with code {child.exitcode}") from None
    finally:
        child.kill()
        child.join()
        receiver.close()
    if isinstance(answer, Exception):
        raise RuntimeError(str(answer)) from answer
    return answer


def _answer_and_send(question: Callable[[], Any], sender: Connection) -> None:
    os.environ["DS_EXT_JIT"] = "0"  # in this child
    try:
        sender.send(question())
    except Exception as error:
        sender.send(RuntimeError(str(error).splitlines()[-1] if str(error) else repr(error)))
