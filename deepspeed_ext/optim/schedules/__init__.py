"""Learning-rate schedules of DeepSpeed's configs, as torch schedulers of closed formulas."""

from collections.abc import Mapping
from types import MappingProxyType

from deepspeed_ext.optim.schedules.base import Schedule
from deepspeed_ext.optim.schedules.one_cycle import OneCycle
from deepspeed_ext.optim.schedules.range_test import LRRangeTest
from deepspeed_ext.optim.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "Schedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
]

SCHEDULES: Mapping[str, type[Schedule]] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
    }
)
