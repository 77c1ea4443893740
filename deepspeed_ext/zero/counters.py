"""What a checkpoint tells of its run: one of an engine, or DeepSpeed's, or of zero.save alone."""

from collections.abc import Mapping
from typing import Any

COUNTERS = ("global_steps", "skipped_steps", "global_samples", "micro_steps")
ENGINE, CLIENT = "engine", "client"  # what an engine calls its counters and its client's state


def told(found: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the counters of a run, those that are told, and all else.

    Args:
        found: the client_state of a checkpoint. An engine's counters stand apart there; others',
            as those of DeepSpeed's folders, stand among what the client saved.
    """
    rest = dict(found)
    own = rest.get(ENGINE)
    if isinstance(own, dict) and own.keys() == set(COUNTERS):  # a client may have such a name too
        del rest[ENGINE]
        return own, {**rest.pop(CLIENT), **rest}
    return {name: rest.pop(name) for name in COUNTERS if name in rest}, rest
