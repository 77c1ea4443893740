"""Compilers, flags and job count: functions of the environment, found when asked for."""

import importlib.util
import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from .errors import Unavailable
from .spec import OpSpec

OLDEST_TORCH = (2, 11)  # that the libraries run with, whichever newer one compiled them
_TORCH_TARGET = f"0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000"
_GET_TORCH = f"run: {sys.executable} -m pip install 'torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}'"
_GIB = 1 << 30

# No contraction into fused multiply-add: all instruction sets and devices must give the same bits.
# No errno and no traps: without these two, GCC does not vectorise loops with a square root.
_CXX_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math"),
    *("-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"),
)


def cxx() -> list[str]:
    """Return the C++ compiler's command: CXX, with its arguments, else g++, c++ or clang++."""
    command = os.environ.get("CXX", "")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise Unavailable(
            f"CXX is {command!r}, which is no command ({error})", "correct or unset CXX"
        ) from error
    if words:
        if shutil.which(words[0]) is None:
            what = "is no program" if os.path.exists(words[0]) else "does not exist"
            raise Unavailable(
                f"CXX names the compiler {words[0]!r}, which {what}",
                "unset CXX or set it to a C++20 compiler",
            )
        return words
    for name in ("g++", "c++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            return [path]
    raise Unavailable(
        "there is no C++ compiler on PATH (looked for g++, c++, clang++)",
        "install one, for example with: apt-get install g++, or set CXX",
    )


def ninja() -> Path:
    """Return the ninja program: beside this Python, on PATH, or inside the ninja package."""
    beside = Path(sys.executable).with_name("ninja")
    if os.access(beside, os.X_OK):
        return beside
    found = shutil.which("ninja")
    if found is not None:
        return Path(found)
    package = importlib.util.find_spec("ninja")
    if package is not None and package.submodule_search_locations:
        inside = Path(package.submodule_search_locations[0]) / "data" / "bin" / "ninja"
        if os.access(inside, os.X_OK):
            return inside
    raise Unavailable(
        f"there is no ninja beside {sys.executable}, on PATH or as a package",
        f"run: {sys.executable} -m pip install ninja",
    )


def torch_root() -> Path:
    """Return the folder of the torch package, without importing it."""
    package = importlib.util.find_spec("torch")
    if package is None or not package.submodule_search_locations:
        raise Unavailable("torch is not installed", _GET_TORCH)
    return Path(package.submodule_search_locations[0])


def torch_version() -> str:
    """Return torch's version, without importing it; raise when it is missing or too old."""
    version = _torch_states("__version__") or "unknown"
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        raise Unavailable(
            f"torch is {version}, expected {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer", _GET_TORCH
        )
    return version


def check_torch(spec: OpSpec) -> None:
    """Raise Unavailable when this torch cannot load a library of `spec`."""
    if "torch" in spec.needs:
        torch_version()
    if "cuda" in spec.needs and torch_cuda() is None:
        raise Unavailable(
            "it is a CUDA op, but the torch that is installed has no CUDA",
            "install a CUDA build of torch",
        )


def torch_cuda() -> str | None:
    """Return the CUDA version torch was built with, such as "13.0", or None for a CPU torch."""
    return _torch_states("cuda")


def _torch_states(name: str) -> str | None:
    """Return a string that torch's version.py assigns to `name`."""
    root = torch_root()
    try:
        text = (root / "version.py").read_text()
    except OSError as error:
        raise Unavailable(
            f"the torch in {root} has no version.py that can be read ({error.strerror})",
            f"run Python in another folder, if that one is not an installation, or {_GET_TORCH}",
        ) from error
    found = re.search(rf"^{name}\b[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None


def python_abi() -> str:
    """Name what a Python module is compiled for, such as cpython-311-x86_64-linux-gnu."""
    return sysconfig.get_config_var("SOABI") or str(sys.implementation.cache_tag)


def python_include() -> Path:
    """Return the folder of this Python's headers."""
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").is_file():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        raise Unavailable(
            f"there is no Python.h in {folder}",
            f"install the headers of {sys.executable}, for example with: apt-get install {package}",
        )
    return folder


def pybind11_include() -> Path:
    """Return the folder of pybind11's headers, without importing it."""
    package = importlib.util.find_spec("pybind11")
    for root in (package and package.submodule_search_locations) or ():
        if (Path(root) / "include" / "pybind11" / "pybind11.h").is_file():
            return Path(root) / "include"
    raise Unavailable("pybind11 is not installed", f"run: {sys.executable} -m pip install pybind11")


def compile_flags(spec: OpSpec, source: str) -> list[str]:
    """Return the C++ flags of one source file that do not depend on where things are installed."""
    flags = [*_CXX_FLAGS, *_warnings_are_errors("-Werror"), *_defines(spec)]
    if "torch" in spec.needs and "_ops" in Path(source).name:
        flags.append(f"-DTORCH_TARGET_VERSION={_TORCH_TARGET}")
        if "cuda" in spec.needs:
            flags.append("-DUSE_CUDA")
    return flags


def _defines(spec: OpSpec) -> list[str]:
    return [f"-D{name}={value}" for name, value in spec.defines]


def nvcc_flags(spec: OpSpec) -> list[str]:
    """Return the nvcc flags that depend neither on places nor on targets."""
    flags = ["-std=c++20", "-O3", "--threads=1", *_defines(spec)]
    host = "-fPIC,-fvisibility=hidden,-Wall,-Wextra"
    if not spec.fused_multiply_add:
        flags.append("-fmad=false")
        host += ",-ffp-contract=off"
    return [*flags, f"-Xcompiler={host}", *_warnings_are_errors("-Werror=all-warnings")]


def link_flags(spec: OpSpec) -> list[str]:
    """Return the libraries of the link line."""
    if "cuda" in spec.needs:
        # torch opens its libraries privately, so each one must be named as needed. There is no
        # libtorch_cuda to link with where torch is a CPU one; libtorch stands for it.
        flags = ["-Wl,--no-as-needed"]
        flags += ["-ltorch", "-ltorch_cpu", "-lc10"] if "torch" in spec.needs else []
        flags.append("-lcudart")
    elif "pybind11" in spec.needs:
        flags = []  # the symbols of Python are found in the process that imports it
    else:
        flags = ["-Wl,-z,defs"]  # a kernel that was not compiled fails here, not at the first call
        flags += ["-ltorch_cpu", "-lc10"] if "torch" in spec.needs else []
    return [*flags, *(f"-l{name}" for name in spec.links)]


def _warnings_are_errors(flag: str) -> list[str]:
    return [flag] if os.environ.get("DS_EXT_WERROR") == "1" else []


def platform_key() -> str:
    """Name the machine and the C library that a compiled file depends on."""
    return f"{platform.machine()} {' '.join(platform.libc_ver())}"


def jobs() -> int:
    """Return how many compilers may run at once: MAX_JOBS, else a core and 2 GiB for each."""
    asked = os.environ.get("MAX_JOBS", "")
    if asked:
        if not asked.isdecimal() or int(asked) < 1:
            raise Unavailable(
                f"MAX_JOBS is {asked!r}, expected a positive number", "set it right or unset it"
            )
        return int(asked)
    return max(1, min(len(os.sched_getaffinity(0)), free_memory() // (2 * _GIB)))


def free_memory() -> int:
    """Return the bytes that this process may still use, by the machine and by its control group."""
    free = []
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    for folder, limit, used, prefix in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", ""),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        lines = [line for name in (limit, used) for line in _lines(f"{folder}/{name}")]
        numbers = [line.strip() for line in lines]
        if len(numbers) == 2 and all(number.isdecimal() for number in numbers):  # not "max"
            most, now = map(int, numbers)
            cached = _cached_files(f"{folder}/memory.stat", prefix)  # which give way
            free.append(max(0, most - max(0, now - cached)))
    return min(free, default=64 * _GIB)


def _cached_files(path: str, prefix: str) -> int:
    """Return the bytes of files that a control group has in memory."""
    pairs = [line.split() for line in _lines(path)]
    keys = (f"{prefix}active_file", f"{prefix}inactive_file")
    return sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in keys)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
