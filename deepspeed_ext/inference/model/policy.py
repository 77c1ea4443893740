"""The form of a policy: a table of where a family of models keeps its weights, and what it does."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

Config = Mapping[str, Any]  # of a model: what its config.json says

LARGEST = 2**31 - 1
_NONE = object()


class Key:
    """A value that the configuration of a model has, under one of several names.

    Args:
        names: of which several may be there, if those that are not null say the same.
        default: what a configuration that has none of them means, where null means None; without
            it, both are refused.
        values: what each value that it may have stands for in the table; None: for itself.
        power: what it is raised to, as the scale of the scores may be given by a size.
    """

    def __init__(
        self,
        *names: str,
        default: Any = _NONE,
        values: Mapping[Any, Any] | None = None,
        power: float = 1.0,
    ) -> None:
        self.names, self.default, self.values, self.power = names, default, values, power

    def of(self, config: Config) -> Any:
        """Return the value.

        Raises:
            ValueError: the configuration has none, two that differ, or one that stands for nothing.
        """
        given = [n for n in self.names if config.get(n) is not None]
        name = given[0] if given else None
        value = self.default if name is None else config[name]
        for other in given[1:]:
            if config[other] != value:
                raise ValueError(
                    f"init_inference: {other} is {config[other]!r:.60}, expected {value!r:.60}, as"
                    f" {name} says"
                )
        if value is not _NONE and name is None and any(n in config for n in self.names):
            value = None
        if value is _NONE:
            raise ValueError(
                f"init_inference: config has no {self.names[0]!r}, expected it for model_type"
                f" {config.get('model_type')!r}"
            )
        if self.values is not None:
            if not isinstance(value, (bool, int, str)) or value not in self.values:
                known = ", ".join(map(repr, self.values))
                raise ValueError(
                    f"init_inference: {name} is {value!r}, expected one of {known}, for model_type"
                    f" {config.get('model_type')!r}"
                )
            return self.values[value]
        if self.power == 1 or value is None:
            return value
        return checked_number(self.names[0], value, above=0) ** self.power


Or = Key | Any  # a value, or where the configuration has it


def value_of(entry: Or, config: Config) -> Any:
    """Return what an entry of a table is for a model."""
    return entry.of(config) if isinstance(entry, Key) else entry


def name_of(entry: Or, config: Config, ours: str) -> str:
    """Return what a configuration calls an entry of a table; our name if it does not have it."""
    if not isinstance(entry, Key):
        return ours
    return next((name for name in entry.names if config.get(name) is not None), entry.names[0])


def checked_number(name: str, value: Any, above: float | None = None, most: float = 1e300) -> float:
    """Return a number of a configuration, which may hold anything.

    Raises:
        ValueError: it is none, not finite, not above what it must be, or more than it may be.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_beyond = is_number and (not -1e300 < value <= most or (above is not None and value <= above))
    if not is_number or is_beyond:
        want = "a number" if above is None else f"a number above {above}"
        want += "" if most == 1e300 else f", and {most} at most"
        raise ValueError(f"init_inference: {name} is {value!r}, expected {want}")
    return float(value)


def check_size(name: str, value: Any, most: int = LARGEST, least: int = 1) -> None:
    """Refuse what is no whole number from least to most.

    Raises:
        ValueError: it is none.
    """
    if type(value) is not int or not least <= value <= most:
        until = "2^31 - 1" if most == LARGEST else most
        raise ValueError(f"init_inference: {name} is {value!r}, expected {least} to {until}")


def checked_choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """Return one of these texts or truth values.

    Raises:
        ValueError: it is none of them.
    """
    if not isinstance(value, (str, bool)) or value not in choices:
        raise ValueError(
            f"init_inference: {name} is {value!r}, expected one of {', '.join(map(str, choices))}"
        )
    return value


def keys_of(entry: Any) -> set[str]:
    """Return all names of a configuration's values that a table, or a part of one, reads."""
    if isinstance(entry, Key):
        return set(entry.names)
    if is_dataclass(entry):
        return {name for each in fields(entry) for name in keys_of(getattr(entry, each.name))}
    if isinstance(entry, tuple):
        return {name for each in entry for name in keys_of(each)}
    return set()


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
    embedding: Or = None  # elements of an embedding; None: hidden
    context: Or = Key("max_position_embeddings", default=None)  # None: no limit


