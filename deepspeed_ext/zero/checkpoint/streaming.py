"""save_streamed: a checkpoint whose tensors are never all in memory, of no process."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from deepspeed_ext.io import AsyncIO
from deepspeed_ext.zero.checkpoint import data_file
from deepspeed_ext.zero.checkpoint.folder import checked_tag, name_latest
from deepspeed_ext.zero.checkpoint.manifest import Piece
from deepspeed_ext.zero.checkpoint.plain_values import NotPlain, OutOfRange, dumps
from deepspeed_ext.zero.checkpoint.storage import Writer

Read = Callable[[str], Iterable[Tensor]]


def save_streamed(
    op: str,
    home: Path,
    tag: str,
    described: Mapping[str, Tensor],
    read: Read,
    values: Mapping[str, object],
) -> None:
    """Write a checkpoint as `zero.save` does, and name it the latest one.

    Args:
        op: for the texts of errors.
        home: folder of the checkpoints, made if it is not there.
        tag: of this one.
        described: tensors on meta, by their names in the checkpoint.
        read: returns the parts of the tensor of a name, when it is written.
        values: plain ones, by their names in the checkpoint.

    Raises:
        OSError: the disk is full, or cannot be written; BlockingIOError: another save writes there.
        ValueError, TypeError: the tag is no name, or a value is not plain.
    """
    texts, apart = _encoded(op, values)
    content = {**texts, **apart}
    shapes = {**described, **content}
    writer = Writer(home / checked_tag(op, tag))
    plan = writer.prepare_local_plan(SavePlan([]))
    try:
        (plan,) = writer.prepare_global_plan([plan])
        path = os.fspath(home / tag / str(plan.storage_data))
        with AsyncIO() as engine:
            pieces = data_file.write(
                path,
                shapes,
                engine,
                lambda name: [content[name]] if name in content else read(name),
            )
        metadata = Metadata({name: _entry(name, shapes[name], texts) for name in shapes})
        results = [_result(name, shapes[name], pieces[name], texts) for name in shapes]
        writer.finish(metadata, [results])
    finally:
        writer.abandon()
    name_latest(home, tag)


def _encoded(op: str, values: Mapping[str, object]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the texts of plain values as bytes, and the large tensors in them, by name."""
    texts: dict[str, Tensor] = {}
    apart: dict[str, Tensor] = {}
    for name, value in values.items():
        large: dict[str, Tensor] = {}
        try:
            text = dumps(value, large, name).encode()
        except (NotPlain, OutOfRange) as error:
            raise type(error)(f"{op}: {error}") from None
        texts[name] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        apart |= large
    return texts, apart


def _entry(name: str, tensor: Tensor, texts: Mapping[str, Tensor]) -> Any:
    if name in texts:
        return BytesStorageMetadata()
    whole = ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [whole])


def _result(name: str, tensor: Tensor, piece: Piece, texts: Mapping[str, Tensor]) -> WriteResult:
    offset = None if name in texts else torch.Size([0] * tensor.dim())
    return WriteResult(MetadataIndex(name, offset), piece.nbytes, piece)
