"""What torch.compile is asked for, checked before anything is sharded or compiled."""

from collections.abc import Mapping
from typing import Any

from torch import nn


def checked_kwargs(op: str, backend: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of Module.compile.

    Args:
        op: for the text of an error.
        backend: a name that torch.compile knows, or a function.
        kwargs: other arguments of torch.compile.

    Raises:
        ValueError: torch.compile does not take them, or they ask for one graph of the whole model.
    """
    if kwargs.get("fullgraph"):
        raise ValueError(
            f"{op}: fullgraph is {kwargs['fullgraph']}, expected false, as blocks are gathered"
            " between graphs"
        )
    made = {**kwargs, "backend": backend}
    try:
        nn.Identity().compile(**made)  # of which torch looks at all but compiles nothing
    except (TypeError, RuntimeError, ValueError) as error:
        raise ValueError(f"{op}: torch.compile takes no {made}: {error}") from error
    return made
