"""What is known of DTensors: the part that is here, its place, sums and votes over processes.

A plain tensor is taken for one that is whole in this process, so that no caller has to ask which it
has. Nothing here imports torch.distributed.tensor before there is a DTensor.
"""

import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from deepspeed_ext.torch_internals.tensors import offset_of_part, part_of, put_part, spec_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

RESTS = "_deepspeed_ext_rests"  # the attribute of a shard that zero.shard lets rest in host memory


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether this is a DTensor, without importing what only they need."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that is in this process; a plain tensor as it is.

    The tensor itself, not a view: FSDP2 may put another one in its place between two steps.
    """
    return part_of(tensor) if is_dtensor(tensor) else tensor


def rests_on_host(param: Tensor) -> bool:
    """Return whether a parameter is a shard that rests in host memory, to be stepped there.

    As shards of FSDP2's CPUOffloadPolicy do, which come to the device of their mesh to be used.
    Where that is the CPU, those that have the mark `RESTS`; parts on meta rest there later.
    """
    if not is_dtensor(param):
        return False
    where = part_of(param).device.type
    if RESTS in vars(param):
        return where in ("cpu", "meta")
    return where == "cpu" and param.device_mesh.device_type != "cpu"


def spread(part: Tensor, param: "DTensor") -> "DTensor":
    """Return a DTensor over this memory, with the mesh, placements and shape of a parameter.

    DTensor.from_local would move a part that is kept in host memory to the device of the mesh.
    """
    spec: Any = spec_of(param)
    spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=part.dtype))
    from torch.distributed.tensor import DTensor

    # A DTensor takes over the storage offset of what it is made from, and can then be neither
    # copied nor pickled (torch 2.13). So it is made from something that has none.
    made = DTensor(part.new_empty(0), spec, requires_grad=False)
    put_part(made, part)
    return made


def same_layout(value: "DTensor", param: "DTensor") -> bool:
    """Return whether each process holds of both the same elements."""
    return value.device_mesh == param.device_mesh and value.placements == param.placements


def full(value: "DTensor") -> Tensor:
    """Return the whole of a DTensor where its mesh computes, also if parts are in host memory.

    All processes call it.
    """
    return _on_mesh_device(value).full_tensor()


def part_for(value: Tensor, param: Tensor) -> Tensor:
    """Return the elements of a value that belong to what this process holds of a parameter.

    Processes exchange elements, so that all must call this, when a DTensor lies in another way
    than the parameter.

    Args:
        value: a DTensor of any mesh and placements, or the whole value in a plain tensor.
        param: a DTensor, or a plain tensor.
    """
    if not is_dtensor(param):
        return full(value) if is_dtensor(value) else value
    if is_dtensor(value):
        if same_layout(value, param):
            return part_of(value)
        if value.device_mesh == param.device_mesh:
            value = _on_mesh_device(value)
            return part_of(value.redistribute(param.device_mesh, param.placements))
        value = full(value)
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = param.device_mesh, param.placements
    return part_of(distribute_tensor(value.detach(), mesh, placements, src_data_rank=None))


def first_index(param: Tensor) -> int:
    """Return which element of the whole parameter the first one in this process is.

    Raises:
        ValueError: the elements in this process do not follow each other in the whole parameter.
    """
    if not is_dtensor(param):
        return 0
    if not is_cut_in_rows(param):
        raise ValueError(f"placements are {param.placements}, expected Shard(0) or Replicate")
    offset = offset_of_part(param)
    return offset[0] * (param.numel() // max(param.shape[0], 1)) if offset else 0


def is_cut_in_rows(param: "DTensor") -> bool:
    """Return whether each process holds all of the parameter, or some rows of it in one piece."""
    from torch.distributed.tensor import Shard

    for dimension, place in enumerate(param.placements):
        is_row = type(place) is Shard and place.dim == 0
        is_all = place.is_shard() and param.device_mesh.size(dimension) == 1
        if not (place.is_replicate() or is_row or is_all):
            return False
    return True


def is_partial(tensor: Tensor) -> bool:
    """Return whether this is a DTensor whose values are still to be added up."""
    return is_dtensor(tensor) and any(place.is_partial() for place in tensor.placements)


def sum_over_shards(squares: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Add up what each process has worked out for its shards, such as sums of squares.

    All processes call it with the same tensors in the same order, also those whose shards are
    empty. There is one all_reduce for each mesh, set of sharded dimensions, and dimension in it.
    Nothing waits for the device, unless the process group of a mesh cannot reduce on it.

    Args:
        squares: (n,) or (n, k), row i about what this process holds of tensors[i]. Not modified.
        tensors: n plain tensors, whose rows stay as they are, and DTensors, whose rows are summed
            over the mesh dimensions that they are sharded on, and not over replicated ones.

    Returns:
        The sums, shape, dtype and device of `squares`; `squares` itself if there is nothing to add.

    Raises:
        ValueError: a DTensor has a Partial placement: its values are not worked out yet.
    """
    rows_of: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}  # in the order of tensors
    for i, tensor in enumerate(tensors):
        if is_dtensor(tensor):
            dimensions = _sharded_dimensions(tensor, i)
            if dimensions:
                rows_of.setdefault((tensor.device_mesh, dimensions), []).append(i)
    if not rows_of:
        return squares
    sums = squares.clone()
    for (mesh, dimensions), rows in rows_of.items():
        # Slices, as a list of indices would have to be copied to the device, with a wait.
        parts = [sums[begin:end] for begin, end in _runs(rows)]
        added = torch.cat(parts)
        for dimension in dimensions:
            added = _all_reduce(added, mesh, dimension)
        for part, value in zip(parts, added.split([len(part) for part in parts]), strict=True):
            part.copy_(value)
    return sums


