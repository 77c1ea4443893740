"""Describe the machine and the software around the ops, one line of text for each thing."""

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import deepspeed_ext
from deepspeed_ext.op_builder import cache, cuda, toolchain

_VECTOR_FEATURES = ("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_bf16")
_BASELINES = {"x86_64": "sse2", "aarch64": "neon"}  # what every CPU of an architecture has
_ISA_FEATURES = {  # what csrc/common/simd/isa.cpp asks for, from narrow to wide
    "scalar": frozenset[str](),
    _BASELINES.get(platform.machine(), "baseline"): frozenset[str](),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx512": frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl"}),
}


def describe() -> dict[str, str]:
    """Return what each probe found; one that fails says so in its own line."""
    probes: dict[str, Callable[[], str]] = {
        "deepspeed_ext": lambda: f"{deepspeed_ext.__version__} in {Path(__file__).parent}",
        "torch": _torch,
        "Python": lambda: f"{platform.python_version()} ({sys.executable})",
        "CUDA of torch": lambda: toolchain.torch_cuda() or "none: this torch is for the CPU",
        "nvcc": lambda: f"{cuda.toolkit_version(cuda.toolkit())} ({cuda.nvcc()})",
        "C++ compiler": lambda: _version_of(toolchain.cxx()),
        "ninja": lambda: f"{_version_of([str(toolchain.ninja())])} ({toolchain.ninja()})",
        "CPU": lambda: _cpu_line("model name") or platform.machine(),
        "CPU features": lambda: " ".join(_features()) or "none that the kernels use",
        "CPU kernels": _isa,
        "threads": _threads,
        "CUDA devices": _devices,
        "locked memory": _locked_memory,
        "I/O backends": lambda: str(_io().backends()),
        "direct I/O": lambda: str(_io().direct_io()),
        "I/O settings": lambda: str(_io().settings()),
        "op cache": _cache,
    }
    return {name: _result(probe) for name, probe in probes.items()}


def _result(probe: Callable[[], str]) -> str:
    try:
        return probe()
    except Exception as error:  # whatever is wrong with the machine, the report goes on
        return f"not found: {' '.join(str(error).split()) or type(error).__name__}"


def _cache() -> str:
    root = cache.configured_root() or cache.private_root()
    try:
        cache.check_trusted(root)
    except OSError as error:
        return f"{root} is not used ({error})"
    return str(root)


def _torch() -> str:
    import torch

    return f"{torch.__version__} in {Path(torch.__file__).parent}"


def _io() -> ModuleType:
    from deepspeed_ext.io import environment  # here, as it imports torch

    return environment


def _version_of(command: list[str]) -> str:
    done = subprocess.run(
        [*command, "--version"], check=True, capture_output=True, text=True, timeout=10
    )
    return (done.stdout.splitlines() or [f"{command[0]} names no version"])[0]


def _cpu_line(key: str) -> str:
    """Return what the kernel says about the first CPU."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _features() -> list[str]:
    flags = _cpu_line("flags").split()
    return [feature for feature in _VECTOR_FEATURES if feature in flags]


def _isa() -> str:
    """Name the instruction set that the CPU kernels use."""
    available = [name for name, needed in _ISA_FEATURES.items() if needed <= set(_features())]
    forced = os.environ.get("DSX_FORCE_ISA", "")
    if not forced:
        return available[-1]
    if forced in available:
        return f"{forced}, forced by DSX_FORCE_ISA (the widest is {available[-1]})"
    return f"none: DSX_FORCE_ISA is {forced}, expected one of {', '.join(available)}"


def _threads() -> str:
    import torch

    cores = len(os.sched_getaffinity(0))
    return f"{torch.get_num_threads()} in torch, {cores} cores for this process"


def _devices() -> str:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        found.append(f"{torch.cuda.get_device_name(index)} (capability {major}.{minor})")
    if found:
        return ", ".join(found)
    hidden = [f"{number / 10:.1f}" for number in cuda.device_capabilities()]
    return f"none for torch; capability {', '.join(hidden)} installed" if hidden else "none"


def _locked_memory() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return "unlimited"
    size, unit = float(limit), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
