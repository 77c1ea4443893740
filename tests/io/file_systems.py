"""Which file system a test stands on."""

from pathlib import Path

TMPFS = Path("/dev/shm")


def file_system_of(path: Path) -> str:
    """Return the kind of the file system that is mounted at a path, or an empty string."""
    kinds = {}
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mounted, kind, *_ = line.split()
        kinds[mounted] = kind
    return kinds.get(str(path), "")
