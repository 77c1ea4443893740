"""Data for the I/O tests, and a batch in which one request fails."""

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from deepspeed_ext import io

BLOCK = 8192  # of the `engine` fixture


def payload(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Return random bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return what a file of this tensor holds."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    flat = flat.as_strided(flat.shape, (1,))  # a single element may have another stride
    return flat.view(torch.uint8).numpy().tobytes()


@contextlib.contextmanager
def one_fails(
    engine: io.AsyncIO, folder: Path, code: int, text: str
) -> Iterator[Callable[[io.Future], None]]:
    """Run a batch of good requests around those that the body gives to the function it gets.

    These must fail with this errno and text (a regular expression); all others must be right.
    """
    source = folder / "batch-source"
    expected = payload(5 * BLOCK + 77, seed=1)
    source.write_bytes(bytes_of(expected))
    bad: list[io.Future] = []
    written: list[tuple[Path, torch.Tensor, io.Future]] = []
    read: list[io.Future] = []

    def good(count: int) -> None:
        for _ in range(count):
            index = len(written)
            path, tensor = folder / f"batch-{index}", payload(3 * BLOCK + index, seed=index)
            written.append((path, tensor, engine.write(tensor, path)))
            read.append(engine.read(torch.zeros_like(expected), source))

    good(4)
    yield bad.append
    good(4)
    assert bad
    for future in bad:
        error = future.exception()
        assert isinstance(error, OSError)
        assert error.errno == code, errno.errorcode.get(error.errno or 0)
        assert error.strerror and re.fullmatch(text, error.strerror), error.strerror
        with pytest.raises(OSError, match=text):
            future.result()
    for future in read:
        assert torch.equal(future.result(), expected)
    for path, tensor, future in written:
        future.result()
        assert path.read_bytes() == bytes_of(tensor)
    engine.wait()  # somebody has seen each failure, so none is raised


def request_text(what: str, nbytes: int, offset: int, path: os.PathLike[str], why: str) -> str:
    """Return the text of a failure as a regular expression."""
    return (
        f"aio: {what} of {nbytes} bytes at offset {offset} of {re.escape(os.fspath(path))} "
        f"{re.escape(why)}; [0-9]+ bytes are free there"
    )
