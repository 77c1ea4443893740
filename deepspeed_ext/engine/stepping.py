"""One step of an optimizer: unscale, clip, step; of any class, also where a gradient is inf."""

import math
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext import zero
from deepspeed_ext.config import Config
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.zero.torch_steps import clip_and_step


class Stepping:
    """What a config says of a step.

    Args:
        optimizer: any.
        max_norm: gradients are clipped to this global norm; 0: they are not.
        scaler: of the loss, with fp16.
        skips: whether a step with inf or NaN in a gradient is skipped, without fp16; None: by
            optimizers of ours alone.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        scaler: zero.LossScaler | None,
        skips: bool | None = None,
    ) -> None:
        self._optimizer: Any = optimizer
        self._is_ours = isinstance(optimizer, FlatStateOptimizer | OffloadOptimizer)
        self._max_norm = max_norm or math.inf
        self._skips = self._is_ours if skips is None else skips
        self.scaler = scaler
        self.norm: Tensor | None = None  # of the last step's gradients, unscaled and not clipped
        if scaler is not None:
            self._note_overflow(False)

    @property
    def scale(self) -> Tensor | None:
        """That losses of the last step were multiplied by, with fp16."""
        return None if self.scaler is None else self.scaler.scale_in_use

    def _note_overflow(self, was_skipped: bool) -> None:
        """Tell accelerate, which asks the optimizer whether the last step was skipped."""
        self._optimizer.overflow = was_skipped

    def step(self) -> bool | Tensor:
        """Take a step, or skip it, and drop the gradients.

        Returns:
            whether it was taken; a tensor on a GPU that nobody has waited for.
        """
        try:
            return self._step()
        finally:
            self._optimizer.zero_grad()

    def _step(self) -> bool | Tensor:
        if self.scaler is not None:
            try:
                was_taken = self.scaler.step(self._optimizer, self._max_norm)
            finally:
                self.norm = self.scaler.grad_norm
            self._note_overflow(not was_taken)
            return was_taken
        if self._is_ours and self._skips:
            norm = self.norm = self._optimizer.clip_and_step(self._max_norm)
        else:
            norm = self.norm = clip_and_step(self._optimizer, self._max_norm, skips=self._skips)
        if not self._skips:
            return True
        return norm.isfinite() if norm.is_cuda else math.isfinite(norm)


def scaler_of(config: Config) -> zero.LossScaler | None:
    """Return what scales the loss, as the block fp16 says; None without it."""
    fp16 = config.fp16
    if not fp16.enabled:
        return None
    if fp16.loss_scale:
        return zero.LossScaler(
            fp16.loss_scale, growth_interval=None, min_scale=min(1.0, fp16.loss_scale)
        )
    return zero.LossScaler(
        2.0**fp16.initial_scale_power,
        growth_interval=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        min_scale=fp16.min_loss_scale,
    )