@dataclass(frozen=True)
class Names:
    """Under which names a state dict has its tensors, without `.weight` and `.bias`.

    Those of a layer are what follows `layer`. None stands for what the family has not, and any may
    be a `Key` where that depends on the configuration.

    Args:
        prefixes: what may stand before all of them but `head`; the first that fits counts.
        layer: of a layer's tensors, with {} for its number.
        qkv: of the three projections to queries, keys and values, or of one for all three.
        up: of the gate and of what it is for, or of one for both, or of the only one.
        head: from the last hidden state to logits, by any of these names; None if there is none.
        project_in: from embeddings to the first hidden state, where their sizes differ.
        project_out: from the last hidden state to what the head takes, likewise.
        sinks: the whole name of a tensor with a score for each head, of one more key without a
            value.
        pooler: from the hidden state of the first token to the pooled one; a state dict may have
            none.
        ignored: parts of names of tensors that nothing needs.
    """

    embedding: str
    layer: str
    qkv: tuple[str, ...]
    out: str
    up: tuple[str, ...]
    down: str
    attention_norm: str | Key | None = None
    mlp_norm: str | Key | None = None
    final_norm: str | Key | None = None
    head: tuple[str, ...] | None = ("lm_head",)
    prefixes: tuple[str, ...] = ("model.", "")
    positions: str | None = None
    token_types: str | None = None
    embedding_norm: str | None = None
    project_in: str | None = None
    project_out: str | None = None
    attention_post_norm: str | None = None
    mlp_post_norm: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    sinks: str | None = None
    pooler: str | None = None
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Windows:
    """Which layers see only the last tokens, and how many of them.

    Args:
        size: tokens that a query of such a layer sees, itself included; None for no windows.
        are_used: whether there are any.
        first: the first layer that may have one.
        behind: the first one behind those that may; None: there is none.
        period: each so manieth layer has none; None: all have.
        by_types: whether `layer_types` of the configuration, if it has them, says it instead.
    """

    size: Or = Key("sliding_window", default=None)
    are_used: Or = True
    first: Or = 0
    behind: Or = None
    period: Or = None
    by_types: bool = True


@dataclass(frozen=True)
class ExpertNames:
    """Under which names a layer has its experts, in one of the forms that a family is saved in.

    They follow `layer` of `Names`, with {} for the number of an expert, and are without `.weight`
    and `.bias` then. Names of `up` and `down` without {} are those of whole tensors, of all experts
    one after another.

    Args:
        router: from hidden states to the logits of experts, without `.weight` in any case.
        up: as of `Names`.
        down: likewise.
    """

    router: str
    up: tuple[str, ...]
    down: str


@dataclass(frozen=True)
class Experts:
    """What layers have that choose some of many feed-forward blocks for each token.

    Args:
        names: of each form that there is; the one whose router is there counts.
        count: of experts.
        chosen: of them for each token.
        intermediate: the inner size of each.
        score: as of ``moe_route``: "softmax", "sigmoid" or "softmax_topk".
        normalize: whether the weights of those chosen are divided by their sum.
        first: the first layer that has experts.
        period: only each so manieth layer has.
        dense: the numbers of layers that have none in any case.
        interleaved: whether the rows of a gate and of what it is for alternate in whole tensors.
        transposed: whether whole tensors lie as (experts, in, out).
        has_biases: whether router and experts have biases; in whole tensors, under the name of the
            weight with `_bias` behind it.
        limit: what a gate is at most, and what it is for at most and at least, which 1 is added to
            then; the activation is g * sigmoid(1.702 g). None: they may be anything.
        shared: intermediate size of an expert that all tokens go to; 0 for none.
        shared_up: its names, as of `Names`.
        shared_down: likewise.
        shared_gate: from hidden states to the logit of what the results of this are multiplied by.
    """

    names: tuple[ExpertNames, ...]
    count: Or
    chosen: Or
    intermediate: Or
    score: Or = "softmax"
    normalize: Or = False
    first: Or = 0
    period: Or = 1
    dense: Or = ()
    interleaved: bool = False
    transposed: bool = False
    has_biases: bool = False
    limit: Or = None
    shared: Or = 0
    shared_up: tuple[str, ...] = ()
    shared_down: str = ""
    shared_gate: str | None = None


