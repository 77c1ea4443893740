"""Packed prefill: as right as prompts alone, within bounds, none touching another."""

import random
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import tiny
import torch
from family_cases import (
    CASES,
    VOCABULARY,
    InDouble,
    cache_for,
    decoder_of,
    exact,
    model_of,
    states_of,
)
from test_batch_invariance import AHEAD, ON_BOTH, make, result
from torch import Tensor

from deepspeed_ext import init_inference
from deepspeed_ext.inference.execution.runner import ROWS, ModelRunner
from deepspeed_ext.inference.execution.sampling import SamplingOptions
from deepspeed_ext.inference.requests.request import Completion
from deepspeed_ext.inference.serving.step_plan import CHUNK, PACKED

LENGTHS = (300, 3, 64, 900, 1, 1500, 5, 5, 5, 130, 700, 12)
GREEDY = SamplingOptions(max_new_tokens=12, logprobs=0)


class Pack(NamedTuple):
    """What goes through the model at once."""

    running: list[int]
    slots: list[int]
    parts: list[list[int]]


Packs = list[Pack]


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> Packs:
    """All packs that are prefilled."""
    found, real = Packs(), ModelRunner.prefill_packed

    def noted(runner: ModelRunner, *of_pack: Any) -> Tensor:
        found.append(Pack(*of_pack[:3]))
        return real(runner, *of_pack)

    monkeypatch.setattr(ModelRunner, "prefill_packed", noted)
    return found


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(VOCABULARY), k=length) for length in lengths]


def check_alike(found: list[Completion], expected: list[Completion]) -> None:
    """The same tokens, and log-probabilities within what rounding makes of a few layers."""
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


@pytest.mark.parametrize("case", CASES)
@ON_BOTH
def test_the_logits_are_as_right_as_those_of_transformers(case: str, device: str) -> None:
    """In parts that share packs, in float32.

    Errors differ by chance, as sums are taken in another order: four times the largest one of
    transformers is room for it. A token at a wrong place, or of another prompt, is off by 1.
    """
    model, prompts = model_of(case), prompts_of(75, 20, 2, 30)
    precise = exact(case, model.state_dict())
    decoder = decoder_of(model.config.to_dict(), model.state_dict(), torch.float32, device)
    cache = cache_for(decoder, 5)
    for tensor in (cache._keys, cache._values):
        tensor.fill_(torch.nan)  # as memory may hold
    steps, done = ModelRunner(decoder, cache, 5), [0, 0, 0, 0]
    for running, counts in (([], {2: 1, 0: 40, 1: 20}), ([2], {3: 30, 0: 35})):
        slots = [which + 1 for which in (*running, *counts)]
        cache.reserve(slots, [1] * len(running) + list(counts.values()))
        parts = [prompts[i][done[i] : done[i] + count] for i, count in counts.items()]
        for i in running:
            steps._tokens[i + 1] = prompts[i][done[i]]
        here, rest = slots[: len(running)], slots[len(running) :]
        with torch.no_grad():
            got = decoder.logits(steps.prefill_packed(here, rest, parts, 64).last).cpu()
        for i, ours in zip((*running, *counts), got, strict=True):
            done[i] += counts.get(i, 1)
            usual = states_of(model, prompts[i][: done[i]])[-1]
            with InDouble():
                want = states_of(precise, prompts[i][: done[i]])[-1]
            bound = 4 * (usual.double() - want).abs().max()
            bound += 2 * torch.finfo(torch.float32).eps * want.abs().max()
            assert bool(((ours.double() - want[-1]).abs() <= bound).all()), (i, done[i])
    assert done == [75, 20, 2, 30]
    cache.check()


@ON_BOTH
@AHEAD
@pytest.mark.parametrize("slots", [3, 12])
def test_the_same_tokens_as_without(slots: int, ahead: bool, device: str, packs: Packs) -> None:
    """Of prompts of all lengths, through slots that several have one after the other."""
    some = prompts_of(*LENGTHS)
    options: dict[str, Any] = dict(max_tokens=2048)
    expected = make(device, ahead, max_batch=slots, **options).generate(some, GREEDY)
    assert not packs
    engine = make(device, ahead, max_batch=slots, pack_prefill=True, **options)
    check_alike(engine.generate(some, GREEDY), expected)
    assert len(packs) >= 2
    tiny.check_all_is_free(engine)
    engine.cache.check()


def test_a_prompt_alone_is_as_it_is_without() -> None:
    packing = make("cpu", max_tokens=2048, pack_prefill=True)
    for prompt in prompts_of(3, 1030):
        (found,), (expected,) = (
            engine.generate([prompt], GREEDY) for engine in (packing, make("cpu", max_tokens=2048))
        )
        assert result(found) == result(expected)


@pytest.mark.parametrize(
    "lengths", [LENGTHS, (1,) * 80, (1000, *(6,) * 20), (2, *(300,) * 20), (64,) * 17]
)
def test_packs_are_bounded_and_full(lengths: tuple[int, ...], packs: Packs) -> None:
    """By tokens, by prompts, by what padding makes of them; prompts go in as they came."""
    some = prompts_of(*lengths)
    engine = make("cpu", max_batch=90, max_tokens=1600, pack_prefill=True)
    engine.generate(some, max_new_tokens=1)
    for _, slots, parts in packs:
        sizes = [len(part) for part in parts]
        assert len(set(slots)) == len(slots) <= ROWS and min(sizes) > 0
        assert sum(sizes) <= CHUNK and max(sizes) * len(sizes) <= PACKED
    for (_, slots, parts), (_, after, following) in pairwise(packs):
        sizes = [len(part) for part in parts]
        longest = max(*sizes, len(following[1 if after[0] in slots else 0]))
        is_full = sum(sizes) == CHUNK or len(slots) == ROWS
        assert is_full or longest * (len(slots) + 1) > PACKED
    taken = [token for _, _, parts in packs for part in parts for token in part]
    assert taken == [token for prompt in some for token in prompt][: len(taken)]


