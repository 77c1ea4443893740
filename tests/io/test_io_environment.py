"""What ds_report says about I/O, and the engine's self-check; nothing is compiled for either."""

import errno
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from file_systems import TMPFS, file_system_of

from deepspeed_ext import environment, io
from deepspeed_ext.io import environment as io_environment, self_checks
from deepspeed_ext.io._native import native
from deepspeed_ext.io.engine.arguments import BACKENDS, Settings
from deepspeed_ext.io.tuning.settings import save
from deepspeed_ext.op_builder import loading
from deepspeed_ext.op_builder.registry import spec_of


@pytest.fixture
def built() -> None:
    """Have the native module where the report finds it."""
    native()
    library, reasons = loading.status(spec_of("async_io"))
    if library is None:
        pytest.skip(f"async_io is not where a later process would find it: {reasons}")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, built: None) -> Callable[[Callable[[], Any]], None]:
    """Let a function answer for the native module."""
    return lambda function: monkeypatch.setattr(io_environment, "_probe_backends", function)


@pytest.mark.usefixtures("built")
def test_each_backend_works_or_says_why_not() -> None:
    words = io_environment.backends().split(", ")
    assert [word.split()[0] for word in words] == list(BACKENDS)
    for word in words:
        assert re.fullmatch(r"\w+ (works|does not: E[A-Z]+ \(.+\))", word)


def test_the_errno_of_a_backend_is_told(answers: Callable[..., None]) -> None:
    answers(lambda: {"io_uring": errno.EPERM, "libaio": errno.ENOSYS, "threads": 0})
    assert io_environment.backends() == (
        "io_uring does not: EPERM (Operation not permitted),"
        " libaio does not: ENOSYS (Function not implemented), threads works"
    )


def test_nothing_is_compiled_for_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DS_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(loading, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.delenv("DS_EXT_LIBRARY_ASYNC_IO", raising=False)
    monkeypatch.setattr(loading, "compile_into_cache", lambda *_: pytest.fail("it compiles"))
    lines = environment.describe()
    text = "not found: async_io is not built; run: ds_report --build async_io"
    assert lines["I/O backends"] == lines["direct I/O"] == text
    assert lines["I/O settings"].startswith("blocks of 1024 KiB, depth 32, 1 thread, auto")
    assert not (tmp_path / "cache").exists()


def test_a_module_that_crashes_is_a_line(answers: Callable[..., None]) -> None:
    answers(lambda: os.kill(os.getpid(), signal.SIGKILL))
    line = environment.describe()["I/O backends"]
    assert line == "not found: async_io ended its process with code -9"


def test_a_module_that_fails_is_a_line(answers: Callable[..., None]) -> None:
    def fails() -> None:
        raise OSError(errno.EIO, "made up")

    answers(fails)
    assert environment.describe()["I/O backends"] == "not found: [Errno 5] made up"


def test_a_module_that_hangs_is_a_line(
    answers: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_environment, "_SECONDS", 0.2)
    answers(signal.pause)
    line = environment.describe()["I/O backends"]
    assert line == "not found: async_io did not answer within 0.2 s"


@pytest.mark.usefixtures("built")
def test_direct_io_is_that_of_the_scratch_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    line = io_environment.direct_io()
    file = native().File.scratch(str(tmp_path))
    if file.direct:
        units = f"in units of {file.offset_alignment} bytes, from addresses that are multiples of"
        assert line.startswith(f"{units} {file.memory_alignment}; {tmp_path} is ")
    else:
        assert line.startswith("none: everything goes through the page cache; ")
    monkeypatch.delenv("TMPDIR")
    monkeypatch.chdir(tmp_path)
    assert io_environment.direct_io() == line
    monkeypatch.setattr(io_environment, "_probe_direct_io", lambda: (0, 1))
    assert io_environment.direct_io().startswith("none: everything goes through the page cache; ")


def test_the_file_system_is_named(monkeypatch: pytest.MonkeyPatch, built: None) -> None:
    if file_system_of(TMPFS) != "tmpfs":
        pytest.skip(f"{TMPFS} is no tmpfs here")
    monkeypatch.setenv("TMPDIR", str(TMPFS))
    assert io_environment.direct_io().endswith(f"; {TMPFS} is tmpfs")


def test_settings_are_the_tuned_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    default = "blocks of 1024 KiB, depth 32, 1 thread, auto; the defaults: "
    assert io_environment.settings() == (
        f"{default}python -m deepspeed_ext.io tune {tmp_path} finds better ones"
    )
    save(tmp_path, Settings(block_size=1 << 19, threads=2, backend="libaio"))
    line = io_environment.settings()
    assert line.startswith("blocks of 512 KiB, depth 32, 2 threads, libaio; tuned for ")


def test_the_self_check_passes() -> None:
    self_checks.async_io("cpu")


@pytest.mark.parametrize("position", [0, 500_001, 1_000_002])
def test_the_self_check_notices_a_wrong_byte(
    position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = io.AsyncIO.read

    def wrong(engine: io.AsyncIO, tensor: torch.Tensor, path: Path, offset: int = 0) -> io.Future:
        future = read(engine, tensor, path, offset)
        if offset <= position < offset + len(future.result()):
            tensor[position - offset] ^= 1
        return future

    monkeypatch.setattr(io.AsyncIO, "read", wrong)
    with pytest.raises(RuntimeError, match=f"async_io: byte {position} is "):
        self_checks.async_io("cpu")


def test_the_self_check_notices_a_wrong_length(monkeypatch: pytest.MonkeyPatch) -> None:
    write = io.AsyncIO.write

    def longer(engine: io.AsyncIO, tensor: torch.Tensor, path: Path, offset: int = 0) -> io.Future:
        return write(engine, torch.cat([tensor, tensor[-1:]]), path, offset)

    monkeypatch.setattr(io.AsyncIO, "write", longer)
    with pytest.raises(RuntimeError, match="file has 1000004 bytes, expected 1000003"):
        self_checks.async_io("cpu")
