"""GPT-NeoX and Pythia: blocks side by side, a part of each head turns, q, k and v head by head."""

from deepspeed_ext.inference.model.policy import Key, Names, Policy

_BIAS = Key("attention_bias", default=True)

GPT_NEOX = Policy(
    families=("gpt_neox",),
    names=Names(
        prefixes=("gpt_neox.", ""),
        embedding="embed_in",
        layer="layers.{}.",
        attention_norm="input_layernorm",
        qkv=("attention.query_key_value",),
        out="attention.dense",
        mlp_norm="post_attention_layernorm",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        final_norm="final_layer_norm",
        head=("lm_head", "embed_out"),
        ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    ),
    norm="layer",
    eps=Key("layer_norm_eps", default=1e-5),
    parallel=Key("use_parallel_residual", default=True),
    rope_base=Key("rotary_emb_base", default=10000.0),  # the usual names count in rope_parameters
    rope_share=Key("rotary_pct", default=0.25),
    gated=False,
    biases=(_BIAS, _BIAS, True, False),
    qkv_by_head=True,
)
