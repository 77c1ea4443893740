"""What an open file of the engine can do; the native class does it."""

from typing import Protocol


class File(Protocol):
    """A file that is opened once for many transfers.

    `File(path, mode)` opens it: mode "read", "write" or "update" (both directions); the last two
    make the file when there is none, and none truncates. `File.scratch(directory)` makes one
    without a name, which vanishes with the process, however that ends. Pass it to AsyncIO in place
    of a path. All that fails raises OSError.
    """

    @property
    def path(self) -> str:
        """The path it was opened by; of a scratch file, its directory."""

    @property
    def closed(self) -> bool:
        """Whether close() was called; requests that were under way then still end well."""

    @property
    def direct(self) -> bool:
        """Whether whole pages travel around the page cache."""

    @property
    def offset_alignment(self) -> int:
        """Multiple that direct offsets and lengths have, in bytes; 0 when nothing is direct."""

    @property
    def memory_alignment(self) -> int:
        """Multiple that addresses have which need no copy, in bytes."""

    def fileno(self) -> int:
        """Return the descriptor that goes through the page cache."""

    def size(self) -> int:
        """Return the length in bytes."""

    def free_bytes(self) -> int:
        """Return what this user may still write to the file system; -1 when that is unknown."""

    def sync(self) -> None:
        """Wait until data and length are on the disk."""

    def truncate(self, nbytes: int) -> None:
        """Cut off or extend the file to this length."""

    def allocate(self, offset: int, nbytes: int) -> None:
        """Reserve space, and extend the file to offset + nbytes if it is shorter."""

    def refuse_direct(self) -> None:
        """Let whole pages travel through the page cache from now on, too."""

    def close(self) -> None:
        """Close it; more calls do nothing."""

    def abandon(self) -> None:
        """Close it in a forked child, at once, whatever its parent has under way."""
