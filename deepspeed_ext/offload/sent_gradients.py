"""What a parameter has for a gradient that has left for host memory: a placeholder without memory.

It is there so that users can drop it, in whatever way gradients are dropped, and with it what was
added up in host memory. A gradient of None would look the same before and after.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from deepspeed_ext.dtensors import is_dtensor, local, spread
from deepspeed_ext.torch_internals.dispatch import FOREACH_ZERO_, TO_COPY
from deepspeed_ext.torch_internals.tensors import make_wrapper_subclass, put_part

_aten = torch.ops.aten


@dataclass
class Since:
    """What was done to a gradient since it has left.

    Attributes:
        of: the sum that it went to.
        is_dropped: something else was written in its place: zeros, or another gradient.
        value: what was added to it, or written in its place.
    """

    of: object
    is_dropped: bool = False
    value: Tensor | None = None


class SentGradient(Tensor):
    """What autograd and FSDP2 add the next gradient to; whoever reads it is told where it is."""

    since: Since

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, since: Since) -> "SentGradient":
        """Stand for a gradient like this tensor, on a device."""
        made: SentGradient = make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        made.since = since
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SentGradient(shape={tuple(self.shape)}, dtype={self.dtype}, in host memory)"

    def __deepcopy__(self, memo: object) -> None:
        """Return None: the sum is of the parameter itself, not of a copy."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch says that of one that is switched off
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        known = _KNOWN.get(func)
        if known is None:
            _refuse(func.name())
        return known(*args, **(kwargs or {}))

    def zeros(self) -> Tensor:
        """Return memory for a gradient."""
        strides = self.stride()
        made = torch.empty_strided(self.shape, strides, dtype=self.dtype, device=self.device)
        return made.zero_()

    def is_touched(self) -> bool:
        """Return whether there is something to take."""
        return self.since.is_dropped or self.since.value is not None

    def added(self) -> Tensor | None:
        """Return what is to be added to the sum, or to begin one."""
        value = self.since.value
        return self.zeros() if value is None and self.since.is_dropped else value


def placeholder(param: Tensor, of: object) -> Tensor:
    """Return what is to be the gradient of a parameter whose own has gone to a sum."""
    part = local(param).detach()
    made = SentGradient(part, part.device, Since(of))
    if not is_dtensor(param):
        return made
    whole = spread(part, param)
    put_part(whole, made)
    return whole


def sent(grad: Tensor | None) -> SentGradient | None:
    """Return the placeholder that a gradient is, or of which it is the part in this process."""
    part = None if grad is None else local(grad)
    return part if isinstance(part, SentGradient) else None


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"OffloadOptimizer: p.grad is in host memory, as free_grads is True, expected one that"
        f" {what} can read; clip by max_grad_norm or clip_and_step, or make the optimizer with"
        " free_grads=False"
    )


def _add_(grad: Tensor, other: Any, alpha: Any = 1) -> Tensor:
    if not isinstance(grad, SentGradient) or isinstance(other, SentGradient):
        _refuse("add_")
    since = grad.since
    if since.value is None and isinstance(other, Tensor) and other.shape == grad.shape:
        since.value = other * alpha if alpha != 1 else other.clone()  # others may hold it, too
    else:
        before = grad.zeros() if since.value is None else since.value
        since.value = before.add_(other, alpha=alpha)
    return grad


def _add(grad: Any, other: Any, alpha: Any = 1) -> Tensor:
    """Do that for a backward that makes a graph."""
    if not isinstance(grad, SentGradient):
        if alpha != 1:
            _refuse("add")
        grad, other = other, grad
    return _add_(_view(grad), other, alpha)


def _copy_(grad: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(grad, SentGradient):
        _refuse("copy_")
    grad.since.is_dropped, grad.since.value = True, grad.zeros().copy_(other)
    return grad


def _zero_(grad: SentGradient) -> Tensor:
    grad.since.is_dropped, grad.since.value = True, None
    return grad


def _foreach_zero_(grads: Sequence[Tensor]) -> None:
    for grad in grads:
        grad.zero_()


def _view(grad: SentGradient) -> SentGradient:
    return SentGradient(grad, grad.device, grad.since)


def _to(grad: SentGradient, **how: Any) -> Tensor:
    """Look as a model does that moves, or gets another dtype, between two backwards."""
    like = torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device="meta")
    look = {key: value for key, value in how.items() if key in ("dtype", "memory_format")}
    device = how.get("device") or grad.device
    return SentGradient(TO_COPY(like, **look), device, grad.since)


_KNOWN: dict[Any, Callable[..., Any]] = {
    _aten.add_.Tensor: _add_,
    _aten.add.Tensor: _add,
    _aten.copy_.default: _copy_,
    _aten.zero_.default: _zero_,
    FOREACH_ZERO_: _foreach_zero_,
    _aten.detach.default: _view,
    _aten.alias.default: _view,
    TO_COPY: _to,
}
