"""Log-probabilities of texts, and logits: those of transformers in float64, in any company."""

import math
import random
import re
import threading
from collections.abc import Iterator
from typing import Any

import family_cases
import numpy as np
import pytest
import tiny
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_ext.inference import SamplingOptions, init_inference
from deepspeed_ext.inference.execution import runner, scoring

ON_BOTH = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
        ),
    ],
)
FAMILIES = ("llama", "gemma2", "gpt2", "opt", "bloom", "phi", "qwen3")


def texts_of(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    drawn = random.Random(seed)
    lengths = [drawn.randint(1, longest) for _ in range(count)]
    return [[drawn.randrange(tiny.VOCABULARY) for _ in range(n)] for n in lengths]


@torch.no_grad()
def expected_of(case: str, tokens: list[int]) -> Tensor:
    """Return log-probabilities in float64, (tokens, vocabulary)."""
    state = dict(family_cases.model_of(case).state_dict())
    with family_cases.InDouble():
        return family_cases.exact(case, state)(torch.tensor([tokens])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("case", FAMILIES)
def test_scores_are_those_of_transformers(case: str) -> None:
    engine = init_inference(family_cases.model_of(case), max_tokens=256)
    texts = [*texts_of(3, 100), [5], [7, 7]]
    for tokens, found in zip(texts, engine.score(texts, top_logprobs=20), strict=True):
        expected = expected_of(case, tokens)
        assert found.tokens == tokens and found.top_logprobs is not None
        assert len(found.logprobs) == len(found.top_logprobs) == len(tokens) - 1
        for i, (logprob, top) in enumerate(zip(found.logprobs, found.top_logprobs, strict=True)):
            assert logprob == pytest.approx(float(expected[i, tokens[i + 1]]), abs=2e-4)
            assert [each for each, _ in top] == engine_order(top)
            for token, value in top:
                assert value == pytest.approx(float(expected[i, token]), abs=2e-4)
            best = expected[i].topk(20).values
            assert torch.allclose(torch.tensor([v for _, v in top]).double(), best, atol=2e-4)


def engine_order(top: list[tuple[int, float]]) -> list[int]:
    """The likeliest first; of equal ones that of the lowest number."""
    return [token for token, _ in sorted(top, key=lambda each: (-each[1], each[0]))]


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_are_those_of_transformers(case: str, side: str) -> None:
    engine = init_inference(family_cases.model_of(case), max_tokens=256, max_batch=2)
    texts = [*texts_of(4, 90), []]
    n = max(map(len, texts)) + 3
    ids, mask = torch.zeros(5, n, dtype=torch.int64), torch.zeros(5, n, dtype=torch.int64)
    for i, tokens in enumerate(texts):
        begin = n - len(tokens) if side == "left" else 0
        ids[i, begin : begin + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        mask[i, begin : begin + len(tokens)] = 1
    out = engine(input_ids=ids, attention_mask=mask).logits
    assert out.shape == (5, n, engine._vocabulary) and not out.requires_grad
    assert not out[mask == 0].any()
    for i, tokens in enumerate(texts[:-1]):
        found = out[i][mask[i] == 1].double().log_softmax(-1)
        torch.testing.assert_close(found, expected_of(case, tokens), atol=2e-4, rtol=0)
    assert torch.equal(engine(ids, mask.bool()).logits, out)
    one = torch.tensor([texts[0]])
    assert torch.equal(engine(one)[0][0], out[0][mask[0] == 1])
    assert engine(torch.zeros(0, 5, dtype=torch.int64)).logits.shape[:2] == (0, 5)
    assert engine(torch.zeros(2, 0, dtype=torch.int64)).logits.shape[:2] == (2, 0)
    tiny.check_all_is_free(engine)


@ON_BOTH
def test_long_texts_in_parts(device: str) -> None:
    """Across parts of prefill and of the head, where a token is scored by the part before."""
    engine = tiny.engine(device, max_tokens=2100)
    tokens = texts_of(1, 1)[0] * 0 + [i * 7 % 97 for i in range(2060)]
    found = engine.score([tokens], top_logprobs=1)[0]
    logits = engine(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    expected = logits[:-1].gather(1, torch.tensor(tokens[1:], device=logits.device)[:, None])[:, 0]
    got = torch.tensor(found.logprobs, dtype=torch.float64, device=logits.device)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    assert found.top_logprobs is not None
    best = [top[0][0] for top in found.top_logprobs]
    assert best == logits[:-1].argmax(-1).tolist()


@ON_BOTH
@pytest.mark.parametrize("ahead", [False, True])
def test_company_changes_nothing(device: str, ahead: bool) -> None:
    """Bit for bit, beside completions and others, whichever comes first."""
    texts = texts_of(30, 200, seed=3)
    alone = [tiny.engine(device).score([each], top_logprobs=3)[0] for each in texts]
    engine = tiny.engine(device, max_batch=5)
    engine._scheduler._ahead = ahead
    expected = tiny.engine(device).generate([[1, 2], [3]], max_new_tokens=150)
    found: list[Any] = []
    other = threading.Thread(
        target=lambda: found.extend(engine.generate([[1, 2], [3]], max_new_tokens=150))
    )
    other.start()
    assert engine.score(texts, top_logprobs=3) == alone
    other.join()
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    tiny.check_all_is_free(engine)


@ON_BOTH
@pytest.mark.parametrize("packs", [False, True])
def test_prompts_are_scored_beside_what_follows(packs: bool, device: str) -> None:
    engine = tiny.engine(device, pack_prefill=packs, max_batch=6)
    texts = texts_of(12, 150, seed=5)
    scores = engine.score(texts, top_logprobs=2)
    options = dict(max_new_tokens=9, temperature=1.0, seed=2)
    plain = engine.generate(texts, n=2, **options)
    found = engine.generate(texts, n=2, prompt_logprobs=2, logprobs=1, **options)
    for i, one in enumerate(found):
        score = scores[i // 2]
        assert one.prompt_logprobs == pytest.approx(score.logprobs, abs=1e-3 if packs else 0)
        assert len(one.prompt_top_logprobs) == len(score.logprobs)
        assert packs or one.tokens == plain[i].tokens
        whole = engine.score([texts[i // 2] + one.tokens])[0]
        assert whole.logprobs[len(texts[i // 2]) - 1 :] == pytest.approx(one.logprobs, abs=1e-3)
    assert plain[0].prompt_logprobs is None and plain[0].prompt_top_logprobs is None
    bare = engine.generate(texts[0], prompt_logprobs=0, max_new_tokens=0, n=3)
    assert [len(each.prompt_logprobs) for each in bare] == [len(texts[0]) - 1] * 3
    assert bare[0].prompt_top_logprobs is None
    tiny.check_all_is_free(engine)


def test_scores_of_a_prompt_whose_first_completion_was_cancelled() -> None:
    """Another one prefills it again."""
    engine = tiny.engine(max_tokens=2600)
    text = [i * 5 % 97 for i in range(2500)]
    expected = engine.score([text])[0].logprobs
    options = SamplingOptions(max_new_tokens=2, n=2, prompt_logprobs=0)
    with engine.generate([text], options, stream=True) as stream:
        stream.advance()
        stream.cancel(0)
        list(stream)
        first, second = stream.completions()
    assert first.finish_reason == "cancelled"
    assert second.prompt_logprobs == expected and len(second.tokens) == 2


@ON_BOTH
def test_equal_logits(device: str) -> None:
    """Of equal ones the first is the likeliest; log-probabilities are equal as logits are."""
    logits = torch.randn(300, 50, device=device).bfloat16()
    logits[:, 7] = logits[:, 31] = logits.amax(-1)
    tokens = torch.full((300,), 31, device=device)
    rows = scoring.score(logits, tokens, 3)
    assert torch.equal(rows[:, 1], rows[:, 5]) and torch.equal(rows[:, 5], rows[:, 6])
    assert bool((rows[:, 2] <= 7).all()) and bool((rows[:, 7] <= rows[:, 6]).all())
    exact = logits.double().log_softmax(-1)[:, 31]
    torch.testing.assert_close(rows[:, 1], exact, atol=1e-6, rtol=1e-6)
    odd = logits.double().log_softmax(-1)
    rows = scoring.score(logits, torch.full((300,), 3, device=device), 0)
    torch.testing.assert_close(rows[:, 1], odd[:, 3], atol=1e-6, rtol=1e-6)


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor had that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() and out.shape[-1] == tiny.VOCABULARY:
            self.rows = max(self.rows, out.numel() // tiny.VOCABULARY)
        return out


def test_logits_of_a_long_text_are_never_there_at_once() -> None:
    engine = tiny.engine(max_tokens=1100)
    with Largest() as seen:
        engine.score([[1] * 1000], top_logprobs=5)
    assert seen.rows == runner.SCORED < 1000


def test_logits_that_are_not_finite() -> None:
    """The error says where; others are not affected, and logits are as they are."""
    engine = tiny.engine(of=tiny.decoder(poisoned=9))
    with pytest.raises(RuntimeError) as error:
        engine.score([[1, 2, 3], [4, 9, 5]])
    text = "score: the logits for token 2 of prompt 1 have nan as the largest, expected finite"
    assert str(error.value).startswith(text)
    assert len(engine.score([[4, 5, 9]])[0].logprobs) == 2  # none is scored by the last
    out = engine(torch.tensor([[4, 9, 5]])).logits[0]
    assert out[0].isfinite().all() and out[1].isnan().all() and out[2].isnan().all()
    tiny.check_all_is_free(engine)


def test_text_and_the_smallest() -> None:
    engine = tiny.engine(tokenizer=tiny.Bytes())
    tokens = tiny.Bytes().encode("Hello")
    assert engine.score("Hello") == engine.score([tokens])
    assert engine.score("Hello")[0].top_logprobs is None
    one = engine.score([[4]], top_logprobs=2)[0]
    assert (one.tokens, one.logprobs, one.top_logprobs) == ([4], [], [])
    assert engine.score([]) == []
    found = tiny.engine(max_tokens=5).score([[1, 2, 3, 4, 5]])
    assert len(found[0].logprobs) == 4 and math.isfinite(sum(found[0].logprobs))


def refusals() -> Iterator[tuple[Any, type[Exception], str]]:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    yield lambda e: e.score([[1]], top_logprobs=21), ValueError, "score: top_logprobs is 21, expect"
    yield lambda e: e.score([[1]], top_logprobs=-1), ValueError, "score: top_logprobs is -1, expec"
    yield lambda e: e.score([[1]], top_logprobs=True), TypeError, "score: top_logprobs is True, ex"
    yield lambda e: e.score([[1], []]), ValueError, "score: prompt 1 is empty, expected"
    yield lambda e: e.score([[1] * 257]), ValueError, "score: prompt 0 has 257 tokens, expected"
    yield lambda e: e([[1]]), TypeError, "InferenceEngine: input_ids is a list, expected a tensor"
    yield lambda e: e(ids[0]), ValueError, "InferenceEngine: input_ids has shape [3], expected (te"
    yield lambda e: e(ids.float()), ValueError, "InferenceEngine: input_ids has dtype torch.float"
    yield lambda e: e(ids, ids), ValueError, "InferenceEngine: attention_mask has 2, expected 0 or"
    yield lambda e: e(ids, ids[:1]), ValueError, "InferenceEngine: attention_mask has shape [1, 3]"
    yield lambda e: e(ids, [1]), TypeError, "InferenceEngine: attention_mask is a list, expected a"
    hole = torch.tensor([[1, 1, 1], [1, 0, 1]])
    text = "InferenceEngine: attention_mask has 0 between tokens that count in row 1, expected pad"
    yield lambda e: e(ids, hole), ValueError, text
    yield lambda e: e(ids - 2), ValueError, "InferenceEngine: input_ids has -1, expected 0 to 96"
    yield lambda e: e(ids + 91), ValueError, "InferenceEngine: input_ids has 97, expected 0 to 96"
    nan = torch.full((2, 3), math.nan)
    yield lambda e: e(ids, nan), ValueError, "InferenceEngine: attention_mask has nan, expected 0"
    long = torch.ones(1, 257, dtype=torch.int64)
    text = "InferenceEngine: row 0 has 257 tokens, expected at most 256, the max_tokens of the en"
    yield lambda e: e(long), ValueError, text
    yield lambda e: e.score([[97]]), ValueError, "score: prompt 0 has token 97, expected 0 to 96"
    yield lambda e: e.score("a"), ValueError, "score: prompt 0 is text, expected numbers of token"
    yield lambda e: e.score(ids.float()), TypeError, "score: prompts has dtype torch.float32, exp"
    yield lambda e: e.score({1}), TypeError, "score: prompts is {1}, expected text, numbers of to"
    yield lambda e: e.score(None), TypeError, "score: nothing is given, expected prompts or input"
    masked = dict(attention_mask=[[1]])
    text = "score: attention_mask has 1 rows, expected 2, one for each prompt"
    yield lambda e: e.score(ids, **masked), ValueError, text
    text = "score: attention_mask has length 1 for prompt 0, expected 3, that of the prompt"
    yield lambda e: e.score(ids[:1], **masked), ValueError, text
    text = "score: attention_mask is [1, [1]], expected 0 or 1 for each token"
    yield lambda e: e.score(ids, attention_mask=[1, [1]]), TypeError, text


@pytest.mark.parametrize(("ask", "kind", "text"), [*refusals()], ids=lambda v: str(v)[:40])
def test_refusals(ask: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match="^" + re.escape(text)):
        ask(tiny.engine())


def test_pages_that_are_too_few() -> None:
    engine = tiny.engine(pages=2)
    text = "has 129 tokens, which is 3 pages of 64, expected at most 2, the pages of the engine"
    with pytest.raises(ValueError, match=f"^score: prompt 0 {text}$"):
        engine.score([[1] * 129])
    with pytest.raises(ValueError, match=f"^InferenceEngine: row 0 {text}$"):
        engine(torch.ones(1, 129, dtype=torch.int64))
    text = "has 129 tokens and max_new_tokens is 0, which is 3 pages of 64, expected at most 2, the"
    with pytest.raises(ValueError, match=f"^generate: prompt 0 {text} pages of the engine$"):
        engine.generate([[1] * 129], max_new_tokens=0)


def test_how_many_are_told_may_be_numpys() -> None:
    engine = tiny.engine()
    for number in (np.int64(2), np.uint8(2)):
        found = engine.score([[1, 2, 3]], top_logprobs=number)  # type: ignore[arg-type]
        assert found == engine.score([[1, 2, 3]], top_logprobs=2)
    for wrong in (np.float64(2), np.array([2]), torch.tensor(2), "2", None):
        with pytest.raises(TypeError, match=r"^score: top_logprobs is .*, expected an int$"):
            engine.score([[1, 2, 3]], top_logprobs=wrong)


def test_whatever_a_mask_leaves_out() -> None:
    """As -100, which loss functions pass over."""
    engine = tiny.engine()
    ids, mask = torch.tensor([[-100, 5, 6], [7, 8, 2**40]]), torch.tensor([[0, 1, 1], [1, 1, 0]])
    plain = [[5, 6], [7, 8]]
    assert engine.score(ids, attention_mask=mask) == engine.score(plain)
    found = engine.generate(ids, attention_mask=mask, max_new_tokens=3, seed=1)
    assert found == engine.generate(plain, max_new_tokens=3, seed=1)
    logits = engine(ids, mask).logits
    assert torch.equal(logits[0, 1:], engine(torch.tensor([[5, 6]])).logits[0])
    with pytest.raises(ValueError, match=r"^generate: prompt 0 has token -100, expected 0 to 96$"):
        engine.generate(ids, attention_mask=torch.ones_like(mask))


def test_a_closed_engine() -> None:
    engine = tiny.engine()
    engine.close()
    for ask in (lambda: engine.score([[1]]), lambda: engine(torch.tensor([[1]]))):
        with pytest.raises(RuntimeError, match=r"^inference: the engine is closed"):
            ask()
