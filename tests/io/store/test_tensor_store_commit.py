"""Commits of a durable TensorStore: a fault at every step, and damage that is found."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from store_engines import LazyIO

from deepspeed_ext import io
from deepspeed_ext.io._native import native
from deepspeed_ext.io.store.tensor_store import TensorStore

STEPS = ("data", "open", "write", "manifest", "replace", "replaced", "folder")


class Crash(BaseException):
    """The process ends here; no handler may know of it."""


def content(generation: int) -> dict[str, torch.Tensor]:
    """Return three tensors of a generation, one of which is not in every one."""
    tensors = {name: torch.full((3000 + generation,), float(generation)) for name in "ab"}
    return {**tensors, f"only{generation}": torch.full((7,), float(generation))}


def put(store: TensorStore, generation: int) -> None:
    for name in store:
        store.delete(name)
    for name, tensor in content(generation).items():
        store.put_async(name, tensor)
    store.wait()


def holds(store: TensorStore, generation: int) -> bool:
    """Tell whether a store has this generation, and nothing else."""
    want = content(generation)
    return sorted(store) == sorted(want) and all(
        torch.equal(store.get(name), tensor) for name, tensor in want.items()
    )


def after_a_crash(path: Path, copy: Path) -> list[int]:
    """Return the generations that a process finds which opens the store now."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy)
    with TensorStore(copy, durable=True) as store:
        assert sorted(os.listdir(copy)) == ["data", "manifest.json", "store.lock"]
        return [generation for generation in range(9) if holds(store, generation)]


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, BaseException], None]:
    """Return a function that makes one step of every later commit raise."""

    def is_folder(fd: int) -> bool:
        return os.path.isdir(f"/proc/self/fd/{fd}")

    def break_at(step: str, error: BaseException) -> None:
        real_fsync, real_replace = os.fsync, os.replace

        def fsync(fd: int) -> None:
            if step == ("folder" if is_folder(fd) else "manifest"):
                raise error
            real_fsync(fd)

        def replace(source: str, target: str, **folders: int) -> None:
            if step == "replace":
                raise error
            real_replace(source, target, **folders)
            if step == "replaced":
                raise error

        def fail(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "replace", replace)
        if step == "data":
            monkeypatch.setattr(native().File, "sync", fail)
        if step == "open":
            monkeypatch.setattr("builtins.open", fail)
        if step == "write":
            monkeypatch.setattr("deepspeed_ext.io.store.folder.memoryview", fail, raising=False)

    return break_at


