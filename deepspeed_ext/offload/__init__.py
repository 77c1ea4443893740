"""Memory that a device has not: optimizer state and saved tensors in host memory and on disk.

- OffloadOptimizer, estimate, Timeline: state, stepped there, beside backward and forward.
- saved_tensors, checkpoint: what autograd saves, until backward wants it.
"""

from deepspeed_ext.offload.activations.checkpointing import checkpoint
from deepspeed_ext.offload.activations.saved_tensors import SavedTensors, saved_tensors
from deepspeed_ext.offload.memory_estimate import Estimate, estimate
from deepspeed_ext.offload.optimizer import OffloadOptimizer
from deepspeed_ext.offload.timeline import Timeline

__all__ = [
    "Estimate",
    "OffloadOptimizer",
    "SavedTensors",
    "Timeline",
    "checkpoint",
    "estimate",
    "saved_tensors",
]
