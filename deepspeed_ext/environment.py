"""Describe the machine and the software around the ops, one line of text for each thing."""

import functools
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import deepspeed_ext
from deepspeed_ext.op_builder import cache, cuda, toolchain
from deepspeed_ext.op_builder.errors import Unavailable

_NCCL_SECONDS = 60.0  # for a group to begin and to add up one number
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
        "NCCL": _nccl,  # before this process uses CUDA, which its children then cannot
        "CUDA devices": _devices,
        "threads": _threads,  # those near the GPUs
        "locked memory": _locked_memory,
        "I/O backends": lambda: str(_io().backends()),
        "direct I/O": lambda: str(_io().direct_io()),
        "I/O settings": lambda: str(_io().settings()),
        "op cache": _cache,
    }
    return {name: _result(probe) for name, probe in probes.items()}


@functools.cache
def torch_problem() -> str | None:
    """Import torch, and say why that cannot be, if so.

    Tried once: where it ends half-way, what a second time says is another thing.
    """
    try:
        toolchain.torch_version()
        import torch  # noqa: F401
    except Unavailable as missing:
        return str(missing)
    except Exception as error:  # a torch that lacks a library raises what it likes
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        return f"torch cannot be imported ({cause}); install torch again"
    return None


def _check_torch() -> None:
    """Raise RuntimeError where there is no torch to ask."""
    problem = torch_problem()
    if problem is not None:
        raise RuntimeError(problem)


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
    _check_torch()
    import torch

    return f"{torch.__version__} in {Path(torch.__file__).parent}"


def _io() -> ModuleType:
    _check_torch()
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
    _check_torch()
    import torch

    from deepspeed_ext.processors import share_here

    cores, share = len(os.sched_getaffinity(0)), share_here()
    of_torch = torch.get_num_threads()
    offload = f"{share.threads(of_torch)} in OffloadOptimizer, on {share}"
    return f"{of_torch} in torch, {cores} cores for this process; {offload}"


def _devices() -> str:
    _check_torch()
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        found.append(f"{torch.cuda.get_device_name(index)} (capability {major}.{minor})")
    if found:
        return ", ".join(found)
    hidden = [f"{number / 10:.1f}" for number in cuda.device_capabilities()]
    return f"none for torch; capability {', '.join(hidden)} installed" if hidden else "none"


def _nccl() -> str:
    """Say which NCCL torch has, and whether a group of one process works, tried in a child."""
    _check_torch()
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return "none in this torch"
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    context = multiprocessing.get_context("fork")  # this process has imported torch already
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_answer_of_nccl, args=(sender,), daemon=True)
    child.start()
    sender.close()
    try:
        if not receiver.poll(_NCCL_SECONDS):
            return f"{version} does not work: no answer within {_NCCL_SECONDS:g} s"
        return f"{version}{receiver.recv()}"
    except EOFError:
        child.join()
        return f"{version} does not work: its process ended with code {child.exitcode}"
    finally:
        child.kill()
        child.join()
        receiver.close()


def _send_answer_of_nccl(sender: Connection) -> None:
    try:
        answer = _try_nccl()
    except Exception as error:
        answer = f" does not work: {' '.join(str(error).split()) or type(error).__name__}"
    sender.send(answer)


def _try_nccl() -> str:
    """Add up one number in a group of this process alone."""
    import torch

    if not torch.cuda.is_available():
        return ", not tried: no CUDA device is visible"
    torch.cuda.set_device(0)
    group = torch.distributed
    store = group.HashStore()  # type: ignore[attr-defined]
    group.init_process_group("nccl", store=store, rank=0, world_size=1)
    number = torch.full((1,), 7.0, device="cuda")
    group.all_reduce(number)
    got = number.item()
    group.destroy_process_group()
    return " works" if got == 7 else f" does not work: the sum of 7 alone is {got:g}"


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
