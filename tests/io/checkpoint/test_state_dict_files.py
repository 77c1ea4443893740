"""Files of `save` and `load`: modes and owners, file systems that lack something, odd kinds."""

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from state_dict_cases import MIB, assert_same, files_in

from deepspeed_ext.io._native import native
from deepspeed_ext.io.checkpoint import new_file
from deepspeed_ext.io.checkpoint.new_file import NewFile
from deepspeed_ext.io.checkpoint.state_dict import inspect, load, save

AsNobody = Callable[[], contextlib.AbstractContextManager[None]]
STATE = {"w": torch.arange(10.0)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("read", [load, inspect])
def test_a_pipe_is_not_waited_for(path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(path)
    with pytest.raises(OSError) as caught:
        read(path)
    assert caught.value.errno in (errno.EINVAL, errno.ESPIPE)
    assert str(path) in str(caught.value)
    with pytest.raises(OSError, match="it is not a regular file"):
        save(STATE, path)


@pytest.mark.parametrize("free", [4096 + 4 * MIB - 1, 0])
def test_a_file_system_that_cannot_reserve(
    path: Path, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(STATE, path)
    state = {"w": torch.zeros(MIB)}
    monkeypatch.setattr(native().File, "allocate", lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(native().File, "free_bytes", lambda _: free)
        with pytest.raises(OSError) as caught:
            save(state, path)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.strerror == (
        f"io.save: {path} has {4096 + 4 * MIB} bytes, expected at most the {free} that are free"
    )
    assert_same(load(path), STATE)
    for enough in (4096 + 4 * MIB, -1):  # the last: nobody knows
        with monkeypatch.context() as patch:
            patch.setattr(native().File, "free_bytes", lambda _, enough=enough: enough)
            save(state, path)
        assert_same(load(path), state)


def test_what_was_reserved_counts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file system that reserves, some users may have more than it says is free."""
    monkeypatch.setattr(native().File, "free_bytes", lambda _: 0)
    save(STATE, path)
    assert_same(load(path), STATE)


@pytest.mark.parametrize("group_too", [False, True])
def test_an_owner_that_cannot_be_passed_on(
    path: Path, group_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the group is; and if that cannot be either, its rights are not for another one."""
    asked: list[tuple[int, int]] = []

    def fchown(fd: int, user: int, group: int) -> None:
        asked.append((user, group))
        if user != -1 or group_too:
            raise PermissionError(errno.EPERM, "injected")

    save(STATE, path)
    path.chmod(0o664)
    status = path.stat()
    monkeypatch.setattr(os, "fchown", fchown)
    save({}, path)
    assert asked == [(status.st_uid, status.st_gid), (-1, status.st_gid)]
    assert mode_of(path) == (0o604 if group_too else 0o664)


def test_rights_of_another_group(open_folder: Path, as_nobody: AsNobody) -> None:
    if os.geteuid():
        pytest.skip("needs a file of another user")
    path = open_folder / "model"
    save(STATE, path)
    path.chmod(0o666)
    os.chown(path, 0, 12345)
    open_folder.chmod(0o777)
    with as_nobody():
        save({}, path)
    assert (path.stat().st_uid, mode_of(path)) == (65534, 0o606)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
@pytest.mark.parametrize("old_mode", [None, 0o600, 0o664])
def test_a_name_of_its_own_is_for_its_user_only(
    path: Path, umask: int, old_mode: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is published: who opens it before can read all that comes."""
    monkeypatch.setattr(new_file, "_DESCRIPTORS", "/does/not/exist")
    made: list[tuple[str, int]] = []
    real_open = os.open

    def noted(name: str, flags: int, mode: int = 0o777, **named: int) -> int:
        fd = real_open(name, flags, mode, **named)
        if flags & os.O_CREAT:
            made.append((os.path.basename(name), stat.S_IMODE(os.fstat(fd).st_mode)))
        return fd

    before = os.umask(umask)
    try:
        if old_mode is not None:
            save(STATE, path)
            path.chmod(old_mode)
        monkeypatch.setattr(os, "open", noted)
        with NewFile(path) as new:
            left = [name for name in files_in(path.parent) if name != path.name]
            assert [(name, mode) for name, mode in made if name in left] == [(left[0], 0o600)]
            assert mode_of(path.parent / left[0]) == 0o600
            new.reserve(10)
            new.publish()
    finally:
        os.umask(before)
    assert mode_of(path) == (0o666 & ~umask if old_mode is None else old_mode)
    assert files_in(path.parent) == [path.name]


@pytest.mark.parametrize("durable", [True, False])
def test_a_folder_that_cannot_be_listed(
    open_folder: Path, as_nobody: AsNobody, durable: bool
) -> None:
    open_folder.chmod(0o333)
    try:
        with as_nobody():
            save(STATE, open_folder / "model", durable=durable)
            assert_same(load(open_folder / "model"), STATE)
    finally:
        open_folder.chmod(0o755)
    assert files_in(open_folder) == ["model"]
