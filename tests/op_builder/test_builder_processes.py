"""Many processes that want one library: one compiles, all get it, and any may be killed."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

from deepspeed_ext.op_builder import lock
from deepspeed_ext.op_builder.errors import Unavailable
from deepspeed_ext.op_builder.lock import held

if TYPE_CHECKING:
    from conftest import Tiny

LIMIT = 60.0
T = TypeVar("T")
Start = Callable[[int], "list[subprocess.Popen[str]]"]


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=LIMIT)
    return process.returncode, output, errors


@pytest.fixture
def workers(tiny: Tiny) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(count: int) -> list[subprocess.Popen[str]]:
        started.extend(tiny.start() for _ in range(count))
        return started[-count:]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_eight_processes_compile_once(
    tiny: Tiny,
    counting_compiler: Callable[[], int],
    workers: Start,
) -> None:
    results = [finish(process) for process in workers(8)]
    assert {code for code, _, _ in results} == {0}, results
    assert len({output for _, output, _ in results}) == 1
    assert counting_compiler() == 1


def test_waiting_processes_report_the_cause_of_the_builder(
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: Start,
) -> None:
    """The compiler waits until all processes have asked for the lock, then fails."""
    monkeypatch.setenv("CXX", str(tmp_path / "failing-c++"))
    gate, log = tmp_path / "gate", tmp_path / "runs"
    os.mkfifo(gate)
    (tmp_path / "failing-c++").write_text(
        f'#!/bin/sh\ncase "$*" in *tiny.cpp*) echo run >> {log}; read line < {gate};\n'
        'echo "tiny.cpp:1:1: error: no such luck" >&2; exit 1;; esac\nexec g++ "$@"\n'
    )
    (tmp_path / "failing-c++").chmod(0o755)
    processes = workers(4)
    path = tiny.cache / "tiny.lock"
    until(lambda: path.exists() and all(has_open(process, path) for process in processes))
    with gate.open("w") as opened:
        opened.write("go\n")
    results = [finish(process) for process in processes]
    assert {code for code, _, _ in results} == {1}
    assert log.read_text().count("run") == 1
    last = {errors.splitlines()[-1] for _, _, errors in results}
    assert len(last) == 1 and "error: no such luck" in last.pop()

    monkeypatch.setenv("CXX", "g++")  # a later process tries again
    (later,) = workers(1)
    assert finish(later)[0] == 0


def until(ask: Callable[[], T]) -> T:
    """Ask until the answer is true and return it."""
    deadline = time.monotonic() + LIMIT
    while not (answer := ask()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)
    return answer


def has_open(process: subprocess.Popen[str], path: Path) -> bool:
    folder = Path(f"/proc/{process.pid}/fd")
    try:
        return any(os.readlink(entry) == str(path) for entry in folder.iterdir())
    except FileNotFoundError:  # a descriptor or the process went away
        return False


def holder(path: Path) -> int:
    try:
        return int((path.read_text().split() or ["0"])[0])
    except FileNotFoundError:
        return 0


STAGES = (  # what the builder has just made when it is killed
    *("tiny.lock", "*.tmp", "*.tmp/build.ninja", "*.tmp/obj", "*.tmp/obj/*/tiny.cpp.o"),
    *("*.tmp/tiny.so", "*.tmp/build.json", "tiny-*/tiny.so"),
)


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_builder_leaves_no_hang_and_no_broken_library(
    tiny: Tiny, workers: Start, stage: str
) -> None:
    processes = workers(3)
    path = tiny.cache / "tiny.lock"
    pid = until(lambda: holder(path))
    (builder,) = (process for process in processes if process.pid == pid)
    until(lambda: any(tiny.cache.glob(stage)) or builder.poll() is not None)
    time.sleep(random.uniform(0.0, 0.02))  # anywhere between this stage and the next
    builder.kill()
    assert finish(builder)[0] in (-signal.SIGKILL, 0)
    results = [finish(process) for process in processes if process is not builder]
    assert [code for code, _, _ in results] == [0, 0], results
    library = Path(results[0][1].split()[1])
    assert tiny.wanted.fits(library)
    assert ctypes.CDLL(str(library)).tiny_answer() == 42
    # A linker outlives who began it, and may write once more into a folder of the dead one.
    assert len([*tiny.cache.glob("tiny-*[0-9a-f]/tiny.so")]) == 1


def test_the_next_builder_removes_what_a_killed_one_left(tiny: Tiny) -> None:
    leftover = tiny.cache / "tiny-0123456789abcdef.0.tmp"
    (leftover / "obj").mkdir(parents=True)
    assert finish(tiny.start())[0] == 0
    assert not list(tiny.cache.glob("*.tmp"))


def test_the_lock_names_its_holder_when_the_wait_ends(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with held(path), pytest.raises(Unavailable) as caught, held(path, wait=0.0):
        pass
    text = str(caught.value)
    assert f"process {os.getpid()} on {os.uname().nodename}" in text
    assert f"kill {os.getpid()}" in text and "DS_EXT_LOCK_TIMEOUT" in text
    with held(path, wait=0.0):  # free again
        pass


def test_a_long_wait_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock, "_FIRST_WORD_SECONDS", 0.01)
    caplog.set_level("INFO", logger="deepspeed_ext")
    path = tmp_path / "x.lock"
    with held(path), pytest.raises(Unavailable), held(path, wait=0.2):
        pass
    assert f"for process {os.getpid()} on" in caplog.text


def test_the_wait_is_set_by_the_environment(
    tiny: Tiny, workers: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.cache.mkdir()
    monkeypatch.setenv("DS_EXT_LOCK_TIMEOUT", "0.2")
    with held(tiny.cache / "tiny.lock"):
        (process,) = workers(1)
        code, _, errors = finish(process)
    assert code == 1
    assert f"kill {os.getpid()}" in errors.splitlines()[-1]
