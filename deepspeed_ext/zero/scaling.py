"""LossScaler: gradients of float16 that neither vanish nor overflow."""

import math
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim.base import SlabOptimizer

_OP = "zero.LossScaler"


class LossScaler:
    """Multiply the loss by a number, and divide the gradients by the same in the step.

        scaler.scale(loss).backward()
        if scaler.step(optimizer, max_norm=1.0):
            scheduler.step()

    inf or NaN in any gradient of any process makes all of them skip the step, and the next ones
    use a smaller scale. That is decided on the device, from the norm that the step takes anyway,
    and the host reads once a step. The scale that gradients were made with is the one that they are
    divided by.

    Args:
        init_scale: the first scale.
        growth_interval: so many steps in a row without inf make the scale grow; None: it is static.
        growth_factor: by which it grows, above 1.
        backoff_factor: by which it shrinks, above 0 and below 1.
        hysteresis: a step with inf shrinks the scale if hysteresis - 1 others had inf since the
            scale last grew; those were skipped only.
        min_scale: it shrinks to this at least.

    Raises:
        ValueError: an argument is out of range.

    See: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        *,
        growth_interval: int | None = 1000,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        hysteresis: int = 2,
        min_scale: float = 1.0,
    ) -> None:
        _check("growth_factor", growth_factor, "a number above 1", 1 < growth_factor < math.inf)
        _check("backoff_factor", backoff_factor, "a number between 0 and 1", 0 < backoff_factor < 1)
        _check("hysteresis", hysteresis, "a whole number above 0", _is_count(hysteresis))
        _check("min_scale", min_scale, "a number above 0", 0 < min_scale < math.inf)
        is_scale = min_scale <= init_scale <= _LARGEST
        _check("init_scale", init_scale, f"min_scale, {min_scale}, to {_LARGEST}", is_scale)
        is_interval = growth_interval is None or _is_count(growth_interval)
        _check("growth_interval", growth_interval, "a whole number above 0, or None", is_interval)
        self.growth_interval = growth_interval
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.hysteresis = hysteresis
        self.min_scale = min_scale
        self._scale = torch.tensor(float(init_scale), device="cpu")
        self._good_steps = torch.tensor(0, device="cpu")
        self._left = torch.tensor(hysteresis, device="cpu")

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, without waiting for the device."""
        self._move(loss.device)
        return loss * self._scale.to(loss.dtype)

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float = math.inf) -> bool:
        """Unscale, clip and step in one pass, unless a gradient has inf or NaN; update the scale.

        All processes that hold shards of the parameters call it.

        Args:
            optimizer: of this package; see its `clip_and_step`.
            max_norm: the largest norm of unscaled gradients to leave as it is; inf: do not clip.

        Returns:
            Whether it stepped.

        Raises:
            TypeError: the optimizer has no clip_and_step that unscales.
            FloatingPointError: nothing was stepped, and the scale cannot shrink.
        """
        if not isinstance(optimizer, SlabOptimizer | OffloadOptimizer):
            raise TypeError(
                f"{_OP}: optimizer is a {type(optimizer).__name__}, expected one of deepspeed_ext;"
                " torch's work with torch.amp.GradScaler"
            )
        attributes: Any = optimizer
        attributes.grad_scale = self._scale
        try:
            norm = optimizer.clip_and_step(max_norm)
        finally:
            del attributes.grad_scale
        self._move(norm.device)
        found_inf = norm.isfinite().logical_not()
        is_stuck = found_inf.logical_and(self._is_smallest())
        self._update(found_inf)
        skipped, stuck = torch.stack((found_inf, is_stuck)).tolist()  # the one host read
        if stuck:
            raise FloatingPointError(
                f"{_OP}: a gradient is inf or NaN, expected finite ones with the smallest scale,"
                f" {self._scale.item()}; nothing was stepped: the loss itself may be NaN"
            )
        return not skipped

    def get_scale(self) -> float:
        """Return the scale; waits for the device."""
        return self._scale.item()

    def state_dict(self) -> dict[str, float]:
        """Return what goes on with the next step, plain numbers; waits for the device."""
        return {
            "scale": self._scale.item(),
            "good_steps": self._good_steps.item(),
            "hysteresis_left": self._left.item(),
        }

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Go on from what `state_dict` returned; options stay those of the constructor.

        Raises:
            ValueError: a number is missing or out of range; nothing has changed then.
        """
        keys = {"scale", "good_steps", "hysteresis_left"}
        if state_dict.keys() != keys:
            raise ValueError(
                f"{_OP}: state_dict has keys {sorted(state_dict)}, expected {sorted(keys)}"
            )
        scale, good = state_dict["scale"], state_dict["good_steps"]
        left = state_dict["hysteresis_left"]
        _check("scale", scale, f"a number above 0, to {_LARGEST}", 0 < scale <= _LARGEST)
        _check("good_steps", good, "a whole number", good == 0 or _is_count(good))
        _check("hysteresis_left", left, "a whole number above 0", _is_count(left))
        device = self._scale.device
        self._scale = torch.tensor(float(scale), device=device)
        self._good_steps = torch.tensor(good, device=device)
        self._left = torch.tensor(min(left, self.hysteresis), device=device)

    def _is_smallest(self) -> Tensor:
        if self.growth_interval is None:
            return torch.zeros_like(self._scale, dtype=torch.bool)
        return self._scale <= self.min_scale

    def _update(self, found_inf: Tensor) -> None:
        """Compute all anew: a step that is still under way has the tensors as they are."""
        if self.growth_interval is None:
            return
        shrinks = found_inf.logical_and(self._left <= 1)
        good = torch.where(found_inf, 0, self._good_steps + 1)
        grown = self._scale * self.growth_factor
        grows = (good >= self.growth_interval).logical_and(grown <= _LARGEST)
        smaller = (self._scale * self.backoff_factor).clamp(min=self.min_scale)
        self._scale = torch.where(shrinks, smaller, torch.where(grows, grown, self._scale))
        fewer = (self._left - found_inf.to(self._left.dtype)).clamp(min=1)
        self._left = torch.where(grows, self.hysteresis, fewer)
        self._good_steps = torch.where(grows, 0, good)

    def _move(self, device: torch.device) -> None:
        if self._scale.device != device:
            self._scale = self._scale.to(device)
            self._good_steps = self._good_steps.to(device)
            self._left = self._left.to(device)


_LARGEST = 2.0**126  # its inverse is a normal float32


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check(name: str, value: object, expected: str, fits: bool) -> None:
    if not fits:
        raise ValueError(f"{_OP}: {name} is {value!r}, expected {expected}")
