"""The form of a policy: a table of where a family of models keeps its weights, and what it does."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Config = Mapping[str, Any]  # of a model: what its config.json says

_NONE = object()


class Key:
    """A value that the configuration of a model has, under one of several names.

    Args:
        names: the first one that is there, and is not null, counts.
        default: if none is; without it, a configuration that has none of them is refused.
    """

    def __init__(self, *names: str, default: Any = _NONE) -> None:
        self.names, self.default = names, default

    def of(self, config: Config) -> Any:
        """Return the value.

        Raises:
            ValueError: the configuration has none.
        """
        for name in self.names:
            if config.get(name) is not None:
                return config[name]
        if self.default is _NONE:
            raise ValueError(
                f"init_inference: config has no {self.names[0]!r}, expected it for model_type"
                f" {config.get('model_type')!r}"
            )
        return self.default


Or = Key | Any  # a value, or where the configuration has it


def value_of(entry: Or, config: Config) -> Any:
    """Return what an entry of a table is for a model."""
    return entry.of(config) if isinstance(entry, Key) else entry


@dataclass(frozen=True)
class Sizes:
    """Under which names a configuration has its sizes."""

    layers: Or = Key("num_hidden_layers")
    hidden: Or = Key("hidden_size")
    heads: Or = Key("num_attention_heads")
    kv_heads: Or = Key("num_key_value_heads", default=None)  # None: as many as heads
    head_dim: Or = Key("head_dim", default=None)  # None: hidden / heads
    intermediate: Or = Key("intermediate_size", default=None)  # None: 4 hidden
    vocabulary: Or = Key("vocab_size")
    context: Or = Key("max_position_embeddings", default=None)  # None: no limit


@dataclass(frozen=True)
class Names:
    """Under which names a state dict has its tensors, without `.weight` and `.bias`.

    Those of a layer are what follows `layer`. None stands for what the family has not.

    Args:
        prefixes: what may stand before all of them but `head`; the first that fits counts.
        layer: of a layer's tensors, with {} for its number.
        qkv: of the projections to queries, keys and values, or of one for all three.
        up: of the gate and of what it is for, or of one for both, or of the only one.
        head: from the last hidden state to logits; where the state dict has none, it is the
            embedding.
        pooler: from the hidden state of the first token to the pooled one; a state dict may have
            none.
        ignored: ends of names of tensors that nothing needs.
        ignored_heads: beginnings of them.
    """

    embedding: str
    layer: str
    qkv: tuple[str, ...]
    out: str
    up: tuple[str, ...]
    down: str
    attention_norm: str | None = None
    mlp_norm: str | None = None
    final_norm: str | None = None
    head: str | None = "lm_head"
    prefixes: tuple[str, ...] = ("model.", "")
    positions: str | None = None
    token_types: str | None = None
    embedding_norm: str | None = None
    attention_post_norm: str | None = None
    mlp_post_norm: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    pooler: str | None = None
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    ignored_heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Policy:
    """What a family of models is made of; every entry may be a `Key` into the configuration.

    Args:
        families: the `model_type` of the configurations that it is for.
        names: of the tensors.
        sizes: where the configuration has them.
        norm: "rms" or "layer".
        norm_offset: added to the weights of norms.
        eps: of norms.
        norm_place: "before" attention and feed-forward block; "after" the sum with them; "both":
            before them, and after them before the sum.
        parallel: whether attention and feed-forward block read the same hidden state.
        position: "rotary", "learned", "alibi" or "none".
        position_offset: of the rows of learned positions.
        position_padding: id of a token that takes no position, or None: the others are counted from
            the row after that of this number, and the token itself has that row, as in RoBERTa.
        interleaved: whether a rotary pair is two neighbours.
        activation: as the configuration names it.
        gated: whether the feed-forward block has a gate.
        biases: of the linear layers: (qkv, out, up and down, head).
        transposed: whether weights lie as (in, out), as those of Conv1D do.
        qkv_by_head: whether one projection has queries, keys and values head by head.
        windows: how many layers see a window only, where `layer_types` does not say: "all", "even",
            "none", or n for all but each n-th.
        attention_scale: of the scores; None: 1 / sqrt(head_dim).
        softcap: of the scores; 0 for none.
        logit_softcap: of the logits; 0 for none.
        embedding_scale: what embeddings are multiplied by; "sqrt" for the root of their size.
        causal: whether tokens see only those before them.
        expects: what a configuration has to say, where it says it: a model of the family that
            differs is refused.
    """

    families: tuple[str, ...]
    names: Names
    sizes: Sizes = field(default_factory=Sizes)
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: Or = 0.0
    eps: Or = Key("rms_norm_eps")
    norm_place: Or = "before"
    parallel: Or = False
    position: Or = "rotary"
    position_offset: Or = 0
    position_padding: Or = None
    interleaved: Or = False
    activation: Or = Key("hidden_act")
    gated: Or = True
    biases: tuple[Or, Or, Or, Or] = (False, False, False, False)
    transposed: bool = False
    qkv_by_head: bool = False
    windows: Or = "none"
    attention_scale: Or = None
    softcap: Or = 0.0
    logit_softcap: Or = 0.0
    embedding_scale: Or = 1.0
    causal: bool = True
    expects: Mapping[str, Any] = field(default_factory=dict)
