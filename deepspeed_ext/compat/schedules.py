"""Constants of deepspeed.runtime.lr_schedules: the names of schedules and of their arguments."""

import inspect

from deepspeed_ext.optim.schedules import SCHEDULES

VALID_LR_SCHEDULES = list(SCHEDULES)
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = VALID_LR_SCHEDULES
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
_ARGUMENTS = {name for kind in SCHEDULES.values() for name in inspect.signature(kind).parameters}


def __getattr__(name: str) -> str:
    """Return the name of an argument: WARMUP_MIN_LR is "warmup_min_lr"."""
    if name == name.upper() and name.lower() in _ARGUMENTS:
        return name.lower()
    raise AttributeError(f"{__name__} has no {name!r}")
