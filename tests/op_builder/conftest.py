"""A tiny op that compiles in a fraction of a second, in an environment of its own."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from deepspeed_ext.op_builder import OpSpec, cache
from deepspeed_ext.op_builder.wanted import Wanted

WORKER = Path(__file__).with_name("worker.py")
OURS = (
    "DS_EXT_",
    "DS_BUILD_",
    "CXX",
    "CUDA_HOME",
    "TORCH_CUDA_ARCH_LIST",
    "MAX_JOBS",
    "XDG_CACHE_HOME",
)


@dataclass(frozen=True)
class Tiny:
    """The tiny op: its row, the folder of its sources, and the cache it is compiled into."""

    spec: OpSpec
    csrc: Path
    cache: Path

    @property
    def wanted(self) -> Wanted:
        return Wanted.of(self.spec, self.csrc)

    @property
    def header(self) -> Path:
        return self.csrc / "tiny" / "tiny.h"

    @property
    def source(self) -> Path:
        return self.csrc / "tiny" / "tiny.cpp"

    def start(self, **environment: str) -> "subprocess.Popen[str]":
        """Start a process that builds the op and prints `ok <path>` or the error."""
        return subprocess.Popen(
            [sys.executable, WORKER, self.csrc],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith(OURS):
            monkeypatch.delenv(name)
    for variable, folder in (("DS_EXT_CACHE", "cache"), ("HOME", "home"), ("TMPDIR", "temporary")):
        monkeypatch.setenv(variable, str(tmp_path / folder))
    (tmp_path / "temporary").mkdir()
    cache._warn_once.cache_clear()


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    csrc = tmp_path / "csrc in $HOME: a copy"  # names that a shell and ninja would misread
    (csrc / "tiny").mkdir(parents=True)
    op = Tiny(OpSpec("tiny", "cpu", ("tiny/tiny.cpp",), needs=()), csrc, tmp_path / "cache")
    op.header.write_text("constexpr int kHeader = 40;\n")
    (csrc / "tiny" / "tiny.inl").write_text("constexpr int kInline = 2;\n")
    op.source.write_text(
        '#include "tiny/tiny.h"\n'
        '#define DSX_KERNEL_SOURCE "tiny/tiny.inl"\n'
        "#include DSX_KERNEL_SOURCE\n"
        'extern "C" [[gnu::visibility("default")]]\n'
        "int tiny_answer() { return kHeader + kInline; }\n"
    )
    return op


@pytest.fixture
def counting_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Make the compiler count; the function returns how many libraries were linked."""
    log = tmp_path / "compiler.log"
    wrapper = tmp_path / "counting-c++"
    wrapper.write_text(f'#!/bin/sh\necho "$*" >> {log}\nexec g++ "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    return lambda: log.read_text().count("-shared") if log.exists() else 0


@pytest.fixture
def warnings_logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the warnings that the library logged so far."""
    caplog.set_level(logging.INFO, logger="deepspeed_ext")
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
