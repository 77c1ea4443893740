"""The folders that compiled libraries are kept in: which they are, and whether they can serve."""

import errno
import fcntl
import functools
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from . import trust
from .errors import Unavailable
from .lock import held
from .log import logger
from .trust import Untrusted

_NEEDED_BYTES = 64 << 20
_ENTRY = re.compile(r"([a-z0-9_]+)-[0-9a-f]{16}(\..*)?")


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
    return Path(temporary) / f"deepspeed_ext-{os.geteuid()}"


def roots() -> list[Path]:
    """Return the folders that may hold libraries, the configured one first; none is checked."""
    configured, private = configured_root(), private_root()
    found = [configured] if configured is not None else []
    return [*found, private] if os.path.lexists(private) else found


def readable_roots() -> list[Path]:
    """Return the folders to look into: those that nobody else can write to."""
    found = []
    for root in roots():
        with suppress(OSError):
            check_trusted(root)
            found.append(root)
    return found


def check_trusted(root: Path, library: Path | None = None) -> None:
    """Raise Untrusted when others could have made a library of a cache, or could change it.

    When that is the configured cache, warn, once, why it is not used.

    Args:
        root: a folder of `roots`.
        library: where a library is or will be in it; None to ask about the folder alone.
    """
    try:
        trust.check(root)
        for path in (library.parent, library) if library is not None else ():
            try:
                trust.check(path)
            except Untrusted as error:
                raise Untrusted(f"{path}: {error}") from error
    except Untrusted as error:
        if root == configured_root():
            _warn_not_used(str(error))
        raise


def fallback_root(why: str) -> Path:
    """Return the private folder for compiling; warn, once, why it is not the configured one."""
    private, configured = private_root(), configured_root()
    _warn_not_used(why)
    why_not_private = why_unusable(private, 0o700)
    if why_not_private is not None:
        fix = "set DS_EXT_CACHE to a folder of your own with space, on a file system mounted with"
        fix += " exec"
        if is_full(why):
            fix += ", and TMPDIR, which compilers use, to one with space"
        raise Unavailable(
            f"no folder can hold compiled libraries: {configured or 'no home'} ({why}),"
            f" {private} ({why_not_private})",
            fix,
        )
    return private


def why_unusable(root: Path, mode: int = 0o755) -> str | None:
    """Try what a build needs: make the folder, write, lock, map code; return what fails."""
    try:
        trust.check(root)
        make_folder(root, mode)
        trust.check(root)
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


def make_folder(folder: Path, mode: int) -> None:
    """Make a folder and those above it, for their owner alone to write to, whatever the umask."""
    if not folder.exists():
        make_folder(folder.parent, mode)
        folder.mkdir(mode=mode, exist_ok=True)


def is_full(text: str) -> bool:
    """Tell whether a message says that a disk is full or a quota used up."""
    return any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EDQUOT))


def _warn_not_used(why: str) -> None:
    configured = configured_root()
    where = "the op cache" if configured is None else f"the op cache {configured}"
    _warn_once(
        f"{where} cannot be used ({why}): {private_root()} takes its place; set DS_EXT_CACHE to a"
        " folder of your own that can be written"
    )


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def clean() -> tuple[list[Path], dict[Path, str]]:
    """Remove what this package put into its caches; return what went, and why the rest did not."""
    removed, left = [], {}
    for root in readable_roots():
        for path in sorted(root.glob("*-*")):
            match = _ENTRY.fullmatch(path.name)
            if match is None or not path.is_dir():
                continue
            try:
                with held(root / f"{match[1]}.lock", wait=0):
                    shutil.rmtree(path)
                removed.append(path)
            except Unavailable:
                left[path] = "another process is using it"
            except OSError as error:
                left[path] = error.strerror or str(error)
    return removed, left
