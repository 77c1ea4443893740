"""What an engine generates is what transformers generates."""

import torch

from deepspeed_ext.inference.initialize import init_inference


def test_the_likeliest_tokens_are_those_of_transformers() -> None:
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
    model = LlamaForCausalLM(config).eval()
    prompt = [3, 5, 7, 11, 13, 17]
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None
    )
    got = init_inference(model).generate([prompt], max_new_tokens=64)
    assert got[0].tokens == expected[0, len(prompt) :].tolist()
