"""Ten thousand random requests: the same completions as one at a time, and nothing is lost."""

import gc
import random
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

from deepspeed_ext.inference.execution.sampling import SamplingOptions
from deepspeed_ext.inference.requests.request import Completion
from deepspeed_ext.inference.requests.stream import Piece, Stream
from deepspeed_ext.inference.serving.engine import InferenceEngine

KINDS: tuple[dict[str, Any], ...] = (
    {},
    dict(logprobs=1),
    dict(temperature=1.0, logprobs=0),
    dict(temperature=0.8, top_k=12, stop=("a", "Z ")),
    dict(temperature=1.0, top_p=0.9, repetition_penalty=1.3),
    dict(temperature=2.0, min_p=0.05, stop_tokens=(1, 40, 41)),
)


class Asked:
    """Something that is asked for again and again, and what comes of it alone."""

    def __init__(self, draw: random.Random) -> None:
        length = int(2 ** draw.uniform(0, 8.2))
        self.prompt = [draw.randrange(tiny.VOCABULARY) for _ in range(length)]
        new = draw.choice([0, 1, 2, 3, 5, 8, 20])
        seed, n = draw.randrange(2**64), draw.choice([1, 1, 1, 2, 3])
        kind = draw.choice(KINDS)
        self.options = SamplingOptions(max_new_tokens=new, seed=seed, n=n, **kind)
        self.expected: list[Completion] = []

    def alone(self, engine: InferenceEngine) -> list[Completion]:
        if not self.expected:
            self.expected = engine.generate([self.prompt], self.options)
        return self.expected


def check(asked: Asked, found: list[Completion], alone: InferenceEngine, i: int) -> None:
    """Compare with what comes alone: with all of it, or, if it was cancelled, its beginning."""
    for one, whole in zip(found, asked.alone(alone), strict=True):
        if one.finish_reason == "cancelled":
            assert one.tokens == whole.tokens[: len(one.tokens)]
            assert one.logprobs == (whole.logprobs and whole.logprobs[: len(one.tokens)])
        else:
            assert vars(one) == vars(whole) | dict(prompt=i)


class Client:
    """One that goes away without closing what it holds, so that the garbage collector does."""

    def __init__(self, stream: Stream) -> None:
        self.pieces = self._taken(stream)
        next(self.pieces, None)

    @staticmethod
    def _taken(stream: Stream) -> Iterator[Piece]:
        with stream:
            yield from stream

    def leave(self) -> None:
        self.itself = self  # a cycle: it ends in whatever step the collector comes to


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.long
def test_ten_thousand_requests() -> None:
    draw = random.Random(17)
    pool = [Asked(draw) for _ in range(200)]
    options: dict[str, Any] = dict(tokenizer=tiny.Bytes(), max_tokens=320)
    alone = tiny.engine(max_batch=1, **options)
    engine = tiny.engine(max_batch=24, pages=60, **options)  # 5 for a slot, but for the least
    running: list[tuple[Any, list[Asked]]] = []
    asked = done = 0
    sizes: list[tuple[int, int]] = []
    while asked < 10000 or running:
        if asked < 10000 and len(running) < 12 and draw.random() < 0.5:
            some = draw.choices(pool, k=draw.choice([1, 1, 2, 8]))
            prompts, wanted = [each.prompt for each in some], [each.options for each in some]
            running.append((engine.generate(prompts, wanted, stream=True), some))
            asked += len(some)
            engine._scheduler._ahead = (
                draw.random() < 0.5
            )  # what is queued is read late, or at once
        if not running:
            continue
        at = draw.randrange(len(running))
        stream, some = running[at]
        what = draw.random()
        if what < 0.03:
            stream.cancel(draw.randrange(len(stream._call.requests)))
        elif what < 0.04:
            stream.close()
        elif what < 0.06:
            running.pop(at)  # and forget it
            done += len(some)
            if what < 0.05:
                Client(stream).leave()
            continue
        for _ in range(draw.choice([1, 5, 40])):
            if next(stream, None) is None:
                found = stream.completions()
                for i, each in enumerate(some):
                    before = sum(other.options.n for other in some[:i])
                    check(each, found[before : before + each.options.n], alone, i)
                running.pop(at)
                done += len(some)
                break
        if done // 2500 > len(sizes):
            gc.collect()
            sizes.append((sys.getallocatedblocks(), resident()))
    del stream, found
    gc.collect()
    assert asked == done >= 10000
    engine._sweep()
    table = engine._scheduler._table
    assert len(table.free) == 24 and table.promised == 0 and not table.requests
    assert sorted(engine.cache._page_table.free) == list(range(60))
    assert engine.cache._page_table.holders == [0] * 60
    engine.cache.check()
    (blocks, memory), (last_blocks, last_memory) = sizes[1], sizes[-1]
    assert last_blocks < blocks + 20000  # those that are running differ
    assert last_memory < memory + 2**24
