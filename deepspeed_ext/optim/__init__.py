"""Optimizers: plain `torch.optim.Optimizer` classes whose steps are compiled ops."""

from deepspeed_ext.optim.adam import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
