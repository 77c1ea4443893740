"""Batch invariance: the same tokens and log-probabilities alone and in any batch."""

import functools
import itertools
import math
import random
from typing import Any

import pytest
import tiny
import torch

from deepspeed_ext.inference.execution.sampling import SamplingOptions
from deepspeed_ext.inference.requests.request import Completion
from deepspeed_ext.inference.serving.engine import InferenceEngine
from deepspeed_ext.inference.serving.step_plan import CHUNK

_NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=_NEEDS_GPU)])
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["read at once", "read late"])
PADDED = pytest.mark.parametrize("padded", [False, True], ids=["as they are", "padded"])
KINDS: tuple[dict[str, Any], ...] = (
    {},
    dict(logprobs=0),
    dict(temperature=1.0, logprobs=2),
    dict(temperature=0.7, top_k=9),
    dict(temperature=1.0, top_p=0.8, repetition_penalty=1.2),
    dict(temperature=1.5, min_p=0.1, logprobs=0),
    dict(repetition_penalty=1.4),
    dict(temperature=1.0, stop_tokens=(3, 50, 77)),
)
Asked = tuple[list[int], SamplingOptions]


def asked(count: int, seed: int = 0, longest: int = 150, most: int = 40) -> list[Asked]:
    """Return prompts and options, all different."""
    draw = random.Random(seed)
    some = []
    for i in range(count):
        prompt = [draw.randrange(tiny.VOCABULARY) for _ in range(draw.randint(1, longest))]
        options = dict(max_new_tokens=draw.randint(1, most), seed=seed * 1000 + i)
        some.append((prompt, SamplingOptions(**options, **draw.choice(KINDS))))
    return some


def make(
    device: str, ahead: bool | None = None, padded: bool = False, **options: Any
) -> InferenceEngine:
    """Return an engine; on the CPU, too, it may read answers late and pad shapes, as on CUDA."""
    engine = tiny.engine(device, **options)
    if ahead is not None:
        engine._scheduler._ahead = ahead
    if padded:
        engine._scheduler._runner.pads, engine._scheduler._pad_to = True, 64
    return engine


def result(completion: Completion) -> tuple[Any, ...]:
    return (
        completion.tokens,
        completion.logprobs,
        completion.top_logprobs,
        completion.finish_reason,
        completion.stop,
    )


def alone(device: str, some: list[Asked], **options: Any) -> list[tuple[Any, ...]]:
    """Return what comes of each on an engine of one slot, one after the other."""
    engine = make(device, max_batch=1, **options)
    return [result(engine.generate([prompt], wanted)[0]) for prompt, wanted in some]


def together(engine: InferenceEngine, some: list[Asked]) -> list[tuple[Any, ...]]:
    found = engine.generate([prompt for prompt, _ in some], [wanted for _, wanted in some])
    return [result(each) for each in found]


