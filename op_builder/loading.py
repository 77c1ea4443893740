"""Load an op library: find it (override, packaged file, cache) or have it compiled, and open it."""

import importlib.util
import os
import stat
import threading
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

from . import cache, probe, toolchain, trust
from .errors import BuildError, Unavailable
from .jit import compile_into_cache
from .registry import EARLIER_NAMES, spec_of
from .spec import OpSpec
from .trust import Untrusted
from .wanted import CSRC, ROOT, Wanted

PREBUILT = ROOT / "prebuilt"  # the libraries that came with the package

_LOADING = threading.RLock()
_LOADED: dict[str, Path] = {}
_MODULES: dict[Path, ModuleType] = {}  # of the loaded libraries that are Python modules


def _forget_other_threads() -> None:
    """Begin a forked child with a free lock: a thread that held it is not there to release it."""
    global _LOADING
    _LOADING = threading.RLock()


os.register_at_fork(after_in_child=_forget_other_threads)


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
            _LOADED[name] = _find_or_compile(spec_of(name))
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


def status(spec: OpSpec) -> tuple[Path | None, list[str]]:
    """Return the library that `load` would take and the reasons why it would fail, if any.

    No library and no reason means that `load` would compile it. Nothing is started for this.
    """
    reasons = probe.why_not_load(spec)
    try:
        wanted = Wanted.of(spec, CSRC)
        library = _override(wanted) or next(ready(wanted), None)
        if library is None:
            reasons += [why for why in probe.why_not(spec, CSRC) if why not in reasons]
            _check_allowed(spec)
    except Unavailable as missing:
        library = None
        reasons += [str(missing)] if str(missing) not in reasons else []
    return library, reasons


def _find_or_compile(spec: OpSpec) -> Path:
    """Load the first library that fits and opens."""
    routes: list[str] = []
    try:
        toolchain.check_torch(spec)
        wanted = Wanted.of(spec, CSRC)
        named = _override(wanted)
        if named is not None:
            return _open(spec, named)
        for path in ready(wanted, routes):
            try:
                return _open(spec, path)
            except Unavailable as broken:
                routes.append(f"{path}: {broken.cause}")
        _check_allowed(spec)
        try:
            path = compile_into_cache(wanted)
        except Unavailable:
            routes.append("compiler: failed")
            raise
        return _open(spec, path)
    except Unavailable as missing:
        raise BuildError.of(spec.name, missing, routes) from missing


def _override(wanted: Wanted) -> Path | None:
    """Return the library that the environment names, or None; raise when it does not fit."""
    name = wanted.spec.name
    names = (name, *(earlier for earlier, of in EARLIER_NAMES.items() if of == name))
    variables = [f"DS_EXT_LIBRARY_{name.upper()}" for name in names]
    variable = next(filter(os.environ.get, variables), variables[0])
    text = os.environ.get(variable, "")
    if not text:
        return None
    path = Path(text).absolute()
    fix = f"correct or unset {variable}"
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
        trust.check(path)
        if is_file and wanted.fits(path):
            return path
        why = f"was {_built_otherwise(wanted.spec)}" if is_file else "is not a file"
    except FileNotFoundError:
        why = "does not exist"
    except Untrusted as error:
        why = f"is not opened ({error})"
        fix = f"copy it to a folder of your own, or unset {variable}"
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    raise Unavailable(f"{variable} names {path}, which {why}", fix)


def ready(wanted: Wanted, routes: list[str] | None = None) -> Iterator[Path]:
    """Yield the libraries that exist and fit: the packaged one, then cached ones.

    Args:
        wanted: what they must fit.
        routes: gets a line for each place that has none.
    """
    file = wanted.file
    for root in (None, *cache.roots()):
        path = root / wanted.entry / file if root else PREBUILT / file
        try:
            if root:
                cache.check_trusted(root, path)
            if wanted.fits(path):
                yield path
                continue
            why = f"was {_built_otherwise(wanted.spec)} or is damaged"
        except FileNotFoundError:
            why = "does not exist"
        except Untrusted as error:
            why = f"is not opened ({error})"
        except OSError as error:
            why = f"cannot be read ({error.strerror})"
        if routes is not None:
            routes.append(f"{'cache' if root else 'packaged'}: {path} {why}")


def _built_otherwise(spec: OpSpec) -> str:
    another = " or for another Python" if "pybind11" in spec.needs else ""
    return f"built from other sources{another}"


def _check_allowed(spec: OpSpec) -> None:
    """Raise Unavailable when DS_EXT_JIT=0 forbids `load` to compile."""
    if os.environ.get("DS_EXT_JIT") == "0":
        raise Unavailable(
            "no ready library fits, and DS_EXT_JIT=0 forbids compiling one",
            f"run: unset DS_EXT_JIT, or: python -m deepspeed_ext.op_builder build {spec.name}",
        )


def _open(spec: OpSpec, path: Path) -> Path:
    """Load the library, with torch or as a Python module."""
    open_library: Callable[[Path], None]
    if "pybind11" in spec.needs:
        open_library = partial(_import, spec.name)
    else:
        import torch

        open_library = torch.ops.load_library
    try:
        open_library(path)
    except (ImportError, OSError) as error:
        if not os.path.lexists(path):
            raise Unavailable(f"{path} has been removed", "load the op again") from error
        text = str(error.__cause__ or error)  # torch wraps what the loader of the system said
        fix = f"run: python -m deepspeed_ext.op_builder clean, then: build {spec.name}"
        if "failed to map" in text or "Operation not permitted" in text:
            fix = "set DS_EXT_CACHE to a folder on a file system mounted with exec"
        elif "libcudart" in text:
            fix = "compile it with the CUDA toolkit that fits torch: set CUDA_HOME"
        raise Unavailable(f"the library cannot be opened ({text})", fix) from error
    return path


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
