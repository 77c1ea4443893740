"""Find an op library (override, packaged file, cache) or compile it now, and load it."""

import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

from . import cache, probe, trust
from .errors import BuildError, Unavailable
from .jit import build
from .registry import OPS
from .sources import CSRC, ROOT, digest_of, matches
from .spec import OpSpec
from .trust import Untrusted

PREBUILT = ROOT / "prebuilt"  # the libraries that came with the package

_LOADING = threading.RLock()
_LOADED: dict[str, Path] = {}
_MODULES: dict[Path, ModuleType] = {}  # of the loaded libraries that are Python modules


def _forget_other_threads() -> None:
    """Begin a forked child with a free lock: a thread that held it is not there to release it."""
    global _LOADING
    _LOADING = threading.RLock()


os.register_at_fork(after_in_child=_forget_other_threads)


def spec_of(name: str) -> OpSpec:
    """Return the registry's row of an op."""
    for spec in OPS:
        if spec.name == name:
            return spec
    raise BuildError(
        name,
        f"there is no such op, expected one of {', '.join(spec.name for spec in OPS)}",
        "run: python -m deepspeed_ext.op_builder list",
    )


def load(name: str) -> Path:
    """Load the library of an op into this process, compiling it when there is none yet.

    Args:
        name: an op of the registry, such as "cpu_adam".

    Returns:
        The library's path. Later calls return it at once; any thread may call.

    Raises:
        BuildError: the op is unknown, or every route to its library failed.
    """
    with _LOADING:
        if name not in _LOADED:
            _LOADED[name] = _load(spec_of(name), CSRC)
        return _LOADED[name]


def load_module(name: str) -> ModuleType:
    """Load an op whose library is a Python module, compiling it when there is none yet.

    Args:
        name: an op of the registry that needs pybind11, such as "async_io".

    Returns:
        The module; it is not in sys.modules. Later calls return the same one; any thread may call.

    Raises:
        BuildError: the op is unknown or its library no Python module, or every route to it failed.
    """
    if "pybind11" not in spec_of(name).needs:
        raise BuildError(name, "its library is not a Python module", f"call load({name!r})")
    with _LOADING:
        return _MODULES[load(name)]


def _load(spec: OpSpec, csrc: Path) -> Path:
    routes: list[str] = []
    try:
        probe.check_loadable(spec)
        override = _override(spec, csrc)
        if override is not None:
            return _open(spec, override)
        for path in ready(spec, csrc, routes):
            try:
                return _open(spec, path)
            except Unavailable as broken:
                routes.append(f"{path}: {broken.cause}")
        probe.check_allowed(spec)
        return _open(spec, build(spec, csrc))
    except Unavailable as missing:
        raise BuildError(spec.name, missing.cause, missing.fix, tuple(routes)) from missing
    except BuildError as failed:
        routes.append("compiler: failed")
        raise BuildError(spec.name, failed.cause, failed.fix, tuple(routes), failed.log) from failed


def status(spec: OpSpec, csrc: Path = CSRC) -> tuple[Path | None, list[str]]:
    """Return the library that `load` would take and the reasons why it would fail, if any.

    No library and no reason means that `load` would compile it. Nothing is started for this.
    """
    reasons = probe.why_not_load(spec)
    try:
        library = _override(spec, csrc) or next(ready(spec, csrc), None)
        if library is None:
            reasons += [why for why in probe.why_not(spec, csrc) if why not in reasons]
            probe.check_allowed(spec)
    except Unavailable as missing:
        library = None
        reasons += [str(missing)] if str(missing) not in reasons else []
    return library, reasons


def _override(spec: OpSpec, csrc: Path) -> Path | None:
    """Return the library that the environment names, or None; raise when it does not fit."""
    variable = f"DS_EXT_LIBRARY_{spec.name.upper()}"
    text = os.environ.get(variable, "")
    if not text:
        return None
    path = Path(text).absolute()
    fix = f"correct or unset {variable}"
    if not path.is_file():
        raise Unavailable(f"{variable} names {path}, which does not exist", fix)
    try:
        trust.check(path)
    except Untrusted as error:
        why = f"{variable} names {path}, which is not opened ({error})"
        raise Unavailable(why, f"copy it to a folder of your own, or unset {variable}") from error
    if not matches(path, digest_of(spec, csrc)):
        raise Unavailable(f"{variable} names {path}, which was {_built_otherwise(spec)}", fix)
    return path


def ready(spec: OpSpec, csrc: Path = CSRC, routes: list[str] | None = None) -> Iterator[Path]:
    """Yield the libraries of `spec` that exist and fit: the packaged one, then cached ones.

    Args:
        spec: the op.
        csrc: the folder of its sources.
        routes: gets a line for each place that has none.
    """
    digest = digest_of(spec, csrc)
    entry = cache.entry_name(spec, csrc)
    places = [("packaged", PREBUILT)]
    places += [("cache", root) for root in cache.roots()]
    for place, root in places:
        path = (root / entry if place == "cache" else root) / f"{spec.name}.so"
        try:
            if place == "cache":
                cache.check_trusted(root, path)
            if matches(path, digest):
                yield path
                continue
            why = f"was {_built_otherwise(spec)} or is damaged"
        except FileNotFoundError:
            why = "does not exist"
        except Untrusted as error:
            why = f"is not opened ({error})"
        except OSError as error:
            why = f"cannot be read ({error.strerror})"
        if routes is not None:
            routes.append(f"{place}: {path} {why}")


def _built_otherwise(spec: OpSpec) -> str:
    another = " or for another Python" if "pybind11" in spec.needs else ""
    return f"built from other sources{another}"


def _open(spec: OpSpec, path: Path) -> Path:
    """Load the library, with torch or as a Python module."""
    load_library = partial(_import, spec.name) if "pybind11" in spec.needs else _loader_of_torch()
    try:
        load_library(path)
    except (ImportError, OSError) as error:
        text = str(error.__cause__ or error)  # torch wraps what the loader of the system said
        fix = f"run: python -m deepspeed_ext.op_builder clean, then: build {spec.name}"
        if "failed to map" in text or "Operation not permitted" in text:
            fix = "set DS_EXT_CACHE to a folder on a file system mounted with exec"
        elif "libcudart" in text:
            fix = "compile it with the CUDA toolkit that fits torch: set CUDA_HOME"
        raise Unavailable(f"the library cannot be opened ({text})", fix) from error
    return path


def _loader_of_torch() -> Callable[[Path], None]:
    import torch

    load_library: Callable[[Path], None] = torch.ops.load_library
    return load_library


def _import(name: str, path: Path) -> None:
    """Import the Python module in a file, whatever that is called, once."""
    if path in _MODULES:
        return
    loader = ExtensionFileLoader(name, str(path))
    found = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert found is not None
    module = importlib.util.module_from_spec(found)
    loader.exec_module(module)
    _MODULES[path] = module
