"""What files and disks do wrong: an OSError that says what, and nothing else is harmed."""

import contextlib
import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from aio_cases import BLOCK, bytes_of, one_fails, payload, request_text
from held_memory import HeldMemory
from refuse_calls import where_refused

from deepspeed_ext import io

AsNobody = Callable[[], contextlib.AbstractContextManager[None]]


@pytest.mark.parametrize("offset", [0, 100, 8192, 9000, 9216, 20_000])
@pytest.mark.parametrize("nbytes", [4096, 4 * BLOCK + 3])
def test_a_read_beyond_the_end(
    engine: io.AsyncIO, tmp_path: Path, offset: int, nbytes: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes_of(payload(9216)))
    there = max(0, 9216 - offset)
    if there >= nbytes:
        assert engine.read(payload(nbytes), path, offset).exception() is None
        return
    why = f"returned {there}: the file ends at 9216"
    text = request_text("read", nbytes, offset, path, why)
    with one_fails(engine, tmp_path, errno.ENODATA, text) as bad:
        bad(engine.read(payload(nbytes), path, offset))
        bad(engine.read(payload(nbytes), io.File(str(path), "read"), offset))


@pytest.mark.parametrize("what", ["read", "write"])
@pytest.mark.parametrize("nbytes", [0, 10, 3 * BLOCK])
def test_a_missing_folder(engine: io.AsyncIO, tmp_path: Path, what: str, nbytes: int) -> None:
    path = tmp_path / "missing" / "file"
    text = request_text(what, nbytes, 5, path, "failed: No such file or directory")
    with one_fails(engine, tmp_path, errno.ENOENT, text) as bad:
        bad(getattr(engine, what)(payload(nbytes), path, 5))
    assert not path.parent.exists()


