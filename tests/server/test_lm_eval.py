"""The published evaluation harness asks our server, through its class for local completions."""

import math
import random
from typing import Any

import pytest
import their_tokenizer
import tiny
import torch

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
harness = pytest.importorskip("lm_eval.models.openai_completions", reason="needs lm_eval")
from serving_here import served  # noqa: E402

pytestmark = pytest.mark.long
LETTERS = "abcdefgh ,."


def model() -> Any:
    """Return the model of the server, by transformers in float64."""
    import transformers

    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny.CONFIG)).double().eval()
    weights = {name: value.double() for name, value in tiny.tensors(tiny.CONFIG).items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    made.load_state_dict(weights)
    return made


@torch.no_grad()
def known(of: Any, context: list[int], following: list[int]) -> tuple[float, bool]:
    """Return the log-likelihood of tokens after others, and whether each is the likeliest."""
    logits = of(torch.tensor([context + following])).logits[0, len(context) - 1 : -1]
    wanted = torch.tensor(following)
    logprobs = logits.log_softmax(-1).gather(1, wanted[:, None])
    return float(logprobs.sum()), bool((logits.argmax(-1) == wanted).all())


def test_log_likelihoods(tmp_path: Any) -> None:
    tokenizer = their_tokenizer.tokenizer()
    tokenizer.save_pretrained(tmp_path)
    of, chance, asked = model(), random.Random(0), []
    for _ in range(40):
        context = "".join(chance.choices(LETTERS, k=chance.randint(1, 30)))
        asked.append((context, "".join(chance.choices(LETTERS, k=chance.randint(1, 12)))))
    ids = [[tokenizer.encode(text, add_special_tokens=False) for text in both] for both in asked]
    with torch.no_grad():  # some that are greedy, and some that are but for their last token
        for context, following in ids[::2]:
            for i in range(len(following) - (len(following) % 2)):
                seen = torch.tensor([context + following[:i]])
                following[i] = int(of(seen).logits[0, -1, 3:].argmax()) + 3
    requests = [(("", ""), *each) for each in ids]
    engine = tiny.engine(tokenizer=tokenizer)
    with served(lambda: engine) as client:
        api = harness.LocalCompletionsAPI(
            base_url=f"http://127.0.0.1:{client.port}/v1/completions",
            model="m",
            tokenizer_backend="huggingface",
            tokenizer=str(tmp_path),
            batch_size=8,
            max_length=256,
        )
        found = api._loglikelihood_tokens(requests)
    greedy = 0
    for (value, is_greedy), (context, following) in zip(found, ids, strict=True):
        expected, is_likeliest = known(of, context, following)
        assert math.isclose(value, expected, rel_tol=1e-4, abs_tol=1e-3)
        assert is_greedy == is_likeliest
        greedy += is_greedy
    assert 0 < greedy < len(ids)
