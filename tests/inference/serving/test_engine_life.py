"""Engines beside each other, threads, failures, interruptions, the end."""

import copy
import gc
import os
import pickle
import signal
import threading
import weakref
from typing import Any

import pytest
import tiny
import torch

from deepspeed_ext.inference.execution.runner import ModelRunner
from deepspeed_ext.inference.execution.sampling import SamplingOptions
from deepspeed_ext.inference.serving.engine import InferenceEngine

_NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=_NEEDS_GPU)])
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["read at once", "read late"])
MANY: dict[str, Any] = dict(max_new_tokens=40, temperature=1.0, seed=1, logprobs=0)


def make(device: str = "cpu", ahead: bool | None = None, **options: Any) -> InferenceEngine:
    engine = tiny.engine(device, **options)
    if ahead is not None:
        engine._scheduler._ahead = ahead
    return engine


class Failing:
    """A step that does something else when its turn comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, after: int, what: Any) -> None:
        self.left = after
        real = getattr(ModelRunner, name)

        def step(runner: ModelRunner, *arguments: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                what()
            return real(runner, *arguments)

        monkeypatch.setattr(ModelRunner, name, step)


def fail() -> None:
    raise MemoryError("no memory for this step")


@ON_BOTH
@AHEAD
@pytest.mark.parametrize(
    ("name", "after"), [("decode", 1), ("decode", 7), ("prefill", 2), ("sample", 2), ("start", 4)]
)
def test_a_step_that_fails(
    name: str, after: int, ahead: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller hears of it; the next call finds nothing of the last."""
    engine = make(device, ahead, max_batch=4)
    prompts = [[i, 5] for i in range(6)]
    expected = engine.generate(prompts, **MANY)
    with monkeypatch.context() as patch:
        Failing(patch, name, after, fail)
        with pytest.raises(MemoryError, match="no memory for this step"):
            engine.generate(prompts, **MANY)
    tiny.check_all_is_free(engine)
    assert engine.generate(prompts, **MANY) == expected


