"""What positions do to queries, keys and scores, as a policy and a configuration say."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from deepspeed_ext.inference.model.policy import Config, Key, Policy, checked_number, value_of
from deepspeed_ext.ops import (
    rope_frequencies,
    rope_frequencies_llama3,
    rope_frequencies_yarn,
    rope_scale_yarn,
)

_TYPES = ("full_attention", "sliding_attention")  # of layers, where rules are given for each
_SHARE = "partial_rotary_factor"
_USUAL = ("rope_type", "type", "rope_theta", _SHARE, "finetuned")  # the last is but told
_TRAINED = "original_max_position_embeddings"


class Rotation(NamedTuple):
    """What ``rope`` takes.

    Args:
        frequencies: (pairs,), float64.
        scale: of what turns.
    """

    frequencies: Tensor
    scale: float


class _Rule(NamedTuple):
    """A way to scale frequencies: what it must and may be given, and what it makes of that."""

    needed: tuple[str, ...]
    others: tuple[str, ...]
    of: Callable[..., Rotation]


def _linear(width: int, base: float, *, factor: float = 1.0, **others: Any) -> Rotation:
    return Rotation(rope_frequencies(width, base=base, factor=factor), 1.0)


def _llama3(width: int, base: float, **options: Any) -> Rotation:
    return Rotation(rope_frequencies_llama3(width, base=base, **options), 1.0)


def _yarn(
    width: int,
    base: float,
    *,
    factor: float,
    attention_factor: float | None = None,
    mscale: float = 0.0,
    mscale_all_dim: float = 0.0,
    **options: Any,
) -> Rotation:
    frequencies = rope_frequencies_yarn(width, base=base, factor=factor, **options)
    if attention_factor is not None:
        return Rotation(frequencies, attention_factor)
    if mscale and mscale_all_dim:  # else neither counts
        scale = rope_scale_yarn(factor, mscale=mscale, mscale_all_dim=mscale_all_dim)
        return Rotation(frequencies, scale)
    return Rotation(frequencies, rope_scale_yarn(factor))


_RULES = {
    "default": _Rule((), (_TRAINED,), lambda width, base, **others: _linear(width, base)),
    "linear": _Rule(("factor",), (_TRAINED,), _linear),
    "llama3": _Rule(("factor", "low_freq_factor", "high_freq_factor", _TRAINED), (), _llama3),
    "yarn": _Rule(
        ("factor", _TRAINED),
        ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"),
        _yarn,
    ),
}


def rotation_of(policy: Policy, config: Config, head_dim: int, is_local: bool) -> Rotation:
    """Return the rotation of layers.

    Args:
        policy: says what counts where the configuration is silent.
        config: has `rope_parameters`, for all layers or for each of their types, or older names.
        head_dim: elements of a head.
        is_local: whether the layers see a window only.

    Raises:
        ValueError: the rule is not known, or is given something that is not.
    """
    given = _rules_of(policy, config, is_local)
    kind = given.get("rope_type") or given.get("type") or "default"
    if not isinstance(kind, str) or kind not in _RULES:
        raise ValueError(
            f"init_inference: rope_type is {kind!r}, expected one of {', '.join(_RULES)}"
        )
    rule = _RULES[kind]
    options = {}
    for name, value in given.items():
        if name in rule.needed + rule.others and value is not None:
            options[name] = value if name == "truncate" else checked_number(name, value)
        elif name not in _USUAL and value is not None:
            raise ValueError(
                f"init_inference: rope_parameters has {name!r}, expected nothing of this name for"
                f" rope_type {kind!r}"
            )
    missing = [name for name in rule.needed if name not in options]
    if missing:
        raise ValueError(
            f"init_inference: rope_parameters has no {missing[0]!r}, expected it for rope_type"
            f" {kind!r}"
        )
    share = checked_number(_SHARE, given[_SHARE], above=0, most=1)
    base = checked_number("rope_theta", given["rope_theta"], above=0)
    return rule.of(int(head_dim * share), base, **options)


def _rules_of(policy: Policy, config: Config, is_local: bool) -> dict[str, Any]:
    """Return the parameters in one form, whichever the configuration has them in."""
    local_base = value_of(policy.rope_local_base, config)
    has_own = is_local and local_base is not None
    given, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    both = given and isinstance(given, Mapping) and isinstance(scaling, Mapping)
    if both and any(name not in given or given[name] != scaling[name] for name in scaling):
        raise ValueError(
            f"init_inference: rope_scaling is {scaling!r}, expected what rope_parameters has"
        )
    given = given or scaling or policy.rope_rules
    if not isinstance(given, Mapping):
        raise ValueError(f"init_inference: rope_parameters is {given!r}, expected names and values")
    by_type = any(kind in given for kind in _TYPES)
    if by_type:
        kind = _TYPES[is_local]
        given = given.get(kind) or ({} if local_base is not None else None)
        if not isinstance(given, Mapping):
            raise ValueError(
                f"init_inference: rope_parameters has no {kind!r}, expected it for layers of this"
                " type"
            )
    elif has_own:
        given = {}
    rules = dict(given)
    if rules.get("rope_theta") is None:
        rules["rope_theta"] = local_base if has_own else value_of(policy.rope_base, config)
    share = value_of(policy.rope_share, config)
    if not isinstance(policy.rope_share, Key):  # the family has one whatever is said
        for said in (rules.get(_SHARE), config.get(_SHARE)):
            if said is not None and said != share:
                raise ValueError(
                    f"init_inference: {_SHARE} is {said!r}, expected {share}: the table of"
                    f" model_type {config.get('model_type')!r} has no place for it"
                )
    if rules.get(_SHARE) is None:
        rules[_SHARE] = share
    trained = None if by_type else config.get(_TRAINED)
    trained = trained or rules.get(_TRAINED) or config.get("max_position_embeddings")
    if trained is not None:
        rules[_TRAINED] = trained
    return rules


def alibi_slopes(heads: int) -> list[float]:
    """Return by how much each head lowers the score of a key for each token that it is away.

    A power of two has a geometric sequence that ends at 2^-8. Other numbers have that of the power
    below, and every second one of the power above.

    See: Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length
    Extrapolation", 2022, section 3, and, for other numbers, the code that was published with it.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]
