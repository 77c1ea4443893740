"""NewFile: a file that stands under its name when it is whole and on the disk, or not at all."""

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import stat

from deepspeed_ext.io._native import native
from deepspeed_ext.io.file import File
from deepspeed_ext.io.regular_file import naming, path_text, sync_folder

_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR)  # by new and by old kernels
_DESCRIPTORS = "/proc/self/fd"


class NewFile:
    """Makes a file beside the one that it is to replace; `publish` puts it into its place.

    Until then it has no name, where the file system allows that, so that nothing remains of it if
    the process is killed; elsewhere it has a name of its own under a lock that the kernel drops
    with its holder, and the next NewFile for the same path removes what it finds unlocked.

    A new file has the mode that open() would give it. A file that is there already is replaced if
    open() could write it, and passes on its mode, and its owner and group if this process may give
    these away; a group that it may not give loses its rights. Symbolic links are followed; other
    hard links of the old file keep the old content.

    Args:
        path: where the file is to stand; its folder has to exist.
        durable: bring content and name to the disk before `publish` returns.

    Raises:
        OSError: the folder is missing or cannot be written, or an old file cannot be replaced.
    """

    def __init__(self, path: str | os.PathLike[str], *, durable: bool = True) -> None:
        self.path = _followed(os.path.join(os.getcwd(), path_text("io.save", path)))
        self._durable = durable
        self._folder, name = os.path.split(self.path)
        # Not made of the name, to which nothing could be added if it is as long as names may be.
        self._prefix = f".saving-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}-"
        self._temporary: str | None = None
        self._mode: int | None = None  # to be given by `publish`; None: it has it from the start
        self._file: File | None = None
        with naming("io.save", f"replacing {self.path}"):
            self._old = _replaceable(self.path)
        with naming("io.save", f"making a file in {self._folder}"):
            self._remove_abandoned()
            self._fd = self._open()
        try:
            with naming("io.save", f"making a file in {self._folder}"):
                place = self._temporary or f"{_DESCRIPTORS}/{self._fd}"
                self._file = native().File(os.fsencode(place), "update")
        except BaseException:
            self._close()
            raise

    @property
    def file(self) -> File:
        """The file to write."""
        assert self._file is not None
        return self._file

    def reserve(self, nbytes: int) -> None:
        """Make the file so long and give it its space on the disk.

        Raises:
            OSError: there is too little space.
        """
        free = self.file.free_bytes()
        try:
            self.file.allocate(0, nbytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise self._shortage(nbytes, free) from error
        if self.file.size() < nbytes and 0 <= free < nbytes:  # a file system that cannot reserve
            raise self._shortage(nbytes, free)

    def publish(self) -> None:
        """Put the file into its place, whole."""
        with naming("io.save", f"replacing {self.path}"):
            if self._old is not None:
                self._mode = _pass_on_owner(self._fd, self._old)
            if self._mode is not None:
                os.fchmod(self._fd, self._mode)
        if self._durable:
            self.file.sync()
        with naming("io.save", f"replacing {self.path}"):
            if self._temporary is None:
                self._temporary = self._new_name()
                source = f"{_DESCRIPTORS}/{self._fd}"
                # Only with a folder's descriptor does Python ask to follow this link.
                os.link(source, self._temporary, src_dir_fd=self._fd, follow_symlinks=True)
            os.replace(self._temporary, self.path)
            self._temporary = None
            if self._durable:
                try:
                    sync_folder(self._folder)
                except PermissionError:  # it can be written but not opened
                    os.sync()

    def __enter__(self) -> "NewFile":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        nameless = self.file.path
        self._close()
        if isinstance(error, OSError) and error.strerror and nameless in error.strerror:
            text = error.strerror.replace(nameless, self.path)
            raise OSError(error.errno, text) from error

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC
        if os.path.isdir(_DESCRIPTORS):
            try:
                fd = os.open(self._folder, flags | os.O_TMPFILE, 0o666)
                _lock(fd)  # for the moment between link and rename in publish
                return fd
            except OSError as error:
                if error.errno not in _NO_UNNAMED_FILES:
                    raise
        if self._old is None:
            self._mode = self._mode_of_new_files()
        while True:
            name = self._new_name()
            # Whoever opened it now could read all that comes, whatever mode it has in the end.
            fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
            _lock(fd)
            if os.fstat(fd).st_nlink:
                self._temporary = name
                return fd
            os.close(fd)  # another process took it for abandoned before it was locked

    def _mode_of_new_files(self) -> int:
        """Return the mode that open() gives in this folder; the umask alone does not tell."""
        name = self._new_name()
        fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            return os.fstat(fd).st_mode & 0o777
        finally:
            os.close(fd)
            with contextlib.suppress(FileNotFoundError):  # another process took it for abandoned
                os.unlink(name)

    def _shortage(self, nbytes: int, free: int) -> OSError:
        text = f"io.save: {self.path} has {nbytes} bytes, expected at most the {free} that are free"
        return OSError(errno.ENOSPC, text)

    def _new_name(self) -> str:
        return os.path.join(self._folder, self._prefix + secrets.token_hex(8))

    def _remove_abandoned(self) -> None:
        """Remove what processes left that were killed while they saved to this path."""
        names: list[str] = []
        with contextlib.suppress(PermissionError), os.scandir(self._folder) as entries:
            # A folder that can only be written does not say what is in it.
            names += [entry.path for entry in entries if entry.name.startswith(self._prefix)]
        for name in names:
            with contextlib.suppress(OSError):  # it is locked, or already gone, or of another user
                fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(name)
                finally:
                    os.close(fd)

    def _close(self) -> None:
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
        if self._file is not None:
            self._file.close()
        os.close(self._fd)


def _replaceable(path: str) -> os.stat_result | None:
    """Return what is known of the file at a path, None if there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    if not os.access(path, os.W_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return status


def _pass_on_owner(fd: int, old: os.stat_result) -> int:
    """Give a file the owner and group of an old one, as far as possible; return its mode then."""
    try:
        os.fchown(fd, old.st_uid, old.st_gid)
    except OSError:
        try:
            os.fchown(fd, -1, old.st_gid)
        except OSError:
            return old.st_mode & 0o707  # what was for that group is not for another one
    return old.st_mode & 0o777


def _lock(fd: int) -> None:
    """Mark a file as in use; where there are no locks, nobody can find it unlocked either."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX)


def _followed(path: str) -> str:
    """Return what a symbolic link points to; links on the way there are the kernel's business."""
    for _ in range(40):  # as many as the kernel follows
        try:
            target = os.readlink(path)
        except OSError:  # it is none, or is not there
            return path
        path = os.path.join(os.path.dirname(path), target)
    raise OSError(errno.ELOOP, f"io.save: {path} has too many symbolic links, expected at most 40")
