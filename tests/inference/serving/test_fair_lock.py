"""Who computes, and what else may be called meanwhile: in other threads, and within a step."""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny

from deepspeed_ext.inference.execution.runner import ModelRunner
from deepspeed_ext.inference.serving.engine import InferenceEngine
from deepspeed_ext.inference.serving.fair_lock import FairLock

MANY: dict[str, Any] = dict(max_new_tokens=40, temperature=1.0, seed=1, logprobs=0)
PROMPTS = [[1, 2], [3]]
NO_STEP = (
    "inference: the engine computes a step, expected no other within it, as a signal handler, a"
    " finalizer or a tokenizer may ask for"
)


class Client:
    """One that goes away without a word: a cycle, so that the garbage collector closes it."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.pieces = self._taken(engine)
        next(self.pieces)

    def _taken(self, engine: InferenceEngine) -> Iterator[Any]:
        with engine.generate([[5]], max_new_tokens=200, stream=True) as stream:
            yield from stream


@contextmanager
def within_a_step(monkeypatch: pytest.MonkeyPatch, what: Any, after: int = 7) -> Iterator[None]:
    """Let something be called in the middle of a step."""
    real, left = ModelRunner.decode, after

    def step(runner: ModelRunner, *arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            what()
        return real(runner, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "decode", step)
        yield


def test_a_stream_may_be_closed_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step goes on; behind it the stream's completions end as they are."""
    engine = tiny.engine(max_batch=4)
    expected = engine.generate(PROMPTS, **MANY)
    stream = engine.generate([[5], [6]], max_new_tokens=200, stream=True)
    next(stream)

    def close() -> None:
        stream.close()
        with pytest.raises(RuntimeError, match=r"^stream: completions are not done, expected all"):
            stream.completions()

    with within_a_step(monkeypatch, close):
        assert engine.generate(PROMPTS, **MANY) == expected
    assert [each.finish_reason for each in stream.completions()] == ["cancelled"] * 2
    assert list(stream) == []
    tiny.check_all_is_free(engine)


@pytest.mark.usefixtures("garbage_stays")
def test_a_client_that_went_away_is_collected_within_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = tiny.engine(max_batch=4)
    expected = engine.generate(PROMPTS, **MANY)
    Client(engine)
    with within_a_step(monkeypatch, gc.collect):
        assert engine.generate(PROMPTS, **MANY) == expected
    tiny.check_all_is_free(engine)


