"""AsyncIO and Future in good weather: paths, files, waits and settings."""

import os
import stat
import threading
from pathlib import Path

import pytest
import torch
from aio_cases import BLOCK, bytes_of, payload
from held_memory import HeldMemory

from deepspeed_ext import io
from deepspeed_ext.io._native import native


class Named:
    """The least that is a path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


KINDS = {"str": str, "Path": Path, "PathLike": Named, "File": lambda p: io.File(str(p), "update")}
NAMES = ["ein Wört, 🦀 and \\n", os.fsdecode(b"not UTF-8: \xff\xfe"), " ", "n" * 255]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("kind", KINDS)
def test_paths_of_every_kind(engine: io.AsyncIO, tmp_path: Path, kind: str, name: str) -> None:
    path, tensor = tmp_path / name, payload(3 * BLOCK + 1)
    engine.write(tensor, KINDS[kind](path)).result()
    assert os.listdir(tmp_path) == [name]
    assert torch.equal(engine.read(torch.zeros_like(tensor), KINDS[kind](path)).result(), tensor)


def test_a_relative_path_is_meant_from_where_the_request_is_made(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with io.AsyncIO(queue_depth=1, backend=backend) as engine, HeldMemory(BLOCK) as held:
        engine.write(held.tensor(), "before")
        held.wait_until_touched()
        engine.write(payload(5), "file")  # its turn comes later
        monkeypatch.chdir(tmp_path / "other")
        held.release()
    assert (tmp_path / "file").read_bytes() == bytes_of(payload(5))
    assert not os.listdir(tmp_path / "other")


def test_truncate_ends_the_file_where_the_write_ends(engine: io.AsyncIO, tmp_path: Path) -> None:
    path, old, new = tmp_path / "file", payload(5 * BLOCK), payload(100, seed=1)
    path.write_bytes(bytes_of(old))
    engine.write(new, path, offset=BLOCK).result()
    assert path.stat().st_size == 5 * BLOCK
    engine.write(new, path, offset=2 * BLOCK, truncate=True).result()
    expected = bytearray(bytes_of(old)[: 2 * BLOCK] + bytes_of(new))
    expected[BLOCK : BLOCK + 100] = bytes_of(new)
    assert path.read_bytes() == expected
    engine.write(new[:0], path, offset=7, truncate=True).result()
    assert path.read_bytes() == expected[:7]
    engine.write(new[:0], path).result()
    assert path.stat().st_size == 7


@pytest.mark.parametrize("umask", [0o022, 0o077, 0])
def test_a_fresh_file_has_the_usual_mode(engine: io.AsyncIO, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        engine.write(payload(10), tmp_path / "file").result()
        io.File(str(tmp_path / "native"), "update").close()
    finally:
        os.umask(before)
    for name in ("file", "native"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~umask


def test_a_read_creates_nothing(engine: io.AsyncIO, tmp_path: Path) -> None:
    for nbytes in (0, 10):
        with pytest.raises(FileNotFoundError):
            engine.read(payload(nbytes), tmp_path / "file").result()
    assert not list(tmp_path.iterdir())


def test_bytes_beyond_4_gib(engine: io.AsyncIO, tmp_path: Path) -> None:
    offset, tensor = (5 << 30) + 12345, payload(3 * BLOCK + 17)
    engine.write(tensor, tmp_path / "file", offset=offset).result()
    assert (tmp_path / "file").stat().st_size == offset + tensor.numel()
    got = torch.zeros(tensor.numel() + 100, dtype=torch.uint8)
    engine.read(got, tmp_path / "file", offset=offset - 100).result()
    assert not got[:100].any() and torch.equal(got[100:], tensor)


def test_one_request_beyond_2_gib(tmp_path: Path) -> None:
    nbytes = (2 << 30) + 4097
    with open(tmp_path / "file", "wb") as file:  # a hole, but for a few marks
        for mark in range(0, nbytes, 100 << 20):
            os.pwrite(file.fileno(), bytes([mark >> 20 & 255 | 1]), mark)
        os.pwrite(file.fileno(), b"end", nbytes - 3)
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    with io.AsyncIO(block_size=1 << 30) as engine:
        engine.read(tensor, tmp_path / "file").result()
    for mark in range(0, nbytes, 100 << 20):
        assert tensor[mark] == mark >> 20 & 255 | 1 and tensor[mark + 1] == 0
    assert bytes_of(tensor[-3:]) == b"end"


def test_a_future_may_be_asked_often_and_by_many(engine: io.AsyncIO, tmp_path: Path) -> None:
    tensor = torch.randn(200, 300).t()
    good = engine.write(tensor, tmp_path / "file")
    bad = engine.read(torch.zeros(3), tmp_path / "missing")
    answers: list[object] = []

    def ask() -> None:
        for _ in range(20):
            answers.append(good.result() is tensor and good.exception() is None and good.done())
            answers.append(isinstance(bad.exception(), FileNotFoundError) and bad.done())
            with pytest.raises(FileNotFoundError):
                bad.result()

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8 * 20 * 2 and all(answers)


def test_wait_counts_what_has_completed_since_the_last_one(
    engine: io.AsyncIO, tmp_path: Path
) -> None:
    assert engine.wait() == 0
    tensors = [payload(BLOCK * 2 + i, seed=i) for i in range(5)]
    futures = [engine.write(t, tmp_path / f"{i}") for i, t in enumerate(tensors)]
    futures[0].result()  # counts too
    assert engine.wait() == 5
    assert all(future.done() for future in futures)
    assert engine.wait(timeout=0.0) == 0
    assert [(tmp_path / f"{i}").read_bytes() for i in range(5)] == [bytes_of(t) for t in tensors]


def test_wait_raises_the_first_failure_that_nobody_has_seen(
    engine: io.AsyncIO, tmp_path: Path
) -> None:
    seen = engine.read(torch.zeros(1), tmp_path / "seen")
    futures = [
        engine.read(torch.zeros(1), tmp_path / "first"),
        engine.write(payload(10), tmp_path / "good"),
        engine.read(torch.zeros(1), tmp_path / "second"),
    ]
    assert isinstance(seen.exception(), FileNotFoundError)
    with pytest.raises(FileNotFoundError, match="/first"):
        engine.wait()
    assert all(future.done() for future in futures)
    with pytest.raises(FileNotFoundError, match="/first"):  # the future still knows
        futures[0].result()
    assert futures[2].exception() is not None
    engine.wait()  # all have been seen
    assert (tmp_path / "good").read_bytes() == bytes_of(payload(10))


def test_leaving_the_block_waits_and_raises(backend: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="/missing"), io.AsyncIO(backend=backend) as engine:
        future = engine.read(torch.zeros(1), tmp_path / "missing")
        engine.write(payload(10**6), tmp_path / "good")
    assert (tmp_path / "good").read_bytes() == bytes_of(payload(10**6))
    assert future.done()
    engine.close()  # once more does no harm, and the failure has been raised


def test_an_error_in_the_block_goes_first(backend: str, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"), io.AsyncIO(backend=backend) as engine:
        engine.read(torch.zeros(1), tmp_path / "missing")
        engine.write(payload(10**6), tmp_path / "good")
        raise KeyError("mine")
    assert (tmp_path / "good").read_bytes() == bytes_of(payload(10**6))


def test_stats_count_requests_and_bytes(engine: io.AsyncIO, tmp_path: Path) -> None:
    engine.write(payload(1000), tmp_path / "file").result()
    engine.read(payload(900), tmp_path / "file").result()
    assert engine.read(payload(1001), tmp_path / "file").exception()
    stats = engine.stats()
    wanted = {"submitted": 3, "completed": 2, "failed": 1, "bytes_written": 1000}
    assert {name: stats[name] for name in wanted} == wanted
    assert stats["bytes_read"] == 900 + 1000
    assert all(isinstance(value, int | str) for value in stats.values())


def test_whole_blocks_go_around_the_page_cache(engine: io.AsyncIO, tmp_path: Path) -> None:
    if not io.File(str(tmp_path / "file"), "update").direct:
        pytest.skip("no direct I/O on the file system of the temporary folder")
    tensor = payload(4 * BLOCK + 4096)
    aligned = -tensor.data_ptr() % 4096
    engine.write(tensor[aligned : aligned + 4 * BLOCK], tmp_path / "file").result()
    assert engine.stats()["direct_bytes"] == 4 * BLOCK
    assert engine.stats()["copied_bytes"] == 0
    engine.read(tensor[1 : 1 + 4 * BLOCK], tmp_path / "file").result()
    assert engine.stats()["direct_bytes"] == 8 * BLOCK
    assert engine.stats()["direct_refused"] == 0


def test_attributes_say_how_it_was_made(backend: str) -> None:
    with io.AsyncIO(block_size=5000, queue_depth=7, threads=2, backend=backend) as engine:
        got = (engine.block_size, engine.queue_depth, engine.threads, engine.backend)
        assert got == (5000, 7, 2, backend)
    with io.AsyncIO() as engine:
        assert (engine.block_size, engine.queue_depth, engine.threads) == (1 << 20, 32, 1)


def test_auto_takes_the_first_that_works() -> None:
    working = [name for name, code in native().probe_backends().items() if code == 0]
    with io.AsyncIO() as engine:
        assert engine.backend == next(
            name for name in ("io_uring", "libaio", "threads") if name in working
        )


def test_the_environment_says_what_auto_means(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_EXT_AIO_BACKEND", backend)
    with io.AsyncIO() as engine:
        assert engine.backend == backend
    monkeypatch.setenv("DS_EXT_AIO_BACKEND", "threads" if backend != "threads" else "libaio")
    with io.AsyncIO(backend=backend) as engine:  # an argument wins
        assert engine.backend == backend
