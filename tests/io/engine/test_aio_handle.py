"""aio_handle: the calls of existing code, and each place where older libraries lost data."""

import errno
import inspect
import os
import re
import socket
import stat
import subprocess
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import warm_python
from aio_cases import bytes_of, payload
from torch import Tensor

from deepspeed_ext import io
from deepspeed_ext.io.engine.handle import aio_handle

MIB = 1 << 20


@pytest.fixture
def handle() -> aio_handle:
    return aio_handle(block_size=8192, queue_depth=8, num_threads=2)


def in_child(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process that can import this file."""
    program = "import sys\nfrom test_aio_handle import *\n" + code
    return warm_python.run("-c", program, *arguments, cwd=Path(__file__).parent)


def test_what_was_set_can_be_asked_for() -> None:
    handle = aio_handle(4096, 5, True, True, 3)
    assert handle.get_block_size() == 4096
    assert handle.get_queue_depth() == 5
    assert handle.get_single_submit() is True
    assert handle.get_overlap_events() is True
    assert handle.get_thread_count() == handle.get_intra_op_parallelism() == 3
    assert handle.get_alignment() == 3 * 512


def test_defaults() -> None:
    handle = aio_handle()
    assert (handle.get_block_size(), handle.get_queue_depth()) == (MIB, 128)
    assert (handle.get_single_submit(), handle.get_overlap_events()) == (False, False)
    assert handle.get_thread_count() == 1
    assert aio_handle(intra_op_parallelism=2).get_thread_count() == 2
    with pytest.raises(ValueError, match="AsyncIO: threads is 0, expected 1 to 256"):
        aio_handle(num_threads=0)


@pytest.mark.parametrize(
    ("method", "names"),
    [
        *((name, "buffer filename validate file_offset fd") for name in ("read", "write")),
        *((name, "buffer filename validate async_ file_offset fd") for name in ("pread", "pwrite")),
        *((name, "buffer filename file_offset fd") for name in ("sync_pread", "sync_pwrite")),
        *((name, "buffer filename file_offset fd") for name in ("async_pread", "async_pwrite")),
        ("new_cpu_locked_tensor", "num_elem example_tensor"),
        ("free_cpu_locked_tensor", "tensor"),
        ("wait", ""),
    ],
)
def test_argument_names(method: str, names: str) -> None:
    signature = inspect.signature(getattr(aio_handle, method))
    assert list(signature.parameters)[1:] == names.split()


def test_the_name_in_the_package_is_the_class() -> None:
    for _ in range(2):  # a module of the same name would take its place when it is imported
        assert io.aio_handle is aio_handle


Write = Callable[[aio_handle, Tensor, str], object]
WRITES: dict[str, Write] = {
    "write": lambda handle, tensor, name: handle.write(tensor, name),
    "write, validated": lambda handle, tensor, name: handle.write(tensor, name, True),
    "pwrite": lambda handle, tensor, name: handle.pwrite(tensor, name, True, False),
    "pwrite, async": lambda handle, tensor, name: handle.pwrite(tensor, name, True, True),
    "sync_pwrite": lambda handle, tensor, name: handle.sync_pwrite(tensor, name),
    "async_pwrite": lambda handle, tensor, name: handle.async_pwrite(tensor, name),
}
READS: dict[str, Write] = {
    "read": lambda handle, tensor, name: handle.read(tensor, name, False),
    "read, validated": lambda handle, tensor, name: handle.read(tensor, name, True),
    "pread": lambda handle, tensor, name: handle.pread(tensor, name, False, False),
    "pread, async": lambda handle, tensor, name: handle.pread(tensor, name, True, True),
    "sync_pread": lambda handle, tensor, name: handle.sync_pread(tensor, name),
    "async_pread": lambda handle, tensor, name: handle.async_pread(tensor, name),
}
RETURNS = {
    **dict.fromkeys(["write", "write, validated", "read", "read, validated"], (0, 0)),
    **dict.fromkeys(["pwrite, async", "async_pwrite", "pread, async", "async_pread"], (0, 1)),
    **dict.fromkeys(["pwrite", "sync_pwrite", "pread", "sync_pread"], (1, 0)),
}


@pytest.mark.parametrize("name", [*WRITES, *READS])
def test_returns(handle: aio_handle, tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes_of(payload(9999)))
    tensor = payload(9999)
    returned, waited = RETURNS[name]
    assert (WRITES | READS)[name](handle, tensor, str(path)) == returned
    assert handle.wait() == waited
    assert handle.wait() == 0


@pytest.mark.parametrize(
    "nbytes", [1, 511, 512, 513, 4096, 1_000_003, 1_000_004, MIB, MIB + 1, MIB + 512, 10_000_003]
)
@pytest.mark.parametrize("how", [*zip(WRITES, READS, strict=True)], ids=lambda how: how[0])
def test_every_size_arrives(tmp_path: Path, nbytes: int, how: tuple[str, str]) -> None:
    handle = aio_handle(num_threads=2)
    path, tensor, got = str(tmp_path / "file"), payload(nbytes), torch.zeros(nbytes).byte()
    WRITES[how[0]](handle, tensor, path)
    handle.wait()
    assert Path(path).read_bytes() == bytes_of(tensor)
    READS[how[1]](handle, got, path)
    handle.wait()
    assert torch.equal(got, tensor)


@pytest.mark.parametrize("offset", [1, 100, 4096, MIB + 1])
def test_file_offsets(handle: aio_handle, tmp_path: Path, offset: int) -> None:
    path, before, tensor = tmp_path / "file", payload(2 * MIB), payload(20_001, seed=1)
    path.write_bytes(bytes_of(before))
    assert handle.sync_pwrite(tensor, str(path), offset) == 1
    before[offset : offset + 20_001] = tensor
    assert path.read_bytes() == bytes_of(before)  # neighbours and length stay
    got = torch.zeros_like(tensor)
    for read in (
        lambda: handle.read(got, str(path), True, offset),
        lambda: handle.pread(got, str(path), True, False, offset),
        lambda: handle.sync_pread(got, str(path), file_offset=offset),
        lambda: handle.async_pread(buffer=got, filename=str(path), file_offset=offset),
    ):
        got.zero_()
        read()
        handle.wait()
        assert torch.equal(got, tensor)


def test_a_view_at_an_odd_byte_of_a_locked_tensor(handle: aio_handle, tmp_path: Path) -> None:
    locked = handle.new_cpu_locked_tensor(100_001, torch.empty(0, dtype=torch.uint8))
    locked.copy_(payload(100_001))
    handle.sync_pwrite(locked[1:], str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == bytes_of(payload(100_001)[1:])


def test_strided_tensors(handle: aio_handle, tmp_path: Path) -> None:
    tensor = torch.randn(300, 200).t()
    handle.pwrite(tensor, tmp_path / "file", True, False)
    assert (tmp_path / "file").read_bytes() == bytes_of(tensor)
    got = torch.zeros(300, 200).t()
    handle.pread(got, tmp_path / "file", True, False)
    assert torch.equal(got, tensor)


@pytest.mark.parametrize("name", READS)
def test_a_file_that_is_too_short(handle: aio_handle, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"x" * 999)
    with pytest.raises(OSError, match="returned 999: the file ends at 999") as caught:
        READS[name](handle, payload(1000), str(tmp_path / "file"))
        handle.wait()
    assert caught.value.errno == errno.ENODATA
    assert handle.wait() == 0


def test_a_longer_file_is_read_from_its_start_and_keeps_its_tail(
    handle: aio_handle, tmp_path: Path
) -> None:
    path = str(tmp_path / "file")
    handle.sync_pwrite(payload(MIB), path)
    handle.sync_pwrite(torch.zeros(MIB // 2).byte(), path)
    assert Path(path).read_bytes() == bytes(MIB // 2) + bytes_of(payload(MIB)[MIB // 2 :])
    got = payload(MIB // 2)
    assert handle.sync_pread(got, path) == 1
    assert not got.any()


@pytest.mark.parametrize("name", [*WRITES, *READS])
def test_a_missing_folder_raises(handle: aio_handle, tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "missing" / "file")
    with pytest.raises(OSError, match=f"of {re.escape(path)} failed: No such file"):
        (WRITES | READS)[name](handle, payload(5), path)
        handle.wait()
    assert handle.wait() == 0


def test_one_failure_of_many_hides_nothing(handle: aio_handle, tmp_path: Path) -> None:
    sizes = {"a": 20_000, "missing/1": 5, "b": 0, "missing/2": 70_000, "c": 64 * MIB + 1}
    for name, nbytes in sizes.items():
        assert handle.async_pwrite(payload(nbytes), f"{tmp_path}/{name}") == 0
    for missing in ("missing/1", "missing/2"):
        with pytest.raises(OSError, match=missing):
            handle.wait()
        for name in "abc":  # nothing is under way any more
            assert (tmp_path / name).read_bytes() == bytes_of(payload(sizes[name]))
    assert handle.wait() == 3
    assert handle.wait() == 0


def test_wait_counts_all_and_a_synchronous_call_waits_for_all(
    handle: aio_handle, tmp_path: Path
) -> None:
    for i in range(7):
        handle.async_pwrite(payload(30_000, seed=i), f"{tmp_path}/{i}")
    assert handle.wait() == 7
    got = [torch.zeros(30_000).byte() for _ in range(7)]
    for i, tensor in enumerate(got):
        handle.async_pread(tensor, f"{tmp_path}/{i}")
    assert handle.sync_pwrite(payload(5), f"{tmp_path}/last") == 8
    assert all(torch.equal(tensor, payload(30_000, seed=i)) for i, tensor in enumerate(got))
    assert handle.wait() == 0


def test_validation_notices(
    handle: aio_handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepspeed_ext.io.engine.handle._COMPARED_AT_ONCE", 1000)
    path, tensor = tmp_path / "file", payload(5001)
    handle.pwrite(tensor, str(path), True, True, 3)
    next(iter(handle._pending.values()))._job.wait(60)
    content = bytearray(path.read_bytes())
    content[4003] ^= 1
    path.write_bytes(content)
    text = f"aio_handle: byte 4003 of {path} is another one than in the tensor, expected 5001 equal"
    with pytest.raises(OSError, match=re.escape(text)) as caught:
        handle.wait()
    assert caught.value.errno == errno.EIO
    content[4003] ^= 1
    path.write_bytes(content)
    handle.read(tensor, str(path), True, 3)


def test_nothing_is_printed_and_leaving_with_work_pending_is_fine(tmp_path: Path) -> None:
    code = """
handle = aio_handle()
handle.write(payload(5), sys.argv[1], True)
handle.read(payload(5), sys.argv[1], True)
handle.async_pwrite(payload(40_000_003), sys.argv[1])
"""
    done = in_child(code, tmp_path / "file")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "file").read_bytes() == bytes_of(payload(40_000_003))


def test_a_file_size_limit_raises(tmp_path: Path) -> None:
    code = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
try:
    aio_handle().sync_pwrite(payload(4 * MIB), sys.argv[1])
except OSError as error:
    assert error.errno == errno.EFBIG, error
    print(error)
"""
    done = in_child(code, tmp_path / "file")
    assert done.returncode == 0, done.stderr
    assert f"write of {4 * MIB} bytes at offset 0 of {tmp_path}/file failed" in done.stdout


def test_a_full_disk_raises(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left on device") as caught:
        aio_handle().sync_pwrite(torch.zeros(64 * MIB, dtype=torch.uint8), small_disk / "file")
    assert caught.value.errno == errno.ENOSPC


def test_a_forked_child_is_refused(handle: aio_handle, tmp_path: Path) -> None:
    if (child := os.fork()) == 0:
        try:
            handle.sync_pwrite(payload(5), str(tmp_path / "file"))
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_many_deep_handles(tmp_path: Path) -> None:
    handles = [aio_handle(queue_depth=128) for _ in range(64)]
    for i, handle in enumerate(handles):
        handle.async_pwrite(payload(1000, seed=i), str(tmp_path / f"{i}"))
    assert [handle.wait() for handle in handles] == [1] * 64
    for i in range(64):
        assert (tmp_path / f"{i}").read_bytes() == bytes_of(payload(1000, seed=i))


def test_one_handle_in_two_threads(handle: aio_handle, tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(20):
                tensor, path = payload(50_000 + i, seed=seed), str(tmp_path / f"{seed}")
                handle.async_pwrite(tensor, path)
                handle.wait()
                got = torch.zeros_like(tensor)
                handle.async_pread(got, path)
                handle.wait()
                assert torch.equal(got, tensor)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_tensor_may_be_dropped_while_it_is_written(handle: aio_handle, tmp_path: Path) -> None:
    for i in range(20):
        handle.async_pwrite(payload(200_003, seed=i), str(tmp_path / f"{i}"))
        torch.full((200_003,), 0xAA, dtype=torch.uint8)  # takes the memory if it was freed
    assert handle.wait() == 20
    for i in range(20):
        assert (tmp_path / f"{i}").read_bytes() == bytes_of(payload(200_003, seed=i))


def test_empty_tensors_and_tmpfs(handle: aio_handle, tmpfs: Path) -> None:
    assert handle.sync_pwrite(torch.empty(0), tmpfs / "empty") == 1
    assert (tmpfs / "empty").read_bytes() == b""
    assert handle.sync_pread(torch.empty(0), tmpfs / "empty") == 1
    handle.sync_pwrite(payload(70_001), tmpfs / "file")
    assert (tmpfs / "file").read_bytes() == bytes_of(payload(70_001))


def test_a_new_file_has_the_mode_that_the_umask_says(handle: aio_handle, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        handle.sync_pwrite(payload(5), tmp_path / "file")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_descriptors(handle: aio_handle, tmp_path: Path) -> None:
    with open(tmp_path / "file", "w+b") as file:
        assert handle.async_pwrite(payload(50_001), file.fileno(), 7) == 0
        assert handle.wait() == 1
        got = torch.zeros(50_001).byte()
        handle.read(got, file.fileno(), True, 7)
    assert torch.equal(got, payload(50_001))
    assert (tmp_path / "file").read_bytes() == bytes(7) + bytes_of(payload(50_001))


def test_descriptors_by_name(handle: aio_handle, tmp_path: Path) -> None:
    with open(tmp_path / "file", "w+b") as file:
        fd = file.fileno()
        for i, write in enumerate(("pwrite", "sync_pwrite", "async_pwrite", "write")):
            tensor = payload(5001, seed=i)
            getattr(handle, write)(tensor, fd=fd, file_offset=7)
            handle.wait()
            assert (tmp_path / "file").read_bytes() == bytes(7) + bytes_of(tensor)
            for read in ("pread", "sync_pread", "async_pread", "read"):
                got = torch.zeros_like(tensor)
                getattr(handle, read)(got, fd=fd, file_offset=7)
                handle.wait()
                assert torch.equal(got, tensor)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ({}, "filename is None and fd is None, expected one of them"),
        ({"filename": "a", "fd": 1}, "filename is 'a' and fd is 1, expected one of them"),
        ({"fd": "a"}, "fd is a str, expected an int"),
    ],
)
def test_a_file_is_named_once(handle: aio_handle, file: dict[str, object], text: str) -> None:
    with pytest.raises(TypeError, match=f"^aio_handle: {text}$"):
        handle.async_pwrite(payload(5), **file)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.float16])
