"""Completions for coroutines: the same as for threads, by one thread, cancelled by who leaves."""

import asyncio
import gc
import itertools
import random
import threading
import weakref
from collections.abc import Coroutine, Iterable
from typing import Any

import pytest
import tiny

from deepspeed_ext.inference.execution.runner import ModelRunner
from deepspeed_ext.inference.requests.async_stream import LoopBell
from deepspeed_ext.inference.requests.stream import Piece
from deepspeed_ext.inference.serving.engine import InferenceEngine
from deepspeed_ext.threads import AwaitedThread

OPTIONS: dict[str, Any] = dict(max_new_tokens=20, temperature=1.0, seed=3)


def run(what: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(what, 60))


def steppers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "deepspeed_ext-inference"]


async def pieces_of(engine: InferenceEngine, *prompts: Any, **options: Any) -> list[Piece]:
    return [piece async for piece in engine.stream(*prompts, **options)]


def joined(lists: Iterable[list[Any] | None]) -> list[Any]:
    return [each for some in lists for each in some or []]


async def until_free(engine: InferenceEngine) -> None:
    """The thread goes on until what was cancelled is taken back."""
    while steppers():
        await asyncio.sleep(0.001)
    tiny.check_all_is_free(engine)


def test_pieces_are_those_for_threads() -> None:
    engine = tiny.engine(tokenizer=tiny.Bytes())
    prompts, options = ["Hello", "you", "a"], OPTIONS | dict(n=2, logprobs=2)
    expected = engine.generate(prompts, **options)

    async def ask() -> None:
        stream = engine.stream(prompts, **options)
        pieces = [piece async for piece in stream]
        assert stream.completions() == expected
        for one in expected:
            mine = [p for p in pieces if (p.prompt, p.sample) == (one.prompt, one.sample)]
            assert "".join(piece.text for piece in mine) == one.text
            assert joined(piece.tokens for piece in mine) == one.tokens
            assert joined(piece.logprobs for piece in mine) == one.logprobs
            assert joined(piece.top_logprobs for piece in mine) == one.top_logprobs
            assert [p.finish_reason for p in mine] == [None] * (len(mine) - 1) + ["length"]
        assert [piece async for piece in stream] == []
        await until_free(engine)

    run(ask())


def test_ends_without_a_token() -> None:
    engine = tiny.engine(tokenizer=tiny.Bytes())
    first = engine.generate("Hello", max_new_tokens=1)[0].tokens[0]

    async def ask() -> None:
        for options in (dict(max_new_tokens=0), dict(stop_tokens=[first])):
            reason = "length" if "max_new_tokens" in options else "stop"
            found = await pieces_of(engine, ["Hello", "Hello"], **options)
            assert [(p.prompt, p.tokens, p.text, p.finish_reason) for p in found] == [
                (i, [], "", reason) for i in range(2)
            ]
        assert await pieces_of(engine, []) == []
        scored = engine.stream("Hello", max_new_tokens=0, prompt_logprobs=0)
        assert len([piece async for piece in scored]) == 1
        assert scored.completions()[0].prompt_logprobs == engine.score("Hello")[0].logprobs
        await until_free(engine)

    run(ask())


def test_many_by_one_thread() -> None:
    """Beside threads that ask themselves; each gets what it would alone."""
    engine = tiny.engine(max_batch=6)
    drawn = random.Random(0)
    prompts = [[drawn.randrange(97) for _ in range(drawn.randint(1, 30))] for _ in range(150)]
    expected = [engine.generate([each], **OPTIONS)[0].tokens for each in prompts]
    most = 0
    by_threads: list[list[int]] = []

    async def one(tokens: list[int]) -> list[int]:
        nonlocal most
        found: list[int] = []
        async for piece in engine.stream([tokens], **OPTIONS):
            found += piece.tokens
            most = max(most, len(steppers()))
        return found

    async def ask() -> None:
        other = threading.Thread(
            target=lambda: by_threads.extend(c.tokens for c in engine.generate(prompts, **OPTIONS))
        )
        other.start()
        assert await asyncio.gather(*map(one, prompts)) == expected
        await asyncio.to_thread(other.join)
        await until_free(engine)

    run(ask())
    assert most == 1 and by_threads == expected


