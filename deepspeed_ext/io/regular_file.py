"""Paths that name a file, opening regular files and nothing else, a folder's names on the disk."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from deepspeed_ext.io.tensors import a

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def path_text(op: str, path: str | bytes | os.PathLike[str]) -> str:
    """Return a path as text.

    Args:
        op: opens the text of the error.
        path: what the caller was given: text, bytes, or an object that stands for these.

    Raises:
        TypeError: it is something else.
        ValueError: it is empty, which would be the working folder, or has zero bytes, at the first
            of which the kernel would take it for complete.
    """
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise TypeError(f"{op}: path is {a(path)}, expected a str or os.PathLike") from None
    if not name:
        raise ValueError(f"{op}: path is '', expected the path of a file or folder")
    if "\0" in name:
        raise ValueError(f"{op}: path is {name!r}, expected one without zero bytes")
    return name


@contextlib.contextmanager
def naming(op: str, doing: str) -> Iterator[None]:
    """Say in an error of the system what could not be done, unless it says so already."""
    try:
        yield
    except OSError as error:
        if error.strerror and error.strerror.startswith(f"{op}: "):
            raise
        raise OSError(error.errno, f"{op}: {doing} failed: {error.strerror}") from error


def open_regular(
    op: str,
    path: str | os.PathLike[str],
    flags: int,
    *,
    follow: bool = True,
    folder: int | None = None,
) -> int:
    """Open a file without waiting for anybody, and return its descriptor.

    Args:
        op: opens the text of the error.
        path: of the file; a new one gets the mode that open() gives.
        flags: of os.open; one that truncates would do so before anything is checked.
        follow: a symbolic link in the last part of the path. It may lead out of a folder that
            somebody else has made.
        folder: descriptor of the folder that the file is in, wherever the path leads by now.

    Raises:
        OSError: it cannot be opened (ELOOP: it is a link), or is something else than a regular
            file (EISDIR, EINVAL).
    """
    name = os.fsdecode(path)
    place = name if folder is None else os.path.basename(name)
    # A pipe would wait for its other end; of a regular file, the flag means nothing.
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(place, flags, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise _refused(op, name, errno.ELOOP, "a symbolic link") from None
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, a socket
            raise _refused(op, name, errno.EINVAL, "a pipe, a socket or a device") from None
        if error.errno == errno.EISDIR:
            raise _refused(op, name, errno.EISDIR, "a folder") from None
        raise
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        if kind != stat.S_IFREG:
            code = errno.EISDIR if kind == stat.S_IFDIR else errno.EINVAL
            raise _refused(op, name, code, kind_of(kind))
    except BaseException:
        os.close(fd)
        raise
    return fd


def kind_of(mode: int) -> str:
    """Return what a file that has this mode is, for texts of errors."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Bring the names in a folder to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _refused(op: str, name: str, code: int, kind: str) -> OSError:
    return OSError(code, f"{op}: {name} is {kind}, expected a regular file")
