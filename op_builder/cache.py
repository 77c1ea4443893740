"""Where compiled libraries are kept, and the key that says whether one fits."""

import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

from . import cuda, toolchain
from .errors import Unavailable
from .lock import held
from .log import logger
from .sources import CSRC, digest_of
from .spec import OpSpec

_NEEDED_BYTES = 64 << 20
_ENTRY = re.compile(r"([a-z0-9_]+)-[0-9a-f]{16}(\..*)?")


def entry_name(spec: OpSpec, csrc: Path = CSRC) -> str:
    """Return the folder name `<op>-<key>`; the key hashes all that the library depends on.

    No process is started for it. The compiler's version is not in it, so that an image built
    elsewhere still loads where there is no compiler.
    """
    parts = {
        "sources": digest_of(spec, csrc),
        "flags": [toolchain.compile_flags(spec, source) for source in spec.sources],
        "link": toolchain.link_flags(spec),
        "nvcc": toolchain.nvcc_flags(spec) if "cuda" in spec.needs else None,
        "cuda": _cuda_key() if "cuda" in spec.needs else None,
        "platform": toolchain.platform_key(),
        "package": _package_version(),
    }
    return f"{spec.name}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}"


def _cuda_key() -> list[str]:
    """Return toolkit version and targets; where there is no toolkit, the version torch wants."""
    try:
        version = cuda.toolkit_version(cuda.toolkit())
    except Unavailable:
        version = toolchain.torch_cuda() or "none"
    return [version, *(str(target) for target in cuda.requested_targets().targets)]


def _package_version() -> str:
    try:
        return importlib.metadata.version("deepspeed_ext")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def configured_root() -> Path | None:
    """Return DS_EXT_CACHE, else the folder in the user's cache; None when there is no home."""
    asked = os.environ.get("DS_EXT_CACHE", "")
    if asked:
        return Path(os.path.abspath(os.path.expanduser(asked)))
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "deepspeed_ext" if os.path.isabs(base) else None


def private_root() -> Path:
    """Return the user's own folder for temporary libraries; whether it is safe is not yet known."""
    temporary = os.path.abspath(os.environ.get("TMPDIR") or "/tmp")
    return Path(temporary) / f"deepspeed_ext-{os.getuid()}"


def readable_roots() -> list[Path]:
    """Return the folders to look for libraries in."""
    configured = configured_root()
    roots = [configured] if configured is not None else []
    return [*roots, private_root()] if _is_ours(private_root()) else roots


def fallback_root(why: str) -> Path:
    """Return the private folder for compiling; warn, once, why it is not the configured one."""
    private, configured = private_root(), configured_root()
    _warn_once(
        f"the op cache {configured or ''} cannot be used ({why}): compiling into {private};"
        " set DS_EXT_CACHE to a folder that can be written"
    )
    why_not_private = why_unusable(private, 0o700)
    if why_not_private is None and not _is_ours(private):
        why_not_private = "others can write to it"
    if why_not_private is not None:
        raise Unavailable(
            f"no folder can hold compiled libraries: {configured or 'no home'} ({why}),"
            f" {private} ({why_not_private})",
            "set DS_EXT_CACHE to a folder with space, on a file system mounted with exec",
        )
    return private


def _is_ours(path: Path) -> bool:
    """Tell whether nobody else can put files into the folder."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    )


def why_unusable(root: Path, mode: int = 0o777) -> str | None:
    """Try what a build needs: make the folder, write, lock, map code; return what fails."""
    try:
        root.mkdir(mode=mode, parents=True, exist_ok=True)
        system = os.statvfs(root)
        if system.f_flag & os.ST_NOEXEC:
            return "it is mounted noexec"
        if system.f_bavail * system.f_frsize < _NEEDED_BYTES:
            return f"it has less than {_NEEDED_BYTES >> 20} MiB free"
        with tempfile.TemporaryFile(dir=root) as probe:
            probe.write(bytes(4096))
            probe.flush()
            fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.strerror or str(error)
    return None


def is_full(text: str) -> bool:
    """Tell whether a message says that a disk is full or a quota used up."""
    return any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EDQUOT))


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def clean() -> tuple[list[Path], list[Path]]:
    """Remove what this package put into its caches; return what went, and what is in use."""
    removed, busy = [], []
    for root in readable_roots():
        for path in sorted(root.glob("*-*")):
            match = _ENTRY.fullmatch(path.name)
            if match is None or not path.is_dir():
                continue
            try:
                with held(root / f"{match[1]}.lock", wait=0):
                    shutil.rmtree(path)
                removed.append(path)
            except (Unavailable, OSError):
                busy.append(path)
    return removed, busy
