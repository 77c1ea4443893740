"""Gemma 2 and 3: norms on both sides of a block, windows in most layers, scores and logits capped.

The configuration inside of one for text and images leaves out what is usual, so there are defaults.
"""

from dataclasses import replace

from deepspeed_ext.inference.model.policy import Key, Names, Policy, Sizes, Windows

_BIAS = Key("attention_bias", default=False)

GEMMA2 = Policy(
    families=("gemma2",),
    names=Names(
        embedding="embed_tokens",
        layer="layers.{}.",
        attention_norm="input_layernorm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.o_proj",
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        mlp_post_norm="post_feedforward_layernorm",
        final_norm="norm",
    ),
    sizes=Sizes(head_dim=Key("head_dim", default=256)),
    eps=Key("rms_norm_eps", default=1e-6),
    norm_offset=1.0,
    norm_place="both",
    activation=Key("hidden_activation", default="gelu_pytorch_tanh"),
    biases=(_BIAS, _BIAS, False, False),
    tied=Key("tie_word_embeddings", default=True),
    windows=Windows(size=Key("sliding_window", default=4096), period=2),
    attention_scale=Key("query_pre_attn_scalar", default=256, power=-0.5),
    softcap=Key("attn_logit_softcapping", default=50.0),
    logit_softcap=Key("final_logit_softcapping", default=30.0),
    embedding_scale=Key("hidden_size", power=0.5),
)

GEMMA3_TEXT = replace(
    GEMMA2,
    families=("gemma3_text",),
    names=replace(GEMMA2.names, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
    sizes=Sizes(
        heads=Key("num_attention_heads", default=8),
        kv_heads=Key("num_key_value_heads", default=4),
        head_dim=Key("head_dim", default=256),
        vocabulary=Key("vocab_size", default=262208),
        context=Key("max_position_embeddings", default=131072),
    ),
    rope_base=Key("rope_theta", default=1000000.0),
    rope_local_base=Key("rope_local_base_freq", default=10000.0),
    windows=Windows(
        size=Key("sliding_window", default=4096),
        period=Key("sliding_window_pattern", default=6),
    ),
    softcap=0.0,
    logit_softcap=Key("final_logit_softcapping", default=None),
)

GEMMA3 = replace(
    GEMMA3_TEXT,
    families=("gemma3",),
    part="text_config",
    names=replace(
        GEMMA3_TEXT.names,
        prefixes=("model.language_model.", "language_model.model."),
        head=("lm_head", "language_model.lm_head"),
        ignored=("vision_tower.", "multi_modal_projector."),  # it takes text only
    ),
    logit_softcap=0.0,
)
