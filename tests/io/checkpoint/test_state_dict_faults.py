"""A save that fails or is killed leaves the old file as it was, and nothing else in the folder."""

import contextlib
import errno
import os
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm_python
from state_dict_cases import MIB, assert_same, files_in, mixed_state, random_tensor

from deepspeed_ext import io
from deepspeed_ext.io.checkpoint import new_file
from deepspeed_ext.io.checkpoint.new_file import NewFile
from deepspeed_ext.io.checkpoint.state_dict import inspect, load, save

AsNobody = Callable[[], contextlib.AbstractContextManager[None]]
OLD = {"w": torch.arange(10.0)}
KILL_SAVES = Path(__file__).with_name("kill_saves.py")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save(OLD, path)
    return path


@pytest.fixture(params=["unnamed", "named"])
def temporary(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both kinds of temporary file, the second as on file systems that lack the first."""
    if request.param == "named":
        monkeypatch.setattr(new_file, "_DESCRIPTORS", "/does/not/exist")
    return str(request.param)


def assert_untouched(path: Path) -> None:
    assert_same(load(path), OLD)
    assert files_in(path.parent) == [path.name]


@contextlib.contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_both_kinds_of_temporary_file(path: Path, temporary: str) -> None:
    with NewFile(path) as new:
        assert len(files_in(path.parent)) == (1 if temporary == "unnamed" else 2)
        new.reserve(10)
    assert_untouched(path)
    save(mixed_state(), path)
    assert_same(load(path), mixed_state())
    assert files_in(path.parent) == [path.name]


def test_space_is_reserved_before_anything_is_written(
    path: Path, temporary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_write(*arguments: object) -> None:
        raise AssertionError

    monkeypatch.setattr(io.AsyncIO, "write", no_write)
    with file_size_limit(5 * MIB), pytest.raises(OSError) as caught:
        save({"w": random_tensor((2 * MIB,))}, path)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.strerror == (
        f"aio: reserving {4096 + 8 * MIB} bytes at offset 0 of {path} failed: File too large"
    )
    assert_untouched(path)


def test_a_full_disk(small_disk: Path) -> None:
    path = small_disk / "model"
    save(OLD, path)
    free = os.statvfs(small_disk)
    with pytest.raises(OSError) as caught:
        save({"w": random_tensor((5 * MIB,))}, path)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.strerror == (
        f"io.save: {path} has {4096 + 20 * MIB} bytes, expected at most the"
        f" {free.f_bavail * free.f_frsize} that are free"
    )
    assert_untouched(path)


@pytest.mark.parametrize("limit", [100, 4096, 4 * MIB + 100, 9 * MIB])
def test_a_write_that_fails_in_the_middle(
    path: Path, temporary: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NewFile, "reserve", lambda self, nbytes: None)
    state = {"large": random_tensor((2 * MIB,)), "odd": random_tensor((MIB + 1,))}
    with file_size_limit(limit), pytest.raises(OSError, match="File too large") as caught:
        save(state, path)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.strerror and f" of {path} failed" in caught.value.strerror
    assert_untouched(path)


def test_a_failure_leaves_nothing_under_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on and has nothing to complain about: the failure was told."""
    monkeypatch.setattr(NewFile, "reserve", lambda self, nbytes: None)
    with io.AsyncIO() as engine:
        with file_size_limit(MIB), pytest.raises(OSError, match="File too large"):
            save({"large": random_tensor((40 * MIB,))}, path, engine=engine)
        engine.wait()
        stats = engine.stats()
        assert stats["submitted"] == int(stats["completed"]) + int(stats["failed"])
        save(OLD, path, engine=engine)
    assert_untouched(path)


def test_folders_that_will_not_do(open_folder: Path, as_nobody: AsNobody, temporary: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"io.save: making a file in .*/none failed: No su"):
        save(OLD, open_folder / "none" / "model")
    with pytest.raises(IsADirectoryError, match=r"io.save: replacing .* failed: Is a directory"):
        save(OLD, open_folder)
    with pytest.raises(OSError, match=r"io.save: replacing /dev/null failed: it is not a regular"):
        save(OLD, "/dev/null")
    (open_folder / "file").touch()
    with pytest.raises(NotADirectoryError):
        save(OLD, open_folder / "file" / "model")
    with as_nobody(), pytest.raises(PermissionError, match=r"making a file in .* failed: Permiss"):
        save(OLD, open_folder / "model")
    with as_nobody(), pytest.raises(PermissionError, match=r"replacing .*/file failed: Permiss"):
        save(OLD, open_folder / "file")
    assert files_in(open_folder) == ["file"]


def test_a_file_of_a_read_only_file_system(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (open_folder / "file").touch()
    known = os.statvfs(open_folder)
    flags = SimpleNamespace(f_flag=known.f_flag | os.ST_RDONLY)
    monkeypatch.setattr(os, "statvfs", lambda path: flags)
    with pytest.raises(OSError, match=r"replacing .*/file failed: Read-only file system") as caught:
        save(OLD, open_folder / "file")
    assert caught.value.errno == errno.EROFS


def test_a_read_only_file_is_not_replaced(open_folder: Path, as_nobody: AsNobody) -> None:
    path = open_folder / "model"
    save(OLD, path)
    path.chmod(0o444)
    open_folder.chmod(0o777)
    with as_nobody(), pytest.raises(PermissionError):
        save({}, path)
    assert_untouched(path)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_modes(tmp_path: Path, umask: int, temporary: str) -> None:
    path, link = tmp_path / "model", tmp_path / "link"
    link.symlink_to("model")
    before = os.umask(umask)
    try:
        save(OLD, link)  # the link leads nowhere yet
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
        path.chmod(0o640)
        save({}, link)
    finally:
        os.umask(before)
    assert load(path) == {} and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert link.is_symlink() and files_in(tmp_path) == ["link", "model"]


def test_the_owner_is_passed_on(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root may give files away")
    os.chown(path, 65534, 65534)
    save({}, path)
    assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65534)


def test_names_as_long_as_they_may_be(tmp_path: Path, temporary: str) -> None:
    path = tmp_path / ("n" * 255)
    for _ in range(2):
        save(OLD, path)
        assert_untouched(path)


def test_a_save_under_way_is_not_taken_for_abandoned(path: Path, temporary: str) -> None:
    with NewFile(path) as first, NewFile(path) as second:
        first.reserve(5)
        second.reserve(6)
        save({}, path)
        first.publish()
        assert path.stat().st_size == 5
        second.publish()
    assert path.stat().st_size == 6 and files_in(path.parent) == [path.name]


def test_saves_to_one_path_at_once(path: Path, temporary: str) -> None:
    """One of them is there, whole, whichever was last; meanwhile a whole one can always be read."""
    states = [{"w": torch.full((MIB,), float(i)), "i": torch.tensor(i)} for i in range(5)]
    failures: list[BaseException] = []

    def work(state: dict[str, torch.Tensor]) -> None:
        try:
            for _ in range(3):
                save(state, path, durable=False)
                loaded = load(path)
                assert_same(loaded, states[int(loaded["i"])])
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(state,)) for state in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert files_in(path.parent) == [path.name]


@pytest.mark.parametrize("kind", ["unnamed", "named"])
def test_killed_saves(tmp_path: Path, kind: str) -> None:
    """See kill_saves.py, which forks and so needs a process that has no threads yet."""
    done = warm_python.run(KILL_SAVES, tmp_path, kind)
    assert done.returncode == 0, done.stderr
    steps, random_kills = map(int, done.stdout.split())
    assert steps > 10 and random_kills == 20


@pytest.mark.parametrize("left", [0, 7, 20, 4095, 4096, 5000, 3 * MIB, -1])
def test_a_file_that_was_cut_short(path: Path, left: int) -> None:
    save({"large": random_tensor((MIB,)), "small": torch.ones(3)}, path)
    whole = path.stat().st_size
    left %= whole
    os.truncate(path, left)
    for read in (load, inspect):
        with pytest.raises(ValueError) as caught:
            read(path)
        text = str(caught.value)
        assert text.startswith(f"io.{read.__name__}: {path} has {left} bytes, expected ")
        if left > 4096:
            assert text.endswith(f"{whole} by its header: it was cut short")


def test_a_file_that_is_cut_short_meanwhile(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"large": random_tensor((MIB,)), "small": torch.ones(3)}, path)
    read = io.AsyncIO.read

    def cut(*arguments: object) -> io.Future:
        os.truncate(path, MIB)
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(io.AsyncIO, "read", cut)
    with pytest.raises(OSError, match=rf" of {path} returned .*: the file ends at {MIB}"):
        load(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for read in (load, inspect):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "none")
        with pytest.raises(OSError):
            read(tmp_path)


