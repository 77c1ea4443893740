"""The numbers of a model's experts, and which of its layers have some."""

from dataclasses import dataclass
from typing import Any

from deepspeed_ext.inference.model.policy import (
    Config,
    Experts,
    Policy,
    check_size,
    checked_choice,
    checked_number,
    name_of,
    value_of,
)

_MOST = 1024  # experts, as ops take them
_SCORES = ("softmax", "sigmoid", "softmax_topk")


@dataclass(frozen=True)
class ExpertSizes:
    """What `Experts` says of one model.

    Args:
        count, chosen, intermediate, score, normalize, limit, shared: see `Experts`.
        layers: whether each layer has experts.
    """

    count: int
    chosen: int
    intermediate: int
    score: str
    normalize: bool
    limit: float | None
    shared: int
    layers: tuple[bool, ...]


def expert_sizes_of(policy: Policy, config: Config, layers: int) -> ExpertSizes | None:
    """Return the numbers of a model's experts; None if its family has none.

    Args:
        policy: of the family.
        config: of the model, or of the part that the policy names.
        layers: of the model.

    Raises:
        ValueError: a value is missing, or is none that the engine knows.
    """
    table = policy.experts
    if table is None:
        return None

    def get(name: str) -> tuple[str, Any]:
        entry = getattr(table, name)
        return name_of(entry, config, name), value_of(entry, config)

    def size(name: str, most: int = 2**31 - 1, least: int = 1) -> int:
        told, value = get(name)
        check_size(told, value, most, least)
        return int(value)

    count = size("count", _MOST)
    _check_names(table)
    told, limit = get("limit")
    return ExpertSizes(
        count=count,
        chosen=size("chosen", count),
        intermediate=size("intermediate"),
        score=checked_choice(*get("score"), _SCORES),
        normalize=checked_choice(*get("normalize"), (False, True)),
        limit=None if limit is None else checked_number(told, limit, above=0),
        shared=size("shared", least=0),
        layers=_layers_of(*get("dense"), size("first", least=0), size("period"), layers),
    )


def _layers_of(told: str, dense: Any, first: int, period: int, layers: int) -> tuple[bool, ...]:
    """Return whether each layer has experts."""
    dense = () if dense is None else dense
    if not isinstance(dense, (list, tuple)) or any(type(each) is not int for each in dense):
        raise ValueError(f"init_inference: {told} is {dense!r:.60}, expected numbers of layers")
    return tuple(i >= first and (i + 1) % period == 0 and i not in dense for i in range(layers))


def _check_names(table: Experts) -> None:
    """Refuse names that blocks would not use, or would miss."""
    for names in table.names:
        each = ["{}" in name for name in (*names.up, names.down)]
        if any(each) != all(each):
            raise ValueError(
                f"init_inference: the table has {names.up[0]} beside {names.down}, expected {{}} in"
                " the names of all tensors of experts, or of none"
            )
    if _is_given(table.shared) != bool(table.shared_up and table.shared_down):
        raise ValueError(
            "init_inference: the table has shared without names, or names without it, expected"
            " shared, shared_up and shared_down"
        )


def _is_given(entry: Any) -> bool:
    """Tell whether a table says a size."""
    return not isinstance(entry, int) or entry > 0
