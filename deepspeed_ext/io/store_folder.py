"""The folder of a durable tensor store: its lock, and a manifest that is replaced as a whole."""

import contextlib
import errno
import fcntl
import os
from pathlib import Path


class StoreFolder:
    """Holds the folder's lock from construction to `close`: one writer, or any number of readers.

    The kernel drops the lock when its holder dies, and with it the last child that it forked and
    that has not called `close`; there, that leaves the parent's lock as it is.

    Args:
        path: the folder. A writer makes it; its parent has to exist.
        read_only: share the folder with other readers, and change nothing.

    Raises:
        FileNotFoundError: a writer's folder has no parent.
        BlockingIOError: another process has it.
    """

    def __init__(self, path: Path, read_only: bool) -> None:
        self._fd = -1
        self._process = os.getpid()
        path = Path(os.path.abspath(path))  # the working directory may change
        self.path = path
        self.data = path / "data"
        self.manifest = path / "manifest.json"
        self._temporary = path / "manifest.json.tmp"
        if not read_only:
            self._make()
        self._lock(path / "store.lock", read_only)
        if not read_only:
            self._recover()

    def __del__(self) -> None:
        if self._process == os.getpid():
            self.close()

    def read(self) -> bytes | None:
        """Return the text of the manifest, None if there is none."""
        try:
            return self.manifest.read_bytes()
        except FileNotFoundError:
            return None

    def prepare(self, text: bytes) -> None:
        """Bring the next manifest to the disk, beside the one that counts."""
        try:
            with open(self._temporary, "wb", buffering=0) as file:
                rest = memoryview(text)
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)
            raise

    def publish(self) -> None:
        """Replace the manifest by the prepared one."""
        os.replace(self._temporary, self.manifest)

    def sync(self) -> None:
        """Bring the names in the folder to the disk."""
        _sync_folder(self.path)

    def close(self) -> None:
        """Let others have the folder."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _make(self) -> None:
        try:
            self.path.mkdir()
        except FileExistsError:
            return
        _sync_folder(self.path.parent)

    def _recover(self) -> None:
        """Tidy up after a writer that was killed."""
        self._temporary.unlink(missing_ok=True)
        # It may have replaced the manifest without seeing the folder on the disk. What only the
        # manifest before needs is going to be overwritten, so that one must not come back.
        self.sync()

    def _lock(self, path: Path, read_only: bool) -> None:
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
        try:
            self._fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            if read_only:
                return  # a copy without it, perhaps where nobody can write; or no store at all
            raise
        try:
            self._take(read_only)
            if not read_only:
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, f"{self._process} on {os.uname().nodename}\n".encode(), 0)
        except BaseException:
            self.close()
            raise

    def _take(self, read_only: bool) -> None:
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_SH if read_only else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(errno.EAGAIN, self._held(read_only)) from None

    def _held(self, read_only: bool) -> str:
        holder = os.pread(self._fd, 400, 0).decode(errors="replace").strip()
        by = f"a writer, process {holder or 'unknown'}"
        if not read_only:
            with contextlib.suppress(BlockingIOError):  # none: a writer has it
                fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                by = "processes that read it"
        want = "no writer" if read_only else "nobody else"
        return f"TensorStore: {self.path} is in use by {by}, expected {want}; close it there first"


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
