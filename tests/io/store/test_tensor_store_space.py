"""The space of a TensorStore: checked before a byte is written, used again, given back."""

import errno
import os
import random
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from store_engines import LazyIO

from deepspeed_ext.io._native import native
from deepspeed_ext.io.store.space import Space
from deepspeed_ext.io.store.tensor_store import TensorStore

MIB = 1 << 20
SLACK = 64 << 10  # what a file system takes or frees for its own books


@pytest.fixture(params=["scratch", "durable"])
def durable(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "durable")


def content(nbytes: int, number: int = 1) -> torch.Tensor:
    return torch.full((nbytes,), number, dtype=torch.uint8)


def free_on(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def places(store: TensorStore) -> dict[str, int]:
    """Return what the store counts itself."""
    stats = store.stats()
    del stats["disk_free_bytes"]
    return stats


@contextmanager
def longest_file(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(small_disk: Path, durable: bool) -> None:
    path = small_disk / "s" if durable else small_disk
    with TensorStore(path, durable=durable) as store:
        store.put("x", content(MIB))
        before, free = places(store), free_on(small_disk)
        where = re.escape(str(path / "data" if durable else path))
        for call in (lambda: store.put("x", content(20 * MIB, 2)), lambda: store.reserve(20 * MIB)):
            with pytest.raises(OSError) as caught:
                call()
            assert caught.value.errno == errno.ENOSPC
            text = re.fullmatch(
                rf"TensorStore: (put of 'x'|reserve) needs {20 * MIB} bytes, {where} has (\d+)"
                r" free, and no gap among the 0 unused bytes of the store is large enough;"
                r" free space there",
                caught.value.strerror,
            )
            assert text and abs(int(text[2]) - free) <= SLACK
            assert places(store) == before
            assert abs(free_on(small_disk) - free) <= SLACK
        assert torch.equal(store.get("x"), content(MIB)), "the name keeps what it has"
        store.put("x", content(MIB, 3))
        store.put("y", content(2 * MIB, 4))
        store.reserve(4 * MIB)
        assert torch.equal(store.get("x"), content(MIB, 3))
        assert torch.equal(store.get("y"), content(2 * MIB, 4))


def test_a_file_system_that_cannot_reserve(
    small_disk: Path, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native().File, "allocate", lambda *_: None)
    path = small_disk / "s" if durable else small_disk
    with TensorStore(path, durable=durable) as store:
        store.put("x", content(MIB))
        store.reserve(MIB)
        assert store._file.size() == store.stats()["file_bytes"] == 2 * MIB
        before = places(store)
        with pytest.raises(OSError, match="put of 'y' needs 19922944 bytes") as caught:
            store.put("y", content(20 * MIB))
        assert caught.value.errno == errno.ENOSPC
        assert places(store) == before
        assert torch.equal(store.get("x"), content(MIB))


def test_a_reservation_that_fails_halfway(
    small_disk: Path, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else may take the space between the look and the reservation."""
    path = small_disk / "s" if durable else small_disk
    with TensorStore(path, durable=durable) as store:
        store.put("x", content(MIB))
        before, free = places(store), free_on(small_disk)
        monkeypatch.setattr(store._ledger._space, "disk_free", lambda: 1 << 40)
        with pytest.raises(OSError, match="put of 'y' needs") as caught:
            store.put("y", content(20 * MIB))
        assert caught.value.errno == errno.ENOSPC
        monkeypatch.undo()
        assert places(store) == before
        assert store._file.size() == before["file_bytes"]
        assert free_on(small_disk) >= free - SLACK, "what was reserved is given back"
        store.put("y", content(MIB))


def test_a_file_that_may_not_grow(tmp_path: Path, durable: bool) -> None:
    with TensorStore(tmp_path / "s" if durable else tmp_path, durable=durable) as store:
        store.put("x", content(MIB))
        with longest_file(2 * MIB):
            with pytest.raises(OSError) as caught:
                store.put("y", content(2 * MIB))
            assert caught.value.errno == errno.EFBIG
            assert caught.value.strerror == (
                f"TensorStore: put of 'y' needs {2 * MIB} bytes more than the {MIB} of"
                f" {store._file.path}, expected at most {2 * MIB} in all, the file size limit of"
                " this process (ulimit -f); raise it"
            )
            store.put("y", content(MIB // 2, 2))
        assert store.names() == ["x", "y"]
        assert torch.equal(store.get("y"), content(MIB // 2, 2))
        assert store._file.size() == store.stats()["file_bytes"] == MIB * 3 // 2


def test_a_full_disk_waits_for_what_will_be_free(small_disk: Path) -> None:
    with LazyIO() as engine, TensorStore(small_disk, engine=engine) as store:
        store.put("x", content(9 * MIB, 1))
        read = store.get_async("x")
        store.delete("x")
        store.put("y", content(9 * MIB, 2))
        assert torch.equal(read.result(), content(9 * MIB, 1))
        assert torch.equal(store.get("y"), content(9 * MIB, 2))


def fill_up(disk: Path) -> Path:
    """Fill a file system up, and return the file that does."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        for nbytes in (65536, 512):
            with pytest.raises(OSError, match="No space"):
                while True:
                    file.write(bytes(nbytes))
    return filler


def test_a_full_disk_and_a_commit_that_frees(small_disk: Path) -> None:
    """What the data file has at its end, and needs no more, is room for the manifest."""
    path = small_disk / "s"
    with TensorStore(path, durable=True) as store:
        store.put("x", content(MIB, 1))
        store.commit()
        store.put("y", content(MIB, 2))
        fill_up(small_disk)
        store.delete("y")
        store.delete("x")
        store.put("z", content(1, 3))
        store.commit()
    with TensorStore(path, durable=True, read_only=True) as store:
        assert store.names() == ["z"] and torch.equal(store.get("z"), content(1, 3))


def test_a_full_disk_and_a_store_that_is_opened(small_disk: Path) -> None:
    path = small_disk / "s"
    with TensorStore(path, durable=True) as store:
        store.put("x", content(MIB))
        store.commit()
    filler = fill_up(small_disk)
    with pytest.raises(
        OSError, match=r"expected room .*; read_only=True reads the store$"
    ) as caught:
        TensorStore(path, durable=True)
    assert caught.value.errno == errno.ENOSPC
    with TensorStore(path, durable=True, read_only=True) as store:
        assert torch.equal(store.get("x"), content(MIB))
    filler.unlink()
    TensorStore(path, durable=True).close()


def test_a_full_disk_at_the_commit(small_disk: Path) -> None:
    path = small_disk / "s"
    with TensorStore(path, durable=True) as store:
        store.put("x", content(MIB, 1))
        store.commit()
        store.put("x", content(MIB, 2))
        store.put("y" * 200_000, content(1))
        store.reserve(1)  # which keeps what the file has for tensors
        filler = fill_up(small_disk)
        with pytest.raises(OSError) as caught:
            store.commit()
        assert caught.value.errno == errno.ENOSPC
        assert sorted(os.listdir(path)) == ["data", "manifest.json", "store.lock"]
        filler.unlink()
        store.commit()
    with TensorStore(path, durable=True, read_only=True) as store:
        assert torch.equal(store.get("x"), content(MIB, 2))


def test_disk_usage_is_flat(small_disk: Path, durable: bool) -> None:
    """Some 30 MiB go through a disk that has 14."""
    chance = random.Random(5)
    free, largest = free_on(small_disk), 0
    with TensorStore(small_disk / "s" if durable else small_disk, durable=durable) as store:
        for turn in range(150):
            name = str(chance.randrange(6))
            if name in store and chance.random() < 0.3:
                store.delete(name)
            else:
                store.put_async(name, content(chance.randrange(1, 600_000), turn % 256))
            if durable and turn % 3 == 0:
                store.commit()
            store.wait()
            stats = store.stats()
            largest = max(largest, stats["used_bytes"])
            assert stats["file_bytes"] <= 2 * largest + 600_000, "room for one more"
        for name in store:
            store.delete(name)
        if durable:
            store.commit()
        assert store.stats()["file_bytes"] == store.stats()["used_bytes"] == 0
    if not durable:
        assert free_on(small_disk) >= free - SLACK


def test_generations_take_turns(tmp_path: Path) -> None:
    with TensorStore(tmp_path / "s", durable=True) as store:
        for generation in range(12):
            for name in "abc":
                store.put_async(name, content(100_000, generation))
            store.commit()
        assert store.stats()["used_bytes"] == 3 * 102_400
        assert store.stats()["file_bytes"] == (2 * 3 + 1) * 102_400, "with what it grew ahead"
    assert (tmp_path / "s" / "data").stat().st_size <= 2 * 3 * 102_400


class CountingFile:
    """A file on a disk with so much free, which may refuse what would otherwise fit."""

    path = "file"

    def __init__(self, free: int, refuse_from: int = 1 << 60, can_reserve: bool = True) -> None:
        self.free, self.refuse_from, self.can_reserve = free, refuse_from, can_reserve
        self.length = 0
        self.grown: list[int] = []

    def free_bytes(self) -> int:
        return self.free

    def size(self) -> int:
        return self.length

    def allocate(self, offset: int, nbytes: int) -> None:
        assert offset == self.length
        if nbytes >= self.refuse_from:
            raise OSError(errno.ENOSPC, "injected")
        if self.can_reserve:
            self.truncate(offset + nbytes)

    def truncate(self, nbytes: int) -> None:
        if nbytes > self.length:
            self.grown.append(nbytes - self.length)
        self.length = nbytes


def fill(space: Space, count: int, nbytes: int) -> None:
    for _ in range(count):
        slot = space.fit(nbytes)
        if slot is None:
            space.grow(nbytes, "put", ahead=True)
            slot = space.fit(nbytes)
        assert slot
        assert space.end - space.used <= min(space.used, 64 * MIB)


def test_growth_is_in_few_steps() -> None:
    file = CountingFile(1 << 40)
    fill(Space(file), 1000, 4096)
    assert len(file.grown) <= 12
    file = CountingFile(1 << 40)
    fill(Space(file), 500, MIB)
    assert max(file.grown) == 65 * MIB
    assert sum(file.grown) == file.length <= 565 * MIB
    file = CountingFile(1 << 40)
    space = Space(file)
    fill(space, 1, MIB)
    space.reserve(3 * MIB, "reserve")
    assert file.grown == [MIB, 3 * MIB], "what is asked for has its size"


@pytest.mark.parametrize(
    "file",
    [
        CountingFile(3 * MIB - 1),
        CountingFile(1 << 40, refuse_from=MIB + 1),
        CountingFile(-1, refuse_from=MIB + 1),
        CountingFile(1 << 40, can_reserve=False),
    ],
    ids=["little is free", "refused", "nobody knows", "nothing is reserved"],
)
def test_growth_without_room_for_more(file: CountingFile) -> None:
    fill(Space(file), 10, MIB)
    assert file.grown == [MIB] * 10


def test_a_store_grows_in_few_steps(
    tmp_path: Path, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    allocate = native().File.allocate

    def counted(file: object, offset: int, nbytes: int) -> None:
        steps.append(nbytes)
        allocate(file, offset, nbytes)

    monkeypatch.setattr(native().File, "allocate", counted)
    path = tmp_path / "s" if durable else tmp_path
    with TensorStore(path, durable=durable) as store:
        for number in range(200):
            store.put_async(str(number), content(20_000))
        store.wait()
        stats = store.stats()
        assert len(steps) <= 10
        assert stats["used_bytes"] == 200 * 20_480
        assert store._file.size() == stats["file_bytes"] <= 2 * stats["used_bytes"]
    if durable:
        assert (path / "data").stat().st_size == 200 * 20_480, "the rest is cut off"


def test_uncommitted_space_is_given_back(tmp_path: Path) -> None:
    with TensorStore(tmp_path / "s", durable=True) as store:
        store.put("x", content(4096))
    store = TensorStore(tmp_path / "s", durable=True)
    store.put("y", content(MIB))
    store.reserve(MIB)
    store.close()
    assert (tmp_path / "s" / "data").stat().st_size == 4096


def test_a_descriptor_elsewhere_keeps_no_space(small_disk: Path) -> None:
    """Say, of a child that was forked by native code."""
    free = free_on(small_disk)
    store = TensorStore(small_disk)
    store.put("x", content(4 * MIB))
    other = os.dup(store._file.fileno())
    store.close()
    assert os.fstat(other).st_size == 0
    assert free_on(small_disk) >= free - SLACK
    os.close(other)
