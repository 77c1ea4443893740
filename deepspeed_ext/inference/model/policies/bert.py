"""BERT and RoBERTa, and what is built like them.

Of a model with a head the encoder is used, with its pooler if it has one; a head's tensors are
passed over.
"""

from dataclasses import replace

from deepspeed_ext.inference.model.policy import Key, Names, Policy

BERT = Policy(
    families=("bert",),
    names=Names(
        prefixes=("bert.", ""),
        embedding="embeddings.word_embeddings",
        positions="embeddings.position_embeddings",
        token_types="embeddings.token_type_embeddings",
        embedding_norm="embeddings.LayerNorm",
        layer="encoder.layer.{}.",
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
        out="attention.output.dense",
        attention_norm="attention.output.LayerNorm",
        up=("intermediate.dense",),
        down="output.dense",
        mlp_norm="output.LayerNorm",
        head=None,
        pooler="pooler.dense",
        ignored=("embeddings.position_ids", "cls.", "classifier.", "qa_outputs."),
    ),
    norm="layer",
    norm_place="after",
    eps=Key("layer_norm_eps"),
    position="learned",
    gated=False,
    biases=(True, True, True, False),
    causal=False,
    expects={"is_decoder": False, "position_embedding_type": "absolute"},
)

ROBERTA = replace(
    BERT,
    families=("roberta", "xlm-roberta", "camembert"),
    names=replace(
        BERT.names,
        prefixes=("roberta.", ""),
        ignored=("embeddings.position_ids", "lm_head.", "classifier.", "qa_outputs."),
    ),
    position_padding=Key("pad_token_id", default=1),
)
