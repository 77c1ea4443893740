"""Penalties for what a completion has, and biases: as OpenAI defines them, in any batch."""

import random
from typing import Any

import pytest
import tiny
import torch

from deepspeed_ext.inference.execution.memory_budget import working_bytes
from deepspeed_ext.inference.execution.sampling import (
    History,
    Parameters,
    SamplingOptions,
    sample,
)

CASES: tuple[dict[str, Any], ...] = (
    dict(presence_penalty=1.5),
    dict(presence_penalty=-2.0),
    dict(frequency_penalty=0.7),
    dict(frequency_penalty=-0.5, presence_penalty=2.0),
    dict(logit_bias={5: 100, 9: -100}),
    dict(logit_bias={i: i / 10 for i in range(97)}),
    dict(logit_bias={7: 3.5}, frequency_penalty=2.0, repetition_penalty=1.3),
    dict(repetition_penalty=1.3),
    {},
)
_NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=_NEEDS_GPU)])


def changed_ref(logits: Any, prompt: list[int], made: list[int], of: SamplingOptions) -> Any:
    """Logits by the definitions, token by token, in float64."""
    values = [float(value) for value in logits]
    for token, bias in of.biases:
        values[token] += bias
    for token in {*prompt, *made}:
        value = values[token]
        by = of.repetition_penalty
        values[token] = value * by if value < 0 else value / by
    for token in set(made):
        values[token] -= made.count(token) * of.frequency_penalty + of.presence_penalty
    return torch.tensor(values, dtype=torch.float64)


@ON_BOTH
@pytest.mark.parametrize("changes", CASES, ids=str)
def test_logits_are_those_of_the_definitions(changes: dict[str, Any], device: str) -> None:
    """The likeliest of all, then of all but that one, until some twenty are seen."""
    options, prompt, made = SamplingOptions(**changes), [1, 5, 5, 9], [9, 30, 30, 30, 7, 2]
    logits = torch.randn(97, generator=torch.Generator().manual_seed(1)) * 4
    seen, counts, bias = torch.zeros(97).bool(), torch.zeros(97).int(), torch.zeros(97)
    seen[prompt + made] = True
    for token in made:
        counts[token] += 1
    for token, value in options.biases:
        bias[token] = value
    history = History(*(each[None].to(device) for each in (seen, counts, bias)))
    row = torch.tensor([Parameters.row(options)], dtype=torch.float64, device=device)
    parameters = Parameters(*row.split(1, -1))
    for _ in range(20):
        expected = changed_ref(logits, prompt, made, options)
        token, best = sample(logits[None].to(device), options.kind, parameters, None, history)[
            0, :2
        ]
        assert int(token) == int(expected.argmax())
        assert abs(float(best) - float(expected.max())) <= 2**-20 * (200 + abs(float(best)))
        logits[int(token)] = -1000.0


def greedy_ref(engine: Any, prompt: list[int], count: int, options: SamplingOptions) -> list[int]:
    """Token by token, each from the logits of all before, which logprobs of an engine stand for."""
    made: list[int] = []
    decoder = engine.decoder
    for _ in range(count):
        cache = tiny.engine(of=decoder).cache
        cache.reserve([0], [len(prompt) + len(made)])
        slots = torch.tensor([0], dtype=torch.int32)
        hidden = decoder.hidden(torch.tensor([prompt + made]), cache, slots, None)
        logits = decoder.logits(hidden[:, -1])[0]
        made.append(int(changed_ref(logits, prompt, made, options).argmax()))
    return made


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_completions_are_those_of_the_definitions(changes: dict[str, Any]) -> None:
    """Over steps, of which each counts what the ones before made."""
    options, of = SamplingOptions(**changes, max_new_tokens=12), tiny.decoder()
    assert of.weights.final_norm is not None
    of.weights.final_norm.weight.mul_(0.1)  # so that logits are near one another
    engine = tiny.engine(of=of)
    with torch.inference_mode():
        expected = greedy_ref(engine, [5, 40, 11], 12, options)
    assert engine.generate([5, 40, 11], options)[0].tokens == expected


def test_nothing_of_a_slot_is_left_for_the_next_request() -> None:
    """Beside others with biases and counts of their own, in slots that were used before."""
    draw, engine = random.Random(0), tiny.engine(max_batch=3)
    wanted = [
        SamplingOptions(
            **draw.choice(CASES),
            max_new_tokens=draw.randrange(1, 12),
            temperature=draw.choice([0.0, 1.0]),
            seed=i,
            n=draw.choice([1, 1, 2]),
            logprobs=draw.choice([None, 2]),
        )
        for i in range(40)
    ]
    prompts = [[draw.randrange(97) for _ in range(draw.randrange(1, 9))] for _ in wanted]
    alone = [tiny.engine(max_batch=2).generate(p, w) for p, w in zip(prompts, wanted, strict=True)]
    found = engine.generate(prompts, wanted)
    expected = [each for some in alone for each in some]
    assert [(e.tokens, e.logprobs) for e in found] == [(e.tokens, e.logprobs) for e in expected]


def test_logprobs_are_of_the_model() -> None:
    """As for penalty and temperature: a bias changes which token comes, not what is told of it."""
    engine = tiny.engine()
    plain = engine.generate([5], max_new_tokens=1, logprobs=20)[0]
    other, logprob = plain.top_logprobs[0][7]
    forced = engine.generate([5], max_new_tokens=1, logprobs=20, logit_bias={other: 100})[0]
    assert forced.tokens == [other] and forced.logprobs == [logprob]
    assert forced.top_logprobs == plain.top_logprobs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_steps_with_penalties_are_recorded() -> None:
    """By graphs and without them the same, from the first step to those that are replayed."""
    of, options = tiny.shared_decoder("cuda"), dict(max_new_tokens=30, seed=1, temperature=1.0)
    for changes in CASES:
        with_graphs, without = (tiny.engine("cuda", of, cuda_graphs=on) for on in (True, False))
        prompts = [[5], [6, 7], [8]]
        found = with_graphs.generate(prompts, **options, **changes)
        assert found == without.generate(prompts, **options, **changes)


def test_tables_are_in_the_memory_budget() -> None:
    """All three, which are made when a request first asks for them, with a row for each slot."""
    of, found = tiny.shared_decoder().of, []
    for slots in (64, 200):  # from 64 on, nothing else that a step makes grows with them
        engine = tiny.engine(max_batch=slots, max_tokens=64)
        assert all(each is None for each in engine._scheduler._runner._history)
        options = dict(repetition_penalty=2.0, presence_penalty=1.0, logit_bias={3: 1})
        engine.generate([[1]], max_new_tokens=2, **options)
        taken = sum(each.nbytes for each in engine._scheduler._runner._history)
        assert taken == (slots + 1) * of.vocabulary * (1 + 4 + 4)
        budget = working_bytes(of, slots, 64, torch.float32, is_quantized=False, packed=0)
        assert budget > taken
        found.append((taken, budget))
    (few, least), (many, most) = found
    assert most - least == many - few