def test_a_file_where_a_folder_should_be(engine: io.AsyncIO, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "below"
    text = request_text("write", 10, 0, path, "failed: Not a directory")
    with one_fails(engine, tmp_path, errno.ENOTDIR, text) as bad:
        bad(engine.write(payload(10), path))


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_folder_as_the_file(engine: io.AsyncIO, tmp_path: Path, what: str) -> None:
    (tmp_path / "folder").mkdir()
    text = request_text(what, 10, 0, tmp_path / "folder", "failed: Is a directory")
    with one_fails(engine, tmp_path, errno.EISDIR, text) as bad:
        bad(getattr(engine, what)(payload(10), tmp_path / "folder"))


def test_a_name_that_is_too_long(engine: io.AsyncIO, tmp_path: Path) -> None:
    path = tmp_path / ("n" * 256)
    text = request_text("write", 10, 0, path, "failed: File name too long")
    with one_fails(engine, tmp_path, errno.ENAMETOOLONG, text) as bad:
        bad(engine.write(payload(10), path))


def test_a_name_that_is_not_utf_8(engine: io.AsyncIO, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff\xfe")
    error = engine.read(payload(10), path).exception()
    assert isinstance(error, FileNotFoundError)
    assert f"aio: read of 10 bytes at offset 0 of {tmp_path}/" in str(error)


@pytest.mark.parametrize("nbytes", [10, 3 * BLOCK])
def test_a_file_opened_for_the_other_direction(
    engine: io.AsyncIO, tmp_path: Path, nbytes: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes_of(payload(nbytes)))
    for mode, what in (("read", "write"), ("write", "read")):
        text = request_text(what, nbytes, 0, path, "failed: Bad file descriptor")
        with one_fails(engine, tmp_path, errno.EBADF, text) as bad:
            bad(getattr(engine, what)(payload(nbytes, seed=1), io.File(str(path), mode)))
    assert path.read_bytes() == bytes_of(payload(nbytes))


@pytest.mark.parametrize(("what", "mode"), [("write", 0o444), ("read", 0o222)])
def test_no_permission(
    engine: io.AsyncIO, open_folder: Path, as_nobody: AsNobody, what: str, mode: int
) -> None:
    path = open_folder / "file"
    path.write_bytes(b"content")
    path.chmod(mode)
    text = request_text(what, 5, 0, path, "failed: Permission denied")
    with one_fails(engine, open_folder, errno.EACCES, text) as bad:
        engine.wait()  # those before it are not meant
        with as_nobody():
            future = getattr(engine, what)(payload(5), path)
            assert isinstance(future.exception(), PermissionError)
        bad(future)
    path.chmod(0o644)
    assert path.read_bytes() == b"content"


def test_a_full_disk(engine: io.AsyncIO, small_disk: Path) -> None:
    path, tensor = small_disk / "file", payload(20 << 20)
    text = request_text("write", 20 << 20, 0, path, "failed: No space left on device")
    with one_fails(engine, small_disk, errno.ENOSPC, text) as bad:
        future = engine.write(tensor, path)
        error = future.exception()
        path.unlink()  # the room that it took is for the others
        bad(future)
    assert "bytes are free there" in str(error)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_disk_that_fills_up(engine: io.AsyncIO, small_disk: Path, shift: int) -> None:
    """Small writes until there is no room: each is whole or an error, and errors go on coming."""
    tensor = payload(BLOCK * 16 + shift)[shift:]
    futures = [engine.write(tensor, small_disk / f"{i}") for i in range(200)]
    errors = [future.exception() for future in futures]
    assert any(errors) and not all(errors)
    for i, error in enumerate(errors):
        if error is None:
            assert (small_disk / f"{i}").read_bytes() == bytes_of(tensor)
        else:
            assert isinstance(error, OSError) and error.errno == errno.ENOSPC
    for entry in small_disk.iterdir():
        entry.unlink()
    engine.write(tensor, small_disk / "again").result()  # the engine lives on
    assert (small_disk / "again").read_bytes() == bytes_of(tensor)


def test_many_small_writes_on_a_full_disk(engine: io.AsyncIO, small_disk: Path) -> None:
    """Also what the page cache takes is not lost in silence once there is no room for it."""
    engine.write(payload(100), small_disk / "first").result()
    room = os.statvfs(small_disk)
    file = io.File(str(small_disk / "filler"), "update")
    with contextlib.suppress(OSError):
        for share in (1, 2, 4, 8, 16, 64):
            file.allocate(file.size(), room.f_bavail * room.f_frsize // share)
    while os.statvfs(small_disk).f_bavail:
        file.allocate(file.size(), room.f_frsize)
    text = request_text("write", 100, 0, small_disk / "second", "failed: No space left on device")
    error = engine.write(payload(100), small_disk / "second").exception()
    assert isinstance(error, OSError) and error.errno == errno.ENOSPC
    assert error.strerror is not None and error.strerror.endswith("; 0 bytes are free there")
    with pytest.raises(OSError, match=text):
        engine.write(payload(100), small_disk / "second").result()
    assert (small_disk / "first").read_bytes() == bytes_of(payload(100))


@contextlib.contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Let this process write no file that is longer; the signal for it is ignored by Python."""
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("nbytes", "offset"), [(10, 40 * BLOCK), (60 * BLOCK, 0), (60 * BLOCK + 5, 77), (BLOCK, 35001)]
)
def test_a_limit_on_the_size_of_files(
    engine: io.AsyncIO, tmp_path: Path, nbytes: int, offset: int
) -> None:
    """The limit lies within a block, so that one piece comes back short before the next fails."""
    path, limit = tmp_path / "file", 37_000 if offset == 35001 else 30 * BLOCK + 100
    text = request_text("write", nbytes, offset, path, "failed: File too large")
    with one_fails(engine, tmp_path, errno.EFBIG, text) as bad, file_size_limit(limit):
        future = engine.write(payload(nbytes), path, offset)
        assert future.exception() is not None
        bad(future)
    assert path.stat().st_size <= limit


def test_a_file_truncated_under_way(backend: str, tmp_path: Path) -> None:
    path, data = tmp_path / "file", payload(8 * BLOCK)
    path.write_bytes(bytes_of(data))
    with (
        io.AsyncIO(block_size=BLOCK, queue_depth=1, backend=backend) as engine,
        HeldMemory(8 * BLOCK, present=2 * BLOCK) as held,
    ):
        future = engine.read(held.tensor(), path)
        other = engine.read(torch.zeros(BLOCK, dtype=torch.uint8), path)
        held.wait_until_touched()  # two blocks are there, the third is on its way
        os.truncate(path, 4 * BLOCK + 1)
        held.release()
        why = f"returned {4 * BLOCK + 1}: the file ends at {4 * BLOCK + 1}"
        with pytest.raises(OSError, match=request_text("read", 8 * BLOCK, 0, path, why)) as caught:
            future.result()
        assert caught.value.errno == errno.ENODATA
        assert torch.equal(other.result(), data[:BLOCK])
        assert bytes_of(held.tensor()[: 2 * BLOCK]) == bytes_of(data[: 2 * BLOCK])


def test_a_file_system_without_direct_io(engine: io.AsyncIO, tmpfs: Path) -> None:
    tensor = payload(5 * BLOCK + 123)
    engine.write(tensor, tmpfs / "file", offset=77).result()
    assert (tmpfs / "file").read_bytes() == bytes(77) + bytes_of(tensor)
    got = torch.zeros_like(tensor)
    assert torch.equal(engine.read(got, tmpfs / "file", offset=77).result(), tensor)
    text = request_text("read", tensor.numel(), 0, tmpfs / "other", "failed: No such file or dire")
    with one_fails(engine, tmpfs, errno.ENOENT, text.replace("dire;", "directory;")) as bad:
        bad(engine.read(got, tmpfs / "other"))


def test_a_device_that_is_always_full(engine: io.AsyncIO) -> None:
    error = engine.write(payload(10), "/dev/full").exception()
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC
    assert "No space left on device" in str(error)


@pytest.mark.parametrize("path", ["/proc/self/status", "/proc/self/environ"])
def test_files_that_know_only_plain_reads(engine: io.AsyncIO, path: str) -> None:
    """The kernel's oldest interface refuses them."""
    content = Path(path).read_bytes()
    got = torch.zeros(16, dtype=torch.uint8)
    assert bytes_of(engine.read(got, path).result()) == content[:16]
    error = engine.read(torch.zeros(1 << 20, dtype=torch.uint8), path).exception()
    assert isinstance(error, OSError)
    assert error.errno == errno.ENODATA
    assert "the file ends at" in str(error)


@pytest.mark.parametrize("address", [0, 1])
def test_files_that_refuse_with_another_cause(engine: io.AsyncIO, address: int) -> None:
    error = engine.read(
        torch.zeros(9000, dtype=torch.uint8)[address:], "/proc/self/mem"
    ).exception()
    assert isinstance(error, OSError)
    assert error.errno == errno.EIO  # nothing is mapped at 0
    assert "Input/output error" in str(error)


def test_a_failure_ends_the_rest_of_its_request(engine: io.AsyncIO, tmp_path: Path) -> None:
    """A long read at the end of a short file does not go on asking for nothing."""
    path = tmp_path / "file"
    path.write_bytes(b"short")
    pieces = 10_000
    error = engine.read(torch.empty(pieces * BLOCK, dtype=torch.uint8), path).exception()
    assert isinstance(error, OSError)
    assert "returned 5: the file ends at 5" in str(error)
    assert engine.wait() >= 0


def libaio_limit() -> int:
    return int(Path("/proc/sys/fs/aio-max-nr").read_text())


def test_more_requests_than_the_system_has_for_linux_aio() -> None:
    threads = libaio_limit() // 4096 + 1
    if threads > 256:
        pytest.skip(f"fs.aio-max-nr is {libaio_limit()}, more than one engine asks for")
    with pytest.raises(OSError, match=r"fs\.aio-max-nr") as caught:
        io.AsyncIO(queue_depth=4096, threads=threads, backend="libaio")
    assert caught.value.errno == errno.EAGAIN


NO_RING, NO_AIO = {"io_uring_setup": errno.EPERM}, {"io_setup": errno.EAGAIN}


@pytest.mark.parametrize(
    ("refused", "takes"), [(NO_RING, "libaio"), (NO_RING | NO_AIO, "threads")], ids=str
)
def test_auto_goes_on_to_what_the_kernel_allows(
    tmp_path: Path, refused: dict[str, int], takes: str
) -> None:
    def run() -> str:
        with io.AsyncIO() as engine:
            engine.write(payload(3 * BLOCK), tmp_path / "file").result()
            return engine.backend

    assert where_refused(refused, run) == takes
    assert (tmp_path / "file").read_bytes() == bytes_of(payload(3 * BLOCK))


@pytest.mark.parametrize(
    ("name", "refused", "code", "text"),
    [
        ("io_uring", NO_RING, errno.EPERM, "io_uring.*Operation not permitted"),
        ("libaio", NO_AIO, errno.EAGAIN, r"libaio.*fs\.aio-max-nr"),
    ],
)
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_backend_that_is_forced_is_never_replaced(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    refused: dict[str, int],
    code: int,
    text: str,
    by: str,
) -> None:
    if by == "environment":
        monkeypatch.setenv("DS_EXT_AIO_BACKEND", name)
    with pytest.raises(OSError, match=text) as caught:
        where_refused(refused, lambda: io.AsyncIO(backend=name if by == "argument" else "auto"))
    assert caught.value.errno == code


def test_probe_says_the_errno_of_each_refusal() -> None:
    from deepspeed_ext.io._native import native

    found = where_refused(NO_RING | NO_AIO, lambda: native().probe_backends())
    assert found == {"io_uring": errno.EPERM, "libaio": errno.EAGAIN, "threads": 0}
