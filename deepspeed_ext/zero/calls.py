"""What of the calls that are under way counts: a model inside of itself, a loop that was left."""

import inspect
import sys
from collections.abc import Callable
from types import FrameType

from torch import nn

from deepspeed_ext.torch_internals.modules import CALL_CODE


class Loop:
    """What is known of micro-steps that are under way.

    Args:
        steps: how many there are; None: nobody knows, and `ends` tells of the one that it is in.
    """

    def __init__(self, steps: int | None) -> None:
        self.steps = steps
        self.ends = False
        self.at = 0  # the micro-step that it is in
        self.last_backward: int | None = None  # the last one whose backward was over
        self.is_set_to: bool | None = None  # of what `is_last` the model was told last
        self.caller: FrameType | None = None  # where the loop stands

    @property
    def is_last(self) -> bool:
        """Whether this is the last micro-step."""
        return self.ends if self.steps is None else self.at == self.steps - 1

    @property
    def is_done(self) -> bool:
        """Whether the backward of the last micro-step is over."""
        return self.is_last and self.last_backward == self.at

    def is_left(self) -> bool:
        """Tell whether the function with the loop has ended, so that nobody goes on with it.

        A generator may go on, as that of tqdm does.
        """
        caller, suspends = self.caller, inspect.CO_GENERATOR | inspect.CO_COROUTINE
        if caller is None or caller.f_code.co_flags & (suspends | inspect.CO_ASYNC_GENERATOR):
            return False
        return not any(_is_in(caller, frame) for frame in sys._current_frames().values())

    def __str__(self) -> str:
        return f"micro-step {self.at + 1}" + f" of {self.steps}" * (self.steps is not None)


class Backward:
    """Kept by a backward, which calls it in the end, or drops it when an error ends it before.

    Args:
        failed: called after such an error.
    """

    def __init__(self, failed: Callable[[], None]) -> None:
        self._failed: Callable[[], None] | None = failed

    def __call__(self) -> None:
        """Be over."""
        self._failed = None

    def __del__(self) -> None:
        """Say that it has failed."""
        if self._failed is not None:
            self._failed()


def calls_of(model: nn.Module) -> int:
    """Count the calls of a model that are under way in this thread."""
    calls, frame = 0, sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        calls += frame.f_code is CALL_CODE and frame.f_locals.get("self") is model
    return calls


def _is_in(wanted: FrameType, frame: FrameType | None) -> bool:
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is not None
