"""The native File: open modes, length, space, scratch files, closing."""

import errno
import os
import re
import threading
from pathlib import Path

import pytest
import torch
from aio_cases import BLOCK, bytes_of, payload
from held_memory import HeldMemory

from deepspeed_ext import io


@pytest.fixture
def file(tmp_path: Path) -> io.File:
    return io.File(str(tmp_path / "file"), "update")


@pytest.mark.parametrize("mode", ["write", "update"])
def test_opening_to_write_creates_and_never_truncates(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "file"
    io.File(str(path), mode).close()
    assert path.stat().st_size == 0
    path.write_bytes(b"content")
    io.File(str(path), mode).close()
    assert path.read_bytes() == b"content"


def test_opening_to_read_needs_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "file"))) as caught:
        io.File(str(tmp_path / "file"), "read")
    assert caught.value.errno == errno.ENOENT
    assert not list(tmp_path.iterdir())


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^File: mode is 'r', expected read, write or update$"):
        io.File(str(tmp_path / "file"), "r")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "error", "text"),
    [
        ("", ValueError, "is '', expected the path of a file or folder"),
        (b"", ValueError, "is '', expected the path of a file or folder"),
        (b"a\0b", ValueError, "is 'a\\x00b', expected one without zero bytes"),
        (Path("a\0b"), ValueError, "is 'a\\x00b', expected one without zero bytes"),
        (7, TypeError, "is an int, expected a str or os.PathLike"),
        (None, TypeError, "is a NoneType, expected a str or os.PathLike"),
    ],
)
def test_what_is_no_path_is_refused(path: object, error: type[Exception], text: str) -> None:
    """As everywhere else in the package, with operation and argument."""
    for mode in ("read", "write", "update"):
        with pytest.raises(error) as caught:
            io.File(path, mode)
        assert str(caught.value) == f"File: path {text}"
    with pytest.raises(error) as caught:
        io.File.scratch(path)
    assert str(caught.value) == f"File.scratch: directory {text}"


def test_what_a_file_says_of_itself(tmp_path: Path, file: io.File) -> None:
    assert file.path == str(tmp_path / "file")
    assert file.size() == 0 and not file.closed
    file.truncate(10_000)
    assert file.size() == os.stat(file.path).st_size == 10_000
    file.allocate(8_000, 4_000)
    assert file.size() == 12_000
    file.truncate(5)
    assert file.size() == 5
    file.sync()
    here = os.statvfs(tmp_path)
    assert abs(file.free_bytes() - here.f_bavail * here.f_frsize) < 4 << 30  # others write, too
    assert os.path.samefile(f"/proc/self/fd/{file.fileno()}", file.path)
    for alignment in (file.offset_alignment, file.memory_alignment):
        assert not file.direct or (alignment > 0 and alignment & (alignment - 1) == 0)


def test_allocated_space_is_there(tmp_path: Path, file: io.File) -> None:
    file.allocate(0, 1 << 20)
    assert os.stat(file.path).st_blocks * 512 >= 1 << 20


def test_no_direct_io_on_tmpfs(tmpfs: Path) -> None:
    file = io.File(str(tmpfs / "file"), "update")
    assert file.direct in (True, False)  # newer kernels have it there
    file.close()


def test_a_closed_file(engine: io.AsyncIO, file: io.File) -> None:
    engine.write(payload(3 * BLOCK), file).result()
    file.close()
    assert file.closed
    file.close()
    uses = {
        "size": file.size,
        "sync": file.sync,
        "truncate": lambda: file.truncate(0),
        "allocate": lambda: file.allocate(0, 1),
        "free_bytes": file.free_bytes,
        "fileno": file.fileno,
        "write": lambda: engine.write(payload(1), file),
        "read": lambda: engine.read(payload(1), file),
    }
    for use in uses.values():
        with pytest.raises(
            ValueError, match=f"^aio: file {re.escape(file.path)} is closed, expected "
        ):
            use()
    assert os.stat(file.path).st_size == 3 * BLOCK
    assert engine.wait() == 1


def test_closing_a_file_leaves_its_requests_alone(engine: io.AsyncIO, file: io.File) -> None:
    content = bytes_of(payload(4 * BLOCK))
    with HeldMemory(4 * BLOCK) as held:
        future = engine.write(held.tensor(), file)
        held.wait_until_touched()
        file.close()
        held.release(content)
        future.result()
    assert Path(file.path).read_bytes() == content


def test_a_file_that_loses_its_name_keeps_its_content(engine: io.AsyncIO, file: io.File) -> None:
    tensor = payload(4 * BLOCK + 5)
    os.unlink(file.path)
    engine.write(tensor, file).result()
    assert torch.equal(engine.read(torch.zeros_like(tensor), file).result(), tensor)
    assert not os.path.exists(file.path)


@pytest.mark.parametrize("where", ["tmp_path", "tmpfs"])
def test_a_scratch_file_has_no_name(
    engine: io.AsyncIO, where: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(where)
    scratch, tensor = io.File.scratch(str(folder)), payload(4 * BLOCK + 5)
    assert not list(folder.iterdir())
    assert os.fstat(scratch.fileno()).st_nlink == 0
    engine.write(tensor, scratch, offset=77).result()
    assert scratch.size() == 77 + tensor.numel()
    got = torch.zeros_like(tensor)
    assert torch.equal(engine.read(got, scratch, offset=77).result(), tensor)


def test_a_scratch_file_needs_its_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "missing"))):
        io.File.scratch(str(tmp_path / "missing"))


def test_a_full_disk_is_seen_by_allocate(small_disk: Path) -> None:
    file = io.File(str(small_disk / "file"), "update")
    with pytest.raises(OSError, match="No space left on device") as caught:
        file.allocate(0, 1 << 30)
    assert caught.value.errno == errno.ENOSPC
    assert str(small_disk / "file") in str(caught.value)
    file.close()


def test_one_file_for_many_threads(engine: io.AsyncIO, file: io.File) -> None:
    parts = [payload(BLOCK + 100, seed=i) for i in range(8)]

    def write(i: int) -> None:
        engine.write(parts[i], file, offset=i * (BLOCK + 100)).result()

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Path(file.path).read_bytes() == b"".join(map(bytes_of, parts))
