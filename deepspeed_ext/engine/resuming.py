"""The counters of an engine that goes on from a checkpoint which may not tell them all."""

from collections.abc import Mapping

from deepspeed_ext.config import BatchSizes


def counted(told: Mapping[str, int], sizes: BatchSizes) -> dict[str, int]:
    """Return all counters: DeepSpeed does not tell the micro-steps, nor zero.save any of them.

    Args:
        told: those that the checkpoint has.
        sizes: of this run, by which the others are counted.
    """
    steps = told.get("global_steps", 0)
    by_sizes = {
        "global_steps": steps,
        "skipped_steps": 0,
        "global_samples": steps * sizes.train,
        "micro_steps": steps * sizes.steps,
    }
    return by_sizes | dict(told)
