"""What a caller has set as torch's defaults makes no difference."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from encoder_cases import make, texts
from family_cases import model_of

from deepspeed_ext.inference.initialize import init_inference

PROMPTS = [[3, 5, 7, 11, 13], [17, 19]]
OPTIONS: dict[str, Any] = dict(
    max_new_tokens=6,
    temperature=1.0,
    top_p=0.9,
    repetition_penalty=1.1,
    frequency_penalty=0.5,
    logit_bias={3: 0.5},
    seed=2,
    logprobs=2,
)


@pytest.fixture(params=["device", "dtype"])
def default(request: pytest.FixtureRequest) -> Iterator[Any]:
    """What sets a default; meta stands for a GPU: values there do not come back by themselves."""
    kind, before = request.param, torch.get_default_dtype()

    def change() -> None:
        if kind == "device":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(torch.float64)

    yield change
    torch.set_default_device(None)
    torch.set_default_dtype(before)


@pytest.mark.parametrize("case", ["llama-llama3", "qwen3", "gemma3", "gpt2", "bloom"])
def test_decoders(case: str, default: Any) -> None:
    model = model_of(case)
    options: dict[str, Any] = dict(max_tokens=64, quantize="int8", kv_dtype="int8")
    expected = init_inference(model, **options).generate(PROMPTS, **OPTIONS)
    default()
    assert init_inference(model, **options).generate(PROMPTS, **OPTIONS) == expected


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_encoders(family: str, default: Any) -> None:
    model = make(family)
    inputs = texts(model)
    expected = init_inference(model)(**inputs)
    default()
    for got, want in zip(init_inference(model)(**inputs), expected, strict=True):
        assert torch.equal(got, want)