def sum_over_meshes(values: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Add up what all processes say that hold some of these tensors, replicas counted too.

    All of them call it with the same tensors in the same order.

    Args:
        values: any shape. Not modified.
        tensors: DTensors, whose meshes count; plain tensors change nothing.
    """
    meshes = dict.fromkeys(tensor.device_mesh for tensor in tensors if is_dtensor(tensor))
    values = values.clone()
    for mesh in meshes:
        if mesh.get_coordinate() is not None:  # else this process holds no part
            for dimension in range(mesh.ndim):
                values = _all_reduce(values, mesh, dimension)
    return values


def least_over_meshes(value: int, tensors: Sequence[Tensor]) -> int:
    """Return the least of what all processes say that hold some of these tensors.

    All of them call it with the same tensors in the same order.

    Args:
        value: of this process.
        tensors: DTensors, whose meshes count; plain tensors change nothing.
    """
    found = torch.tensor(value, device="cpu")
    for mesh in dict.fromkeys(tensor.device_mesh for tensor in tensors if is_dtensor(tensor)):
        if mesh.get_coordinate() is not None:  # else this process holds no part
            for dimension in range(mesh.ndim):
                found = _all_reduce(found, mesh, dimension, torch.distributed.ReduceOp.MIN)
    return int(found)


def largest_part(param: Tensor) -> int:
    """Return how many elements the largest part of a parameter has, in whichever process."""
    if not is_dtensor(param):
        return param.numel()
    shape = list(param.shape)
    for dimension, placement in enumerate(param.placements):
        if placement.is_shard():
            sharded: Any = placement
            shape[sharded.dim] = -(-shape[sharded.dim] // param.device_mesh.size(dimension))
    return math.prod(shape)


def all_zero(tensors: Sequence[Tensor]) -> bool:
    """Return whether there are only zeros, in any process that holds a part of these DTensors.

    If there are DTensors, only they count: all processes have to come to one answer. Waits for the
    device, and for those processes, which must all call this.
    """
    tensors = [tensor for tensor in tensors if is_dtensor(tensor)] or tensors
    counts = [int(torch.count_nonzero(local(tensor))) for tensor in tensors]
    return not sum_over_shards(torch.tensor(counts, device="cpu"), tensors).any()


class Agreement:
    """What processes that hold parts of the same parameters agree on: to go on, or not.

    Each may find something wrong with what it was given, and would leave the others with half of
    the parameters changed, or waiting for it.

    Args:
        params: the DTensors among them count; without any, this process decides alone.
        stages: how often they agree.
    """

    def __init__(self, params: Iterable[Tensor], stages: int) -> None:
        self._sharded = [param for param in params if is_dtensor(param)]
        self._stages = stages

    def go_on(self) -> bool:
        """Say that all is well here, wait for the others, and return whether it is there too."""
        return self._others_agree(refuses=0)

    def refuse(self) -> None:
        """Tell the others that something is wrong, unless they know or need not."""
        if self._stages:
            self._others_agree(refuses=1)

    def _others_agree(self, refuses: int) -> bool:
        count = torch.tensor(refuses, device="cpu")
        left, self._stages = self._stages - 1, 0  # none, should the others not be reached
        agreed = not self._sharded or not sum_over_meshes(count, self._sharded)
        self._stages = left if agreed else 0
        return agreed


def _on_mesh_device(value: "DTensor") -> "DTensor":
    """Return the value where its mesh can exchange it; parts may be kept in host memory."""
    part = part_of(value)
    if part.device.type == value.device_mesh.device_type:
        return value
    return spread(part.to(value.device_mesh.device_type), value)


def _sharded_dimensions(tensor: "DTensor", i: int) -> tuple[int, ...]:
    """Return the mesh dimensions that the tensor is sharded on, in any way."""
    for placement in tensor.placements:
        if placement.is_partial():
            raise ValueError(
                f"sum_over_shards: tensors[{i}] has placement {placement!r}, expected Shard or"
                " Replicate; add it up with redistribute() first"
            )
    places = enumerate(tensor.placements)
    return tuple(dimension for dimension, place in places if not place.is_replicate())


def _runs(rows: list[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as ranges."""
    runs = itertools.groupby(enumerate(rows), lambda item: item[1] - item[0])
    ranges = [[row for _, row in run] for _, run in runs]
    return [(run[0], run[-1] + 1) for run in ranges]


def _all_reduce(values: Tensor, mesh: "DeviceMesh", dimension: int, how: Any = None) -> Tensor:
    """Sum over one mesh dimension, where the values are if its group can do that there.

    Args:
        how: another operation of torch.distributed than the sum.
    """
    group = mesh.get_group(dimension)
    where = values.device
    backends = torch.distributed.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    if where.type not in [item.partition(":")[0] for item in backends.split(",")]:
        values = values.to(mesh.device_type)
    op = torch.distributed.ReduceOp.SUM if how is None else how
    torch.distributed.all_reduce(values, op, group)
    return values.to(where)
