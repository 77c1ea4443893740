"""Phi 1 and 2: attention and feed-forward block side by side behind one norm."""

from deepspeed_ext.inference.model.policy import Key, Names, Policy

PHI = Policy(
    families=("phi",),
    names=Names(
        embedding="embed_tokens",
        layer="layers.{}.",
        attention_norm="input_layernorm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.dense",
        up=("mlp.fc1",),
        down="mlp.fc2",
        final_norm="final_layernorm",
    ),
    norm="layer",
    eps=Key("layer_norm_eps", default=1e-5),
    parallel=True,
    rope_share=Key("partial_rotary_factor", default=0.5),
    gated=False,
    biases=(True, True, True, True),
)