def test_the_order_of_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut keeps what was synced: data before the manifest, and that before its name."""
    done: list[str] = []
    real_fsync, real_replace, real_sync = os.fsync, os.replace, native().File.sync

    def fsync(fd: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        done.append(f"fsync {name} of {os.fstat(fd).st_size if '.' in name else 0}")
        real_fsync(fd)

    def replace(source: str, target: str, **folders: int) -> None:
        done.append(f"replace {source} {target}")
        real_replace(source, target, **folders)

    def sync(file: object) -> None:
        done.append("sync data")
        real_sync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(native().File, "sync", sync)
    with TensorStore(tmp_path / "s", durable=True) as store:
        parent = f"fsync {tmp_path.name} of 0"
        assert done[0] == parent, "the new folder has its name"
        made = [step for step in done if step.startswith(("fsync s", "replace"))]
        replace = "replace manifest.json.tmp manifest.json"
        assert made[-3:] == ["fsync s of 0", replace, "fsync s of 0"], "data, then the manifest"
        done.clear()
        put(store, 1)
        assert done == []
        store.commit()
        length = (tmp_path / "s" / "manifest.json").stat().st_size
        assert done == [
            "sync data",
            f"fsync manifest.json.tmp of {length}",
            "replace manifest.json.tmp manifest.json",
            "fsync s of 0",
        ]
        store.commit()
    assert len(done) == 4, "nothing was new"
    done.clear()
    TensorStore(tmp_path / "s", durable=True).close()
    again = [f"fsync manifest.json.tmp of {length}", replace, "fsync s of 0"]
    assert done == [parent, *again], "the manifest that it found is the one to stay"
    TensorStore(tmp_path / "s", durable=True, read_only=True).close()
    assert len(done) == 4, "a reader brings nothing to the disk"


def test_a_commit_waits_for_each_write(tmp_path: Path) -> None:
    with LazyIO() as engine, TensorStore(tmp_path / "s", durable=True, engine=engine) as store:
        for number, name in enumerate("abc"):
            store.put_async(name, torch.full((3000,), float(number)))
        assert engine.ran() == []
        store.commit()
        assert engine.ran() == ["write"] * 3
        shutil.copytree(tmp_path / "s", tmp_path / "copy")
    with TensorStore(tmp_path / "copy", durable=True, read_only=True) as store:
        for number, name in enumerate("abc"):
            assert torch.equal(store.get(name), torch.full((3000,), float(number)))


def test_nothing_that_a_failed_fsync_may_have_lost_is_read(
    tmp_path: Path, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first, the last, and all between; what an earlier commit has stays."""
    with TensorStore(tmp_path / "s", durable=True) as store:
        store.put("kept", torch.ones(3000))
        store.commit()
        for name in "abc":
            store.put(name, torch.ones(3000))
        fault("data", OSError(errno.EIO, "injected"))
        with pytest.raises(OSError, match="injected"):
            store.commit()
        monkeypatch.undo()
        for name in "abc":
            with pytest.raises(OSError, match="injected"):
                store.get(name)
            store.delete(name)
        assert torch.equal(store.get("kept"), torch.ones(3000))
        assert store.stats()["used_bytes"] == 12_288


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at(
    tmp_path: Path, step: str, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    store = TensorStore(path, durable=True)
    put(store, 1)
    store.commit()
    put(store, 2)
    fault(step, Crash())
    with pytest.raises(Crash):
        store.commit()
    monkeypatch.undo()
    found = after_a_crash(path, tmp_path / "copy")
    assert found == ([2] if step in ("replaced", "folder") else [1])
    store.close()


@pytest.mark.parametrize("step", STEPS)
def test_an_error_at(
    tmp_path: Path, step: str, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store goes on, and what the disk may have stays whole until the next commit."""
    path = tmp_path / "s"
    with TensorStore(path, durable=True) as store:
        put(store, 1)
        store.commit()
        put(store, 2)
        fault(step, OSError(errno.EIO, "injected"))
        with pytest.raises(
            OSError, match=rf"TensorStore: commit of {path} failed: injected"
        ) as caught:
            store.commit()
        assert caught.value.errno == errno.EIO
        monkeypatch.undo()
        assert not (path / "manifest.json.tmp").exists() or step == "replace"
        on_disk = [2] if step in ("replaced", "folder") else [1]
        if step == "data":
            with pytest.raises(OSError, match=r"commit of .* failed: injected"):
                store.get("a")  # after a failed fsync nobody knows
        else:
            assert holds(store, 2)
        assert after_a_crash(path, tmp_path / "copy") == on_disk
        for generation in (3, 4):
            for name in ("a", "b", "only2"):
                store.put(name, torch.full((3000 + 2,), float(generation)))
            assert after_a_crash(path, tmp_path / "copy") == on_disk
        put(store, 5)
        store.commit()
        assert after_a_crash(path, tmp_path / "copy") == [5]
        put(store, 6)
        store.commit()
        assert store.stats()["used_bytes"] == sum(
            -(-tensor.nbytes // 4096) * 4096 for tensor in content(6).values()
        ), "nothing of the failed commit is kept"
    with TensorStore(path, durable=True) as store:
        assert holds(store, 6)


def test_a_commit_in_doubt_is_not_the_last(
    tmp_path: Path, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may have it, so to go back to the one before is a commit of its own."""
    path = tmp_path / "s"
    with TensorStore(path, durable=True) as store:
        put(store, 1)
        store.commit()
        store.put("more", torch.ones(1))
        fault("folder", OSError(errno.EIO, "injected"))
        with pytest.raises(OSError, match="injected"):
            store.commit()
        monkeypatch.undo()
        store.delete("more")
        store.commit()
        assert after_a_crash(path, tmp_path / "copy") == [1]


def test_a_commit_in_doubt_keeps_the_one_before(
    tmp_path: Path, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the folder is on the disk, a loss of power brings the old manifest back."""
    path = tmp_path / "s"
    with TensorStore(path, durable=True) as store:
        put(store, 1)
        store.commit()
        before = (path / "manifest.json").read_bytes()
        put(store, 2)
        fault("folder", OSError(errno.EIO, "injected"))
        with pytest.raises(OSError, match="injected"):
            store.commit()
        for generation in range(3, 6):
            put(store, generation)  # into whatever is free
            lost = shutil.copytree(path, tmp_path / f"lost{generation}")
            (lost / "manifest.json").write_bytes(before)
            with TensorStore(lost, durable=True, read_only=True) as found:
                assert holds(found, 1)
        monkeypatch.undo()


def test_the_next_writer_does_not_believe_a_second_fsync(
    tmp_path: Path, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one that failed, the kernel has nothing more to write and succeeds."""
    path = tmp_path / "s"
    store = TensorStore(path, durable=True)
    put(store, 1)
    fault("folder", OSError(errno.EIO, "injected"))
    with pytest.raises(OSError, match="injected"):
        store.commit()
    monkeypatch.undo()
    store.close()
    before = os.stat(path / "manifest.json").st_ino
    with TensorStore(path, durable=True) as store:
        assert os.stat(path / "manifest.json").st_ino != before, "it is written anew"
        assert holds(store, 1)


def test_an_interrupted_fsync_proves_nothing(
    tmp_path: Path, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C takes the place of its error; a repeated commit would succeed and sync nothing."""
    path = tmp_path / "s"
    store = TensorStore(path, durable=True)
    put(store, 1)
    store.commit()
    put(store, 2)
    fault("data", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        store.commit()
    monkeypatch.undo()
    with pytest.raises(OSError, match="has no content"):
        store.commit()
    assert after_a_crash(path, tmp_path / "copy") == [1]
    store.delete("only2")
    put(store, 3)
    store.commit()
    assert after_a_crash(path, tmp_path / "copy") == [3]
    store.close()


def test_what_a_killed_writer_leaves_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with TensorStore(path, durable=True) as store:
        put(store, 1)
    (path / "manifest.json.tmp").write_bytes(b"half")
    end = (path / "data").stat().st_size
    with open(path / "data", "ab") as file:
        file.write(bytes(1 << 20))
    with TensorStore(path, durable=True, read_only=True) as store:
        assert holds(store, 1)
    assert (path / "manifest.json.tmp").exists(), "a reader changes nothing"
    with TensorStore(path, durable=True) as store:
        assert holds(store, 1)
        assert not (path / "manifest.json.tmp").exists()
        assert (path / "data").stat().st_size == end


def test_a_store_that_was_never_committed(tmp_path: Path) -> None:
    """Its writer was killed while it made the folder."""
    path = tmp_path / "s"
    path.mkdir()
    (path / "data").touch()
    with TensorStore(path, durable=True) as store:
        assert len(store) == 0
        put(store, 1)


# Damage


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    with TensorStore(tmp_path / "s", durable=True) as store:
        put(store, 1)
        store.put("empty", torch.empty(0))
        store.put("odd", torch.arange(9001, dtype=torch.uint8))
    yield tmp_path / "s"


def flip(file: Path, offset: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte[0] ^ 16]))


@pytest.mark.parametrize("place", [0, 4096, 9000])
def test_a_flipped_byte_in_the_data(path: Path, place: int) -> None:
    with TensorStore(path, durable=True, read_only=True) as store:
        record = store._ledger._records["odd"]
        offset, checksum = record.offset, record.info.checksum
        flip(path / "data", offset + place)
        for out in (None, torch.zeros(9001, dtype=torch.uint8), torch.zeros(18002).byte()[::2]):
            future = store.get_async("odd", out)
            with pytest.raises(OSError) as caught:
                future.result()
            assert caught.value.errno == errno.EBADMSG
            text = str(caught.value)
            assert f"TensorStore: 'odd' in {path / 'data'} has crc32c " in text
            assert f", expected {checksum:08x}: its 9001 bytes at offset {offset}" in text
            if out is not None and not out.is_contiguous():
                assert out.count_nonzero() == 0, "it was not handed over"
        assert torch.equal(store.get("a"), content(1)["a"]), "others are good"
        flip(path / "data", offset + place)
        assert torch.equal(store.get("odd"), torch.arange(9001, dtype=torch.uint8))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.integers(0, 10**6))
def test_a_flipped_byte_in_the_manifest(path: Path, shared_engine: io.AsyncIO, place: int) -> None:
    manifest = path / "manifest.json"
    offset = place % manifest.stat().st_size
    data = (path / "data").read_bytes()
    flip(manifest, offset)
    for read_only in (True, False):
        with pytest.raises(OSError, match=r"manifest\.json has a wrong checksum") as caught:
            TensorStore(path, durable=True, read_only=read_only, engine=shared_engine)
        assert caught.value.errno == errno.EBADMSG
    assert (path / "data").read_bytes() == data, "what may be saved by hand is not touched"
    flip(manifest, offset)
    # The error is still held; the lock is not.
    TensorStore(path, durable=True, engine=shared_engine).close()


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[io.AsyncIO]:
    with io.AsyncIO() as engine:
        yield engine


def test_data_that_are_cut_off(path: Path) -> None:
    size = (path / "data").stat().st_size
    os.truncate(path / "data", size - 4096)
    for read_only in (True, False):
        with pytest.raises(OSError, match=rf"but the data file has {size - 4096}") as caught:
            TensorStore(path, durable=True, read_only=read_only)
        assert caught.value.errno == errno.EBADMSG


def test_data_that_are_cut_off_under_way(path: Path) -> None:
    with TensorStore(path, durable=True, read_only=True) as store:
        os.truncate(path / "data", 0)
        with pytest.raises(OSError, match=r"TensorStore: get of 'a' failed: .*ends at 0"):
            store.get("a")


def test_files_that_are_missing(path: Path) -> None:
    (path / "manifest.json").rename(path / "manifest.json.saved")
    with pytest.raises(FileExistsError, match=r"no manifest\.json"):
        TensorStore(path, durable=True)
    with pytest.raises(FileNotFoundError, match=r"no manifest\.json, expected a store"):
        TensorStore(path, durable=True, read_only=True)
    (path / "manifest.json.saved").rename(path / "manifest.json")
    (path / "data").unlink()
    for read_only in (True, False):
        with pytest.raises(FileNotFoundError) as caught:
            TensorStore(path, durable=True, read_only=read_only)
        assert caught.value.strerror == (
            f"TensorStore: {path / 'data'} is missing, expected the tensors that manifest.json"
            " tells of"
        )
    assert sorted(os.listdir(path)) == ["manifest.json", "store.lock"], "no empty one is made"
