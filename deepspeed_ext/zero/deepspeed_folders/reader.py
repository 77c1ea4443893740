"""DeepSpeedReader: a folder of DeepSpeed's for zero.load, each process reading its own rows."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from deepspeed_ext.zero.checkpoint.storage import Reader
from deepspeed_ext.zero.deepspeed_folders.contents import contents_of
from deepspeed_ext.zero.deepspeed_folders.lazy import Lazy
from deepspeed_ext.zero.deepspeed_folders.whole_state import Names


class DeepSpeedReader(Reader):
    """What reads a checkpoint of `zero.save`, for one of DeepSpeed's.

    Args:
        path: the folder of the checkpoint.
        names: of the parameters of each group of the optimizer; None: there is none.

    Raises:
        OSError, ValueError: as `contents_of` does.
    """

    def __init__(self, path: Path, names: Names | None) -> None:
        super().__init__(path)
        self._contents = contents_of(path, names is not None, names)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the checkpoint holds."""
        return Metadata({n: _entry(one.described) for n, one in self._contents.tensors.items()})

    def value(self, metadata: Metadata, name: str) -> Any:
        """Return a plain value."""
        return self._contents.values[name]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this process wants."""
        for item in plan.items:
            target = planner.resolve_tensor(item)
            _fill(target.detach(), self._contents.tensors[item.storage_index.fqn], item)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _entry(described: Tensor) -> TensorStorageMetadata:
    whole = ChunkStorageMetadata(torch.Size([0] * described.dim()), described.shape)
    return TensorStorageMetadata(TensorProperties(dtype=described.dtype), described.shape, [whole])


def _fill(into: Tensor, saved: Lazy, item: ReadItem) -> None:
    """Copy what is wanted of a tensor: rows part by part, anything else out of the whole."""
    shape, lengths = saved.described.shape, item.lengths
    if lengths[1:] == shape[1:] and into.is_contiguous():
        first = item.storage_offsets[0] if shape else 0
        begin = first * shape[1:].numel()
        flat = into.view(-1)
        for part in saved.small_parts(begin, begin + flat.numel()):
            flat[: part.numel()].copy_(part)
            flat = flat[part.numel() :]
        return
    found = saved.read()
    for dimension, (begin, length) in enumerate(zip(item.storage_offsets, lengths, strict=True)):
        found = found.narrow(dimension, begin, length)
    into.copy_(found)
