"""Buffers that a module works out from its config: the engine does so too, or refuses by name."""

import copy

import pytest
import torch
from encoder_cases import make
from family_cases import CASES, model_of

from deepspeed_ext.inference import init_inference
from deepspeed_ext.inference.model.architecture import architecture_of
from deepspeed_ext.inference.model.buffers import check_buffers
from deepspeed_ext.inference.model.policies import policy_of


def check(model: torch.nn.Module) -> None:
    config = model.config.to_dict()  # type: ignore[operator,union-attr]
    check_buffers(dict(model.named_buffers()), architecture_of(policy_of(config), config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_a_model_that_was_cast_is_taken(case: str, dtype: torch.dtype) -> None:
    check(copy.deepcopy(model_of(case)).to(dtype).float())


FREQUENCIES = {
    "llama": "model.rotary_emb.inv_freq",
    "llama-llama3": "model.rotary_emb.inv_freq",
    "qwen3": "model.rotary_emb.inv_freq",
    "mistral": "model.rotary_emb.inv_freq",
    "phi": "model.rotary_emb.inv_freq",
    "gpt_neox": "gpt_neox.rotary_emb.inv_freq",
    "gemma3": "model.rotary_emb.full_attention_inv_freq",
    "gemma3-with-images": "model.language_model.rotary_emb.sliding_attention_inv_freq",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", FREQUENCIES)
def test_one_frequency_that_was_changed(case: str, dtype: torch.dtype) -> None:
    model, name = copy.deepcopy(model_of(case)).to(dtype), FREQUENCIES[case]
    model.get_buffer(name)[-1] *= 1.1
    with pytest.raises(ValueError, match=rf"^init_inference: {name} has .* at \[.*\], expected"):
        check(model)


def test_frequencies_of_another_length() -> None:
    model = copy.deepcopy(model_of("llama"))
    rotary = model.get_submodule("model.rotary_emb")
    rotary.register_buffer("inv_freq", torch.ones(3), persistent=False)
    with pytest.raises(ValueError, match=r"inv_freq has shape \[3\], expected \[8\], as the eng"):
        init_inference(model)


def test_frequencies_that_changed_places() -> None:
    """Of layers with windows and others."""
    model = copy.deepcopy(model_of("gemma3"))
    rotary = model.get_submodule("model.rotary_emb")
    one, other = (f"{kind}_attention_inv_freq" for kind in ("sliding", "full"))
    moved = rotary.get_buffer(one).clone()
    rotary.get_buffer(one).copy_(rotary.get_buffer(other))
    rotary.get_buffer(other).copy_(moved)
    with pytest.raises(ValueError, match="attention_inv_freq has"):
        init_inference(model)


def test_a_scale_of_embeddings() -> None:
    model = copy.deepcopy(model_of("gemma2"))
    model.get_buffer("model.embed_tokens.embed_scale").mul_(3)
    with pytest.raises(ValueError, match=r"embed_scale has 23.2379, expected 7.74597, as the eng"):
        init_inference(model)


@pytest.mark.parametrize("name", ["position_ids", "token_type_ids"])
def test_numbers_of_an_encoder(name: str) -> None:
    model = make("bert")
    check(model)
    model.get_buffer(f"embeddings.{name}")[0, 2] = 1
    with pytest.raises(ValueError, match=rf"embeddings.{name} has 1 at \[0, 2\], expected"):
        init_inference(model)
