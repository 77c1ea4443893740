"""Compile an op library into the cache: once, whatever happens to the processes that want it."""

import json
import os
import shutil
import stat
import uuid
from pathlib import Path

from . import cache, trust
from .compile import compile_library
from .errors import BuildError, Unavailable
from .lock import check_process, held
from .log import logger
from .sources import CSRC, digest_of, matches
from .spec import OpSpec

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def build(spec: OpSpec, csrc: Path = CSRC) -> Path:
    """Compile `spec` into the cache, once for all processes that ask; return the library's path.

    When the configured cache cannot be used or fills up, a private folder takes its place.
    """
    configured = cache.configured_root()
    try:
        why = "there is no home folder" if configured is None else cache.why_unusable(configured)
        if configured is not None and why is None:
            try:
                return _build_in(configured, spec, csrc)
            except OSError as error:
                why = str(error)
            except BuildError as failed:
                if not cache.is_full(failed.cause):
                    raise
                why = failed.cause
        return _build_in(cache.fallback_root(str(why)), spec, csrc)
    except Unavailable as missing:
        raise BuildError(spec.name, missing.cause, missing.fix) from missing
    except OSError as error:
        raise BuildError(
            spec.name,
            f"the compiled library cannot be stored ({error})",
            "set DS_EXT_CACHE to a folder that can be written",
        ) from error


def _build_in(root: Path, spec: OpSpec, csrc: Path) -> Path:
    """Compile under the op's lock, or take what another process compiled meanwhile."""
    entry = cache.entry_name(spec, csrc)
    library = root / entry / f"{spec.name}.so"
    failures = root / f"{entry}.failed"
    earlier = _failure(failures)
    with held(root / f"{spec.name}.lock"):
        cache.check_trusted(root, library)
        if library.is_file() and matches(library, digest_of(spec, csrc)):
            return library
        latest = _failure(failures)
        if latest is not None and latest != earlier:  # it failed while this process waited
            raise BuildError(spec.name, latest["cause"], latest["fix"], log=failures / "build.log")
        for leftover in root.glob(f"{spec.name}-*.tmp"):  # of builders that were killed
            shutil.rmtree(leftover, ignore_errors=True)
        logger.info("%s: compiling (first use)", spec.name)
        work = root / f"{entry}.{uuid.uuid4().hex}.tmp"
        work.mkdir(mode=0o700)  # whatever the umask lets compilers write, nobody gets at it
        builder = os.getpid()
        try:
            compiled = compile_library(spec, work, csrc)
            check_process(builder)
            _publish(compiled, root / entry)
        except BuildError as failed:
            check_process(builder)
            raise _keep_failure(failed, work, failures) from failed
        finally:
            if os.getpid() == builder:
                shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(failures, ignore_errors=True)
        logger.info("%s: compiled into %s", spec.name, library)
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
        trust.check(failures)
        trust.check(path)
        record: dict[str, str] = json.loads(path.read_text())
        return record
    except (OSError, ValueError):
        return None


def _keep_failure(failed: BuildError, work: Path, failures: Path) -> BuildError:
    """Keep the log and the cause, for people and for waiting processes."""
    record = {"cause": failed.cause, "fix": failed.fix, "id": uuid.uuid4().hex}
    (work / "failure.json").write_text(json.dumps(record))
    shutil.rmtree(work / "obj", ignore_errors=True)
    _seal(work)
    shutil.rmtree(failures, ignore_errors=True)
    work.rename(failures)
    log = failures / "build.log"
    return BuildError(failed.op, failed.cause, failed.fix, log=log if log.is_file() else None)
