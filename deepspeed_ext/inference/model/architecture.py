"""What a model computes, in numbers: a policy and a configuration put together."""

import math
from dataclasses import dataclass, fields
from typing import Any

from deepspeed_ext.inference.model.expert_sizes import ExpertSizes, expert_sizes_of
from deepspeed_ext.inference.model.policy import (
    LARGEST,
    Config,
    Policy,
    Windows,
    check_size,
    checked_choice,
    checked_number,
    keys_of,
    name_of,
    value_of,
)
from deepspeed_ext.inference.model.positions import Rotation, rotation_of

_ACTIVATIONS = {  # of configurations, as our ops name them
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_MOST = {"head_dim": 256, "layers": 10_000}  # of what kernels take; of what is gone through at once
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # What configurations of many families may say that changes the result, with the values that
    # change nothing: a table that does not read one of them cannot do without these.
    "sliding_window": (),
    "layer_types": ("full_attention",),
    "attention_chunk_size": (),
    "no_rope_layers": (1,),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "clip_qkv": (),
    "qk_layernorm": (False,),
    "use_qk_norm": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "use_parallel_residual": (False,),
    "parallel_attn": (False,),
    "alibi": (False,),
    "rope_interleave": (False,),
    "attn_temperature_tuning": (False,),
    "num_kv_shared_layers": (0,),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "first_k_dense_replace": (0,),
    "moe_layer_freq": (1,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "scoring_func": ("softmax",),
    "routed_scaling_factor": (1,),
    "n_group": (1,),
    "topk_group": (1,),
}
_NOT_OF_DECODERS = ("token_types", "pooler")
_NOT_OF_ENCODERS = (
    *("head", "final_norm", "project_in", "project_out", "q_norm", "k_norm", "sinks"),
)
_LISTS = ("layer_types", "no_rope_layers")  # of which each item counts


@dataclass(frozen=True)
class Architecture:
    """The numbers of one model; see `Policy` for those that it names, too.

    Args:
        layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary: sizes.
        embedding: elements of an embedding.
        context: tokens that it is made for; None for no limit.
        rotations: of each layer, or None.
        windows: of each layer: tokens that a query sees; 0 for all.
        activation: as ``bias_activation`` names it.
        experts: of layers that have some; None: no layer has.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    embedding: int
    context: int | None
    norm: str
    norm_offset: float
    eps: float
    norm_place: str
    parallel: bool
    position: str
    position_offset: int
    position_padding: int | None
    interleaved: bool
    rotations: tuple[Rotation | None, ...]
    windows: tuple[int, ...]
    activation: str
    gated: bool
    attention_scale: float
    softcap: float
    logit_softcap: float
    embedding_scale: float
    causal: bool
    whole_norms: bool = False
    experts: ExpertSizes | None = None


def architecture_of(policy: Policy, config: Config) -> Architecture:
    """Return what a configuration says, by the table of its family.

    Raises:
        ValueError: a value is missing, or is none that the engine knows.
    """
    config = policy.part_of(config)

    def get(name: str) -> Any:
        return value_of(getattr(policy, name), config)

    def number(name: str, above: float | None = None) -> float:
        return checked_number(name_of(getattr(policy, name), config, name), get(name), above)

    def choice(name: str, choices: tuple[Any, ...]) -> Any:
        return checked_choice(name_of(getattr(policy, name), config, name), get(name), choices)

    def cap(name: str) -> float:
        return 0.0 if get(name) is None or get(name) == 0 else number(name, above=0)

    _check_expected(policy, config)
    norm_place = choice("norm_place", ("before", "after", "both"))
    parallel = choice("parallel", (False, True))
    _check_use_of_names(policy, norm_place, parallel)
    sizes = _sizes_of(policy, config)
    windows = windows_of(policy.windows, config, sizes["layers"])
    _check_types(policy, config, windows)
    position = choice("position", ("rotary", "learned", "alibi", "none"))
    if policy.qkv_by_head and sizes["kv_heads"] != sizes["heads"]:
        name = name_of(policy.sizes.kv_heads, config, "kv_heads")
        raise ValueError(
            f"init_inference: {name} is {sizes['kv_heads']}, expected {sizes['heads']}, as many"
            " as heads, where queries, keys and values lie head by head"
        )
    return Architecture(
        **sizes,
        norm=policy.norm,
        norm_offset=number("norm_offset"),
        eps=number("eps", above=0),
        norm_place=norm_place,
        parallel=parallel,
        position=position,
        position_offset=int(number("position_offset")),
        position_padding=_padding_of(policy, config, sizes["vocabulary"]),
        interleaved=choice("interleaved", (False, True)),
        rotations=tuple(
            rotation_of(policy, config, sizes["head_dim"], window > 0)
            if position == "rotary"
            else None
            for window in windows
        ),
        windows=windows,
        activation=_ACTIVATIONS[choice("activation", tuple(_ACTIVATIONS))],
        gated=choice("gated", (False, True)),
        attention_scale=(
            1 / math.sqrt(sizes["head_dim"])
            if get("attention_scale") is None
            else number("attention_scale")
        ),
        softcap=cap("softcap"),
        logit_softcap=cap("logit_softcap"),
        embedding_scale=number("embedding_scale"),
        causal=policy.causal,
        whole_norms=policy.whole_norms,
        experts=expert_sizes_of(policy, config, sizes["layers"]),
    )


def _padding_of(policy: Policy, config: Config, vocabulary: int) -> int | None:
    entry = policy.position_padding
    padding = value_of(entry, config)
    if padding is not None and (type(padding) is not int or not 0 <= padding < vocabulary):
        name = name_of(entry, config, "position_padding")
        raise ValueError(
            f"init_inference: {name} is {padding!r}, expected 0 to {vocabulary - 1}, the number of"
            " a token"
        )
    return padding


def windows_of(table: Windows | None, config: Config, layers: int) -> tuple[int, ...]:
    """Return how many tokens a query sees in each layer; 0 for all."""
    if table is None or not value_of(table.are_used, config):
        return (0,) * layers
    size = value_of(table.size, config)
    if size is None:
        return (0,) * layers
    check_size("sliding_window", size)
    types = config.get("layer_types") if table.by_types else None
    if types is not None:
        _check_length(types, layers)
        for kind in types:
            checked_choice("layer_types", kind, ("full_attention", "sliding_attention"))
        return tuple(size if kind == "sliding_attention" else 0 for kind in types)
    first, period = value_of(table.first, config), value_of(table.period, config)
    behind = value_of(table.behind, config)
    behind = layers if behind is None else behind
    checked_number("max_window_layers", first)
    checked_number("max_window_layers", behind)
    if period is not None:
        check_size("sliding_window_pattern", period)
    has_window = (
        first <= i < behind and (period is None or (i + 1) % period > 0) for i in range(layers)
    )
    return tuple(size if has else 0 for has in has_window)


def _check_length(types: Any, layers: int) -> None:
    if not isinstance(types, (list, tuple)) or len(types) != layers:
        has = len(types) if isinstance(types, (list, tuple)) else repr(types)
        raise ValueError(
            f"init_inference: layer_types has length {has}, expected {layers}, as many as layers"
        )


def _sizes_of(policy: Policy, config: Config) -> dict[str, Any]:
    table = policy.sizes
    sizes = {each.name: value_of(getattr(table, each.name), config) for each in fields(table)}
    told = {name: name_of(getattr(table, name), config, name) for name in sizes}
    for name in ("hidden", "heads"):  # others are worked out from them
        check_size(told[name], sizes[name])
    usual = {
        "kv_heads": sizes["heads"],
        "head_dim": sizes["hidden"] // sizes["heads"],
        "intermediate": 4 * sizes["hidden"],
        "embedding": sizes["hidden"],
    }
    for name, value in usual.items():
        sizes[name] = value if sizes[name] is None else sizes[name]
    for name, value in sizes.items():
        if name != "context" or value is not None:
            check_size(told[name], value, _MOST.get(name, LARGEST))
    if sizes["heads"] % sizes["kv_heads"]:
        raise ValueError(
            f"init_inference: {told['heads']} is {sizes['heads']}, expected a multiple of"
            f" {told['kv_heads']}, {sizes['kv_heads']}"
        )
    return sizes


def _check_expected(policy: Policy, config: Config) -> None:
    """Refuse what would change the result and has no place in the table."""
    read = keys_of(policy)
    wanted = {name: values for name, values in _NEUTRAL.items() if name not in read}
    wanted.update((name, (value,)) for name, value in policy.expects.items())
    if policy.windows is not None:  # looked at layer by layer
        wanted.pop("layer_types", None)
    if config.get("use_sliding_window") is False:
        wanted.pop("sliding_window", None)
    for name, values in wanted.items():
        value = config.get(name)
        items = value if name in _LISTS and isinstance(value, (list, tuple)) else [value]
        for item in items:
            if item is not None and item not in values:
                raise ValueError(
                    f"init_inference: {name} is {item!r}, expected"
                    f" {' or '.join(map(repr, values)) or None}: the table of model_type"
                    f" {config.get('model_type')!r} has no place for it"
                )


def _check_types(policy: Policy, config: Config, windows: tuple[int, ...]) -> None:
    """Refuse types of layers that say more than a table of windows that does not read them."""
    types = config.get("layer_types")
    if policy.windows is None or policy.windows.by_types or types is None:
        return
    _check_length(types, len(windows))
    for kind, window in zip(types, windows, strict=True):
        want = "sliding_attention" if window > 0 else "full_attention"
        if kind != want:
            raise ValueError(
                f"init_inference: layer_types is {kind!r}, expected {want!r}: the table of"
                f" model_type {config.get('model_type')!r} has no place for it"
            )


def _check_use_of_names(policy: Policy, norm_place: str, parallel: bool) -> None:
    """Refuse a table with names of what its blocks would not use.

    A name that a table has not is no danger: the tensor is left over.
    """
    if policy.experts is not None and (parallel or norm_place == "after" or not policy.causal):
        raise ValueError(
            "init_inference: the table has experts, expected none where norm_place is 'after', or"
            " parallel is True, or causal is False"
        )
    if policy.causal and parallel and norm_place != "before":
        raise ValueError(
            f"init_inference: norm_place is {norm_place!r}, expected 'before' where parallel is"
            " True"
        )
    unused: tuple[str, ...] = _NOT_OF_DECODERS if policy.causal else _NOT_OF_ENCODERS
    if norm_place != "both":
        unused += ("attention_post_norm", "mlp_post_norm")
    kind = "a decoder" if policy.causal else "an encoder"
    for name in unused:
        if getattr(policy.names, name) is not None:
            raise ValueError(
                f"init_inference: the table has a name for {name}, expected none of {kind} with"
                f" norm_place {norm_place!r}"
            )
    if policy.causal and policy.position_padding is not None:
        raise ValueError(
            "init_inference: the table has position_padding, expected none of a decoder"
        )
    if policy.causal and policy.names.head is None:
        raise ValueError(
            "init_inference: the table has no name for head, expected one of a decoder"
        )
