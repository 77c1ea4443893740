"""The locks of a durable TensorStore, when its files are removed or replaced by hand under it."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepspeed_ext.io.store.tensor_store import TensorStore

OLD, NEW = torch.arange(5000), torch.arange(5000) + 1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with TensorStore(tmp_path / "s", durable=True) as store:
        store.put("x", OLD)
    return tmp_path / "s"


def unlink_lock(path: Path) -> None:
    (path / "store.lock").unlink()


def new_lock(path: Path) -> None:
    unlink_lock(path)
    (path / "store.lock").touch()


def linked_lock(path: Path) -> None:
    unlink_lock(path)
    other = path.parent / "other.lock"
    other.touch()
    os.link(other, path / "store.lock")


def copied_data(path: Path) -> None:
    shutil.copy(path / "data", path / "copy")
    os.replace(path / "copy", path / "data")


def move_away(path: Path) -> None:
    path.rename(path.parent / "away")


def another_folder(path: Path) -> None:
    move_away(path)
    shutil.copytree(path.parent / "away", path)


def folder_of_links(path: Path) -> None:
    move_away(path)
    shutil.copytree(path.parent / "away", path, copy_function=os.link)


def a_file(path: Path) -> None:
    move_away(path)
    path.touch()


WAYS = (unlink_lock, new_lock, linked_lock, copied_data)
WAYS += (move_away, another_folder, folder_of_links, a_file)


@pytest.mark.parametrize("change", WAYS)
def test_nothing_is_published(path: Path, change: Callable[[Path], None]) -> None:
    """What others find is not what this writer has locked: they may have been told of a commit."""
    store = TensorStore(path, durable=True)
    store.put("x", NEW)
    change(path)
    before = {file: file.read_bytes() for file in path.parent.glob("*/manifest.json")}
    for _ in range(2):
        with pytest.raises(
            OSError, match=rf"TensorStore: commit of {path} failed: {path}.* removed or replaced"
        ) as caught:
            store.commit()
        assert caught.value.errno == errno.ESTALE
    assert torch.equal(store.get("x"), NEW), "it can be kept elsewhere"
    store.close()
    assert before == {file: file.read_bytes() for file in path.parent.glob("*/manifest.json")}
    for file in before:
        with TensorStore(file.parent, durable=True, read_only=True) as found:
            assert torch.equal(found.get("x"), OLD)


def test_a_file_put_back_is_the_same(path: Path) -> None:
    with TensorStore(path, durable=True) as store:
        store.put("x", NEW)
        os.link(path / "store.lock", path / "saved")
        new_lock(path)
        with pytest.raises(OSError, match="removed or replaced"):
            store.commit()
        os.replace(path / "saved", path / "store.lock")
        move_away(path)
        with pytest.raises(OSError, match="removed or replaced"):
            store.commit()
        (path.parent / "away").rename(path)
        store.commit()
    with TensorStore(path, durable=True, read_only=True) as found:
        assert torch.equal(found.get("x"), NEW)


@pytest.mark.parametrize("change", [unlink_lock, new_lock, linked_lock, folder_of_links])
@pytest.mark.parametrize("reads", [False, True])
def test_nobody_else_gets_the_data(path: Path, change: Callable[[Path], None], reads: bool) -> None:
    """A second writer would overwrite what this one has, and be overwritten."""
    store = TensorStore(path, durable=True, read_only=reads)
    change(path)
    by = "processes that read it" if reads else "a writer"
    with pytest.raises(BlockingIOError, match=f"s is in use by {by}") as caught:
        TensorStore(path, durable=True)
    if change is not folder_of_links:  # where it is the same lock
        assert caught.value.strerror == (
            f"TensorStore: {path} is in use by {by} without this store.lock, expected nobody else;"
            " close it there first"
        )
    if not reads:
        with pytest.raises(BlockingIOError, match=r"expected no writer"):
            TensorStore(path, durable=True, read_only=True)
    else:
        with TensorStore(path, durable=True, read_only=True) as other:
            assert torch.equal(other.get("x"), OLD)
    store.close()
    if change is folder_of_links:
        shutil.rmtree(path.parent / "away")
    with TensorStore(path, durable=True) as store:
        store.put("x", NEW)


@pytest.mark.parametrize("reads", [False, True])
def test_a_lock_that_is_removed_before_it_is_locked(
    path: Path, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed_ext.io.store import folder as store_folder

    real_flock = store_folder.fcntl.flock

    def flock(fd: int, how: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("store.lock"):
            new_lock(path)
        real_flock(fd, how)

    with monkeypatch.context() as patch:
        patch.setattr(store_folder.fcntl, "flock", flock)
        with pytest.raises(OSError, match=r"store\.lock was removed or replaced") as caught:
            TensorStore(path, durable=True, read_only=reads)
    assert caught.value.errno == errno.ESTALE
    TensorStore(path, durable=True).close()


def test_the_last_moment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is swapped between the check and the rename is not touched."""
    real_replace = os.replace

    def replace(source: str, target: str, **folders: int) -> None:
        another_folder(path)
        real_replace(source, target, **folders)

    store = TensorStore(path, durable=True)
    store.put("x", NEW)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        store.commit()
    store.close()
    for folder, want in ((path, OLD), (path.parent / "away", NEW)):
        with TensorStore(folder, durable=True, read_only=True) as found:
            assert torch.equal(found.get("x"), want)


def test_data_with_another_name(path: Path) -> None:
    """Of a copy by hard links, as some backups are: to write here would change it there."""
    copy = shutil.copytree(path, path.parent / "copy", copy_function=os.link)
    with pytest.raises(OSError) as caught:
        TensorStore(copy, durable=True)
    assert caught.value.errno == errno.EMLINK
    assert caught.value.strerror == (
        f"TensorStore: {copy / 'data'} has 2 hard links, expected 1: writing would change the file"
        " under its other names too; put a copy in its place"
    )
    with TensorStore(copy, durable=True, read_only=True) as found:
        assert torch.equal(found.get("x"), OLD)