def test_locked_tensors(handle: aio_handle, tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(3, 3, dtype=dtype))
    assert (tensor.shape, tensor.dtype) == ((1000,), dtype)
    assert handle.is_pinned(tensor) and handle.is_pinned(tensor[999:])
    assert not handle.is_pinned(torch.empty(1000))
    tensor.copy_(torch.arange(1000))
    handle.sync_pwrite(tensor, tmp_path / "file")
    assert handle.free_cpu_locked_tensor(tensor) is True
    assert handle.free_cpu_locked_tensor(tensor) is False
    assert handle.free_cpu_locked_tensor(torch.empty(5)) is False
    assert torch.equal(tensor, torch.arange(1000).to(dtype))  # still there


def test_locked_tensors_of_another_handle(handle: aio_handle) -> None:
    tensor = aio_handle().new_cpu_locked_tensor(1000, torch.empty(0))
    assert handle.is_pinned(tensor) and handle.is_pinned(tensor.view(10, 100)[3:].detach())
    assert aio_handle().free_cpu_locked_tensor(tensor) is True
    assert handle.free_cpu_locked_tensor(tensor) is False
    assert handle.is_pinned(tensor) == tensor.is_pinned()  # as it stays with CUDA
    tensor.fill_(1)  # still there
    gone = weakref.ref(tensor.untyped_storage())
    del tensor
    assert gone() is None


