"""ZeRO as settings of torch's fully_shard, with what it lacks around it.

- shard, accumulate: the stages, and the micro-steps of a step.
"""

from deepspeed_ext.zero.accumulate import accumulate
from deepspeed_ext.zero.stages import shard

__all__ = ["accumulate", "shard"]
