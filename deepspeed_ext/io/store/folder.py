"""The folder of a durable tensor store: its lock, and a manifest that is replaced as a whole."""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

from deepspeed_ext.io.regular_file import naming, open_regular, sync_folder
from deepspeed_ext.io.store.manifest import LARGEST_TEXT


class StoreFolder:
    """Holds the folder's locks from construction to `close`: one writer, or any number of readers.

    There are two, on `store.lock` and on `data`. The first is there before any data are; the other
    keeps the bytes, also when somebody has removed the first by hand, or has made a second folder
    of hard links. The kernel drops them when their holder dies, and with it the last child that it
    forked and that has not called `close`; there, that leaves the parent's locks as they are.

    Files in the folder are regular ones: a link could lead to what is none of its business. They
    are looked for in the folder that was opened, wherever that has been moved since.

    Args:
        path: the folder. A writer makes it; its parent has to exist.
        read_only: share the folder with other readers, and change nothing.

    Raises:
        FileNotFoundError: a writer's folder has no parent; a reader's is not there.
        BlockingIOError: another process has it.
        OSError: ELOOP or EINVAL: its lock is no regular file; ENOTDIR: nor is this a folder.
    """

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self._folder = self._lock = self._data = -1  # descriptors
        self._process = os.getpid()
        self.read_only = read_only
        path = Path(os.path.abspath(path))  # the working directory may change
        self.path = path
        self.data = path / "data"
        self.manifest = path / "manifest.json"
        self._lock_path = path / "store.lock"
        self._temporary = path / "manifest.json.tmp"
        try:
            with naming("TensorStore", f"opening of {path}"):
                self._open()
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        if os is not None and self._process == os.getpid():  # a module that is gone is None
            self.close()

    def read(self) -> bytes | None:
        """Return the text of the manifest, None if there is none.

        Raises:
            OSError: EBADMSG: it is too large for one; ELOOP or EINVAL: it is no regular file.
        """
        try:
            fd = self._file(self.manifest, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with open(fd, "rb", buffering=0) as file:
            nbytes = os.fstat(fd).st_size
            if nbytes > LARGEST_TEXT:
                raise OSError(
                    errno.EBADMSG,
                    f"TensorStore: {self.manifest} has {nbytes} bytes, expected at most"
                    f" {LARGEST_TEXT}",
                )
            parts = []
            while nbytes and (part := file.read(nbytes)):
                parts.append(part)
                nbytes -= len(part)
        return b"".join(parts)

    def hold_data(self, *, make: bool = False) -> bool:
        """Lock the data file, and tell whether there is one.

        Args:
            make: make it when there is none.

        Raises:
            BlockingIOError: somebody has it who has not this `store.lock`.
            OSError: ELOOP, EINVAL or EISDIR: it is no regular file; EMLINK: a writer would change
                what has another name.
        """
        flags = os.O_RDONLY if self.read_only else os.O_RDWR
        try:
            self._data = self._file(self.data, flags | (os.O_CREAT if make else 0))
        except FileNotFoundError:
            return False
        self._take(self._data, "without this store.lock")
        self._check_same(self.data, self._data, self._status)
        names = os.fstat(self._data).st_nlink
        if names > 1 and not self.read_only:
            raise OSError(
                errno.EMLINK,
                f"TensorStore: {self.data} has {names} hard links, expected 1: writing would change"
                " the file under its other names too; put a copy in its place",
            )
        return True

    def data_bytes(self) -> int:
        """Return the length of the data file that is locked."""
        return os.fstat(self._data).st_size

    def is_data(self, fd: int) -> bool:
        """Tell whether a descriptor is of the data file that is locked."""
        return os.path.sameopenfile(self._data, fd)

    def prepare(self, text: bytes) -> None:
        """Bring the next manifest to the disk, beside the one that counts, with the mode of that.

        Raises:
            OSError: EFBIG: `read` would refuse it; or what the disk says.
        """
        if len(text) > LARGEST_TEXT:
            want = f"expected at most {LARGEST_TEXT}: it has too many tensors"
            raise OSError(errno.EFBIG, f"the manifest has {len(text)} bytes, {want}")
        self.check_place()
        self._remove_temporary()
        try:
            with open(self._temporary.name, "xb", buffering=0, opener=self._made_here) as file:
                self._pass_on_mode(file.fileno())
                rest = memoryview(text)
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                self._remove_temporary()
            raise

    def publish(self) -> None:
        """Replace the manifest by the prepared one.

        Raises:
            OSError: ESTALE: see `check_place`; nothing was replaced.
        """
        self.check_place()
        here = {"src_dir_fd": self._folder, "dst_dir_fd": self._folder}
        os.replace(self._temporary.name, self.manifest.name, **here)

    def check_place(self) -> None:
        """Make sure that others who look for the store find what is locked here.

        Raises:
            OSError: ESTALE: folder, lock or data were removed, moved away or replaced.
        """
        self._check_same(self.path, self._folder, os.stat)
        self._check_same(self._lock_path, self._lock, self._status)
        if self._data >= 0:
            self._check_same(self.data, self._data, self._status)

    def sync(self) -> None:
        """Bring the names in the folder to the disk."""
        os.fsync(self._folder)

    def close(self) -> None:
        """Let others have the folder."""
        # `store.lock` last: who gets that one is not to find the data still locked.
        descriptors = (self._data, self._lock, self._folder)
        self._data = self._lock = self._folder = -1
        for fd in descriptors:
            if fd >= 0:
                os.close(fd)

    def _open(self) -> None:
        if not self.read_only:
            self._make()
        access = os.O_PATH if self.read_only else os.O_RDONLY  # a writer syncs it
        try:
            self._folder = os.open(self.path, access | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            text = f"TensorStore: {self.path} does not exist, expected a store"
            raise FileNotFoundError(errno.ENOENT, text) from None
        self._take_lock()
        if not self.read_only:
            self._recover()

    def _file(self, path: Path, flags: int) -> int:
        return open_regular("TensorStore", path, flags, follow=False, folder=self._folder)

    def _made_here(self, name: str, flags: int) -> int:
        return os.open(name, flags, 0o666, dir_fd=self._folder)

    def _status(self, path: Path) -> os.stat_result:
        return os.stat(path.name, dir_fd=self._folder, follow_symlinks=False)

    def _check_same(self, path: Path, fd: int, status_of: Callable[[Path], os.stat_result]) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(status_of(path), os.fstat(fd)):
                return
        raise OSError(
            errno.ESTALE,
            f"{path} was removed or replaced meanwhile, expected the one that this process has"
            " locked: another one may use the store",
        )

    def _remove_temporary(self) -> None:
        try:
            os.unlink(self._temporary.name, dir_fd=self._folder)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            text = f"{self._temporary} is a folder, expected nothing or a file"
            raise IsADirectoryError(errno.EISDIR, text) from None

    def _make(self) -> None:
        made = True
        try:
            self.path.mkdir()
        except FileExistsError:
            made = False
        except FileNotFoundError:
            text = f"TensorStore: {self.path.parent} does not exist, expected a folder"
            raise FileNotFoundError(errno.ENOENT, text) from None
        try:
            # Also when it was there: who made it may have been killed before it got this far.
            sync_folder(self.path.parent)
        except PermissionError:
            if made:  # otherwise that parent is somebody else's, and so is this
                raise

    def _pass_on_mode(self, fd: int) -> None:
        try:
            mode = self._status(self.manifest).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISREG(mode):
            with contextlib.suppress(PermissionError):  # a file system without modes
                os.fchmod(fd, mode & 0o777)

    def _recover(self) -> None:
        """Tidy up after a writer that was killed."""
        self._remove_temporary()

    def _take_lock(self) -> None:
        flags = os.O_RDONLY if self.read_only else os.O_RDWR | os.O_CREAT
        try:
            self._lock = self._file(self._lock_path, flags)
        except FileNotFoundError:
            if self.read_only:
                return  # a copy without it, perhaps where nobody can write; or no store at all
            raise
        self._take(self._lock)
        # Somebody may have removed it before it was locked, and others lock another one.
        self._check_same(self._lock_path, self._lock, self._status)
        if not self.read_only:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{self._process} on {os.uname().nodename}\n".encode(), 0)

    def _take(self, fd: int, how: str = "") -> None:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if self.read_only else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(errno.EAGAIN, self._held(fd, how)) from None

    def _held(self, fd: int, how: str) -> str:
        by = "a writer"
        if fd == self._lock:
            holder = os.pread(fd, 400, 0).decode(errors="replace").strip()
            by += f", process {holder or 'unknown'}"
        if not self.read_only:
            with contextlib.suppress(BlockingIOError):  # none: a writer has it
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                by = "processes that read it"
        want = "no writer" if self.read_only else "nobody else"
        by = f"{by} {how}".rstrip()
        return f"TensorStore: {self.path} is in use by {by}, expected {want}; close it there first"
