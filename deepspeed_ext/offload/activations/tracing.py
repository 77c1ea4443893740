"""What torch.compile is not to look into, where it is there."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from deepspeed_ext.torch_internals.compiler import is_loaded, untraced

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def untraced_where_compiled(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Leave a function to Python as `untraced` does, which imports the compiler at the first call.

    This one does not where nobody has.
    """
    left_to_python: Callable[_Args, _Result] = untraced(function)

    @wraps(function)
    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        if is_loaded():
            return left_to_python(*args, **kwargs)
        return function(*args, **kwargs)

    return call