@pytest.mark.parametrize("what", ["generate", "next", "close"])
def test_nothing_else_is_computed_within_a_step(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.engine(max_batch=4)
    expected = engine.generate(PROMPTS, **MANY)
    stream = engine.generate([[5]], max_new_tokens=200, stream=True)
    next(stream)
    calls = dict(
        generate=lambda: engine.generate([[9]], max_new_tokens=3),
        next=lambda: list(stream),  # first what is there, then more
        close=engine.close,
    )
    texts: list[str] = []

    def call() -> None:
        with pytest.raises(RuntimeError) as error:
            calls[what]()
        texts.append(str(error.value))

    with within_a_step(monkeypatch, call):
        assert engine.generate(PROMPTS, **MANY) == expected
    closing = "close: the engine computes a step in this thread, expected it to be over"
    assert texts == [closing if what == "close" else NO_STEP]
    assert engine.generate(PROMPTS, **MANY) == expected
    stream.close()
    tiny.check_all_is_free(engine)


def test_a_tokenizer_that_generates_fails_its_prompt_only() -> None:
    class Asks(tiny.Bytes):
        def decode(self, ids: list[int]) -> str:
            if ids[:1] == [bad]:
                engine.generate([[1]], max_new_tokens=1)
            return super().decode(ids)

    bad = -1
    engine = tiny.engine(tokenizer=Asks(), max_batch=4)
    expected = engine.generate([[3]], **MANY)
    bad = engine.generate([[4]], **MANY)[0].tokens[0]
    assert bad != expected[0].tokens[0]
    stream = engine.generate([[3]], **MANY, stream=True)
    with pytest.raises(RuntimeError) as error:
        engine.generate([[4]], **MANY)
    assert str(error.value) == NO_STEP
    list(stream)
    assert stream.completions() == expected


@pytest.mark.parametrize("what", ["close", "generate", "engine"])
def test_signal_handlers_at_any_moment(what: str) -> None:
    """Whatever they call, the call that they come to is as without them, and nobody waits."""
    engine = tiny.engine(max_batch=4)
    expected = engine.generate(PROMPTS, **MANY)
    hits = 0
    for i in range(30):
        if what == "engine":
            engine = tiny.engine(max_batch=4)
        stream = engine.generate([[5]], max_new_tokens=200, stream=True)
        next(stream)

        def handler(*_: Any) -> None:
            nonlocal hits
            hits += 1
            try:
                if what == "close":
                    stream.close()  # noqa: B023
                elif what == "generate":
                    engine.generate([[9]], max_new_tokens=3)  # noqa: B023
                else:
                    engine.close()  # noqa: B023
            except RuntimeError as error:
                assert "computes a step" in str(error)

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0003 * i)
        try:
            assert engine.generate(PROMPTS, **MANY) == expected
        except RuntimeError as error:  # it came between two steps
            assert what == "engine" and "the engine" in str(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        stream.close()
    assert hits > 5
    if what != "engine":
        assert engine.generate(PROMPTS, **MANY) == expected
        tiny.check_all_is_free(engine)


def test_threads_whose_clients_go_away() -> None:
    """Wherever the garbage collector finds them, no two threads are in a step at once."""
    engine = tiny.engine(max_batch=8)
    expected = engine.generate(PROMPTS, **MANY)
    inside, most, found = [0], [0], list[bool]()
    real, counting = engine._scheduler.step, threading.Lock()

    def step() -> None:
        with counting:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        try:
            real()
        finally:
            with counting:
                inside[0] -= 1

    def work() -> None:
        for _ in range(25):
            Client(engine)
            found.append(engine.generate(PROMPTS, **MANY) == expected)

    engine._scheduler.step = step  # type: ignore[method-assign]
    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [True] * 75 and most == [1]
    gc.collect()
    tiny.check_all_is_free(engine)


class Busy:
    """Another thread that generates until it is told to stop; a step of its may be held up."""

    def __init__(self, engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine = engine
        self.expected = engine.generate(PROMPTS, **MANY)
        self.found: list[Any] = []
        self._may_stop, self._may_go, self._is_held = (threading.Event() for _ in range(3))
        self._may_go.set()
        self._thread = threading.Thread(target=self._work, daemon=True)
        real = ModelRunner.decode

        def step(runner: ModelRunner, *arguments: Any) -> Any:
            if threading.current_thread() is self._thread and not self._may_go.is_set():
                self._is_held.set()
                self._may_go.wait(60)
            return real(runner, *arguments)

        monkeypatch.setattr(ModelRunner, "decode", step)

    def _work(self) -> None:
        while not self._may_stop.is_set():
            try:
                self.found.append(self._engine.generate(PROMPTS, **MANY))
            except RuntimeError as error:
                self.found.append(str(error))

    def hold(self) -> None:
        """Wait until the thread is in the middle of a step, and keep it there."""
        self._is_held.clear()
        self._may_go.clear()
        assert self._is_held.wait(60)

    def let_go(self) -> None:
        self._may_go.set()

    def __enter__(self) -> "Busy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._may_stop.set()
        self._may_go.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_closing_a_stream_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the step of another thread, nor for the end of all that it goes on to do."""
    engine = tiny.engine(max_batch=8)
    with Busy(engine, monkeypatch) as busy:
        for _ in range(20):
            stream = engine.generate([[5]], max_new_tokens=100, stream=True)
            next(stream)
            busy.hold()
            stream.close()
            assert list(stream) == []
            busy.let_go()
            assert stream.completions()[0].finish_reason == "cancelled"  # behind that step
    assert busy.found == [busy.expected] * len(busy.found)
    tiny.check_all_is_free(engine)


def test_interrupted_while_another_thread_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C gets out of a call that waits for a step of another thread, before that ends."""
    engine = tiny.engine(max_batch=8)
    with Busy(engine, monkeypatch) as busy:
        for i in range(20):
            busy.hold()
            before = signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.001 * (i + 1))
            with pytest.raises(KeyboardInterrupt):
                engine.generate([[5]], max_new_tokens=100)
            signal.signal(signal.SIGALRM, before)
            busy.let_go()
    assert busy.found == [busy.expected] * len(busy.found)
    tiny.check_all_is_free(engine)


def test_interrupted_at_any_moment_beside_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever computes, the other goes on: with what it wanted, or with an error, never waiting."""
    engine = tiny.engine(max_batch=8)
    hits = 0
    with Busy(engine, monkeypatch) as busy:
        for i in range(60):
            before = signal.signal(signal.SIGALRM, signal.default_int_handler)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0002 * i)
                engine.generate([[5]], max_new_tokens=100)
            except KeyboardInterrupt:
                hits += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
    assert hits > 10
    odd = [each for each in busy.found if each != busy.expected and "was given up" not in each]
    assert odd == []
    assert engine.generate(PROMPTS, **MANY) == busy.expected
    tiny.check_all_is_free(engine)


def test_closing_an_engine_comes_before_further_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that always goes on does not keep it open."""
    engine = tiny.engine(max_batch=8)
    with Busy(engine, monkeypatch) as busy:
        busy.hold()
        closing = threading.Thread(target=engine.close, daemon=True)
        closing.start()
        busy.let_go()
        closing.join(60)
        assert not closing.is_alive() and not hasattr(engine, "cache")
    assert "the engine" in busy.found[-1]


def test_a_fork_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn belongs to a thread that the child has not; so nobody waits for it there."""
    engine = tiny.engine(max_batch=8)
    stream = engine.generate([[5]], max_new_tokens=100, stream=True)
    with Busy(engine, monkeypatch) as busy:
        busy.hold()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            text = ""
            try:
                stream.close()
                engine.close()
                engine._sweep()
                engine._advance(lambda: False)
            except RuntimeError as error:
                text = str(error)
            os.write(write, text.encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
    assert text.startswith(f"inference: the engine belongs to process {os.getpid()}, expected")


def test_whoever_waits_looks_again_when_nobody_wakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an interruption may stop a thread that has just ended its turn."""
    lock, began, may_end = FairLock(), threading.Event(), threading.Event()
    done: list[int] = []

    def work() -> None:
        began.set()
        assert may_end.wait(60)

    first = threading.Thread(target=lock.run, args=(work, lambda: False))
    first.start()
    assert began.wait(60)
    second = threading.Thread(target=lock.run, args=(lambda: done.append(2), lambda: False))
    second.start()
    monkeypatch.setattr(lock, "_wake", lambda: None)
    may_end.set()
    first.join(60)
    second.join(60)
    assert done == [2] and not lock.is_mine


def test_a_generator_that_is_left_at_exit() -> None:
    """Torch ends the process if tensors change in a generator's end then (2.13)."""
    program = (
        "import sys, tiny\n"
        "engine = tiny.engine(max_batch=4)\n"
        "def taken():\n"
        "    with engine.generate([[5]], max_new_tokens=200, stream=True) as stream:\n"
        "        yield from stream\n"
        "pieces = taken()\n"
        "next(pieces)\n"
    )
    shared = str(Path(tiny.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {shared!r})\n{program}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
