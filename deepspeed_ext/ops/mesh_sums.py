"""Sums over the processes that hold shards of a tensor, and the local parts of DTensors."""

import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether this is a DTensor, without importing what only they need."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return what this process holds of each tensor: a DTensor's local part, others as they are."""
    with torch.no_grad():
        return [tensor.to_local() if is_dtensor(tensor) else tensor for tensor in tensors]


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


def _all_reduce(values: Tensor, mesh: "DeviceMesh", dimension: int) -> Tensor:
    """Sum over one mesh dimension, where the values are if its group can do that there."""
    group = mesh.get_group(dimension)
    where = values.device
    backends = torch.distributed.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    if where.type not in [item.partition(":")[0] for item in backends.split(",")]:
        values = values.to(mesh.device_type)
    torch.distributed.all_reduce(values, group=group)
    return values.to(where)
