"""Which engine a parameter belongs to, and what DeepSpeed calls the classes around an engine."""

import weakref
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.engine import Engine

DeepSpeedEngine = Engine
DeepSpeedOptimizer = torch.optim.Optimizer
ZeRORuntimeException = RuntimeError
_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()  # of the whole process


def note_engine(engine: Engine) -> None:
    """Let `optimizer_of` find the parameters of an engine while it lives."""
    _engines.add(engine)


def optimizer_of(param: Tensor) -> Any:
    """Return the optimizer of the engine that steps a parameter, or None."""
    for engine in list(_engines):
        optimizer = engine.optimizer
        groups = optimizer.param_groups if optimizer is not None else []
        if any(param is each for group in groups for each in group["params"]):
            return optimizer
    return None
