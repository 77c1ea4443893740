"""Settings of the engine that suit a device: the tuner finds them, the user's cache keeps them."""

import errno
import hashlib
import json
import os
import platform
import re
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepspeed_ext.io._native import native
from deepspeed_ext.io.engine.arguments import BACKENDS, Settings, check_sizes
from deepspeed_ext.io.regular_file import path_text
from deepspeed_ext.op_builder import cache
from deepspeed_ext.op_builder.log import logger


@dataclass(frozen=True)
class Device:
    """What a path is stored on.

    Args:
        number: of the device, such as "259:1".
        source: what is mounted, such as "/dev/nvme0n1p1".
        file_system: such as "ext4".
    """

    number: str
    source: str
    file_system: str


def tuned(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the arguments for AsyncIO that `tune` saved for the device of a path.

    Args:
        path: a file or folder, which need not exist yet.

    Returns:
        block_size (bytes), queue_depth, threads and backend: the defaults when nothing was saved.
        The backend is "auto" when DS_EXT_AIO_BACKEND is set or the saved one does not work here.

    Raises:
        TypeError: path is no path.
        ValueError: path is empty.
    """
    found = saved(path_text("io.tuned", path))
    if found is None:
        return asdict(Settings())
    arguments = asdict(found)
    if os.environ.get("DS_EXT_AIO_BACKEND") or not _works(found.backend):
        arguments["backend"] = "auto"
    return arguments


def saved(path: str | os.PathLike[str]) -> Settings | None:
    """Return what was saved for the device of a path, or None."""
    device = device_of(path)
    for root in cache.readable_roots():
        file = _file_of(root, device)
        try:
            record = json.loads(file.read_text())
            if (record["device"], record["source"]) == (device.number, device.source):
                return _checked(record["settings"])
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("the I/O settings in %s are not used: %s", file, error)
    return None


def save(path: str | os.PathLike[str], settings: Settings, **measured: object) -> Path:
    """Keep settings for the device of a path, whole or not at all.

    Args:
        path: on the device.
        settings: for it.
        measured: what else to write down, for people.

    Returns:
        The file they are in.

    Raises:
        OSError: there is no cache folder, or it cannot be written.
    """
    root = cache.configured_root()
    if root is None:
        text = "the I/O settings cannot be saved: there is no home folder; set DS_EXT_CACHE"
        raise OSError(errno.ENOENT, text)
    try:
        cache.check_trusted(root)
    except OSError as error:
        text = f"the I/O settings cannot be saved in {root}: {error}; set DS_EXT_CACHE to another"
        raise OSError(errno.EPERM, text) from error
    device = device_of(path)
    file = _file_of(root, device)
    record = {"device": device.number, "source": device.source, "settings": asdict(settings)}
    cache.make_folder(file.parent, 0o700)
    new = file.with_name(f"{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        new.write_text(json.dumps(record | measured, indent=1) + "\n")
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
    return file


def device_of(path: str | os.PathLike[str]) -> Device:
    """Return what a path is stored on; of one that does not exist, where it would be."""
    place = Path(os.path.realpath(path))
    while not place.exists():
        place = place.parent
    number = place.stat().st_dev
    best, source, kind = -1, "unknown", "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mounted_at = Path(_unescaped(before.split()[4]))
        # The last of several mounts at one place hides the others.
        if place.is_relative_to(mounted_at) and len(mounted_at.parts) >= best:
            best = len(mounted_at.parts)
            kind, source = (_unescaped(word) for word in after.split()[:2])
    return Device(f"{os.major(number)}:{os.minor(number)}", source, kind)


def _unescaped(word: str) -> str:
    """Undo how the kernel writes spaces and the like: as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


def _file_of(root: Path, device: Device) -> Path:
    # The cache may be on a disk that several machines have, each with disks of its own.
    key = f"{platform.node()}\0{device.number}\0{device.source}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return root / "io" / f"{digest}.json"


def _checked(record: dict[str, Any]) -> Settings:
    settings = Settings(**record)
    sizes = asdict(settings)
    del sizes["backend"]
    check_sizes(**sizes)
    if settings.backend not in BACKENDS:
        raise ValueError(f"backend is {settings.backend!r}, expected one of {', '.join(BACKENDS)}")
    return settings


def _works(backend: str) -> bool:
    return bool(native().probe_backends().get(backend) == 0)
