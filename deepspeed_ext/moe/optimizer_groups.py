"""Groups of parameters, as optimizers of layers of experts get them."""

from typing import Any


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Any, max_group_size: int | float | None = None
) -> tuple[Any, ...]:
    """Return groups of parameters as they are.

    DeepSpeed has an optimizer keep experts apart, as each process has others there. Here they are
    parts of the same parameters, so that optimizers need not know of them.

    Args:
        param_groups: a dict with "params", or some.
        max_group_size: nothing is split.

    Returns:
        A tuple of them.
    """
    return (param_groups,) if isinstance(param_groups, dict) else tuple(param_groups)