def test_who_leaves_is_cancelled() -> None:
    """By any way out, at any moment; the others get what they would alone."""
    engine = tiny.engine(max_batch=4)
    options = OPTIONS | dict(max_new_tokens=60)
    expected = engine.generate([[5]], **options)[0].tokens
    drawn = random.Random(1)

    async def leaves(way: str, after: int) -> None:
        if way == "with":
            async with engine.stream([[1], [2]], **options) as stream:
                async for _ in stream:
                    return
        count = 0
        async for _ in engine.stream([[1], [2]], **options):
            count += 1
            if count > after and way == "break":
                break
            if count > after and way == "error":
                raise KeyError

    async def cancelled() -> None:
        task = asyncio.create_task(leaves("", 0))
        await asyncio.sleep(drawn.random() * 0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def stays() -> list[int]:
        return joined(piece.tokens for piece in await pieces_of(engine, [[5]], **options))

    async def ask() -> None:
        ways = [leaves(way, i) for i in range(5) for way in ("with", "break", "error")]
        rest = [cancelled() for _ in range(20)] + [stays() for _ in range(10)]
        found = await asyncio.gather(*ways, *rest, return_exceptions=True)
        assert found[-10:] == [expected] * 10
        await until_free(engine)

    run(ask())


def test_a_task_that_is_cancelled_closes_what_is_kept() -> None:
    """Somebody may still hold the stream."""
    engine = tiny.engine(max_tokens=4000)

    async def ask() -> None:
        stream = engine.stream([[1]], max_new_tokens=3900)

        async def read() -> None:
            async for _ in stream:
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert [piece async for piece in stream] == []
        await until_free(engine)
        assert len(stream.completions()[0].tokens) < 3900

    run(ask())


def test_one_of_several_is_cancelled() -> None:
    engine = tiny.engine()

    async def ask() -> None:
        stream = engine.stream([[1], [2]], max_new_tokens=200)
        for wrong in (2, -1):
            with pytest.raises(ValueError, match=rf"^stream: which is {wrong}, expected 0 to 1$"):
                stream.cancel(wrong)
        with pytest.raises(TypeError, match=r"^stream: which is None, expected an int$"):
            stream.cancel(None)  # type: ignore[arg-type]
        async for piece in stream:
            if piece.prompt == 0:
                stream.cancel(0)
        assert [one.finish_reason for one in stream.completions()] == ["cancelled", "length"]

    run(ask())


def test_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were in it hear of it, with the cause; the next ones do not."""
    engine = tiny.engine(max_batch=2)
    real, left = ModelRunner.decode, 3

    def decode(runner: ModelRunner, *arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise MemoryError("no memory for this step")
        return real(runner, *arguments)

    monkeypatch.setattr(ModelRunner, "decode", decode)

    async def ask() -> None:
        found = await asyncio.gather(
            *(pieces_of(engine, [[i]], max_new_tokens=9) for i in range(4)), return_exceptions=True
        )
        failed = [each for each in found if isinstance(each, Exception)]
        assert len(failed) == 2
        for error in failed:
            assert "was given up" in str(error) and isinstance(error.__cause__, MemoryError)
        await until_free(engine)

    run(ask())


def test_a_device_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be computed, nor begun anew: all hear of it, and the thread ends."""
    engine = tiny.engine(max_batch=2)

    def gone(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(ModelRunner, "decode", gone)
    monkeypatch.setattr(type(engine.cache), "clear", gone)

    async def ask() -> None:
        asked = (pieces_of(engine, [[i]]) for i in range(5))
        for error in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(error, RuntimeError)
        while steppers():
            await asyncio.sleep(0.001)

    run(ask())


def test_the_engine_is_closed() -> None:
    engine = tiny.engine()

    async def ask() -> None:
        stream = engine.stream([[1]], max_new_tokens=250)
        await anext(stream)
        engine.close()
        with pytest.raises(RuntimeError, match="was given up, as the engine was closed"):
            while True:
                await anext(stream)
        with pytest.raises(RuntimeError, match="the engine is closed"):
            engine.stream([[1]])
        while steppers():
            await asyncio.sleep(0.001)

    run(ask())


def test_logits_that_are_not_finite() -> None:
    engine = tiny.engine(of=tiny.decoder(poisoned=9))

    async def ask() -> None:
        with pytest.raises(RuntimeError, match="expected finite ones"):
            await pieces_of(engine, [[9]])
        assert len(await pieces_of(engine, [[4]], max_new_tokens=1)) <= 2
        await until_free(engine)

    run(ask())


def test_what_is_refused_at_once() -> None:
    engine = tiny.engine()
    with pytest.raises(RuntimeError) as error:
        engine.stream([[1]])
    text = "stream: no event loop is running, expected a coroutine; elsewhere use"
    assert str(error.value) == f"{text} generate(..., stream=True)"

    async def ask() -> None:
        with pytest.raises(ValueError, match="prompt 0 is empty"):
            engine.stream([[]])
        with pytest.raises(TypeError, match="option is tmp"):
            engine.stream([[1]], tmp=1)

    run(ask())
    tiny.check_all_is_free(engine)


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of threads, or as a signal comes when it has begun: the next call has another."""
    engine, real = tiny.engine(max_batch=2), AwaitedThread.start
    expected = engine.generate([[1], [2]], **OPTIONS)

    def none_left(thread: AwaitedThread) -> None:
        raise RuntimeError("can't start new thread")

    def interrupted(thread: AwaitedThread) -> None:
        real(thread)
        raise KeyError("of a signal handler")

    async def ask() -> None:
        for start in (none_left, interrupted) * 2:
            with monkeypatch.context() as patch:
                patch.setattr(AwaitedThread, "start", start)
                for _ in range(3):
                    with pytest.raises((RuntimeError, KeyError), match=r"can't start|of a sig"):
                        engine.stream([[1], [2]], **OPTIONS)
            assert engine.load == (0, 0)
            found = await asyncio.wait_for(pieces_of(engine, [[1], [2]], **OPTIONS), 60)
            for one in expected:
                assert joined(p.tokens for p in found if p.prompt == one.prompt) == one.tokens
            await until_free(engine)

    run(ask())


def test_an_engine_that_is_closed_while_a_call_begins() -> None:
    """As another thread may do: no step will come, and the call hears of it."""

    class Closes(tiny.Bytes):
        def encode(self, text: str) -> list[int]:
            engine.close()
            return super().encode(text)

    engine = tiny.engine(tokenizer=Closes())

    async def ask() -> None:
        with pytest.raises(RuntimeError, match="was given up, as the engine was closed"):
            await asyncio.wait_for(pieces_of(engine, "Hello"), 60)
        while steppers():
            await asyncio.sleep(0.001)

    run(ask())


def test_a_loop_that_ends_early_and_another_one() -> None:
    """What it left goes on for nobody, and is taken back; the engine serves the next loop."""
    engine = tiny.engine()
    kept = []

    async def leave() -> None:
        stream = engine.stream([[1]], max_new_tokens=250)
        await anext(stream)
        kept.append(stream)

    run(leave())
    found = run(pieces_of(engine, [[1]], max_new_tokens=3))
    assert sum(len(piece.tokens) for piece in found) == 3  # some may come together
    kept.clear()
    run(until_free(engine))


def test_loops_are_let_go() -> None:
    """Some programs have one for each call."""
    engine, loops = tiny.engine(), list[Any]()

    async def ask() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        assert await pieces_of(engine, [[1]], max_new_tokens=2)
        await until_free(engine)

    for _ in range(3):
        run(ask())
    gc.collect()
    assert [each() for each in loops] == [None] * 3


def test_who_is_woken_when() -> None:
    """First those that wait for their first news, in their order; others of the loop in between."""
    order = list[Any]()

    class Noted(asyncio.Event):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def set(self) -> None:
            order.append(self.name)

    async def ring() -> None:
        bell = LoopBell(asyncio.get_running_loop())
        for i in range(20):
            bell.add(Noted(f"other {i}"), False)
            bell.add(Noted(f"first {i}"), True)
        bell.ring()
        bell.ring()
        while "other 19" not in order:
            await asyncio.sleep(0)
            order.append("loop")
        bell.add(Noted("late"), False)
        bell.ring()
        await asyncio.sleep(0)

    run(ring())
    names = [f"{kind} {i}" for kind in ("first", "other") for i in range(20)]
    assert [each for each in order if each != "loop"] == [*names, "late"]
    turns = [i for i, each in enumerate(order) if each == "loop"]
    assert max(b - a for a, b in itertools.pairwise(turns)) <= 17


def test_an_engine_that_is_let_go() -> None:
    engine = tiny.engine()
    gone = weakref.ref(engine)
    run(pieces_of(engine, [[1]], max_new_tokens=3))
    del engine
    for _ in range(6000):
        gc.collect()
        if gone() is None:
            break
        threading.Event().wait(0.01)  # the thread has it for the rest of a step
    assert gone() is None


class Letters(tiny.Bytes):
    """Any token is a byte of some letters, most of which have several."""

    def decode(self, ids: list[int]) -> str:
        letters = "日本é!a".encode()
        return bytes(letters[each % len(letters)] for each in ids).decode(errors="replace")


def test_text_is_the_same_streamed_and_whole() -> None:
    """With stop strings, which are there or not, and where it ends within a character."""
    engine, partial = tiny.engine(tokenizer=Letters()), 0

    async def streamed(**options: Any) -> str:
        return "".join(piece.text for piece in await pieces_of(engine, [[7]], **options))

    for seed in range(2):
        for count in (1, 2, 3, 5, 8):
            options: dict[str, Any] = dict(max_new_tokens=count, seed=seed, temperature=2.0)
            whole = engine.generate([[7]], **options)[0]
            assert whole.text == engine.tokenizer.decode(whole.tokens)  # type: ignore[union-attr]
            partial += whole.text.endswith("\ufffd")
            for stop in ((), ("never there", "\ufffd\ufffd!!!!"), ("a", "é")):
                cuts = [at for each in stop if (at := whole.text.find(each)) >= 0]
                expected = whole.text[: min(cuts, default=len(whole.text))]
                asked = options | dict(stop=stop)
                assert engine.generate([[7]], **asked)[0].text == expected
                with engine.generate([[7]], **asked, stream=True) as pieces:
                    assert "".join(piece.text for piece in pieces) == expected
                assert run(streamed(**asked)) == expected
    assert partial > 1
