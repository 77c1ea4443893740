"""The folder of a durable tensor store: its lock, and a manifest that is replaced as a whole."""

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

from deepspeed_ext.io.manifest import LARGEST_TEXT
from deepspeed_ext.io.regular_file import open_regular, sync_folder


class StoreFolder:
    """Holds the folder's lock from construction to `close`: one writer, or any number of readers.

    The kernel drops the lock when its holder dies, and with it the last child that it forked and
    that has not called `close`; there, that leaves the parent's lock as it is.

    Files in the folder are regular ones: a link could lead to what is none of its business.

    Args:
        path: the folder. A writer makes it; its parent has to exist.
        read_only: share the folder with other readers, and change nothing.

    Raises:
        FileNotFoundError: a writer's folder has no parent.
        BlockingIOError: another process has it.
        OSError: ELOOP or EINVAL: its lock is no regular file.
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
        """Return the text of the manifest, None if there is none.

        Raises:
            OSError: EBADMSG: it is too large for one; ELOOP or EINVAL: it is no regular file.
        """
        try:
            fd = open_regular("TensorStore", self.manifest, os.O_RDONLY, follow=False)
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

    def has_data(self) -> bool:
        """Tell whether there is a data file that is not empty; links are not followed."""
        try:
            status = os.lstat(self.data)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size > 0

    def prepare(self, text: bytes) -> None:
        """Bring the next manifest to the disk, beside the one that counts, with the mode of that.

        Raises:
            OSError: EFBIG: `read` would refuse it; or what the disk says.
        """
        if len(text) > LARGEST_TEXT:
            want = f"expected at most {LARGEST_TEXT}: it has too many tensors"
            raise OSError(errno.EFBIG, f"the manifest has {len(text)} bytes, {want}")
        try:
            self._temporary.unlink(missing_ok=True)
            with open(self._temporary, "xb", buffering=0) as file:  # of this call, so no link
                self._pass_on_mode(file.fileno())
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
        sync_folder(self.path)

    def close(self) -> None:
        """Let others have the folder."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _make(self) -> None:
        made = True
        try:
            self.path.mkdir()
        except FileExistsError:
            made = False
        try:
            # Also when it was there: who made it may have been killed before it got this far.
            sync_folder(self.path.parent)
        except PermissionError:
            if made:  # otherwise that parent is somebody else's, and so is this
                raise

    def _pass_on_mode(self, fd: int) -> None:
        try:
            mode = os.lstat(self.manifest).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISREG(mode):
            with contextlib.suppress(PermissionError):  # a file system without modes
                os.fchmod(fd, mode & 0o777)

    def _recover(self) -> None:
        """Tidy up after a writer that was killed."""
        self._temporary.unlink(missing_ok=True)
        # It may have replaced the manifest without seeing the folder on the disk. What only the
        # manifest before needs is going to be overwritten, so that one must not come back.
        self.sync()

    def _lock(self, path: Path, read_only: bool) -> None:
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
        try:
            self._fd = open_regular("TensorStore", path, flags, follow=False)
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
