"""What an engine generates is what transformers generates."""

from collections import Counter
from typing import Any

import pytest
import torch

from deepspeed_ext.inference.initialize import init_inference

PROMPT = [3, 5, 7, 11, 13, 17, 7]


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_the_likeliest_tokens_are_those_of_transformers(penalty: float) -> None:
    """Tokens of the prompt are penalized, too, and those that it has twice are once."""
    theirs = model()
    expected = theirs.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=None,
        repetition_penalty=penalty,
    )
    engine = init_inference(theirs)
    options: dict[str, Any] = dict(max_new_tokens=64, stop_tokens=())
    got = engine.generate(PROMPT, repetition_penalty=penalty, **options)[0]
    assert got.tokens == expected[0, len(PROMPT) :].tolist()
    if penalty != 1:
        assert got.tokens != engine.generate(PROMPT, **options)[0].tokens


def test_a_module_without_a_generation_config() -> None:
    """Before transformers 5, models that cannot generate have None there."""
    theirs = model()
    theirs.generation_config = None
    assert init_inference(theirs).stop_tokens == (theirs.config.eos_token_id,)


@pytest.mark.parametrize("embedding", [torch.bfloat16, torch.float32])
def test_the_dtype_is_that_of_most_bytes(embedding: torch.dtype) -> None:
    """Not of the largest tensor, nor of masks."""
    theirs = model()
    theirs.resize_token_embeddings(300)
    layers = torch.float32 if embedding == torch.bfloat16 else torch.bfloat16
    theirs.to(layers)
    for part in (theirs.model.embed_tokens, theirs.lm_head):
        part.to(embedding)
    mask = torch.ones(1 << 20, dtype=torch.bool)
    theirs.model.rotary_emb.register_buffer("inv_freq_mask", mask)  # which the table passes over
    state = theirs.state_dict().values()
    assert max(state, key=lambda each: each.nbytes * each.is_floating_point()).dtype == embedding
    assert init_inference(theirs).decoder.weights.embedding.dtype == layers


def test_what_is_tied_counts_once_for_the_dtype() -> None:
    theirs = model()
    theirs.resize_token_embeddings(400)
    theirs.to(torch.bfloat16)
    theirs.model.embed_tokens.to(torch.float32)
    theirs.lm_head.weight = theirs.model.embed_tokens.weight
    sizes = Counter[torch.dtype]()
    for each in theirs.parameters():
        sizes[each.dtype] += each.nbytes
    both = sizes[torch.float32] * 2
    assert sizes[torch.float32] < sizes[torch.bfloat16] < both
    assert init_inference(theirs).decoder.weights.embedding.dtype == torch.bfloat16


def test_log_probabilities_are_those_of_transformers() -> None:
    """Both in float32, whose logits of about 1 err by some 2^-22 after three layers."""
    theirs = model()
    got = init_inference(theirs).generate(
        PROMPT, max_new_tokens=40, temperature=1.0, seed=1, logprobs=3, stop_tokens=()
    )[0]
    ids = torch.tensor([PROMPT + got.tokens])
    with torch.no_grad():
        logits = theirs.double()(ids).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(got.tokens)[:, None])[:, 0]
    assert got.logprobs is not None and got.top_logprobs is not None
    assert (torch.tensor(got.logprobs, dtype=torch.float64) - chosen).abs().max() < 2**-20
    for row, top in zip(expected, got.top_logprobs, strict=True):
        values, tokens = row.topk(3)
        assert [token for token, _ in top] == tokens.tolist()
        found = torch.tensor([value for _, value in top], dtype=torch.float64)
        assert (found - values).abs().max() < 2**-20
