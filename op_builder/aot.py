"""Compile op libraries into a package while it is built, as the DS_BUILD_* variables ask.

DS_BUILD_OPS=1 asks for every op that this machine can compile; DS_BUILD_<OP>=1 or 0, such as
DS_BUILD_CPU_ADAM=1, asks for one or leaves it out, whatever DS_BUILD_OPS says. An op that is asked
for by its own name must be built; one that DS_BUILD_OPS cannot have is left out with a warning.
"""

import importlib.util
import os
import shutil
from pathlib import Path

from . import probe
from .compile import compile_library
from .errors import BuildError
from .loading import spec_of
from .log import logger
from .registry import OPS
from .spec import OpSpec

_ALL = "DS_BUILD_OPS"


def build(folder: Path, scratch: Path) -> list[Path]:
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
        _check_visible("torch", "install")
    shutil.rmtree(folder, ignore_errors=True)
    libraries = []
    for spec, by_name in chosen:
        try:
            library = _compile(spec, scratch / spec.name)
        except BuildError as failed:
            if by_name:
                variable = _variable(spec)
                fix = f"{failed.fix}, or set {variable}=0 to install without {spec.name}"
                cause = f"{variable}=1 asks for it, but {failed.cause}"
                raise BuildError(spec.name, cause, fix, log=failed.log) from failed
            logger.warning("%s is left out: %s; %s", spec.name, failed.cause, failed.fix)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        libraries.append(Path(shutil.copy2(library, folder / library.name)))
    return libraries


def _chosen() -> list[tuple[OpSpec, bool]]:
    """Return the ops to compile, and for each whether it was asked for by its own name."""
    known = {_variable(spec) for spec in OPS}
    for variable, value in os.environ.items():
        if variable.startswith("DS_BUILD_") and variable not in {_ALL, *known} and value == "1":
            raise BuildError(
                "install",
                f"{variable}=1 asks for an op that does not exist",
                f"expected one of {', '.join(sorted(known))}",
            )
    everything = _is_on(_ALL)
    asked = [(spec, _is_on(_variable(spec))) for spec in OPS]
    return [(spec, bool(one)) for spec, one in asked if (everything if one is None else one)]


def _variable(spec: OpSpec) -> str:
    return f"DS_BUILD_{spec.name.upper()}"


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


def _check_visible(package: str, who: str) -> None:
    """Raise unless this build sees a package; builds in isolation do not see what is installed."""
    if importlib.util.find_spec(package) is None:
        raise BuildError(
            who,
            f"compiling needs {package}, which this build cannot see",
            f"run: pip install {package}, then: pip install --no-build-isolation .",
        )


def _compile(spec: OpSpec, scratch: Path) -> Path:
    if "pybind11" in spec.needs:
        _check_visible("pybind11", spec.name)
    reasons = probe.why_not(spec)
    if reasons:
        cause, _, fix = reasons[0].rpartition("; ")
        raise BuildError(spec.name, cause, fix)
    return compile_library(spec, scratch)
