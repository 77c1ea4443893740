"""A shard that somebody holds while it is shown whole: what is done to it is done to the whole."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from deepspeed_ext.torch_internals.dispatch import tree_map
from deepspeed_ext.torch_internals.tensors import past_torch_function

WHOLE = "_deepspeed_ext_whole"  # attribute of a parameter that is shown
_OF_SHARD = {"grad", "is_leaf", "requires_grad", "__hash__", "requires_grad_"}


class ShownShard(DTensor):
    """A shard, the same object, inside of GatheredParameters."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do to the whole what is asked, but for what the shard alone has, such as its gradient."""
        name = func.__name__
        if name in ("__get__", "__set__"):
            name = getattr(func.__self__, "__name__", "")
        if name in _OF_SHARD:
            with past_torch_function():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(_whole_of, (args, kwargs or {}))
        if name == "data" and len(args) == 2:  # what others see of the whole is the same memory
            return args[0].detach().copy_(args[1])
        return func(*args, **kwargs)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Return what is shown."""
        whole: Tensor = vars(self)[WHOLE].value
        return whole


def _whole_of(value: Any) -> Any:
    return vars(value)[WHOLE].value if type(value) is ShownShard else value
