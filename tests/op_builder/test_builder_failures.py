"""Each way to fail is one BuildError; its last line names the true cause and what fixes it."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from building import build

from deepspeed_ext.op_builder import BuildError, cuda, probe, toolchain
from deepspeed_ext.op_builder.compile import first_error
from deepspeed_ext.op_builder.errors import Unavailable

if TYPE_CHECKING:
    from conftest import Tiny

Break = Callable[["Tiny", pytest.MonkeyPatch], None]


def no_compiler(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tiny.csrc))


def wrong_cxx(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++ -O1")


def unreadable_cxx(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", 'g++ "-O2')


def silent_cxx(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false -O2")


def idle_cxx(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true -O2")


def no_ninja(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.cache.parent / "bin"
    folder.mkdir()
    (folder / "g++").write_text("#!/bin/sh\n")
    (folder / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)


def failing_compile(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.source.write_text('#warning "error: not this one"\nint answer() { return nothing; }\n')


def missing_header(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.source.write_text('#include "gone.h"\n')


def missing_kernel(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.source.write_text("int gone(); int answer() { return gone(); }\n")


def missing_source(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.source.unlink()


def wrong_jobs(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "many")


def wrong_timeout(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_EXT_LOCK_TIMEOUT", "soon")


def endless_timeout(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_EXT_LOCK_TIMEOUT", "nan")


def negative_timeout(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_EXT_LOCK_TIMEOUT", "-1")


@pytest.mark.parametrize(
    "break_it, cause, fix",
    [
        (no_compiler, "no C++ compiler on PATH", "apt-get install g++"),
        (wrong_cxx, "CXX names the compiler '/nowhere/c++'", "unset CXX"),
        (unreadable_cxx, "CXX is 'g++ \"-O2', which is no command (No closing", "unset CXX"),
        (silent_cxx, "false failed and said no error", "set CXX"),
        (idle_cxx, "the compiler true -O2 ended well but wrote no library", "set CXX"),
        (no_ninja, "there is no ninja", "-m pip install ninja"),
        (failing_compile, "tiny.cpp:2:", "op_builder build tiny"),
        (missing_header, "gone.h: No such file", "op_builder build tiny"),
        (missing_kernel, "undefined reference to", "op_builder build tiny"),
        (missing_source, "tiny.cpp cannot be read", "install deepspeed_ext again"),
        (wrong_jobs, "MAX_JOBS is 'many'", "unset it"),
        (wrong_timeout, "DS_EXT_LOCK_TIMEOUT is 'soon'", "unset it"),
        (endless_timeout, "DS_EXT_LOCK_TIMEOUT is 'nan'", "unset it"),
        (negative_timeout, "DS_EXT_LOCK_TIMEOUT is '-1'", "unset it"),
    ],
)
def test_the_last_line_names_cause_and_fix(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, break_it: Break, cause: str, fix: str
) -> None:
    break_it(tiny, monkeypatch)
    with pytest.raises(BuildError) as caught:
        build(tiny.spec, tiny.csrc)
    last = str(caught.value).splitlines()[-1]
    assert last.startswith("tiny: ") and cause in last and fix in last


@pytest.mark.parametrize(
    "break_it", [no_compiler, wrong_cxx, unreadable_cxx, no_ninja, missing_source, wrong_jobs]
)
def test_the_probe_says_the_same_without_trying(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, break_it: Break
) -> None:
    assert probe.why_not(tiny.spec, tiny.csrc) == []
    break_it(tiny, monkeypatch)
    with pytest.raises(BuildError) as caught:
        build(tiny.spec, tiny.csrc)
    (reason,) = probe.why_not(tiny.spec, tiny.csrc)
    assert f"tiny: {reason}" == str(caught.value).splitlines()[-1]


def test_a_failed_compile_keeps_its_log(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_compile(tiny, monkeypatch)
    with pytest.raises(BuildError) as caught:
        build(tiny.spec, tiny.csrc)
    error = caught.value
    assert error.op == "tiny" and "nothing" in error.cause
    assert error.log is not None and "nothing" in error.log.read_text()
    assert f"log: {error.log}" in str(error)


def test_a_compiler_is_asked_to_speak_english(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrapper = tmp_path / "german-c++"
    wrapper.write_text(
        '#!/bin/sh\n[ "$LC_ALL" = C ] && w=error || w=Fehler\necho "a: $w: x"; exit 1\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    with pytest.raises(BuildError, match="tiny: a: error: x"):
        build(tiny.spec, tiny.csrc)


def test_an_error_survives_pickling(tmp_path: Path) -> None:
    error = BuildError("tiny", "it broke", "mend it", ("cache: empty",), tmp_path)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_an_uncaught_error_ends_with_the_cause(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_compile(tiny, monkeypatch)
    process = tiny.start()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith("tiny: ") and "tiny.cpp:2:" in errors.splitlines()[-1]


def gpu_reasons(tiny: Tiny) -> str:
    return "\n".join(probe.why_not(replace(tiny.spec, needs=("cuda",)), tiny.csrc))


def fake_toolkit(root: Path, version: int) -> Path:
    (root / "bin").mkdir(parents=True)
    (root / "include").mkdir()
    (root / "bin" / "nvcc").write_text("#!/bin/sh\n")
    (root / "bin" / "nvcc").chmod(0o755)
    header = f"#define CUDART_VERSION  {version}\n"
    (root / "include" / "cuda_runtime_api.h").write_text(header)
    return root


def test_cuda_home_without_a_compiler(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert "CUDA_HOME is /nowhere, which has no bin/nvcc; set CUDA_HOME" in gpu_reasons(tiny)


def test_no_cuda_compiler(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(shutil.which("g++")))
    monkeypatch.setenv("PATH", str(tiny.cache))
    monkeypatch.setattr(cuda, "_USUAL_PLACE", Path("/nowhere"))
    assert "there is no CUDA compiler" in gpu_reasons(tiny)


def test_a_toolkit_of_another_major_version_than_torch(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(fake_toolkit(tmp_path / "cuda", 12090)))
    monkeypatch.setattr(cuda, "torch_cuda", lambda: "13.0")
    assert "is 12.9, but torch was built with CUDA 13.0; install a CUDA 13" in gpu_reasons(tiny)
    monkeypatch.setattr(cuda, "torch_cuda", lambda: "12.6")
    assert gpu_reasons(tiny) == ""
    monkeypatch.setattr(cuda, "torch_cuda", lambda: None)  # a CPU torch still compiles CUDA ops
    assert gpu_reasons(tiny) == ""


def test_a_cuda_compiler_that_does_not_run(tmp_path: Path) -> None:
    root = fake_toolkit(tmp_path / "cuda", 13000)
    with pytest.raises(Unavailable, match="does not run"):
        cuda.known_numbers(root / "bin" / "nvcc")


def test_a_torch_that_is_missing_or_too_old(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = replace(tiny.spec, needs=("torch",))
    (tmp_path / "version.py").write_text("__version__ = '2.10.1+cpu'\ncuda: Optional[str] = None\n")
    monkeypatch.setattr(toolchain, "torch_root", lambda: tmp_path)
    (reason,) = probe.why_not(spec, tiny.csrc)
    assert "torch is 2.10.1+cpu, expected 2.11 or newer" in reason and "pip install" in reason
    monkeypatch.undo()
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    assert "torch is not installed" in "\n".join(probe.why_not_load(spec))


@pytest.mark.parametrize(
    "line",
    [
        "a.cpp:3:1: error: 'x' was not declared",
        "a.cpp:1:10: fatal error: b.h: No such file or directory",
        "g++: fatal error: Killed signal terminated program cc1plus",
        "g++: error: unrecognized command-line option '-std=c++20'",
        "clang++: error: unable to execute command",
        'a.cu(20): error: identifier "x" is undefined',
        'a.cu(2): catastrophic error: cannot open source file "b.h"',
        "a.cu(2): error #20012-D: something",
        "nvcc fatal   : Unsupported gpu architecture 'compute_61'",
        "ptxas fatal   : Unresolved extern function 'f'",
        "ptxas error   : too much shared data",
        "/usr/bin/ld: cannot find -lcudart: No such file or directory",
        "a.cpp:(.text+0x5): undefined reference to `f()'",
        "/bin/sh: 1: g++: not found",
    ],
)
def test_the_first_error_is_found(line: str) -> None:
    log = "\n".join(
        [
            "[1/2] g++ -Werror -c a.cpp -o error: a.o",
            "FAILED: [code=1] a.o ",
            "g++ -Werror -c a.cpp -o error: a.o",
            "a.cpp:1:1: warning: unused error: x [-Wunused]",
            "    1 | int error;",
            line,
            "a.cpp:9:1: error: a later one",
        ]
    )
    assert first_error(log) == line


def test_a_cuda_library_names_the_unknown_target(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        cuda.toolkit()
    except Unavailable as missing:
        pytest.skip(str(missing))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "3.0")
    with pytest.raises(BuildError, match=r"names 3\.0, which this nvcc does not know"):
        build(replace(tiny.spec, needs=("cuda",)), tiny.csrc)


def test_a_process_without_the_package_prints_nothing() -> None:
    """Importing the builder starts no process, prints nothing and does not import torch."""
    code = (
        "import subprocess, sys; subprocess.Popen.__init__ = None;"
        "import deepspeed_ext.op_builder; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
