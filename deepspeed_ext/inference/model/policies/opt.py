"""OPT: learned positions from row 2; the one of 350 M parameters has its norms after the sums."""

from deepspeed_ext.inference.model.policy import Key, Names, Policy, Sizes

_BIAS = Key("enable_bias", default=True)

OPT = Policy(
    families=("opt",),
    names=Names(
        prefixes=("model.decoder.", "decoder.", ""),
        embedding="embed_tokens",
        positions="embed_positions",
        project_in="project_in",
        layer="layers.{}.",
        attention_norm="self_attn_layer_norm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        up=("fc1",),
        down="fc2",
        final_norm=Key(
            "do_layer_norm_before", default=True, values={True: "final_layer_norm", False: None}
        ),
        project_out="project_out",
    ),
    expects={"_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
    sizes=Sizes(
        intermediate=Key("ffn_dim"),
        embedding=Key("word_embed_proj_dim", default=None),
        context=Key("max_position_embeddings"),
    ),
    norm="layer",
    eps=1e-5,
    norm_place=Key("do_layer_norm_before", default=True, values={True: "before", False: "after"}),
    position="learned",
    position_offset=2,
    activation=Key("activation_function", default="relu"),
    gated=False,
    biases=(_BIAS, _BIAS, _BIAS, False),
    tied=Key("tie_word_embeddings", default=True),
)