def test_files_that_are_something_else(path: Path) -> None:
    torch.save(OLD, path)
    for read in (load, inspect):
        with pytest.raises(ValueError, match=rf"{path} has a header of .* is it a safe"):
            read(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match=rf"io.load: {path} has 2 bytes, expected at least 8"):
        load(path)


@pytest.mark.parametrize("durable", [True, False])
def test_durable_means_synced_in_order(
    path: Path, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the content, then the name, then the folder that has the name."""
    steps: list[str] = []

    def noted(step: str, function: Callable[..., object]) -> Callable[..., object]:
        return lambda *arguments, **named: (steps.append(step), function(*arguments, **named))[1]

    monkeypatch.setattr(io.File, "sync", noted("sync", io.File.sync))
    monkeypatch.setattr(os, "replace", noted("replace", os.replace))
    monkeypatch.setattr(os, "fsync", noted("fsync", os.fsync))
    save(OLD, path, durable=durable)
    assert steps == (["sync", "replace", "fsync"] if durable else ["replace"])


def test_descriptors_are_given_back(path: Path, temporary: str) -> None:
    def work() -> int:
        save(OLD, path)
        load(path)
        inspect(path)
        with pytest.raises(FileNotFoundError):
            save(OLD, path.parent / "none" / "model")
        with pytest.raises(ValueError, match="names has 'none'"):
            load(path, names=["none"])
        with file_size_limit(100), pytest.raises(OSError, match="File too large"):
            save(OLD, path)
        return len(os.listdir("/proc/self/fd"))

    before = work()
    assert [work() for _ in range(5)] == [before] * 5
