"""Encoders with random weights, and texts of many lengths for them."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.inference.model.policies.bert import BERT
from deepspeed_ext.inference.model.policy import Policy

VOCABULARY, PLACES = 97, 80
LENGTHS = (33, 7, 1, 33, 20, 0, 40, 2)


def make(family: str, kind: str = "Model", **options: Any) -> Any:
    """Return a model with random weights, biases and norms, in float32."""
    import transformers

    sizes = dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=PLACES,
    )
    config = transformers.AutoConfig.for_model(family, **{**sizes, **options})
    torch.manual_seed(0)
    model = getattr(transformers, f"Auto{kind}").from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "LayerNorm.weight" in name else 0.0, 0.15)
    return model


def texts(model: Any, side: str = "right", seed: int = 1) -> dict[str, Tensor]:
    """Return texts of LENGTHS, padded on a side, or with "holes" in them."""
    random = torch.Generator().manual_seed(seed)
    shape = len(LENGTHS), max(LENGTHS)
    ids = torch.randint(5, VOCABULARY, shape, generator=random)
    places = torch.arange(shape[1]).expand(shape)
    if side == "holes":
        places = torch.rand(shape, generator=random).argsort(1)
    elif side == "left":
        places = places.flip(1)
    mask = (places < torch.tensor(LENGTHS).unsqueeze(1)).long()
    ids[mask == 0] = model.config.pad_token_id
    kinds = torch.randint(model.config.type_vocab_size, shape, generator=random)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds}


def gated_encoder(queries: int, keys: int) -> tuple[Policy, dict[str, Any], dict[str, Tensor]]:
    """A table of other choices than BERT's, with a configuration and random weights."""
    names = replace(
        BERT.names, positions=None, token_types=None, pooler=None, up=("gate", "intermediate.dense")
    )
    policy = replace(
        BERT, names=names, norm="rms", position="none", gated=True, biases=(False,) * 4, expects={}
    )
    wide, width = 48, 16
    config = dict(model_type="bert", vocab_size=VOCABULARY, hidden_size=width * queries)
    config |= dict(num_attention_heads=queries, num_key_value_heads=keys, intermediate_size=wide)
    config |= dict(num_hidden_layers=1, hidden_act="silu", layer_norm_eps=1e-5)
    hidden, at = width * queries, "encoder.layer.0."
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings": (VOCABULARY, hidden),
        "embeddings.LayerNorm": (hidden,),
        f"{at}attention.self.query": (hidden, hidden),
        f"{at}attention.self.key": (width * keys, hidden),
        f"{at}attention.self.value": (width * keys, hidden),
        f"{at}attention.output.dense": (hidden, hidden),
        f"{at}attention.output.LayerNorm": (hidden,),
        f"{at}gate": (wide, hidden),
        f"{at}intermediate.dense": (wide, hidden),
        f"{at}output.dense": (hidden, wide),
        f"{at}output.LayerNorm": (hidden,),
    }
    torch.manual_seed(0)
    return (
        policy,
        config,
        {f"{name}.weight": torch.randn(size) / 4 for name, size in shapes.items()},
    )
