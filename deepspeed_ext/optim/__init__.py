"""Optimizers: plain `torch.optim.Optimizer` classes with compiled steps; schedules for them."""

from deepspeed_ext.optim.adagrad import DeepSpeedCPUAdagrad, FusedAdagrad
from deepspeed_ext.optim.adam import CPUAdam, DeepSpeedCPUAdam, FusedAdam, HybridAdam
from deepspeed_ext.optim.lamb import FusedLamb
from deepspeed_ext.optim.lars import Lars
from deepspeed_ext.optim.lion import DeepSpeedCPULion, FusedLion
from deepspeed_ext.optim.rmsprop import FusedRMSprop
from deepspeed_ext.optim.schedules import (
    SCHEDULES,
    LRRangeTest,
    OneCycle,
    Schedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from deepspeed_ext.optim.sgd import FusedSGD

__all__ = [
    "SCHEDULES",
    "CPUAdam",
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "FusedRMSprop",
    "FusedSGD",
    "HybridAdam",
    "LRRangeTest",
    "Lars",
    "OneCycle",
    "Schedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
]
