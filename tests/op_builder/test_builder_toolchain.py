"""What is found on a machine: ninja, the CUDA toolkit, the number of jobs, the compiler in CXX."""

import os
import sys
from pathlib import Path

import pytest

from deepspeed_ext.op_builder import OpSpec, cuda, toolchain
from deepspeed_ext.op_builder.compile import host_compiler

GIB = 1 << 30


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "cores, memory, expected", [(8, 64 * GIB, 8), (64, 10 * GIB, 5), (4, GIB, 1)]
)
def test_jobs_are_bounded_by_cores_and_memory(
    monkeypatch: pytest.MonkeyPatch, cores: int, memory: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(toolchain, "free_memory", lambda: memory)
    assert toolchain.jobs() == expected
    monkeypatch.setenv("MAX_JOBS", "7")
    assert toolchain.jobs() == 7


def testfree_memory_is_that_of_the_control_group_when_it_is_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {"/proc/meminfo": ["MemTotal: 9 kB", f"MemAvailable:  {8 * GIB // 1024} kB"]}
    monkeypatch.setattr(toolchain, "_lines", lambda path: files.get(path, []))
    assert toolchain.free_memory() == 8 * GIB
    files["/sys/fs/cgroup/memory.max"] = ["max"]
    files["/sys/fs/cgroup/memory.current"] = [str(GIB)]
    assert toolchain.free_memory() == 8 * GIB
    files["/sys/fs/cgroup/memory.max"] = [str(4 * GIB)]
    assert toolchain.free_memory() == 3 * GIB
    files["/sys/fs/cgroup/memory.current"] = [str(4 * GIB)]  # of which files give way
    files["/sys/fs/cgroup/memory.stat"] = [
        f"anon {GIB}",
        f"inactive_file {2 * GIB}",
        f"active_file {GIB // 2}",
    ]
    assert toolchain.free_memory() == 5 * GIB // 2


def test_ninja_beside_python_wins_over_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_path = program(tmp_path / "path" / "ninja")
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "environment" / "python"))
    assert toolchain.ninja() == on_path
    beside = program(tmp_path / "environment" / "ninja")
    assert toolchain.ninja() == beside


def test_a_compiler_command_may_hold_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ -m64 -DNAME='a b'")
    assert toolchain.cxx() == ["g++", "-m64", "-DNAME=a b"]


@pytest.mark.parametrize(
    "command, expected",
    [(["g++", "-m64"], "g++"), (["/usr/bin/ccache", "clang++-16"], "clang++-16")],
)
def test_the_host_compiler_for_nvcc(command: list[str], expected: str) -> None:
    assert host_compiler(command) == expected


def test_the_toolkit_of_a_compiler_that_is_a_wrapper_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "cuda"
    (root / "include").mkdir(parents=True)
    (root / "include" / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  12080\n")
    wrapper = program(tmp_path / "bin" / "nvcc")
    monkeypatch.setenv("PATH", str(wrapper.parent))
    monkeypatch.setattr(cuda, "_USUAL_PLACE", root)
    assert (cuda.nvcc(), cuda.toolkit()) == (wrapper, root)
    assert cuda.toolkit_version(root) == "12.8"
    compiler = program(root / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(root))
    assert cuda.nvcc() == compiler


def test_flags_promise_equal_bits_and_the_oldest_torch() -> None:
    spec = OpSpec("x", "cuda", ("x.cu", "x_ops_cuda.cpp"), needs=("torch", "cuda"))
    flags = toolchain.compile_flags(spec, "x_ops_cuda.cpp")
    assert {"-std=c++20", "-O3", "-ffp-contract=off", "-DUSE_CUDA"} <= set(flags)
    assert "-DTORCH_TARGET_VERSION=0x020b000000000000" in flags
    assert "-DUSE_CUDA" not in toolchain.compile_flags(spec, "x.cpp")  # a kernel knows no torch
    assert "-fmad=false" in toolchain.nvcc_flags(spec)
    every = " ".join([*flags, *toolchain.nvcc_flags(spec), *toolchain.link_flags(spec)])
    for banned in ("-march", "fast-math", "fast_math", "-fopenmp"):
        assert banned not in every
    tolerant = OpSpec("x", "cuda", ("x.cu",), fused_multiply_add=True)
    assert "-fmad=false" not in toolchain.nvcc_flags(tolerant)


def test_gpus_are_found_without_torch() -> None:
    """The numbers are those of the driver; none where there is no driver."""
    import torch

    found = cuda.device_capabilities()
    assert found == sorted(set(found))
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        assert 10 * major + minor in found
