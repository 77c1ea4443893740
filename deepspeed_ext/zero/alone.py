"""A model of one process: nothing is shared out, so its parameters stay as they are."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from deepspeed_ext.torch_internals.dispatch import (
    current_backward,
    is_in_backward,
    queue_callback,
    tree_leaves,
)
from deepspeed_ext.zero.calls import Backward, Loop
from deepspeed_ext.zero.kinds_of_parameters import NAME
from deepspeed_ext.zero.sharding import Sharding


def keep_whole(model: nn.Module, stage: int, mesh: DeviceMesh) -> bool:
    """Let a model be used in the place of a sharded one, where there is one process.

    Fully_shard gathers and reduces there, too, which costs more than the step of a small model. Its
    parameters stay plain tensors; micro-steps, `save`, `load` and what is built on them take it.

    Args:
        model: of plain parameters, which move to the device of the mesh.
        stage: 0 to 2, which all mean the same here.
        mesh: that zero.shard would be given.

    Returns:
        Whether it is. It is not with several processes, or parameters of other kinds.
    """
    params = list(model.parameters())
    is_plain = all(type(param) is nn.Parameter and not param.is_meta for param in params)
    if mesh.size() > 1 or stage > 2 or not params or not is_plain:
        return False
    model.to(mesh.device_type)
    Alone(model, stage, mesh, ()).attach()
    return True


class Alone(Sharding):
    """What is remembered of such a model: when a backward is over, or was ended by an error."""

    def attach(self) -> None:
        """Stand by the model."""
        self._has_failed = False
        self._begins = partial(_in_backward, weakref.ref(self))
        object.__setattr__(self.model, NAME, self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # a pickle or a copy of the model is an ordinary one

    def detach(self) -> None:
        """Go from the model's side."""
        if vars(self.model).get(NAME) is self:
            object.__delattr__(self.model, NAME)

    def watch(self, output: object) -> None:
        """Hear of a backward by what a forward has returned."""
        if not is_in_backward():
            for tensor in (output,) if isinstance(output, Tensor) else tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._begins)

    def reshard(self) -> None:
        """Do nothing, as nothing is gathered."""

    def _set_backward(self, loop: Loop, is_last: bool) -> None:
        pass

    def stopped(self) -> str:
        """Tell whether an error has ended a "backward"."""
        return "backward" if self._has_failed else ""

    def settle(self) -> None:
        """Drop nothing."""
        self._has_failed, self._settled = False, self._backward

    def forget(self) -> None:
        """Drop all gradients."""
        self.settle()
        self.model.zero_grad()

    def after_backward(self) -> None:
        """Take note that a backward is over."""
        if self._loop is not None:
            self._loop.last_backward = self._loop.at

    def fail(self, number: int) -> None:
        """Take note that an error has ended a backward, of this number.

        The thread of a GPU may say so late, when what it left is dropped and others have begun.
        """
        self._has_failed = self._has_failed or number > self._settled

    def in_backward(self) -> None:
        """Begin a backward, if it has not begun, and have it known how it ends."""
        number = current_backward()
        if number != self._backward:
            self._backward = number
            queue_callback(_Backward(self.after_backward, partial(self.fail, number)))


def _nothing() -> None:
    """Return None."""


class _Backward(Backward):
    """A backward that tells of both ends."""

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        super().__init__(failed)
        self._ended = ended

    def __call__(self) -> None:
        super().__call__()
        self._ended()


def _in_backward(sharding: "weakref.ref[Alone]", _: Any) -> None:
    found = sharding()
    if found is not None:
        found.in_backward()
