"""A fork in the middle of a first compile: the child compiles, waits or raises; nothing breaks."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from building import build

from deepspeed_ext.op_builder import jit, load, loading, registry
from deepspeed_ext.op_builder.errors import Unavailable
from deepspeed_ext.op_builder.lock import held

if TYPE_CHECKING:
    from conftest import Tiny

LIMIT = 60
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@dataclass
class Compiling:
    """A thread that loads the tiny op, and whose compiler waits for the gate."""

    gate: Path
    thread: threading.Thread
    found: list[Path]

    def end(self) -> None:
        gate = os.open(self.gate, os.O_RDWR)  # which waits for no reader
        os.write(gate, b"go\n")
        self.thread.join(LIMIT)
        os.close(gate)


@pytest.fixture
def compiling(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiling]:
    monkeypatch.setattr(registry, "OPS", (tiny.spec,))
    monkeypatch.setattr(loading, "CSRC", tiny.csrc)
    monkeypatch.setattr(loading, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(loading, "_LOADED", {})
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    os.mkfifo(gate)
    os.mkfifo(begun)
    wrapper = tmp_path / "waiting-c++"
    wrapper.write_text(
        '#!/bin/sh\ncase "$*" in *-shared*) ;;\n'
        f'*tiny.cpp*) echo > {begun}; read line < {gate};; esac\nexec g++ "$@"\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    found: list[Path] = []
    thread = threading.Thread(target=lambda: found.append(load("tiny")))
    word = os.open(begun, os.O_RDONLY | os.O_NONBLOCK)
    thread.start()
    assert select.select([word], [], [], LIMIT)[0], "the compiler was not called"
    os.close(word)
    started = Compiling(gate, thread, found)
    yield started
    started.end()


def forked(work: Callable[[], str]) -> tuple[int, int]:
    """Do something in a child; return its number and where its answer can be read."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT)  # ends a child that hangs
        try:
            text = work()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(sender, text.encode())
        os._exit(0)
    os.close(sender)
    return child, receiver


def answer(child: int, receiver: int) -> str:
    with open(receiver) as opened:
        text = opened.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return text


def test_a_child_waits_no_longer_than_it_may(
    compiling: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_EXT_LOCK_TIMEOUT", "0.1")
    text = answer(*forked(lambda: str(load("tiny"))))
    assert text.startswith("BuildError: ") and f"process {os.getpid()} on" in text
    assert "for more than 0.1 s" in text
    compiling.end()
    assert len(compiling.found) == 1


def test_a_child_gets_what_its_parent_compiles(compiling: Compiling) -> None:
    child = forked(lambda: str(load("tiny")))
    compiling.end()
    assert answer(*child) == str(compiling.found[0])


def test_a_child_of_the_building_thread_leaves_the_build_to_its_parent(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a signal handler forks, and the child comes back from it."""
    compile_library = jit.compile_library
    children = []

    def forks(*arguments: object) -> Path:
        child = os.fork()
        if child:
            children.append(child)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 7
            with pytest.raises(Unavailable), held(tiny.cache / "tiny.lock", wait=0.0):
                pass  # it is still this process that has it
            assert len(list(tiny.cache.glob("*.tmp"))) == 1
        return compile_library(*arguments)

    monkeypatch.setattr(jit, "compile_library", forks)
    parent = os.getpid()
    try:
        library = build(tiny.spec, tiny.csrc)
    except RuntimeError as error:
        told = "is a fork of process" in str(error) and os.getpid() != parent
        os._exit(7 if told else 1)
    finally:
        if os.getpid() != parent:
            os._exit(1)
    assert len(children) == 1
    assert library.is_file()


HOLDER = """
import os, sys, threading
from pathlib import Path
from deepspeed_ext.op_builder.lock import held

got, fork = threading.Event(), threading.Event()

def hold():
    with held(Path(sys.argv[1])):
        got.set()
        fork.wait()

threading.Thread(target=hold, daemon=True).start()
got.wait()
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)
    sys.stdin.read()  # lives until the test ends it
os._exit(0)
"""


def test_a_lock_does_not_outlive_its_holder_in_a_child(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    assert int(process.stdout.readline()) != process.pid
    assert process.wait(LIMIT) == 0
    with held(path, wait=0.0):  # the child is there, the holder is not
        pass
    process.stdin.close()
    process.stdout.close()
