"""The config that DeepSpeed's users have: typed, read once, and each key accounted for."""

from deepspeed_ext.config.batch_sizes import BatchSizes
from deepspeed_ext.config.config import Config, read

__all__ = ["BatchSizes", "Config", "read"]
