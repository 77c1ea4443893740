"""What a model computes, in numbers: a policy and a configuration put together."""

import math
from dataclasses import dataclass
from typing import Any

from deepspeed_ext.inference.policy import Config, Policy, value_of
from deepspeed_ext.inference.rotation import Rotation, rotation_of

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
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Architecture:
    """The numbers of one model; see `Policy` for those that it names, too.

    Args:
        layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary: sizes.
        context: tokens that it is made for; None for no limit.
        rotations: of each layer, or None.
        windows: of each layer: tokens that a query sees; 0 for all.
        activation: as ``bias_activation`` names it.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
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


def architecture_of(policy: Policy, config: Config) -> Architecture:
    """Return what a configuration says, by the table of its family.

    Raises:
        ValueError: a value is missing, or is none that the engine knows.
    """

    def get(entry: Any) -> Any:
        return value_of(entry, config)

    for name, wanted in policy.expects.items():
        if config.get(name) not in (None, wanted):
            raise ValueError(f"init_inference: {name} is {config[name]!r}, expected {wanted!r}")
    sizes = {name: get(entry) for name, entry in vars(policy.sizes).items()}
    sizes["kv_heads"] = sizes["kv_heads"] or sizes["heads"]
    sizes["head_dim"] = sizes["head_dim"] or sizes["hidden"] // sizes["heads"]
    sizes["intermediate"] = sizes["intermediate"] or 4 * sizes["hidden"]
    _check_sizes(sizes)
    windows = windows_of(config, sizes["layers"], get(policy.windows))
    position = get(policy.position)
    _check_choice("position", position, ("rotary", "learned", "alibi", "none"))
    norm_place = get(policy.norm_place)
    _check_choice("norm_place", norm_place, ("before", "after", "both"))
    activation = get(policy.activation)
    _check_choice("activation", activation, tuple(_ACTIVATIONS))
    scale, embedding_scale = get(policy.attention_scale), get(policy.embedding_scale)
    return Architecture(
        **sizes,
        norm=policy.norm,
        norm_offset=float(get(policy.norm_offset)),
        eps=float(get(policy.eps)),
        norm_place=norm_place,
        parallel=bool(get(policy.parallel)),
        position=position,
        position_offset=int(get(policy.position_offset)),
        position_padding=get(policy.position_padding),
        interleaved=bool(get(policy.interleaved)),
        rotations=tuple(
            rotation_of(config, sizes["head_dim"], window > 0) if position == "rotary" else None
            for window in windows
        ),
        windows=windows,
        activation=_ACTIVATIONS[activation],
        gated=bool(get(policy.gated)),
        attention_scale=1 / math.sqrt(sizes["head_dim"]) if scale is None else float(scale),
        softcap=float(get(policy.softcap) or 0.0),
        logit_softcap=float(get(policy.logit_softcap) or 0.0),
        embedding_scale=(
            math.sqrt(sizes["hidden"]) if embedding_scale == "sqrt" else float(embedding_scale)
        ),
        causal=policy.causal,
    )


def windows_of(config: Config, layers: int, rule: str | int) -> tuple[int, ...]:
    """Return how many tokens a query sees in each layer; 0 for all.

    Args:
        rule: of the policy, for a configuration without `layer_types`.
    """
    window = config.get("sliding_window")
    types = config.get("layer_types")
    if window is None or config.get("use_sliding_window") is False:
        return (0,) * layers
    if types is not None:
        if len(types) != layers:
            raise ValueError(
                f"init_inference: layer_types has length {len(types)}, expected {layers}, as many"
                " as layers"
            )
        for kind in types:
            _check_choice("layer_types", kind, ("full_attention", "sliding_attention"))
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)
    if rule == "none":
        return (0,) * layers
    if rule == "all":
        return (window,) * layers
    if rule == "even":
        return tuple(0 if i % 2 else window for i in range(layers))
    return tuple(window if (i + 1) % int(rule) else 0 for i in range(layers))


def _check_sizes(sizes: dict[str, Any]) -> None:
    for name, value in sizes.items():
        if name == "context" and value is None:
            continue
        if type(value) is not int or not 0 < value <= _LARGEST:
            raise ValueError(f"init_inference: {name} is {value!r}, expected 1 to 2^31 - 1")
    if sizes["heads"] % sizes["kv_heads"]:
        raise ValueError(
            f"init_inference: heads is {sizes['heads']}, expected a multiple of kv_heads,"
            f" {sizes['kv_heads']}"
        )


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            f"init_inference: {name} is {value!r}, expected one of {', '.join(choices)}"
        )
