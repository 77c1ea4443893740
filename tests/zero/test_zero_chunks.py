"""Chunks of tensors in the files of a checkpoint: written, read in parts, copied meanwhile."""

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_writes import Engine

from deepspeed_ext.io import AsyncIO
from deepspeed_ext.zero.checkpoint import data_file, reading
from deepspeed_ext.zero.checkpoint.reading import Wanted
from deepspeed_ext.zero.checkpoint.staging import staged

MIB = 1 << 20


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncIO]:
    with AsyncIO() as made:
        yield made


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few numbers are several blocks, and are read in several pieces."""
    for module in (reading, data_file):
        monkeypatch.setattr(module, "BLOCK", 32)
    monkeypatch.setattr(reading, "_PIECE", 64)


def boxes(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """All parts of a tensor, the empty ones among them."""
    ranges = [[slice(a, b) for a in range(n + 1) for b in range(a, n + 1)] for n in shape]
    return itertools.product(*ranges)


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(), (37,), (4, 7), (4, 2, 3), (2, 1, 3, 2)])
def test_every_part_of_a_chunk(
    shape: tuple[int, ...], dtype: torch.dtype, engine: AsyncIO, tmp_path: Path
) -> None:
    """Each part gets its own elements, whatever its memory looks like, and no other element."""
    chunk = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    before = {"before": torch.ones(3, dtype=torch.int8), "chunk": chunk.to(torch.float32)}
    piece = data_file.write(os.fspath(tmp_path / "file"), before, engine)["chunk"]
    wanted, expected = [], []
    for i, box in enumerate(boxes(shape)):
        want = chunk[box].to(dtype)
        around = torch.full([n + i % 2 for n in want.shape], -1, dtype=dtype)
        if i % 3 == 0:  # columns before rows
            around = around.mT.contiguous().mT if around.dim() > 1 else around
        into = around[tuple(slice(n) for n in want.shape)]
        offsets = tuple(part.start for part in box)
        wanted.append(Wanted(piece, shape, offsets, into, torch.float32, "chunk"))
        whole = torch.full_like(around, -1)
        whole[tuple(slice(n) for n in want.shape)] = want
        expected.append((around, whole))
    reading.read(os.fspath(tmp_path), wanted, engine)
    for part, (got, want) in zip(wanted, expected, strict=True):
        assert torch.equal(got, want), (part.offsets, part.into.shape)


def test_reads_have_ended_when_one_has_failed(engine: AsyncIO, tmp_path: Path) -> None:
    """They would go on into memory of somebody else."""
    tensors = {name: torch.rand(50) for name in "abc"}
    pieces = data_file.write(os.fspath(tmp_path / "file"), tensors, engine)
    with (tmp_path / "file").open("r+b") as file:
        file.seek(pieces["a"].offset)
        file.write(b"\0")
    into = {name: torch.empty(50) for name in tensors}
    parts = [Wanted(pieces[n], (50,), (0,), into[n], torch.float32, n) for n in tensors]
    own = Engine()
    with pytest.raises(
        OSError, match=r"zero\.load: 'a' in .*/file has crc32c .* not what was saved"
    ):
        reading.read(os.fspath(tmp_path), parts, own)
    assert [answer.is_asked for answer in own.answers] == [True] * 3


def test_writes_have_ended_when_one_has_failed(tmp_path: Path) -> None:
    tensors = {name: torch.rand(MIB) for name in "abc"}
    own = Engine(OSError(errno.EIO, "broken"))
    with pytest.raises(OSError, match="broken"):
        data_file.write(os.fspath(tmp_path / "file"), tensors, own)
    assert len(own.answers) > 3 and all(answer.is_asked for answer in own.answers)
    assert list(tmp_path.iterdir()) == []


def test_dtypes_that_files_lack_are_named(engine: AsyncIO, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^zero: a tensor has dtype torch\.complex128, expected"):
        tensors = {"a": torch.ones(2, dtype=torch.complex128)}
        data_file.write(os.fspath(tmp_path / "file"), tensors, engine)


def test_copies_that_outgrow_their_room() -> None:
    """By a little, as by a step count that is new; and memory is used again where it is enough."""
    few = {name: torch.rand(16) for name in "ab"}
    copies, room = staged(few, None)
    assert room is not None and room.numel() == 128
    again, same = staged(few, room)
    assert same is room and all(torch.equal(again[n], t) for n, t in few.items())
    more = few | {"c": torch.rand(1)}
    copies, room = staged(more, room)
    assert all(torch.equal(copies[n], t) for n, t in more.items())
