"""Compile op libraries ahead of time: into a package while it is built, as DS_BUILD_* asks.

DS_BUILD_OPS=1 asks for every op that this machine can compile; DS_BUILD_<OP>=1 or 0, such as
DS_BUILD_CPU_ADAM=1, asks for one or leaves it out, whatever DS_BUILD_OPS says. The name of a group
stands for those of its ops that are not named. An op that is asked
for by its own name must be built; one that DS_BUILD_OPS cannot have is left out with a warning.
"""

import importlib.util
import os
import shutil
from pathlib import Path

from . import probe
from .compile import compile_library
from .errors import BuildError, Unavailable
from .log import logger
from .registry import GROUPS, OPS, spec_of
from .spec import OpSpec
from .wanted import Wanted

_ALL = "DS_BUILD_OPS"


def compile_into_package(folder: Path, scratch: Path) -> list[Path]:
    """Compile the ops that the environment asks for.

    Args:
        folder: gets `<op>.so` for each of them; other libraries in it are removed.
        scratch: where to compile; each op leaves its log there.

    Returns:
        The libraries.

    Raises:
        BuildError: a variable is wrong, or an op that is asked for by name cannot be built.
    """
    chosen = _chosen()
    if any("torch" in spec.needs for spec, _ in chosen):
        try:
            _check_visible("torch")
        except Unavailable as missing:
            raise BuildError.of("install", missing) from missing
    shutil.rmtree(folder, ignore_errors=True)
    libraries = []
    for spec, by_name in chosen:
        try:
            library = _compile(spec, scratch / spec.name)
        except Unavailable as missing:
            if by_name:
                variable = _asked_by(spec)
                fix = f"{missing.fix}, or set {variable}=0 to install without {spec.name}"
                cause = f"{variable}=1 asks for it, but {missing.cause}"
                raise BuildError(spec.name, cause, fix, log=missing.log) from missing
            logger.warning("%s is left out: %s", spec.name, missing)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        libraries.append(Path(shutil.copy2(library, folder / library.name)))
    return libraries


def _chosen() -> list[tuple[OpSpec, bool]]:
    """Return the ops to compile, and for each whether it was asked for by its own name."""
    known = {_variable(name) for name in [*(spec.name for spec in OPS), *GROUPS]}
    for variable, value in os.environ.items():
        if variable.startswith("DS_BUILD_") and variable not in {_ALL, *known} and value == "1":
            raise BuildError(
                "install",
                f"{variable}=1 asks for an op that does not exist",
                f"expected one of {', '.join(sorted(known))}",
            )
    everything = _is_on(_ALL)
    asked = [(spec, _is_on(_asked_by(spec))) for spec in OPS]
    return [(spec, bool(one)) for spec, one in asked if (everything if one is None else one)]


def _asked_by(spec: OpSpec) -> str:
    """Return the variable that decides of an op: its own, or that of its group."""
    groups = [group for group, members in GROUPS.items() if spec.name in members]
    names = [name for name in [spec.name, *groups] if _is_on(_variable(name)) is not None]
    return _variable([*names, spec.name][0])


def _variable(name: str) -> str:
    return f"DS_BUILD_{name.upper()}"


def _is_on(variable: str) -> bool | None:
    """Return what a variable of the environment says, None when it is not set."""
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise BuildError(
            "install", f"{variable} is {value!r}, expected 0 or 1", f"unset {variable}"
        )
    return None if value == "" else value == "1"


def is_for_one_python(libraries: list[Path]) -> bool:
    """Tell whether one of these libraries is a Python module, which other Pythons cannot load."""
    return any("pybind11" in spec_of(library.stem).needs for library in libraries)


def _check_visible(package: str) -> None:
    """Raise unless this build sees a package; builds in isolation do not see what is installed."""
    if importlib.util.find_spec(package) is None:
        raise Unavailable(
            f"compiling needs {package}, which this build cannot see",
            f"run: pip install {package}, then: pip install --no-build-isolation .",
        )


def _compile(spec: OpSpec, scratch: Path) -> Path:
    if "pybind11" in spec.needs:
        _check_visible("pybind11")
    probe.check_compilable(spec)
    return compile_library(Wanted.of(spec), scratch)
