"""What is told to torch.compile without importing it."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch._compile import _disable_dynamo

# Leaves a function to Python where torch.compile traces; torch.compiler.disable does that too, and
# imports the compiler, which takes 0.8 s.
untraced = _disable_dynamo
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def untraced_where_compiled(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Leave a function to Python as `untraced` does, which imports the compiler at the first call.

    This one does not where nobody has.
    """
    left_to_python: Callable[_Args, _Result] = untraced(function)

    @wraps(function)
    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        if "torch._dynamo" in sys.modules:
            return left_to_python(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def leave_to_python(classes: set[type]) -> None:
    """Let compiled code leave what touches tensors of these classes to Python.

    By a setting that only config files are meant to know; nothing to do where nobody compiles.
    """
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is not None and not classes <= config.nontraceable_tensor_subclasses:
        config.nontraceable_tensor_subclasses |= classes
