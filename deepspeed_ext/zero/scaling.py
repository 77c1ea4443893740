"""LossScaler: gradients of float16 that neither vanish nor overflow."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor

from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.torch_internals.tensors import version_of
from deepspeed_ext.zero.torch_steps import clip_and_step

_OP = "zero.LossScaler"
_log = logging.getLogger("deepspeed_ext")
Stamps = dict[int, tuple[ref[Tensor], int]]  # by the identity of the parameter


class LossScaler:
    """Multiply the loss by a number, and divide the gradients by the same in the step.

        scaler.scale(loss).backward()
        if scaler.step(optimizer, max_norm=1.0):
            scheduler.step()

    inf or NaN in any gradient of any process makes all of them skip the step, and the next ones
    use a smaller scale. That is decided on the device, from the norm that the step takes anyway,
    and the host reads once a step. The scale that gradients were made with is the one that they are
    divided by: with several optimizers it moves once in an iteration, and inf in any counts. The
    next one begins where `scale` is called when all that stepped in the one before have stepped,
    or, with no call of it in between, where one of them steps again; and not while one of them
    has gradients that it has not stepped. An optimizer is known from its first step on.

    Args:
        init_scale: the first scale.
        growth_interval: so many steps in a row without inf make the scale grow; None: it is static.
        growth_factor: by which it grows, above 1.
        backoff_factor: by which it shrinks, above 0 and below 1.
        hysteresis: a step with inf shrinks the scale if hysteresis - 1 others had inf since the
            scale last grew; those were skipped only.
        min_scale: it shrinks to this at least.
        optimizers: that will step, where the first step of one comes after several of another.

    Attributes:
        grad_norm: what clip_and_step of the last step returned; None before the first.

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
        optimizers: Iterable[torch.optim.Optimizer] = (),
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
        self.grad_norm: Tensor | None = None
        self._found: list[Tensor] = []  # inf or NaN, in iterations that have not moved the scale
        self._stepped: WeakSet[torch.optim.Optimizer] = WeakSet()  # in this iteration
        self._expected: WeakSet[torch.optim.Optimizer] = WeakSet()  # those of the one before
        self._is_given = False  # the scale was, since the last step
        self._known = WeakSet(optimizers)
        # Gradients as the last step has seen them, which are not to be stepped again.
        self._consumed: WeakKeyDictionary[torch.optim.Optimizer, Stamps] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy goes on with: of no optimizers, which it has not stepped."""
        scale, good, left = self._next()
        kept = {"_scale": scale, "_good_steps": good, "_left": left, "_is_given": False}
        state = {**vars(self), **kept, "_found": []}
        return {key: value for key, value in state.items() if key not in _OF_OPTIMIZERS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, **{key: made() for key, made in _OF_OPTIMIZERS.items()})

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, in float32 or more, without waiting for the device.

        A loss of float16 has a gradient of float16, in which a scale above 65504 is inf: a dynamic
        scale shrinks until it fits.

        Raises:
            ValueError: the scale is static and does not fit.
        """
        self._move(loss.device)
        is_over = all(optimizer in self._stepped for optimizer in self._expected)
        if is_over and not self._is_awaited():
            self._begin_iteration()
        self._is_given = True
        if loss.dtype is torch.float16 and self.growth_interval is None:
            scale, largest = self._scale.item(), torch.finfo(torch.float16).max
            expected = f"at most {largest}, as a loss of float16 has a gradient of it; or a float32"
            _check("the static scale", scale, f"{expected} loss", scale <= largest)
        return loss * self._scale.to(torch.promote_types(loss.dtype, torch.float32))

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float | None = None) -> bool:
        """Unscale, clip and step in one pass, unless a gradient has inf or NaN; update the scale.

        All processes that hold shards of the parameters call it.

        Args:
            optimizer: any. Those of this package do all in one pass, see `clip_and_step`; of
                others the gradients are written, and the host reads the norm before they step.
            max_norm: the largest norm of unscaled gradients to leave as it is; inf: do not clip;
                None: as the optimizer's own max_grad_norm says, if it has one.

        Returns:
            Whether it stepped.

        Raises:
            TypeError: that is no optimizer.
            FloatingPointError: nothing was stepped, and the scale cannot shrink.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"{_OP}: optimizer is a {type(optimizer).__name__}, expected a"
                " torch.optim.Optimizer"
            )
        steps_again = optimizer in self._stepped
        if steps_again:
            if self._is_given or self._is_awaited(optimizer):  # gradients are of the scale that is
                self._expected = WeakSet(self._stepped)
                self._stepped.clear()
            else:
                self._begin_iteration()
        if max_norm is None:
            own = optimizer.max_grad_norm if isinstance(optimizer, OffloadOptimizer) else None
            max_norm = math.inf if own is None else own
        norm = self.grad_norm = self._take(optimizer, max_norm)
        self._move(norm.device)
        found_inf = norm.isfinite().logical_not()
        is_stuck = found_inf.logical_and(self._is_smallest())
        if not self._stepped:
            self._found.append(found_inf)
        else:
            self._found[-1] = self._found[-1].to(norm.device).logical_or(found_inf)
        self._stepped.add(optimizer)
        self._known.add(optimizer)
        self._consumed[optimizer] = {
            id(p): (ref(grad), version_of(grad)) for p, grad in _grads(optimizer)
        }
        self._is_given = False
        skipped, stuck = torch.stack((found_inf, is_stuck)).tolist()  # the one host read
        if stuck:
            raise FloatingPointError(
                f"{_OP}: a gradient is inf or NaN, expected finite ones with the smallest scale,"
                f" {self._scale.item()}; nothing was stepped: the loss itself may be NaN"
            )
        if skipped and steps_again and self._is_awaited(optimizer):
            _log.warning(
                "%s: inf or NaN again, and the scale cannot shrink before another optimizer has"
                " stepped its gradients; drop those that are not wanted by zero_grad()",
                _OP,
            )
        return not skipped

    def _take(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Take the step, and return the norm."""
        if not isinstance(optimizer, FlatStateOptimizer | OffloadOptimizer):
            return clip_and_step(optimizer, max_norm, self._scale)
        attributes: Any = optimizer
        attributes.grad_scale = self._scale
        try:
            return optimizer.clip_and_step(max_norm)
        finally:
            del attributes.grad_scale

    @property
    def scale_in_use(self) -> Tensor:
        """The scale of the losses of this iteration, until the next one begins; on the device."""
        return self._scale

    def get_scale(self) -> float:
        """Return the scale that the next iteration begins with; waits for the device."""
        return self._next()[0].item()

    def state_dict(self) -> dict[str, float]:
        """Return what goes on with the next step, plain numbers; waits for the device."""
        scale, good, left = self._next()
        return {"scale": scale.item(), "good_steps": good.item(), "hysteresis_left": left.item()}

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
        self._found = []
        self._stepped.clear()
        self._expected.clear()

    def _is_smallest(self) -> Tensor:
        if self.growth_interval is None:
            return torch.zeros_like(self._scale, dtype=torch.bool)
        return self._scale <= self.min_scale

    def _is_awaited(self, left_out: torch.optim.Optimizer | None = None) -> bool:
        """Return whether an optimizer has gradients of the scale that is, to be stepped later."""
        if len(self._known) == 1:
            return False  # its steps alone tell
        for optimizer in self._known:
            if optimizer is left_out:
                continue
            stamps = self._consumed.get(optimizer, {})
            for param, grad in _grads(optimizer):
                known, version = stamps.get(id(param), (None, 0))
                if known is None or known() is not grad or version_of(grad) != version:
                    return True
        return False

    def _begin_iteration(self) -> None:
        """Move the scale, if an iteration has ended."""
        if self._stepped:
            self._scale, self._good_steps, self._left = self._next()
            self._expected = WeakSet(self._stepped)
            self._stepped.clear()
            self._found = []

    def _next(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return scale, good steps and hysteresis as they are after what was found.

        All is computed anew: a step that is still under way has the tensors as they are.
        """
        scale, good, left = self._scale, self._good_steps, self._left
        if self.growth_interval is None:
            return scale, good, left
        for found_inf in self._found:
            found_inf = found_inf.to(scale.device)
            shrinks = found_inf.logical_and(left <= 1)
            good = torch.where(found_inf, 0, good + 1)
            grown = scale * self.growth_factor
            grows = (good >= self.growth_interval).logical_and(grown <= _LARGEST)
            smaller = (scale * self.backoff_factor).clamp(min=self.min_scale)
            scale = torch.where(shrinks, smaller, torch.where(grows, grown, scale))
            fewer = (left - found_inf.to(left.dtype)).clamp(min=1)
            left = torch.where(grows, self.hysteresis, fewer)
            good = torch.where(grows, 0, good)
        return scale, good, left

    def _move(self, device: torch.device) -> None:
        if self._scale.device != device:
            self._scale = self._scale.to(device)
            self._good_steps = self._good_steps.to(device)
            self._left = self._left.to(device)


_OF_OPTIMIZERS: dict[str, Callable[[], object]] = {
    "_stepped": WeakSet,
    "_expected": WeakSet,
    "_known": WeakSet,
    "_consumed": WeakKeyDictionary,
}
_LARGEST = 2.0**126  # its inverse is a normal float32


def _grads(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                yield param, param.grad


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check(name: str, value: object, expected: str, fits: bool) -> None:
    if not fits:
        raise ValueError(f"{_OP}: {name} is {value!r}, expected {expected}")