@functools.cache
def for_slots(slots: int, padded: bool, device: str) -> tuple[list[Asked], list[tuple[Any, ...]]]:
    """Return more than there are slots, so that each slot has several, and what each is alone."""
    some = asked(slots + 9, longest=150 if slots < 64 else 20, most=min(40, 400 // slots + 6))
    return some, alone(device, some, padded=padded)


@ON_BOTH
@AHEAD
@PADDED
@pytest.mark.parametrize("slots", [2, 5, 64])
def test_among_others(slots: int, padded: bool, ahead: bool, device: str) -> None:
    some, expected = for_slots(slots, padded, device)
    assert len({tuple(tokens) for tokens, *_ in expected}) > len(some) * 0.8
    engine = make(device, ahead, padded, max_batch=slots)
    for seed in range(2):
        order = list(range(len(some)))
        random.Random(seed).shuffle(order)
        found = together(engine, [some[i] for i in order])
        assert found == [expected[i] for i in order]
        tiny.check_all_is_free(engine)
    engine.cache.check()


def mixed(word: int) -> int:
    """The mixing of SplitMix64, by its constants."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ (word >> shift)) * factor % 2**64
    return word ^ (word >> 31)


@ON_BOTH
@AHEAD
def test_each_token_is_drawn_by_one_number_of_its_place(ahead: bool, device: str) -> None:
    """Of seed, sample and place, in plain ints: as many draws as tokens, whatever else runs."""
    wanted = dict(max_new_tokens=12, temperature=0.8, top_k=5, seed=11, n=3, logprobs=20)
    others = asked(9, seed=4, longest=20, most=20)
    engine = make(device, ahead, max_batch=6)
    for before in ([], others[:5], others):
        rest = others[len(before) :] if before else []
        some = [*before, ([5, 6], SamplingOptions(**wanted)), *rest]
        found = engine.generate([prompt for prompt, _ in some], [options for _, options in some])
        for one in (each for each in found if each.prompt == len(before)):
            assert one.top_logprobs is not None and len(one.tokens) == 12
            key = mixed((mixed(11) + one.sample) % 2**64)
            for i, (token, top) in enumerate(zip(one.tokens, one.top_logprobs, strict=True)):
                state = (key + (i + 1) * 0x9E3779B97F4A7C15) % 2**64
                share = (mixed(state) >> 11) * 2.0**-53
                kept = sorted(top[:5])  # in the order of tokens
                weights = [math.exp(logprob / 0.8) for _, logprob in kept]
                ends = list(itertools.accumulate(weights))
                assert token == next(
                    t for (t, _), end in zip(kept, ends, strict=True) if end > share * ends[-1]
                )


@ON_BOTH
def test_more_than_a_step_can_take(device: str) -> None:
    some = asked(90, seed=1, longest=20, most=12)
    engine = make(device, max_batch=80)
    assert together(engine, some) == alone(device, some)


@ON_BOTH
def test_whenever_they_come(device: str) -> None:
    some = asked(24, seed=2)
    expected = alone(device, some)
    engine = make(device, max_batch=6)
    draw = random.Random(0)
    streams, left, found = {}, list(range(24)), dict[int, list[int]]()
    while left or streams:
        if left and (not streams or draw.random() < 0.2):
            i = left.pop(draw.randrange(len(left)))
            streams[i], found[i] = engine.generate([some[i][0]], some[i][1], stream=True), []
        i = draw.choice(list(streams))
        piece = next(streams[i], None)
        if piece is None:
            assert result(streams.pop(i).completions()[0]) == expected[i]
            assert found[i] == expected[i][0]
        else:
            found[i] += piece.tokens
    tiny.check_all_is_free(engine)


@ON_BOTH
@PADDED
def test_prompts_longer_than_a_part(padded: bool, device: str) -> None:
    """Prefilled part by part while others run; the last parts have all kinds of lengths."""
    lengths = CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 64, CHUNK + 70, 2 * CHUNK + 500, 3
    draw = random.Random(3)
    wanted = SamplingOptions(max_new_tokens=30, temperature=1.0, seed=5, logprobs=0)
    some = [([draw.randrange(97) for _ in range(length)], wanted) for length in lengths]
    options: dict[str, Any] = dict(max_tokens=3 * CHUNK, padded=padded)
    expected = alone(device, some, **options)
    engine = make(device, max_batch=4, **options)
    assert together(engine, some) == expected
    assert together(engine, some[::-1]) == expected[::-1]


@ON_BOTH
def test_what_follows_is_the_same_for_who_looks_at_the_prompt(device: str) -> None:
    """By prompt_logprobs, and by as few of these as can be asked for."""
    draw, engine = random.Random(5), make(device, max_batch=2)
    for length in (2, 40, 70, 200):
        prompt = [draw.randrange(97) for _ in range(length)]
        plain = SamplingOptions(max_new_tokens=6, logprobs=0)
        looks = SamplingOptions(max_new_tokens=6, logprobs=0, prompt_logprobs=0)
        kept, found = (engine.generate([prompt], each)[0] for each in (plain, looks))
        assert (found.tokens, found.logprobs) == (kept.tokens, kept.logprobs)


@ON_BOTH
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_with_a_cache_of_codes(kind: str, device: str) -> None:
    some = asked(12, seed=4)
    engine = make(device, max_batch=5, kv_quantized=kind)
    assert together(engine, some) == alone(device, some, kv_quantized=kind)


@ON_BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits(dtype: torch.dtype, device: str) -> None:
    some = asked(20, seed=7)
    of = tiny.shared_decoder(device, dtype)
    engine = make(device, max_batch=7, of=of)
    assert together(engine, some) == alone(device, some, of=of)


@ON_BOTH
@AHEAD
@pytest.mark.parametrize("capacity", [64, 100, 128])
def test_a_slot_may_be_full_to_the_last_token(capacity: int, ahead: bool, device: str) -> None:
    engine = make(device, ahead, max_batch=2, max_tokens=capacity)
    roomy = make(device, ahead, max_batch=1)
    for prompt in ([5] * (capacity - 1), [5] * (capacity - 20), [5]):
        new = capacity - len(prompt)
        for fewer in (1, 0):
            if new - fewer > 0:
                tight, free = (
                    each.generate([prompt], max_new_tokens=new - fewer)[0]
                    for each in (engine, roomy)
                )
                assert result(tight) == result(free) and len(tight.tokens) == new - fewer
        with pytest.raises(ValueError) as error:
            engine.generate([prompt], max_new_tokens=new + 1)
        assert str(error.value) == (
            f"generate: prompt 0 has {len(prompt)} tokens and max_new_tokens is {new + 1}, expected"
            f" at most {capacity} together, the max_tokens of the engine"
        )
        tiny.check_all_is_free(engine)
    engine.cache.check()


@ON_BOTH
@AHEAD
def test_pages_for_few_at_a_time(ahead: bool, device: str) -> None:
    """With too few pages for all slots some wait, and none is stopped on its way."""
    some = asked(20, seed=6, longest=180, most=70)
    engine = make(device, ahead, max_batch=8, pages=7)
    assert together(engine, some) == alone(device, some)
    tiny.check_all_is_free(engine)
    exact = make(device, ahead, max_batch=8, pages=2)
    assert len(exact.generate([[1] * 64], max_new_tokens=65)[0].tokens) == 65
    with pytest.raises(ValueError) as error:
        exact.generate([[1] * 64], max_new_tokens=66)
    assert str(error.value) == (
        "generate: prompt 0 has 64 tokens and max_new_tokens is 66, which is 3 pages of 64,"
        " expected at most 2, the pages of the engine"
    )


EIGHT = SamplingOptions(max_new_tokens=20, temperature=1.0, seed=9, n=8, logprobs=0)


@functools.cache
def eight_apart(length: int, device: str) -> list[tuple[Any, ...]]:
    """Return the completions of a prompt of this length, each made while no other one is."""
    apart, found = make(device, max_batch=8), []
    for sample in range(8):
        stream = apart.generate([[i % 90 for i in range(length)]], EIGHT, stream=True)
        for i in range(8):
            if i != sample:
                stream.cancel(i)
        list(stream)
        found.append(result(stream.completions()[sample]))
    return found


@ON_BOTH
@AHEAD
@pytest.mark.parametrize("length", [1, 64, 130])
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_several_completions_of_a_prompt(slots: int, length: int, ahead: bool, device: str) -> None:
    """They share its pages, at once or one after the other, and are what they are alone."""
    prompt, expected = [i % 90 for i in range(length)], eight_apart(length, device)
    assert len({tuple(tokens) for tokens, *_ in expected}) == 8
    pages = -(-(length + 19) // 64) - length // 64
    tight = make(device, ahead, max_batch=slots, pages=length // 64 + pages * min(slots, 8))
    found = tight.generate([prompt], EIGHT)
    assert [result(each) for each in found] == expected
    assert [each.sample for each in found] == list(range(8))
    tiny.check_all_is_free(tight)
    tight.cache.check()


def test_shared_pages_are_shared() -> None:
    """All eight run at once where there are pages for the prompt once only."""
    engine = make("cpu", max_batch=8, pages=3 + 8)
    stream = engine.generate([[1] * 192], max_new_tokens=10, temperature=1.0, n=8, stream=True)
    most = 0
    for _ in stream:
        most = max(most, len(engine._scheduler._table.requests))
    assert most == 8


def test_a_seed_is_another_text_and_none_is_another_each_time() -> None:
    engine = make("cpu")
    texts = [
        engine.generate([[1, 2]], temperature=1.0, seed=seed)[0].tokens
        for seed in (1, 2, None, None)
    ]
    assert len({tuple(text) for text in texts}) == 4
    again = engine.generate([[1, 2]] * 2, temperature=1.0, seed=1)
    assert [each.tokens for each in again] == [texts[0]] * 2
    known = engine.generate([[1, 2]], temperature=1.0)[0]
    assert engine.generate([[1, 2]], temperature=1.0, seed=known.seed)[0].tokens == known.tokens
