"""The engine: what DeepSpeed's scripts call, a face over zero, optim and offload."""

from deepspeed_ext.engine.engine import Engine
from deepspeed_ext.engine.making import initialize

__all__ = ["Engine", "initialize"]
