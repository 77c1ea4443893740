"""Writer: what a folder has after saves that fail, who may save there, what is on the disk when."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_writes import fail_writes_of, files_of
from torch.distributed.checkpoint.api import CheckpointException

from deepspeed_ext import zero
from deepspeed_ext.io.checkpoint.new_file import NewFile
from deepspeed_ext.zero.checkpoint import data_file, folder, storage
from deepspeed_ext.zero.checkpoint.storage import MANIFEST

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(writer: zero.Writer, number: float) -> None:
    state = {"w": torch.full((5,), number), "at": number}
    dcp.save(state, storage_writer=writer, no_dist=True)


def loaded(path: Path) -> float:
    state: dict[str, Any] = {"w": torch.zeros(5), "at": 0.0}
    dcp.load(state, storage_reader=zero.Reader(path), no_dist=True)
    assert state["w"].eq(state["at"]).all()
    return state["at"]


def broken(*arguments: object) -> None:
    raise OSError("the disk has gone")


def test_a_writer_saves_again_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP tells nobody that a save has failed: what it holds is its own."""
    writer = zero.Writer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(data_file, "write", broken)
        with pytest.raises(CheckpointException, match="the disk has gone"):
            save(writer, 1.0)
    with pytest.raises(CheckpointException, match="is written by another save, expected one"):
        save(zero.Writer(tmp_path), 2.0)
    for number in (3.0, 4.0):
        save(writer, number)
        assert loaded(tmp_path) == number
    save(zero.Writer(tmp_path), 5.0)
    assert len(files_of(tmp_path)) == 2


def test_what_is_abandoned_is_only_what_nobody_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a Writer that has saved before."""
    writer = zero.Writer(tmp_path)
    save(writer, 1.0)
    before = files_of(tmp_path)
    with monkeypatch.context() as patch:
        fail_writes_of(patch, b'{"format":')
        with pytest.raises(CheckpointException, match="the disk has gone"):
            save(writer, 2.0)
    assert len(files_of(tmp_path)) == 4  # with a file of data, and the mark of a save
    writer.abandon()
    assert files_of(tmp_path) == before and loaded(tmp_path) == 1


def test_a_manifest_that_may_be_there_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had its name before that was known to be on the disk."""
    writer, publish = zero.Writer(tmp_path), NewFile.publish
    save(writer, 1.0)

    def doubtful(self: NewFile) -> None:
        publish(self)
        if self.path.endswith(MANIFEST):
            broken()

    with monkeypatch.context() as patch:
        patch.setattr(NewFile, "publish", doubtful)
        with pytest.raises(CheckpointException, match="the disk has gone"):
            save(writer, 2.0)
    writer.abandon()
    assert loaded(tmp_path) == 2
    save(writer, 3.0)
    assert loaded(tmp_path) == 3 and len(files_of(tmp_path)) == 2