def test_an_empty_locked_tensor(handle: aio_handle) -> None:
    assert handle.new_cpu_locked_tensor(0, torch.empty(0)).shape == (0,)


def test_a_single_element_of_any_stride_is_compared(handle: aio_handle, tmp_path: Path) -> None:
    tensor = torch.arange(9.0)[3::2][:1]
    assert tensor.stride() == (2,)
    assert handle.write(tensor, tmp_path / "file", validate=True) == 0
    assert (tmp_path / "file").read_bytes() == bytes_of(tensor)


def test_what_is_no_file_is_called_what_it_is(handle: aio_handle, tmp_path: Path) -> None:
    """Before anything moves, in each call, by descriptor and by path."""
    fifo, sock = tmp_path / "fifo", tmp_path / "socket"
    os.mkfifo(fifo)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(sock))
    pipe, folder, event = os.pipe(), os.open(tmp_path, os.O_RDONLY), os.eventfd(0)
    closed = os.dup(event)
    os.close(closed)
    called: dict[object, tuple[int, str]] = {
        **{fd: (errno.EBADF, f"fd is {fd}, which is not open") for fd in (-1, closed, 2**70)},
        **{fd: (errno.ESPIPE, f"aio_handle: fd {fd} is a pipe, expected a file") for fd in pipe},
        server.fileno(): (errno.ESPIPE, f"fd {server.fileno()} is a socket, expected a file"),
        event: (errno.ESPIPE, f"fd {event} is something else, expected a file"),
        folder: (errno.EISDIR, f"fd {folder} is a folder, expected a file"),
        str(fifo): (errno.ESPIPE, f"{fifo} failed: it is a pipe or a socket, expected a file"),
        str(sock): (errno.ESPIPE, f"{sock} failed: it is a pipe or a socket, expected a file"),
        str(tmp_path): (errno.EISDIR, f"{tmp_path} failed: Is a directory"),
    }
    try:
        for name, (code, text) in called.items():
            for call in (WRITES | READS).values():
                with pytest.raises(OSError, match=re.escape(text)) as caught:
                    call(handle, torch.zeros(8192).byte(), name)  # type: ignore[arg-type]
                    handle.wait()
                assert caught.value.errno == code
        for call in (WRITES | READS).values():
            with pytest.raises(TypeError, match="filename is a bool, expected a path or desc"):
                call(handle, torch.zeros(1), True)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=r"path is 'a\\x00b', expected one without zero"):
                call(handle, torch.zeros(1), "a\0b")
    finally:
        server.close()
        for fd in (*pipe, folder, event):
            os.close(fd)


def test_a_file_in_memory_takes_more_than_it_has(handle: aio_handle) -> None:
    """Its file system says that 0 of 0 blocks are free."""
    fd = os.memfd_create("file")
    try:
        tensor = payload(100_000)
        handle.write(tensor, fd)
        got = torch.zeros_like(tensor)
        handle.read(got, fd)
        assert torch.equal(got, tensor)
    finally:
        os.close(fd)
