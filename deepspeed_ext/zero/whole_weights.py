"""The weights of a sharded model for one process: each goes there, and to no other process."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
        self._group = mesh.get_group(mesh.ndim - 1)  # of processes that share each parameter out
        self._device = mesh.device_type
        place = mesh.get_coordinate() or []
        self.takes_part = not any(place[:-1])  # others have the same once more
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
            _check_cut(op, name, tensor)
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
        if dist.get_world_size(self._group) == 1:
            return index
        told = torch.tensor(index, device=self._device)
        dist.broadcast(told, dist.get_global_rank(self._group, 0), group=self._group)
        return int(told)

    def _gathered(self, name: str) -> Tensor | None:
        """Return a whole tensor in the first process; what is sent has its dtype already."""
        tensor = self._tensors[name].detach()
        part = local(tensor).to(self._dtypes[name])
        processes = dist.get_world_size(self._group)
        if processes == 1 or not is_dtensor(tensor):
            return part
        rows = -(-tensor.shape[0] // processes)  # the last ones may have fewer; NCCL wants as many
        if len(part) < rows:
            part = torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])
        whole = part.new_empty(rows * processes, *part.shape[1:]) if self.is_first else None
        pieces = None if whole is None else list(whole.split(rows))
        first = dist.get_global_rank(self._group, 0)
        dist.gather(part.contiguous(), pieces, dst=first, group=self._group)
        return None if whole is None else whole[: tensor.shape[0]]


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


def _check_cut(op: str, name: str, tensor: Tensor) -> None:
    if is_dtensor(tensor):
        *others, last = tensor.placements
        if not last.is_shard(0) or not all(place.is_replicate() for place in others):
            raise ValueError(
                f"{op}: {plain_name(name)!r} has placements {tensor.placements}, expected rows over"
                " the processes of zero.shard"
            )