def test_files_that_got_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else has written them too."""
    save(zero.Writer(tmp_path), 1.0)
    write = data_file.write

    def and_more(path: str, *arguments: Any) -> Any:
        pieces = write(path, *arguments)
        with open(path, "ab") as file:
            file.write(b"x")
        return pieces

    with monkeypatch.context() as patch:
        patch.setattr(data_file, "write", and_more)
        text = r"safetensors of process 0 has \d+ bytes, expected the \d+ bytes that were written"
        with pytest.raises(CheckpointException, match=text):
            save(zero.Writer(tmp_path), 2.0)
    assert loaded(tmp_path) == 1


def test_what_others_are_writing_stays(tmp_path: Path) -> None:
    """A NewFile of another program has a lock on it; one that was killed has none."""
    names = (".saving-alive", ".saving-dead")
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with (tmp_path / names[0]).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        save(zero.Writer(tmp_path), 1.0)
        assert files_of(tmp_path).keys() & set(names) == {".saving-alive"}
    save(zero.Writer(tmp_path), 1.0)
    assert not files_of(tmp_path).keys() & set(names)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_file_systems_without_locks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    save(zero.Writer(tmp_path), 1.0)
    assert loaded(tmp_path) == 1


def test_a_fork_does_not_hold_a_folder(tmp_path: Path) -> None:
    """It has the descriptor of its parent, and keeps it when the save has ended."""
    with storage._held(tmp_path):
        opened = [int(fd) for fd in os.listdir("/proc/self/fd") if at(fd) == os.fspath(tmp_path)]
        forked = [os.dup(fd) for fd in opened]
        with pytest.raises(BlockingIOError), storage._held(tmp_path):
            pass
    assert len(forked) == 1
    with storage._held(tmp_path):
        pass
    os.close(*forked)


def at(fd: str) -> str | None:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # the one by which the others were listed
        return None


class Bomb:
    """What runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_runs_that_is_saved_by_dcp(tmp_path: Path) -> None:
    """Its planner has pickled the value before the Writer sees it."""
    mark = tmp_path / "went off"
    state = {"bomb": Bomb(mark), "w": torch.ones(3)}
    text = r"zero\.Writer: 'bomb' has \['.*'\] in it, expected numbers, text, tensors, and lists"
    with pytest.raises(CheckpointException, match=text) as caught:
        dcp.save(state, storage_writer=zero.Writer(tmp_path / "a"), no_dist=True)
    assert "weights_only" not in str(caught.value)  # which opens files, and would run this
    assert not mark.exists()


def test_the_names_of_all_folders_that_are_made_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(storage, "sync_folder", synced.append)
    (tmp_path / "a").mkdir()
    save(zero.Writer(tmp_path / "a" / "b" / "c"), 1.0)
    assert sorted(synced) == [tmp_path / "a", tmp_path / "a" / "b"]
    synced.clear()
    save(zero.Writer(tmp_path / "a" / "b" / "c"), 1.0)
    assert synced == []


def test_folders_that_can_be_written_but_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(storage, "sync_folder", refused)
    save(zero.Writer(tmp_path / "a"), 1.0)
    assert loaded(tmp_path / "a") == 1


LONGEST = "x" * 200


@pytest.mark.parametrize("tag", ["a", LONGEST, "\u00e4" * 100], ids=len)
@pytest.mark.parametrize("end", ["\n", ""])
def test_the_latest_checkpoint(tag: str, end: str, tmp_path: Path) -> None:
    folder.name_latest(tmp_path, tag)
    assert (tmp_path / "latest").read_text() == f"{tag}\n"
    (tmp_path / "latest").write_text(tag + end)
    assert folder.folder_of("op", tmp_path, None) == folder.folder_of("op", tmp_path, tag)
    assert folder.folder_of("op", tmp_path, tag) == tmp_path / tag


@pytest.mark.parametrize(
    "text",
    [
        *("", "\n", "a/b\n", "..\n", "../a\n", "/a\n", ".a\n", "a\nb\n", "a\n\n", "latest\n"),
        *(f"{LONGEST}y", f"{LONGEST}y\n", f"{LONGEST}yy\n", "\u00e4" * 101),
    ],
)
def test_a_latest_checkpoint_of_another_name(text: str, tmp_path: Path) -> None:
    """What was written there by somebody else is no path, and no name that is too long is cut."""
    (tmp_path / "latest").write_text(text)
    with pytest.raises(ValueError, match=r"op: tag is .*, expected a name without / of 1 to 200"):
        folder.folder_of("op", tmp_path, None)


def test_a_latest_checkpoint_that_cannot_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before stays it."""
    folder.name_latest(tmp_path, "a")
    fail_writes_of(monkeypatch, b"b\n")
    with pytest.raises(OSError, match="the disk has gone"):
        folder.name_latest(tmp_path, "b")
    assert files_of(tmp_path) == {"latest": b"a\n"}
