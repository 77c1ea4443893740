"""Engines for the tests of TensorStore: one that puts every request off, one that fails."""

import os
from collections.abc import Callable

import torch
from torch import Tensor

from deepspeed_ext import io
from deepspeed_ext.io.tensors import plain


class _Later:
    """A job that starts only when somebody waits for it, or when it is told to."""

    def __init__(self, start: Callable[[], io.Future]) -> None:
        self.start = start
        self.inner: io.Future | None = None

    def run(self) -> None:
        if self.inner is None:
            self.inner = self.start()
            self.inner.wait()

    def wait(self, seconds: float) -> bool:
        if seconds > 0:
            self.run()
        return self.inner is not None

    def done(self) -> bool:
        return self.inner is not None

    def check(self) -> None:
        assert self.inner is not None
        self.inner.check()


class LazyIO(io.AsyncIO):
    """Nothing happens before it is waited for, so that everything is in flight for long."""

    def __init__(self) -> None:
        super().__init__(backend="threads")
        self.jobs: list[tuple[str, _Later]] = []

    def read(self, tensor: Tensor, path: object, offset: int = 0) -> io.Future:
        return self._later("read", tensor, lambda: super(LazyIO, self).read(tensor, path, offset))

    def write(
        self, tensor: Tensor, path: object, offset: int = 0, truncate: bool = False
    ) -> io.Future:
        return self._later("write", tensor, lambda: super(LazyIO, self).write(tensor, path, offset))

    def ran(self) -> list[str]:
        """Return what has happened, in the order of the calls."""
        return [verb for verb, job in self.jobs if job.inner is not None]

    def fail(self, number: int, code: int) -> None:
        """Have this request, of those that have not happened, fail when it does."""
        self.jobs[number][1].start = lambda: io.Future(_Failed(code), torch.empty(0))

    def _later(self, verb: str, tensor: Tensor, start: Callable[[], io.Future]) -> io.Future:
        job = _Later(start)
        self.jobs.append((verb, job))
        return io.Future(job, tensor)


class _Failed:
    """A job that is done, badly."""

    def __init__(self, code: int) -> None:
        self._code = code

    def wait(self, seconds: float) -> bool:
        return True

    def done(self) -> bool:
        return True

    def check(self) -> None:
        raise OSError(self._code, f"injected {os.strerror(self._code)}")


class FailingIO(io.AsyncIO):
    """Requests fail with the errno `code` while it is not 0; of a write, half is on the disk."""

    code = 0

    def read(self, tensor: Tensor, path: object, offset: int = 0) -> io.Future:
        if self.code:
            return io.Future(_Failed(self.code), tensor)
        return super().read(tensor, path, offset)

    def write(
        self, tensor: Tensor, path: object, offset: int = 0, truncate: bool = False
    ) -> io.Future:
        if self.code:
            flat = plain(tensor).reshape(-1).view(torch.uint8)
            super().write(flat[: len(flat) // 2], path, offset).result()
            return io.Future(_Failed(self.code), tensor)
        return super().write(tensor, path, offset)
