"""Opening regular files and nothing else, and bringing a folder's names to the disk."""

import errno
import os
import stat

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def open_regular(op: str, path: str | os.PathLike[str], flags: int, follow: bool = True) -> int:
    """Open a file without waiting for anybody, and return its descriptor.

    Args:
        op: opens the text of the error.
        path: of the file; a new one gets the mode that open() gives.
        flags: of os.open; one that truncates would do so before anything is checked.
        follow: a symbolic link in the last part of the path. It may lead out of a folder that
            somebody else has made.

    Raises:
        OSError: it cannot be opened (ELOOP: it is a link), or is something else than a regular
            file (EISDIR, EINVAL).
    """
    name = os.fsdecode(path)
    # A pipe would wait for its other end; of a regular file, the flag means nothing.
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise _refused(op, name, errno.ELOOP, "a symbolic link") from None
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, a socket
            raise _refused(op, name, errno.EINVAL, "a pipe, a socket or a device") from None
        raise
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        if kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if kind != stat.S_IFREG:
            raise _refused(op, name, errno.EINVAL, _KINDS.get(kind, "something else"))
    except BaseException:
        os.close(fd)
        raise
    return fd


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Bring the names in a folder to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _refused(op: str, name: str, code: int, kind: str) -> OSError:
    return OSError(code, f"{op}: {name} is {kind}, expected a regular file")