@ON_BOTH
@AHEAD
def test_others_go_on_beside_a_pack(ahead: bool, device: str, packs: Packs) -> None:
    """In the same pass; by themselves where they are more than a step can take."""
    some = prompts_of(*range(1, 90), *range(30, 90))
    wanted = [
        SamplingOptions(max_new_tokens=20 + i % 11, temperature=0.7, seed=4, logprobs=0)
        for i in range(len(some))
    ]
    for slots, most in ((20, 20), (80, ROWS)):
        expected = make(device, max_batch=slots).generate(some, wanted)
        engine = make(device, ahead, max_batch=slots, pack_prefill=True)
        check_alike(engine.generate(some, wanted), expected)
        assert max(len(pack.running) for pack in packs) > most // 2
        for running, slots_of_parts, parts in packs:
            assert not set(running) & set(slots_of_parts)
            assert len(running) < slots and len(running) <= ROWS
            assert len(running) + sum(map(len, parts)) <= CHUNK
        packs.clear()
        tiny.check_all_is_free(engine)
        engine.cache.check()


@ON_BOTH
@pytest.mark.parametrize("capacity", [64, 100, 128])
def test_slots_are_full_to_the_last_token(capacity: int, device: str, packs: Packs) -> None:
    some = prompts_of(capacity - 1, capacity - 12, 1)
    options = [SamplingOptions(max_new_tokens=capacity - len(each), logprobs=0) for each in some]
    expected = make(device, max_batch=3, max_tokens=192).generate(some, options)
    engine = make(device, max_batch=3, max_tokens=capacity, pack_prefill=True)
    check_alike(engine.generate(some, options), expected)
    assert len(packs) == 1
    tiny.check_all_is_free(engine)
    engine.cache.check()


def test_pages_for_few_at_a_time(packs: Packs) -> None:
    some = prompts_of(100, 20, 64, 150, 3, 90)
    expected = make("cpu").generate(some, GREEDY)
    engine = make("cpu", pages=5, pack_prefill=True)
    check_alike(engine.generate(some, GREEDY), expected)
    assert packs
    tiny.check_all_is_free(engine)


@ON_BOTH
@AHEAD
@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_of_a_pack_is_cancelled(which: int, ahead: bool, device: str, packs: Packs) -> None:
    """In the middle of its prompt, or right after it; its neighbours go on."""
    some = prompts_of(1400, 2400, 300)
    expected = make(device, max_tokens=4096).generate(some, GREEDY)
    engine = make(device, ahead, max_tokens=4096, pack_prefill=True)
    stream = engine.generate(some, GREEDY, stream=True)
    stream.advance()
    stream.cancel(which)
    list(stream)
    assert len(packs[0].parts) == 2
    found = stream.completions()
    assert found[which].finish_reason == "cancelled" and len(found[which].tokens) <= 2
    for each in (found, expected):
        each.pop(which)
    check_alike(found, expected)
    tiny.check_all_is_free(engine)


@ON_BOTH
def test_one_of_a_pack_is_not_finite(device: str, packs: Packs) -> None:
    """Others have its tokens beside them, and behind theirs as padding."""
    poison = 96
    some = [[1, 2], [5] * 9, [4, poison, *[4] * 30], [7]]
    of = tiny.decoder(device, poisoned=poison)
    fine = [each for each in some if poison not in each]
    expected = make(device, of=of).generate(fine, GREEDY)
    assert poison not in {token for each in expected for token in each.tokens}
    engine = make(device, of=of, pack_prefill=True)
    streams = [engine.generate([each], GREEDY, stream=True) for each in some]
    with pytest.raises(RuntimeError, match="logits for token 0 after prompt 0 have nan"):
        list(streams.pop(2))
    assert [len(pack.parts) for pack in packs] == [4]
    for stream in streams:
        list(stream)
    check_alike([stream.completions()[0] for stream in streams], expected)
    tiny.check_all_is_free(engine)


@ON_BOTH
@AHEAD
def test_several_completions_of_packed_prompts(ahead: bool, device: str, packs: Packs) -> None:
    """They share the pages of their prompt, with few pages and slots, too."""
    some = prompts_of(130, 64, 7)
    wanted = SamplingOptions(max_new_tokens=9, temperature=1.0, seed=3, n=4, logprobs=0)
    expected = make(device, max_batch=12).generate(some, wanted)
    for pages in (12 + 3, 5):
        engine = make(device, ahead, max_batch=12, pages=pages, pack_prefill=True)
        check_alike(engine.generate(some, wanted), expected)
        tiny.check_all_is_free(engine)
        engine.cache.check()


def test_a_pack_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """All callers hear of it; the next call finds nothing of the last."""
    engine = make("cpu", pack_prefill=True)
    some = prompts_of(20, 30)
    expected = engine.generate(some, GREEDY)

    def fail(*_: Any) -> None:
        raise MemoryError("no memory for this pack")

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "prefill_packed", fail)
        with pytest.raises(MemoryError, match="no memory for this pack"):
            engine.generate(some, GREEDY)
    tiny.check_all_is_free(engine)
    found = engine.generate(some, GREEDY)
    assert [result(each) for each in found] == [result(each) for each in expected]


def test_init_inference_packs_when_it_is_told_to(packs: Packs) -> None:
    model, some = model_of("llama"), prompts_of(5, 6)
    for told in (False, True):
        engine = init_inference(model, max_tokens=64, pack_prefill=told)
        engine.generate(some, max_new_tokens=1)
        assert len(packs) == told
