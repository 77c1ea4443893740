"""The files of a durable TensorStore: something else under their names is refused at once."""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepspeed_ext.io.store import folder as store_folder
from deepspeed_ext.io.store.tensor_store import TensorStore

NAMES = ("store.lock", "data", "manifest.json")
AsNobody = Callable[[], contextlib.AbstractContextManager[None]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with TensorStore(tmp_path / "s", durable=True) as store:
        store.put("x", torch.arange(5000))
    return tmp_path / "s"


def refusal(path: Path, read_only: bool) -> OSError:
    with pytest.raises(OSError) as caught:
        TensorStore(path, durable=True, read_only=read_only)
    return caught.value


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_links_are_not_followed(path: Path, name: str, read_only: bool) -> None:
    """A store from somebody else must not have files truncated that lie elsewhere."""
    outside = path.parent / "outside"
    outside.write_bytes((path / name).read_bytes() + b"precious" * 10_000)
    before = outside.read_bytes()
    (path / name).unlink()
    (path / name).symlink_to(outside)
    for _ in range(2):
        error = refusal(path, read_only)
        assert error.errno == errno.ELOOP
        assert error.strerror == (
            f"TensorStore: {path / name} is a symbolic link, expected a regular file"
        )
        assert not outside.exists() or outside.read_bytes() == before
        outside.unlink(missing_ok=True)  # once more with a link that leads nowhere
    assert not outside.exists(), "nothing is made there either"


@pytest.mark.parametrize("name", ["data", "store.lock"])
def test_links_in_a_folder_without_a_store(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / name).symlink_to(outside)
    assert refusal(folder, False).errno == errno.ELOOP
    assert outside.read_bytes() == b"precious"


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_regular_file(path: Path, name: str, kind: str, read_only: bool) -> None:
    (path / name).unlink()
    (os.mkfifo if kind == "pipe" else os.mkdir)(path / name)
    error = refusal(path, read_only)
    text = f"TensorStore: {path / name} is a {kind}, expected a regular file"
    code = errno.EISDIR if kind == "folder" else errno.EINVAL
    assert (error.errno, error.strerror) == (code, text)


def test_a_temporary_manifest_that_is_a_link(path: Path) -> None:
    outside = path.parent / "outside"
    outside.write_bytes(b"precious")
    with TensorStore(path, durable=True) as store:
        (path / "manifest.json.tmp").symlink_to(outside)
        store.put("x", torch.ones(3))
    assert outside.read_bytes() == b"precious"
    assert not (path / "manifest.json").is_symlink()
    with TensorStore(path, durable=True, read_only=True) as store:
        assert torch.equal(store.get("x"), torch.ones(3))


def test_a_temporary_manifest_that_is_a_folder(path: Path) -> None:
    def said(error: OSError, doing: str) -> None:
        assert error.errno == errno.EISDIR
        text = f"{path / 'manifest.json.tmp'} is a folder, expected nothing or a file"
        assert error.strerror == f"TensorStore: {doing} of {path} failed: {text}"

    with TensorStore(path, durable=True) as store:
        store.put("x", torch.ones(3))
        (path / "manifest.json.tmp").mkdir()
        with pytest.raises(IsADirectoryError) as caught:
            store.commit()
        said(caught.value, "commit")
        (path / "manifest.json.tmp").rmdir()
    (path / "manifest.json.tmp").mkdir()
    said(refusal(path, False), "opening")
    with TensorStore(path, durable=True, read_only=True) as store:
        assert torch.equal(store.get("x"), torch.ones(3))


@pytest.mark.parametrize("read_only", [False, True])
def test_what_is_no_folder(tmp_path: Path, read_only: bool) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "pipe", "file/s"):
        error = refusal(tmp_path / name, read_only)
        assert error.errno == errno.ENOTDIR
        assert (
            error.strerror == f"TensorStore: opening of {tmp_path / name} failed: Not a directory"
        )
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("link", "no/s"):
        error = refusal(tmp_path / name, read_only)
        assert error.errno == errno.ENOENT
        assert error.strerror.startswith(f"TensorStore: {tmp_path / name.removesuffix('/s')}")
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "pipe"]


@pytest.mark.parametrize("options", [{}, {"durable": True}, {"durable": True, "read_only": True}])
def test_paths_that_are_none(
    tmp_path: Path, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for bad, text in (
        ("", "TensorStore: path is '', expected the path of a file or folder"),
        (b"", "TensorStore: path is '', expected the path of a file or folder"),
        ("a\0b", "TensorStore: path is 'a\\x00b', expected one without zero bytes"),
    ):
        with pytest.raises(ValueError) as caught:
            TensorStore(bad, **options)
        assert str(caught.value) == text
    with pytest.raises(TypeError) as wrong:
        TensorStore(5, **options)  # type: ignore[arg-type]
    assert str(wrong.value) == "TensorStore: path is an int, expected a str or os.PathLike"
    assert os.listdir(tmp_path) == []


def test_paths_of_other_kinds(tmp_path: Path) -> None:
    class Name:
        def __fspath__(self) -> str:
            return str(tmp_path / "s")

    for path in (Name(), os.fsencode(tmp_path / "s"), str(tmp_path / "s")):
        with TensorStore(path, durable=True) as store:
            store.put("x", torch.ones(3))
    assert os.listdir(tmp_path) == ["s"]


@pytest.mark.parametrize("read_only", [False, True])
def test_a_manifest_that_is_too_large(path: Path, read_only: bool) -> None:
    """A few bytes on the disk can be many in memory."""
    os.truncate(path / "manifest.json", 2 << 30)
    error = refusal(path, read_only)
    assert error.errno == errno.EBADMSG
    assert error.strerror == (
        f"TensorStore: {path / 'manifest.json'} has {2 << 30} bytes, expected at most {256 << 20}"
    )


def test_a_manifest_that_would_be_too_large(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before it counts, or the store could not be opened again."""
    with TensorStore(path, durable=True) as store:
        store.put("n" * 5000, torch.ones(3))
        with monkeypatch.context() as patch:
            patch.setattr(store_folder, "LARGEST_TEXT", 4000)
            with pytest.raises(
                OSError, match=rf"commit of {re.escape(str(path))} failed: the manifest has 5"
            ) as caught:
                store.commit()
        assert caught.value.errno == errno.EFBIG
        with TensorStore(path.parent / "other", durable=True):
            pass
        store.commit()
    with TensorStore(path, durable=True, read_only=True) as store:
        assert len(store) == 2


def test_the_manifest_keeps_its_mode(path: Path) -> None:
    for mode in (0o640, 0o600, 0o664):
        (path / "manifest.json").chmod(mode)
        with TensorStore(path, durable=True) as store:
            store.put("x", torch.tensor(mode))
        assert stat.S_IMODE((path / "manifest.json").stat().st_mode) == mode


def test_a_parent_that_cannot_be_read(open_folder: Path, as_nobody: AsNobody) -> None:
    """Its names cannot be brought to the disk, which is the business of who made them."""
    path = open_folder / "s"
    path.mkdir()
    path.chmod(0o777)
    open_folder.chmod(0o311)
    try:
        with as_nobody(), TensorStore(path, durable=True) as store:
            store.put("x", torch.ones(3))
    finally:
        open_folder.chmod(0o755)
