"""Optimizer state in host memory: stepped there, beside backward and forward on the device."""

from deepspeed_ext.offload.estimate import Estimate, estimate
from deepspeed_ext.offload.optimizer import OffloadOptimizer

__all__ = ["Estimate", "OffloadOptimizer", "estimate"]
