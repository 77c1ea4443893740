"""How a model turns queries and keys by their positions, as its configuration says."""

from typing import Any, NamedTuple

from torch import Tensor

from deepspeed_ext.inference.policy import Config
from deepspeed_ext.ops import rope_frequencies, rope_frequencies_llama3


class Rotation(NamedTuple):
    """What ``rope`` takes.

    Args:
        frequencies: (pairs,), float64.
        scale: of what turns.
    """

    frequencies: Tensor
    scale: float


def rotation_of(config: Config, head_dim: int, is_local: bool) -> Rotation:
    """Return the rotation of layers.

    Args:
        config: has `rope_parameters`, or `rope_theta` and `rope_scaling`.
        head_dim: elements of a head.
        is_local: whether the layers see a window only.

    Raises:
        ValueError: the rule is not known.
    """
    rules = _rules_of(config, is_local)
    width = int(head_dim * float(rules.get("partial_rotary_factor") or 1.0))
    base = float(rules["rope_theta"])
    kind = rules.get("rope_type") or rules.get("type") or "default"
    if kind == "default":
        return Rotation(rope_frequencies(width, base=base), 1.0)
    if kind == "linear":
        return Rotation(rope_frequencies(width, base=base, factor=float(rules["factor"])), 1.0)
    if kind == "llama3":
        frequencies = rope_frequencies_llama3(
            width,
            factor=rules["factor"],
            original_max_position_embeddings=rules["original_max_position_embeddings"],
            low_freq_factor=rules["low_freq_factor"],
            high_freq_factor=rules["high_freq_factor"],
            base=base,
        )
        return Rotation(frequencies, 1.0)
    raise ValueError(f"init_inference: rope_type is {kind!r}, expected default, linear or llama3")


def _rules_of(config: Config, is_local: bool) -> dict[str, Any]:
    """Return the parameters in one form, whichever the configuration has them in."""
    rules = dict(config.get("rope_parameters") or {})
    kind = "sliding_attention" if is_local else "full_attention"
    if kind in rules:
        rules = dict(rules[kind])
    if not rules:
        rules = dict(config.get("rope_scaling") or {})
    rules.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    factor = config.get("partial_rotary_factor") or config.get("rotary_pct")
    rules.setdefault("partial_rotary_factor", factor)
    return rules
