"""ZeRO as settings of torch's fully_shard, with what it lacks around it.

- shard, accumulate, Accumulation: the stages, and the micro-steps of a step.
- stream: blocks whose weights rest in host memory or on a disk, for one process.
- Init: models that never stand whole anywhere. GatheredParameters: whole parameters for a while.
- LossScaler: for gradients of float16.
- save, load, inspect: checkpoints for any number of processes. consolidate: the model of one in
  safetensors files. Writer, Reader: the same for users of DCP.
- import_deepspeed, import_deepspeed_weights: checkpoints of DeepSpeed, to go on from or as weights.
  export_deepspeed: the way back.
"""

from deepspeed_ext.zero.accumulate import Accumulation, accumulate
from deepspeed_ext.zero.checkpoint.consolidate import consolidate
from deepspeed_ext.zero.checkpoint.saving import inspect, save
from deepspeed_ext.zero.checkpoint.storage import Reader, Writer
from deepspeed_ext.zero.deepspeed_folders.exporting import export_deepspeed
from deepspeed_ext.zero.deepspeed_folders.importing import (
    import_deepspeed,
    import_deepspeed_weights,
)
from deepspeed_ext.zero.gather import GatheredParameters
from deepspeed_ext.zero.init import Init
from deepspeed_ext.zero.loading import load
from deepspeed_ext.zero.scaling import LossScaler
from deepspeed_ext.zero.stages import shard
from deepspeed_ext.zero.streaming import Stream, stream

__all__ = [
    "Accumulation",
    "GatheredParameters",
    "Init",
    "LossScaler",
    "Reader",
    "Stream",
    "Writer",
    "accumulate",
    "consolidate",
    "export_deepspeed",
    "import_deepspeed",
    "import_deepspeed_weights",
    "inspect",
    "load",
    "save",
    "shard",
    "stream",
]
