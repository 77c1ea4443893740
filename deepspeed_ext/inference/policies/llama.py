"""LLaMA, and what is built like it."""

from deepspeed_ext.inference.policy import Key, Names, Policy

LLAMA = Policy(
    families=("llama",),
    names=Names(
        embedding="embed_tokens",
        layer="layers.{}.",
        attention_norm="input_layernorm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.o_proj",
        mlp_norm="post_attention_layernorm",
        up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        final_norm="norm",
    ),
    biases=(
        Key("attention_bias", default=False),
        Key("attention_bias", default=False),
        Key("mlp_bias", default=False),
        False,
    ),
)
