"""What the tests of a checkpoint's files share: transfers that fail, and what is in a folder."""

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from deepspeed_ext.io import AsyncIO
from deepspeed_ext.io.file import File


def fail_writes_of(patch: pytest.MonkeyPatch, beginning: bytes) -> None:
    """Let writes fail of what begins so; as an engine's, the failure is known to who asks."""
    write = AsyncIO.write

    def failing(self: AsyncIO, tensor: Tensor, *where: Any) -> Any:
        if bytes(tensor[: len(beginning)].tolist()) != beginning:
            return write(self, tensor, *where)
        failed: Future[Tensor] = Future()
        failed.set_exception(OSError("the disk has gone"))
        return failed

    patch.setattr(AsyncIO, "write", failing)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Answer:
    """A Future that notes who asked for it, and that its file was open then."""

    def __init__(self, file: File, error: OSError | None) -> None:
        self._file, self._error = file, error
        self.is_asked = False

    def exception(self) -> OSError | None:
        assert not self._file.closed
        self.is_asked = True
        return self._error

    def result(self) -> None:
        if self.exception() is not None:
            raise self._error


class Engine:
    """Moves bytes at once. As an engine does that has many transfers, it fails only when asked."""

    def __init__(self, *errors: OSError | None) -> None:
        self._errors = list(errors)
        self.answers: list[Answer] = []

    def read(self, memory: Tensor, file: File, offset: int) -> Answer:
        os.preadv(file.fileno(), [memory.numpy()], offset)
        return self._answer(file)

    def write(self, memory: Tensor, file: File, offset: int) -> Answer:
        return self._answer(file)

    def _answer(self, file: File) -> Answer:
        self.answers.append(Answer(file, self._errors.pop(0) if self._errors else None))
        return self.answers[-1]
