"""The weights of a sharded model for one process: each goes there, and to no other process."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from deepspeed_ext.dtensors import is_dtensor, local
from deepspeed_ext.zero.agreement import all_or_none, check_agreement
from deepspeed_ext.zero.names import by_plain_name, plain_name
from deepspeed_ext.zero.sharding import Sharding, sharding_of

_END = -1
T = TypeVar("T")


class WholeWeights:
    """What the first process of a mesh may read; see `in_first_process`.

    Attributes:
        described: parameters and the buffers that a state dict has, on meta, tied ones once; in the
            order of the model, by names as of a model in which nothing is wrapped.
        ties: other names of these, with the names that are in `described`.
    """

    def __init__(
        self, op: str, sharding: Sharding, dtype: torch.dtype | None, exclude_frozen: bool
    ) -> None:
        mesh = sharding.mesh
        all_take_part = sharding.has_experts  # else replicas have the same once more
        told = range(0 if all_take_part else mesh.ndim - 1, mesh.ndim)
        self._groups = [mesh.get_group(dimension) for dimension in told]
        self._device = mesh.device_type
        place: list[int] = list(mesh.get_coordinate() or ())
        self.takes_part = all_take_part or not any(place[:-1])
        self.is_first = not any(place)
        self._tensors: dict[str, Tensor] = {}
        self.ties: dict[str, str] = {}
        state = by_plain_name(op, sharding.model.state_dict(keep_vars=True))
        known: dict[int, str] = {}
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor):
                continue  # extra state of a module
            if exclude_frozen and isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                continue
            kept = known.setdefault(id(tensor), name)
            if kept != name:
                self.ties[name] = kept
                continue
            _check_cut(op, name, tensor, mesh)
            self._tensors[name] = tensor
        self._dtypes = {
            name: dtype
            if dtype and isinstance(t, nn.Parameter) and t.is_floating_point()
            else t.dtype
            for name, t in self._tensors.items()
        }
        self.described = {
            name: torch.empty(t.shape, dtype=self._dtypes[name], device="meta")
            for name, t in self._tensors.items()
        }
        self._names = list(self._tensors)

    def read(self, name: str) -> Tensor:
        """Return a weight of `described` on the CPU, in memory of its own."""
        self._next(self._names.index(name))
        whole = self._gathered(name)
        assert whole is not None
        whole = whole.cpu()
        memory = whole.untyped_storage()
        is_own = memory.data_ptr() != local(self._tensors[name]).untyped_storage().data_ptr()
        return whole if is_own and memory.nbytes() == whole.nbytes else whole.clone()

    def serve(self) -> None:
        """Give what the first process reads, until it ends."""
        while (index := self._next(_END)) != _END:
            self._gathered(self._names[index])

    def end(self) -> None:
        """Tell the others that nothing more is read."""
        self._next(_END)

    def _next(self, index: int) -> int:
        """Return what the first process reads next."""
        told = torch.tensor(index, device=self._device)
        for group in self._groups:  # the last one has it from the first process of each before
            if dist.get_world_size(group) > 1:
                dist.broadcast(told, dist.get_global_rank(group, 0), group=group)
        return int(told)

    def _gathered(self, name: str) -> Tensor | None:
        """Return a whole tensor in the first process; what is sent has its dtype already."""
        tensor = self._tensors[name].detach()
        part: Tensor | None = local(tensor).to(self._dtypes[name])
        if is_dtensor(tensor):
            for dimension, place in enumerate(tensor.placements):
                cut: Any = place
                if part is not None and place.is_shard():
                    group = tensor.device_mesh.get_group(dimension)
                    part = part.to(self._device)  # from where it rests
                    part = _joined(part, cut.dim, tensor.shape[cut.dim], group)
        return part if self.is_first else None


def _joined(part: Tensor, dimension: int, size: int, group: dist.ProcessGroup) -> Tensor | None:
    """Return parts of a group one after another in its first process."""
    processes = dist.get_world_size(group)
    if processes == 1:
        return part
    length = -(-size // processes)  # the last ones may have less; NCCL wants as much
    rows = part.movedim(dimension, 0)
    if len(rows) < length:
        rows = torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])
    is_first = dist.get_rank(group) == 0
    whole = rows.new_empty(length * processes, *rows.shape[1:]) if is_first else None
    pieces = None if whole is None else list(whole.split(length))
    dist.gather(rows.contiguous(), pieces, dst=dist.get_global_rank(group, 0), group=group)
    return None if whole is None else whole[:size].movedim(0, dimension).contiguous()


def in_first_process(
    op: str,
    model: nn.Module,
    take: Callable[[WholeWeights], T],
    *,
    dtype: torch.dtype | None = None,
    exclude_frozen: bool = False,
) -> T | None:
    """Let the first process of a model's mesh read its weights, whole, one after another.

    All processes of the mesh call it. Each weight is cast and sent to that process alone, which
    holds one of them at a time, unless it keeps them.

    Args:
        op: for the texts of errors.
        model: that zero.shard was called on, not between micro-steps.
        take: called in the first process.
        dtype: of parameters; None: as they are.
        exclude_frozen: leave out parameters that need no gradient.

    Returns:
        What `take` returns, in the first process; None in others.

    Raises:
        ValueError: the model is not sharded, or not by zero.shard.
        RuntimeError: it is between micro-steps, or another process failed, such as by what `take`
            raises in the first one.
    """
    sharding = sharding_of(op, model)
    with all_or_none(op, sharding.mesh):
        sharding.check_idle(op)
        weights = WholeWeights(op, sharding, dtype, exclude_frozen)
    lines = [f"dtype {dtype}", *weights.described]
    check_agreement(op, lines, sharding.mesh)
    result = None
    with all_or_none(op, sharding.mesh):
        if weights.is_first:
            try:
                result = take(weights)
            finally:
                weights.end()
        elif weights.takes_part:
            weights.serve()
    return result


def _check_cut(op: str, name: str, tensor: Tensor, mesh: DeviceMesh) -> None:
    """Refuse a tensor of which the first process cannot be given each part once."""
    if not is_dtensor(tensor):
        return
    kinds: list[Any] = list(tensor.placements)
    cut = [place.dim for place in kinds if type(place) is Shard]
    first = int(tensor.device_mesh.mesh.flatten()[0]), int(mesh.mesh.flatten()[0])
    is_known = all(type(place) is Shard or place.is_replicate() for place in kinds)
    if not is_known or len({*cut}) < len(cut) or (len(kinds) > 1 and first[0] != first[1]):
        raise ValueError(
            f"{op}: {plain_name(name)!r} has placements {tensor.placements} on"
            f" {tensor.device_mesh}, expected rows over the processes of zero.shard, or experts as"
            " it shards them"
        )
