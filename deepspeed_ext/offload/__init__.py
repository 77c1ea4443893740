"""Optimizer state in host memory: stepped there, beside backward and forward on the device."""

from deepspeed_ext.offload.memory_estimate import Estimate, estimate
from deepspeed_ext.offload.optimizer import OffloadOptimizer
from deepspeed_ext.offload.timeline import Timeline

__all__ = ["Estimate", "OffloadOptimizer", "Timeline", "estimate"]
