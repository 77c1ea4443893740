"""What tensors, storages and DTensors keep to themselves."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_traceable_wrapper_subclass"]

_tensor: Any = Tensor  # whose private methods the type checker does not know

# is_traceable_wrapper_subclass tells whether a tensor has others inside of it, in place of memory;
# no public name does.

# How often a tensor, or what shares its counter, was written to: torch documents it for autograd,
# and has no other name for it. Called by map() over thousands, so of C.
version_of: Callable[[Tensor], int] = attrgetter("_version")
# The tensor that this one is a view of, or None; documented likewise.
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
# Which storage it is: two objects of Python may be of one, and on meta all addresses are 0.
storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
# Makes a tensor of a subclass that has no memory, which torch's notes on subclasses do by this.
make_wrapper_subclass: Callable[..., Any] = _tensor._make_wrapper_subclass
# A context in which __torch_function__ of subclasses is not asked; a public one is there for modes
# only.
past_torch_function = torch._C.DisableTorchFunctionSubclass
# Whether it is asked, in this thread.
asks_torch_function = torch._C._is_torch_function_enabled
# The part of a DTensor in this process, the tensor itself: to_local() makes a view, with a node for
# autograd. `put_part` puts another in its place, `part_slot` is where it stands.
part_of: Callable[["DTensor"], Tensor] = attrgetter("_local_tensor")
# Mesh, placements, shape and dtype of a DTensor, all that its constructor wants; from_local would
# move memory to the device of the mesh.
spec_of: Callable[[Any], Any] = attrgetter("_spec")


@torch.no_grad()
def differ(tensor: Tensor, kept: Tensor) -> Tensor:
    """Return whether a tensor, rounded to the dtype of another one, has other bits anywhere.

    This sees writes that no version counter tells of, and NaN is equal to itself.
    """
    bits = (torch.uint8, torch.int16, torch.int32, torch.int64)[kept.itemsize.bit_length() - 1]
    rounded = tensor.to(kept.dtype).contiguous()
    return (rounded.view(bits) != kept.contiguous().view(bits)).any()


def is_zero_tensor(tensor: Tensor) -> bool:
    """Tell whether it is one of autograd's zeros, which have no memory to read."""
    return tensor._is_zerotensor()


def is_watched_in_backward(param: Tensor) -> bool:
    """Tell whether hooks are told of its gradient once that is there.

    There are functions that add and remove hooks, none that tells.
    """
    return bool(param._post_accumulate_grad_hooks)


def has_gradient_hooks(param: Tensor) -> bool:
    """Tell whether any hook is told of its gradient, or changes it; likewise."""
    return bool(param._backward_hooks) or is_watched_in_backward(param)


def parameter_over(tensor: Any) -> Parameter:
    """Return what Parameter.__new__ makes of a plain tensor, also within it."""
    made: Parameter = _tensor._make_subclass(Parameter, tensor, False)
    return made


def put_part(whole: "DTensor", part: Tensor) -> None:
    """Put another tensor in the place of the part of a DTensor; see `part_of`."""
    whole._local_tensor = part


def part_slot(cls: type["DTensor"]) -> Any:
    """Return the descriptor of the part, which a property of a subclass hides; see `part_of`."""
    return vars(cls)["_local_tensor"]


def offset_of_part(param: "DTensor") -> Sequence[int]:
    """Return where in the whole the part of a DTensor begins; nothing public tells."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    return offset
