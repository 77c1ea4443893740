"""Weights on their way: whoever touches one waits for it, whichever way it is come by.

While the value of a parameter has not arrived, its class is one of those below. What torch does
with a tensor from Python asks the class first, by `__torch_function__`: then the value is waited
for, and the class is what it was. So hooks of modules need not be relied on; they only wait sooner,
and for less work.

What torch does not ask the class about reads what is there, old or half new:
    memory that was known before: views, other tensors of the same storage, arrays of numpy,
    addresses, CUDA graphs;
    C++ that was handed the tensor before, such as modules of TorchScript, or by bindings of its
    own, such as `ProcessGroup.allreduce`;
    `torch.func.grad` and `vjp` of the parameter itself, `torch.tensor`, `torch.as_tensor` and
    other constructors of copies;
    code that switches `__torch_function__` off, as that of some subclasses does.
Whoever does that calls `OffloadOptimizer.synchronize()` before.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn import Parameter

from deepspeed_ext.torch_internals.compiler import leave_to_python, untraced
from deepspeed_ext.torch_internals.tensors import (
    asks_torch_function,
    parameter_over,
    part_slot,
    past_torch_function,
)

Wait = Callable[[], None]
_WAIT = "_deepspeed_ext_wait"  # the attribute of a parameter
_set_class = vars(object)["__class__"].__set__
_tensor: Any = Tensor  # whose properties the type checker takes for values
# These are about a parameter, not about its value, and are asked for between step() and forward.
_VALUELESS = frozenset(
    (
        _tensor.grad.__get__,
        _tensor.grad.__set__,
        _tensor.grad.__delete__,
        _tensor.requires_grad.__get__,
        _tensor.is_leaf.__get__,
    )
)


class _Arriving:
    """What has the class of a parameter for as long as its value is on its way.

    Attributes:
        home: the class that it has before and after.
    """

    __slots__ = ()  # else the class of a tensor could not become this
    home: ClassVar[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make another parameter, as `type(param)(...)` does: nothing of it is on its way."""
        return cls.home(*args, **kwargs)

    @classmethod
    @untraced
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func not in _VALUELESS:
            found = [arg for arg in _tensors((args, kwargs)) if isinstance(arg, _Arriving)]
            for arg in found:
                _wait_for(arg)
            if not any(isinstance(arg, _Arriving) for arg in found):
                return func(*args, **kwargs)  # others may have classes that are asked, too
        with past_torch_function():
            return func(*args, **kwargs)

    # What torch asks no class about

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _wait_for(self).__reduce_ex__(self, protocol)

    def as_subclass(self, cls: type[Tensor]) -> Any:
        """Return the same value in another class."""
        return _wait_for(self).as_subclass(self, cls)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Take other memory."""
        return _wait_for(self).set_(self, *args, **kwargs)

    def detach(self) -> Any:
        """Return the same value, apart from the graph."""
        home = _wait_for(self)
        # It has found a class that is not Parameter, and wants that of the parameter back.
        if sys._getframe(1).f_code is Parameter.__new__.__code__ and home is Parameter:
            return parameter_over(self)
        return home.detach(self)

    @property
    def __class__(self) -> Any:
        return _home(self)

    @__class__.setter
    def __class__(self, cls: type) -> None:
        _wait_for(self)
        _set_class(self, cls)


class _ArrivingTensor(_Arriving, Tensor):
    __slots__ = ()
    home = Tensor


class _ArrivingParameter(_Arriving, Parameter):
    __slots__ = ()
    home = Parameter


def is_on_its_way(param: Tensor) -> bool:
    """Tell whether who touches this waits."""
    return issubclass(type(param), _Arriving)


def set_out(params: Iterable[Tensor], wait: Wait) -> bool:
    """Let whoever touches one of these wait.

    Args:
        params: whose values will be written.
        wait: returns when `arrive` was called with them.

    Returns:
        False if a parameter has a class of somebody else's, whose methods are to be left alone.
    """
    classes = set()
    has_all = True
    for param in params:
        cls = _arriving(type(param))
        if cls is None:
            has_all = False
            continue
        classes.add(cls)
        param.__dict__[_WAIT] = wait
        _set_class(param, cls)
    _tell_dynamo(classes)
    return has_all


def arrive(params: Iterable[Tensor]) -> None:
    """Give parameters their class back."""
    for param in params:
        if isinstance(param, _Arriving):
            _set_class(param, _home(param))
            param.__dict__.pop(_WAIT, None)


def _tell_dynamo(classes: set[type[Tensor]]) -> None:
    """Let compiled code leave tensors of these to Python, which waits each time it is run.

    Tracing would wait itself, for values that it does not want, and again in each step: what it
    makes is for the class that a parameter has then.
    """
    leave_to_python(classes)


def _arriving(cls: type[Tensor]) -> type[Tensor] | None:
    """Return what becomes of a class, or None."""
    if cls is Parameter:
        return _ArrivingParameter
    if cls is Tensor:
        return _ArrivingTensor
    tensor = sys.modules.get("torch.distributed.tensor")
    return _arriving_dtensor() if tensor is not None and cls is tensor.DTensor else None


def _home(param: Any) -> Any:
    """Return the class that a parameter has when its value has arrived, as it may have just now."""
    cls: Any = type(param)
    return cls.home if issubclass(cls, _Arriving) else cls


@untraced
def _wait_for(param: Any) -> Any:
    """Wait until a parameter has its class back, if there is anything to wait for; return that."""
    while (
        isinstance(param, _Arriving)
        and asks_torch_function()  # not in the thread that writes the value
        and (wait := param.__dict__.get(_WAIT)) is not None
    ):
        wait()
    return _home(param)


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments, and in lists and dicts among them."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(tuple(values.values()))


@cache
def _arriving_dtensor() -> type[Tensor]:
    from torch.distributed.tensor import DTensor

    slot = part_slot(DTensor)

    class _ArrivingDTensor(_Arriving, DTensor):
        __slots__ = ()
        home = DTensor

        @property
        def _local_tensor(self) -> Tensor:
            """What fully_shard looks at before it gathers, and all that torch does with a part."""
            _wait_for(self)
            part: Tensor = slot.__get__(self)
            return part

        @_local_tensor.setter
        def _local_tensor(self, part: Tensor) -> None:
            _wait_for(self)
            slot.__set__(self, part)

    return _ArrivingDTensor


def _reduce_shared(param: Tensor) -> Any:
    _wait_for(param)
    return reduce_tensor(param)


# Processes share the memory of a parameter by its class.
for _cls in (_ArrivingTensor, _ArrivingParameter):
    ForkingPickler.register(_cls, _reduce_shared)
