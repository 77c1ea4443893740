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
# What a module asks of a parameter and of what it was moved or cast to, by its name.
FITS_DATA = torch._has_compatible_shallow_copy_type.__name__
# Of `differ`: few enough to be small beside a model, and enough to keep a GPU busy.
_COMPARED_AT_ONCE = 1 << 26
# Mesh, placements, shape and dtype of a DTensor, all that its constructor wants; from_local would
# move memory to the device of the mesh.
spec_of: Callable[[Any], Any] = attrgetter("_spec")


@torch.no_grad()
def differ(tensors: list[Tensor], kept: list[Tensor]) -> Tensor:
    """Return whether any tensor, rounded to the dtype of its like, has other bits than that one.

    This sees writes that no version counter tells of, and NaN is equal to itself. It is made of few
    calls, and needs memory for _COMPARED_AT_ONCE elements, or for those of the largest tensor.

    Args:
        tensors: of one dimension, one dtype and one device; at least one.
        kept: as many of the same sizes, of one dtype on the same device.
    """
    begin, sizes, found = 0, [tensor.numel() for tensor in tensors], []
    while begin < len(sizes):
        end, total = begin + 1, sizes[begin]
        while end < len(sizes) and total + sizes[end] <= _COMPARED_AT_ONCE:
            total += sizes[end]
            end += 1
        whole_words = max(8, total + -total % 8)  # 8 elements are some, also where there are none
        pair = torch.empty((2, whole_words), dtype=kept[0].dtype, device=kept[0].device)
        pair[:, total:] = 0
        for flat, source in zip(pair, (tensors, kept), strict=True):
            torch._foreach_copy_(flat[:total].split(sizes[begin:end]), source[begin:end])
        words = pair.view(torch.int64)
        found.append((words[0] != words[1]).any())
        begin = end
    return torch.stack(found).any()


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