@pytest.mark.parametrize("where", ["plan", "set", "check_slot"])
@pytest.mark.parametrize("after", [1, 2, 9, 30])
def test_an_interruption_in_the_middle_of_a_table(
    where: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C may come after any line; pages are not lost, even if their table is half done."""
    from deepspeed_ext.inference.execution.page_table import PageTable

    engine = make(max_batch=4, pages=9)
    prompts = [[i] * 40 for i in range(6)]
    expected = engine.generate(prompts, **MANY, n=2)
    left, real = after, getattr(PageTable, where)

    def broken(pages: PageTable, *arguments: Any, **others: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            if where == "set":
                pages.holders[pages.free.pop()] += 1  # half of it
            raise KeyboardInterrupt
        return real(pages, *arguments, **others)

    with monkeypatch.context() as patch:
        patch.setattr(PageTable, where, broken)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts, **MANY, n=2)
    tiny.check_all_is_free(engine)
    assert engine.generate(prompts, **MANY, n=2) == expected


def test_interruptions_at_any_moment() -> None:
    """Signals, as Ctrl-C sends them, wherever the program is; then all is as before."""
    engine = make(max_batch=4)
    prompts = [[i, 7] for i in range(9)]
    expected = engine.generate(prompts, **MANY)
    hits = 0
    # Before the timer runs, or the signal ends the program.
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for i in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0007 * (i + 1))
                engine.generate(prompts, **MANY)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hits += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert hits > 10
    assert engine.generate(prompts, **MANY) == expected
    tiny.check_all_is_free(engine)


@ON_BOTH
@AHEAD
def test_a_stream_that_is_interrupted_is_closed(
    ahead: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    engine = make(device, ahead, max_batch=4)
    other = engine.generate([[9], [8]], **MANY, stream=True)
    stream = engine.generate([[1], [2]], **MANY, stream=True)
    next(stream)
    with monkeypatch.context() as patch:
        Failing(patch, "decode", 5, interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    assert list(stream) == []
    with pytest.raises(RuntimeError, match="given up"):
        stream.completions()
    with pytest.raises(RuntimeError) as error:
        list(other)
    assert str(error.value) == (
        "generate: prompt 0 was given up, as a step that it was part of was interrupted, or failed"
        " for the caller that took it"
    )
    tiny.check_all_is_free(engine)


@ON_BOTH
@AHEAD
def test_logits_that_are_not_finite_name_their_prompt(ahead: bool, device: str) -> None:
    """Others are as they are without it, and the engine goes on."""
    tokens = {token for each in make(device).generate([[1], [2]], **MANY) for token in each.tokens}
    poison = max(set(range(97)) - tokens)
    engine = make(device, ahead, of=tiny.decoder(device, poisoned=poison), max_batch=4)
    expected = engine.generate([[1], [2]], **MANY)
    stream = engine.generate([[1], [2]], **MANY, stream=True)
    with pytest.raises(RuntimeError) as error:
        engine.generate([[3], [4, poison, 4], [5]], **MANY)
    assert str(error.value) == (
        "generate: the logits for token 0 after prompt 1 have nan as the largest, expected finite"
        " ones; a weight is not finite, or numbers become too large for the dtype"
    )
    list(stream)
    assert stream.completions() == expected
    tiny.check_all_is_free(engine)


def test_a_tokenizer_that_fails_fails_its_prompt_only() -> None:
    class Fails(tiny.Bytes):
        def decode(self, ids: list[int]) -> str:
            if len(ids) > 3:
                raise KeyError("no such token")
            return super().decode(ids)

    engine = make(tokenizer=Fails(), max_batch=4)
    other = engine.generate([[1]], max_new_tokens=3, stream=True)
    with pytest.raises(KeyError, match="no such token"):
        engine.generate([[1]], max_new_tokens=20)
    list(other)
    assert other.completions()[0].text == tiny.Bytes().decode(other.completions()[0].tokens)
    tiny.check_all_is_free(engine)


def test_a_tokenizer_that_fails_for_what_is_cancelled() -> None:
    """As others are when one prompt of a call has failed; the rest goes on."""

    class Fails(tiny.Bytes):
        def decode(self, ids: list[int]) -> str:
            if ids[0] in bad:
                raise IndexError("no such token")
            return super().decode(ids)

    bad: set[int] = set()
    engine = make(tokenizer=Fails(), max_batch=4)
    some = engine.generate([[1], [2], [3]], max_new_tokens=30)
    other = engine.generate([[3]], max_new_tokens=30, stream=True)
    next(other)
    bad = {some[0].tokens[0], some[1].tokens[0]} - {some[2].tokens[0]}
    assert len(bad) == 2
    short, long = SamplingOptions(max_new_tokens=3), SamplingOptions(max_new_tokens=30)
    with pytest.raises(IndexError, match="no such token"):
        engine.generate([[1], [2]], [short, long])
    list(other)
    assert other.completions()[0].tokens == some[2].tokens
    tiny.check_all_is_free(engine)


@ON_BOTH
def test_threads_share_an_engine(device: str) -> None:
    engine = make(device, max_batch=5)
    prompts = [[[t, i, 3] for i in range(4)] for t in range(6)]
    expected = [engine.generate(some, **MANY) for some in prompts]
    found: list[Any] = [None] * 6

    def work(t: int) -> None:
        results = []
        for i in range(3):
            if t % 2:
                stream = engine.generate(prompts[t], **MANY, stream=True)
                pieces = list(stream) if i else [next(stream)]  # or closed early
                stream.close()
                results.append(stream.completions() if i and pieces else expected[t])
            else:
                results.append(engine.generate(prompts[t], **MANY))
        found[t] = results

    threads = [threading.Thread(target=work, args=(t,)) for t in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [[each] * 3 for each in expected]
    tiny.check_all_is_free(engine)


def test_a_thread_that_fails_leaves_the_others_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a wait without end: one caller has what was raised, the others that they were part."""
    engine = make(max_batch=8)
    errors: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work(t: int) -> None:
        barrier.wait()
        try:
            engine.generate([[t]], max_new_tokens=200)
        except BaseException as error:
            errors.append(error)

    Failing(monkeypatch, "decode", 60, fail)
    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    kinds = sorted(type(error).__name__ for error in errors)
    assert kinds.count("MemoryError") == 1 and set(kinds) <= {"MemoryError", "RuntimeError"}
    tiny.check_all_is_free(engine)


def test_two_engines_never_meet() -> None:
    engines = [make(max_batch=3), make(of=tiny.decoder(rope_theta=500.0), max_batch=3)]
    expected = [engine.generate([[1, 2], [3]], **MANY) for engine in engines]
    assert expected[0] != expected[1]
    streams = [engine.generate([[1, 2], [3]], **MANY, stream=True) for engine in engines]
    done = [False, False]
    while not all(done):
        for i, stream in enumerate(streams):
            done[i] = next(stream, None) is None
    assert [stream.completions() for stream in streams] == expected


@ON_BOTH
def test_beside_training_in_the_same_thread(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mode leaks out between pieces: what the caller computes has gradients."""
    engine = make(device)
    weight = torch.ones(3, device=device, requires_grad=True)
    stream = engine.generate([[1], [2]], **MANY, stream=True)
    for _ in stream:
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        (weight.exp().sum() * 2).backward()
    assert weight.grad is not None and bool((weight.grad > 0).all())
    expected = stream.completions()
    with torch.autocast(device, dtype=torch.bfloat16), torch.no_grad():
        assert engine.generate([[1], [2]], **MANY) == expected
        with monkeypatch.context() as patch:
            modes: list[bool] = []
            note = lambda: modes.append(torch.is_autocast_enabled(device))  # noqa: E731
            Failing(patch, "decode", 1, note)
            engine.generate([1], max_new_tokens=2)
            assert modes == [False]
    with torch.inference_mode():
        assert engine.generate([[1], [2]], **MANY) == expected
        other = tiny.engine(device, of=tiny.decoder(device))
    assert other.generate([[1], [2]], **MANY) == expected


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied(how: Any) -> None:
    with pytest.raises(TypeError) as error:
        how(make())
    assert str(error.value) == (
        "inference: an engine was to be copied or pickled, expected init_inference once more, as it"
        " holds a cache, and completions under way"
    )


def test_memory_is_given_back() -> None:
    for how in ("close", "with", "forget"):
        of = tiny.decoder()
        engine = make(of=of, max_batch=2)
        kept = [weakref.ref(of), weakref.ref(engine.cache)]
        stream = engine.generate([[1]], max_new_tokens=9, stream=True)
        next(stream)
        del of
        if how == "with":
            with engine:
                pass
        if how == "close":
            engine.close()
            engine.close()
        if how == "forget":
            del stream, engine
            gc.collect()
        else:
            with pytest.raises(RuntimeError) as error:
                list(stream)
            assert str(error.value) == "generate: prompt 0 was given up, as the engine was closed"
            with pytest.raises(RuntimeError) as error:
                engine.generate([[1]])
            assert str(error.value) == "inference: the engine is closed, expected one that is open"
        assert [each() for each in kept] == [None, None], how


def test_an_engine_stays_in_its_process() -> None:
    engine = make()
    stream = engine.generate([[1]], max_new_tokens=9, stream=True)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            stream.close()
            engine.close()
            engine.generate([[1]])
        except RuntimeError as error:
            text = str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    assert text == (
        f"inference: the engine belongs to process {os.getpid()}, expected to be used there;"
        " start processes by spawn, and make an engine in each, as torch's threads do not outlive"
        " a fork"
    )
    assert len(list(stream)) == 9


def test_an_interruption_while_a_stream_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was cancelled while it waited stays so."""
    from deepspeed_ext.inference.requests.request import Request

    engine = make(max_batch=1)
    first = engine.generate([[1]], max_new_tokens=20, stream=True)
    waiting = engine.generate([[2]], max_new_tokens=50, stream=True)
    next(first)
    waiting.close()

    def interrupt(request: Request) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Request, "cancel", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(first)
    engine.generate([[3]], max_new_tokens=5)
    (completion,) = waiting.completions()
    assert completion.finish_reason == "cancelled" and not completion.tokens
    tiny.check_all_is_free(engine)


def test_an_interruption_between_a_request_and_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread whose request ended just then does not wait for ever."""
    from deepspeed_ext.inference.requests.request import Request

    engine = make(max_batch=4)
    other = engine.generate([[1], [2]], max_new_tokens=5, stream=True)

    def interrupt(request: Request) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Request, "_end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[3]], max_new_tokens=9)
    with pytest.raises(RuntimeError, match="prompt 1 was given up"):
        list(other)
    assert other._call.open == 0
    tiny.check_all_is_free(engine)
