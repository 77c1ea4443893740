"""LLaMA, and what is built like it: Mistral, Qwen 2 and 3, Phi 3."""

from dataclasses import replace

from deepspeed_ext.inference.model.policy import Key, Names, Policy, Windows

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

MISTRAL = replace(
    LLAMA,
    families=("mistral",),
    biases=(False, False, False, False),
    windows=Windows(size=Key("sliding_window", default=4096), by_types=False),
)

QWEN2 = replace(
    LLAMA,
    families=("qwen2",),
    biases=(True, False, False, False),
    windows=Windows(
        size=Key("sliding_window", default=4096),
        are_used=Key("use_sliding_window", default=False),
        first=Key("max_window_layers", default=28),
    ),
)

QWEN3 = replace(
    QWEN2,
    families=("qwen3",),
    names=replace(LLAMA.names, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
    sizes=replace(LLAMA.sizes, head_dim=Key("head_dim", default=128)),
    biases=(
        Key("attention_bias", default=False),
        Key("attention_bias", default=False),
        False,
        False,
    ),
)

PHI3 = replace(
    MISTRAL,
    families=("phi3",),
    names=replace(LLAMA.names, qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    rope_share=Key("partial_rotary_factor", default=1.0),
    windows=Windows(by_types=False),
)