@dataclass(frozen=True)
class Policy:
    """What a family of models is made of: a table, of which any entry may be a `Key`.

    To write one: print the names and shapes of a model's `state_dict()`, and its configuration.
    Begin with the table of the family that is most like it, as ``dataclasses.replace(LLAMA,
    families=("mine",))``, and change the entries that differ, each beside the model's own code.
    Tensors that the table forgets, or expects in vain, are refused by name, as are values of the
    configuration that usually change what a model computes and that no entry reads. Then compare
    logits with those of the model in float32, with random weights, those of norms and biases
    included: they agree to five digits or something is wrong.

    Args:
        families: the `model_type` of the configurations that it is for.
        names: of the tensors.
        part: the entry of the configuration that describes the decoder, if it is not at the top;
            only whether the head is tied is at the top then.
        expects: what the configuration has to say, where it says it: values that would change what
            the model computes, and that no other entry reads.
        sizes: where the configuration has them.
        norm: "rms" or "layer".
        norm_offset: added to the weights of norms.
        eps: of norms.
        norm_place: "before" attention and feed-forward block; "after" the sum with them; "both":
            before them, and after them before the sum.
        parallel: whether attention and feed-forward block read the same hidden state; one without a
            norm of its own reads what the other reads.
        position: "rotary", "learned", "alibi" or "none".
        position_offset: of the rows of learned positions.
        position_padding: of an encoder, number of a token that takes no position, or None:
            positions are counted without it, from the row after the one of this number, which is
            its own.
        interleaved: whether a rotary pair is two neighbours.
        rope_base: of rotary frequencies.
        rope_local_base: of those of layers with windows, which are not scaled for long contexts;
            None: they are as all others.
        rope_share: how much of a head turns; with a number here, a configuration that says another
            one, as `partial_rotary_factor`, is refused.
        rope_rules: what stands for `rope_parameters` where the configuration has none.
        activation: as the configuration names it.
        gated: whether the feed-forward block has a gate.
        biases: of the linear layers: (qkv, out, up and down, head).
        transposed: whether weights of layers lie as (in, out), as those of Conv1D do.
        qkv_by_head: whether the one projection has query, key and value head by head.
        tied: whether the head is the embedding.
        windows: of layers; None for none.
        attention_scale: of the scores; None: 1 / sqrt(head_dim).
        whole_norms: whether `q_norm` and `k_norm` are of all heads together, not of each.
        softcap: of the scores; 0 or None for none.
        logit_softcap: of the logits; 0 or None for none.
        embedding_scale: what embeddings are multiplied by; rounded to the dtype.
        causal: whether tokens see only those before them.
        experts: of layers that choose blocks for each token; None: all layers are alike.
    """

    families: tuple[str, ...]
    names: Names
    part: str | None = None
    expects: Mapping[str, Any] = field(default_factory=dict)
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
    rope_base: Or = Key("rope_theta", default=10000.0)
    rope_local_base: Or = None
    rope_share: Or = 1.0
    rope_rules: Mapping[str, Any] = field(default_factory=dict)
    activation: Or = Key("hidden_act")
    gated: Or = True
    biases: tuple[Or, Or, Or, Or] = (False, False, False, False)
    transposed: bool = False
    qkv_by_head: bool = False
    tied: Or = Key("tie_word_embeddings", default=False)
    windows: Windows | None = None
    attention_scale: Or = None
    whole_norms: bool = False
    softcap: Or = 0.0
    logit_softcap: Or = 0.0
    embedding_scale: Or = 1.0
    causal: bool = True
    experts: Experts | None = None

    def part_of(self, config: Config) -> Config:
        """Return the configuration of the decoder.

        Raises:
            ValueError: there is no such part.
        """
        if self.part is None:
            return config
        part = config.get(self.part)
        if not isinstance(part, Mapping):
            raise ValueError(
                f"init_inference: config has no {self.part!r}, expected it for model_type"
                f" {config.get('model_type')!r}"
            )
        of_whole = "model_type", "tie_word_embeddings"
        inner = {name: value for name, value in part.items() if name not in of_whole}
        return inner | {name: config[name] for name in of_whole if name in config}
