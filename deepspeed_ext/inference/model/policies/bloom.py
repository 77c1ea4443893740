"""BLOOM: no positions but slopes of the scores, a norm behind the embedding, q, k, v by head."""

from deepspeed_ext.inference.model.policy import Key, Names, Policy, Sizes

BLOOM = Policy(
    families=("bloom",),
    names=Names(
        prefixes=("transformer.", ""),
        embedding="word_embeddings",
        embedding_norm="word_embeddings_layernorm",
        layer="h.{}.",
        attention_norm="input_layernorm",
        qkv=("self_attention.query_key_value",),
        out="self_attention.dense",
        mlp_norm="post_attention_layernorm",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        final_norm="ln_f",
    ),
    sizes=Sizes(
        layers=Key("n_layer", "num_hidden_layers"),
        hidden=Key("n_embed", "hidden_size"),
        heads=Key("n_head", "num_attention_heads"),
        intermediate=None,
        context=Key("seq_length", default=None),
    ),
    norm="layer",
    eps=Key("layer_norm_epsilon", default=1e-5),
    position="alibi",
    activation="gelu_pytorch_tanh",
    gated=False,
    biases=(True, True, True, False),
    qkv_by_head=True,
    tied=Key("tie_word_embeddings", default=True),
    expects={"slow_but_exact": False},  # in several parts it leaves two biases out
)
