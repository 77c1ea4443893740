"""Compile an op library just in time: into the cache, once for all processes that want it."""

import json
import os
import shutil
import stat
import uuid
from pathlib import Path

from . import cache, trust
from .compile import compile_library
from .errors import Unavailable
from .lock import check_process, held
from .log import logger
from .wanted import Wanted

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def compile_into_cache(wanted: Wanted) -> Path:
    """Compile a library, once for all processes that ask for it at the same time; return its path.

    When the configured cache cannot be used or fills up, a private folder takes its place. Raises
    Unavailable.
    """
    configured = cache.configured_root()
    try:
        why = "there is no home folder" if configured is None else cache.why_unusable(configured)
        if configured is not None and why is None:
            try:
                return _compile_in(configured, wanted)
            except OSError as error:
                why = str(error)
            except Unavailable as failed:
                if not cache.is_full(failed.cause):
                    raise
                why = failed.cause
        return _compile_in(cache.fallback_root(str(why)), wanted)
    except OSError as error:
        raise Unavailable(
            f"the compiled library cannot be stored ({error})",
            "set DS_EXT_CACHE to a folder that can be written",
        ) from error


def _compile_in(root: Path, wanted: Wanted) -> Path:
    """Compile under the op's lock, unless another process has just done so."""
    name = wanted.spec.name
    library = root / wanted.entry / wanted.file
    failures = root / f"{wanted.entry}.failed"
    earlier = _failure(failures)
    with held(root / f"{name}.lock"):
        if library.is_file():  # of a builder that was faster, or damaged
            cache.check_trusted(root, library)
            if wanted.fits(library):
                return library
        latest = _failure(failures)
        if latest is not None and latest != earlier:  # it failed while this process waited
            raise Unavailable(latest["cause"], latest["fix"], failures / "build.log")
        for leftover in root.glob(f"{name}-*.tmp"):  # of builders that were killed
            shutil.rmtree(leftover, ignore_errors=True)
        logger.info("%s: compiling (first use)", name)
        work = root / f"{wanted.entry}.{uuid.uuid4().hex}.tmp"
        work.mkdir(mode=0o700)  # whatever the umask lets compilers write, nobody gets at it
        builder = os.getpid()
        try:
            compiled = compile_library(wanted, work)
            check_process(builder)
            _publish(compiled, library.parent)
        except Unavailable as failed:
            check_process(builder)
            _keep_failure(failed, work, failures)
            raise
        finally:
            if os.getpid() == builder:
                shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(failures, ignore_errors=True)
        logger.info("%s: compiled into %s", name, library)
    return library


def _publish(library: Path, target: Path) -> None:
    """Move the folder of a new library to its place, whole or not at all."""
    for path in library.parent.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (library.name, "build.log", "build.json"):
            path.unlink()
    with library.open("rb") as file:
        os.fsync(file.fileno())
    _seal(library.parent)
    shutil.rmtree(target, ignore_errors=True)  # only a damaged one can be there
    library.parent.rename(target)


def _seal(folder: Path) -> None:
    """Let those read it who can read the cache, and nobody but its owner write."""
    for path in folder.iterdir():
        path.chmod(path.stat().st_mode & ~_OTHERS_WRITE)
    folder.chmod(folder.parent.stat().st_mode & 0o777 & ~_OTHERS_WRITE)


def _failure(failures: Path) -> dict[str, str] | None:
    """Read the record of the last failed build, which is different for each one."""
    path = failures / "failure.json"
    try:
        if not path.is_file():
            return None
        trust.check(failures)
        trust.check(path)
        record: dict[str, str] = json.loads(path.read_text())
        return {name: record[name] for name in ("cause", "fix", "id")}
    except (OSError, ValueError, LookupError, TypeError):  # nothing there, or nothing of ours
        return None


def _keep_failure(failed: Unavailable, work: Path, failures: Path) -> None:
    """Keep the log and the cause, for people and for waiting processes."""
    record = {"cause": failed.cause, "fix": failed.fix, "id": uuid.uuid4().hex}
    (work / "failure.json").write_text(json.dumps(record))
    shutil.rmtree(work / "obj", ignore_errors=True)
    _seal(work)
    shutil.rmtree(failures, ignore_errors=True)
    work.rename(failures)
    failed.log = failures / failed.log.name if failed.log else None
