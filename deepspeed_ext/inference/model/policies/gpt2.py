"""GPT-2: learned positions, and weights that lie as (in, out)."""

from deepspeed_ext.inference.model.policy import Key, Names, Policy, Sizes

GPT2 = Policy(
    families=("gpt2",),
    names=Names(
        prefixes=("transformer.", ""),
        embedding="wte",
        positions="wpe",
        layer="h.{}.",
        attention_norm="ln_1",
        qkv=("attn.c_attn",),
        out="attn.c_proj",
        mlp_norm="ln_2",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        final_norm="ln_f",
        ignored=(".attn.bias", ".attn.masked_bias"),  # masks
    ),
    sizes=Sizes(
        layers=Key("n_layer", "num_hidden_layers"),
        hidden=Key("n_embd", "hidden_size"),
        heads=Key("n_head", "num_attention_heads"),
        intermediate=Key("n_inner", default=None),
        context=Key("n_positions", "max_position_embeddings"),
    ),
    norm="layer",
    eps=Key("layer_norm_epsilon", default=1e-5),
    position="learned",
    activation=Key("activation_function", default="gelu_new"),
    gated=False,
    biases=(True, True, True, False),
    transposed=True,
    tied=Key("tie_word_embeddings", default=True),
)
