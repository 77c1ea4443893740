"""What DeepSpeed's users read of the scale of the loss, at `optimizer.loss_scaler`."""

import weakref
from typing import Any, Protocol

import torch

from deepspeed_ext import zero


class Counting(Protocol):
    """An engine."""

    global_steps: int


class LossScale:
    """The scale of the loss under the names of DeepSpeed's scalers; nothing is set by it.

    Args:
        scaler: what scales; None: nothing does, as without fp16.
        engine: whose loss it is; not kept alive.
    """

    def __init__(self, scaler: zero.LossScaler | None, engine: Counting) -> None:
        self._scaler = scaler
        self._engine = weakref.ref(engine)

    def __repr__(self) -> str:
        return f"LossScale(cur_scale={self.cur_scale:g}, cur_iter={self.cur_iter})"

    @property
    def cur_iter(self) -> int:
        """Steps of the engine that were taken or skipped; 0 when it is gone."""
        engine = self._engine()
        return 0 if engine is None else engine.global_steps

    @property
    def cur_scale(self) -> float:
        """That the next step begins with, 1 without fp16; waits for the device."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    loss_scale = cur_scale

    @property
    def dynamic(self) -> bool:
        """Whether it follows overflows."""
        return self.scale_window is not None

    dynamic_loss_scale = dynamic

    @property
    def scale_window(self) -> int | None:
        """So many steps without overflow let it grow; None: it stays."""
        return None if self._scaler is None else self._scaler.growth_interval

    @property
    def scale_factor(self) -> float | None:
        """By which it grows."""
        return self._scaler.growth_factor if self._scaler is not None and self.dynamic else None

    @property
    def min_scale(self) -> float | None:
        """It is never below this."""
        return self._scaler.min_scale if self._scaler is not None and self.dynamic else None

    min_loss_scale = min_scale

    @property
    def cur_hysteresis(self) -> int | None:
        """So many overflows let it shrink; waits for the device."""
        if self._scaler is None or not self.dynamic:
            return None
        return int(self._scaler.state_dict()["hysteresis_left"])


def show_scale(optimizer: torch.optim.Optimizer, scale: LossScale) -> None:
    """Let it be found where wrappers of optimizers have it in DeepSpeed."""
    shown: dict[str, Any] = vars(optimizer)
    shown["loss_scaler"] = shown["loss_scale_config"] = scale
    shown["dynamic_loss_scale"] = scale.dynamic
