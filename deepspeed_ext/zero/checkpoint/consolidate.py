"""One model in safetensors files, as everybody reads it, from a checkpoint of many processes."""

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from deepspeed_ext.io import AsyncIO
from deepspeed_ext.io.checkpoint.format import make_header
from deepspeed_ext.io.checkpoint.new_file import NewFile
from deepspeed_ext.io.checkpoint.packed_writer import PackedWriter
from deepspeed_ext.io.checkpoint.saved_tensors import lay_out
from deepspeed_ext.io.tensors import byte_view
from deepspeed_ext.ops.optimizers.state_formats import join_float32
from deepspeed_ext.optim.formats import MASTER, REMAINDER
from deepspeed_ext.zero.checkpoint.folder import folder_of
from deepspeed_ext.zero.checkpoint.reading import Wanted, read
from deepspeed_ext.zero.checkpoint.storage import Reader
from deepspeed_ext.zero.checkpoint.training_state import MODEL, OPTIMIZER
from deepspeed_ext.zero.saved_model import INDEX

_OP = "zero.consolidate"
Progress = Callable[[int], object]


def consolidate(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 << 30,
    progress: Progress | None = None,
) -> list[Path]:
    """Write the weights of a checkpoint as safetensors files with Hugging Face's index.

    One tensor is in memory at a time, and 256 MiB of what is being written. Weights that were
    trained with float32 masters are these masters.

    Args:
        folder: that zero.save was given.
        out: a folder, made if it is not there; files in it of the same names are replaced.
        tag: of the checkpoint; None: the latest.
        dtype: of floating-point weights; None: of the masters, or as they were saved.
        max_shard_bytes: of a file; a larger tensor has one of its own.
        progress: called with bytes that were written.

    Returns:
        The files: model.safetensors, or several and their index, which comes last.

    Raises:
        OSError: a file cannot be read or written, or EBADMSG: bytes are not what was saved.
        ValueError: the checkpoint is not one of zero.save.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"{_OP}: max_shard_bytes is {max_shard_bytes}, expected 1 or more")
    path = folder_of(_OP, folder, tag)
    metadata = Reader(path).read_metadata()
    source = _Weights(path, metadata, dtype)
    home = Path(out)
    home.mkdir(parents=True, exist_ok=True)
    shards = _shards(source.described, max_shard_bytes)
    index: dict[str, str] = {}
    written = []
    with AsyncIO() as engine:
        for i, names in enumerate(shards, 1):
            file = "model.safetensors"
            if len(shards) > 1:
                file = f"model-{i:05}-of-{len(shards):05}.safetensors"
            _write(home / file, names, source, engine, progress)
            written.append(home / file)
            index |= dict.fromkeys(names, file)
        if len(shards) > 1:
            total = sum(tensor.nbytes for tensor in source.described.values())
            content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
            text = bytearray(json.dumps(content, indent=2).encode())
            with NewFile(home / INDEX) as new:
                engine.write(torch.frombuffer(text, dtype=torch.uint8), new.file).result()
                new.publish()
            written.append(home / INDEX)
    return written


class _Weights:
    """The weights of a checkpoint, as they are to be written."""

    def __init__(self, path: Path, metadata: Metadata, dtype: torch.dtype | None) -> None:
        self._path = os.fspath(path)
        self._metadata = metadata
        self.described: dict[str, Tensor] = {}  # on meta
        for full, entry in metadata.state_dict_metadata.items():
            if full.startswith(MODEL) and isinstance(entry, TensorStorageMetadata):
                name, given = full.removeprefix(MODEL), entry.properties.dtype
                if given.is_floating_point:
                    has_master = self._key(name, MASTER) or self._key(name, REMAINDER)
                    given = dtype or (torch.float32 if has_master else given)
                self.described[name] = torch.empty(entry.size, dtype=given, device="meta")
        if not self.described:
            raise ValueError(f"{_OP}: {path} has no weights, expected a checkpoint of zero.save")

    def read(self, name: str, engine: AsyncIO) -> Tensor:
        """Return a weight."""
        described = self.described[name]
        master, lower = self._key(name, MASTER), self._key(name, REMAINDER)
        if master is not None:
            return self._whole(master, engine).to(described.dtype)
        weight = self._whole(MODEL + name, engine)
        if lower is not None and weight.dtype == torch.bfloat16:
            weight = join_float32(weight, self._whole(lower, engine).to(torch.int16))
        return weight.to(described.dtype)

    def _key(self, name: str, key: str) -> str | None:
        full = f"{OPTIMIZER}{name}.{key}"
        return full if full in self._metadata.state_dict_metadata else None

    def _whole(self, full: str, engine: AsyncIO) -> Tensor:
        entry = self._metadata.state_dict_metadata[full]
        assert isinstance(entry, TensorStorageMetadata)
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        parts = []
        for chunk in entry.chunks:
            into = whole
            for i, (begin, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                into = into.narrow(i, begin, length)
            piece = self._metadata.storage_data[MetadataIndex(full, chunk.offsets)]
            zeros = (0,) * len(chunk.sizes)
            parts.append(Wanted(piece, tuple(chunk.sizes), zeros, into, whole.dtype, full))
        read(self._path, parts, engine)
        return whole


def _shards(described: dict[str, Tensor], most: int) -> list[list[str]]:
    """Cut the weights, in their order, into files."""
    shards: list[list[str]] = []
    room = -1
    for name, tensor in described.items():
        if tensor.nbytes > room:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= tensor.nbytes
    return shards


def _write(
    path: Path,
    names: Iterable[str],
    source: _Weights,
    engine: AsyncIO,
    progress: Progress | None,
) -> None:
    entries = lay_out({name: source.described[name] for name in names}, mmap.PAGESIZE)
    with NewFile(path) as new:
        page = max(mmap.PAGESIZE, new.file.offset_alignment)
        header = make_header(entries, {"format": "pt"}, page)
        new.reserve(len(header) + max(entry.end for entry in entries.values()))
        writer = PackedWriter(engine, new.file, page)
        try:
            writer.add(torch.frombuffer(bytearray(header), dtype=torch.uint8))
            for name in entries:
                weight = source.read(name, engine)
                assert weight.numel() == math.prod(source.described[name].shape)
                writer.add(byte_view(weight.contiguous()))
                if progress is not None:
                    progress(weight.nbytes)
            writer.finish()
        finally:
            writer.abandon()
        new.publish()
