"""One model in safetensors files, as everybody reads it, from a checkpoint of many processes."""

import json
import math
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from deepspeed_ext.dtypes import DTYPES
from deepspeed_ext.io import AsyncIO
from deepspeed_ext.io.checkpoint.format import make_header
from deepspeed_ext.io.checkpoint.new_file import NewFile
from deepspeed_ext.io.checkpoint.packed_writer import PackedWriter
from deepspeed_ext.io.checkpoint.saved_tensors import lay_out
from deepspeed_ext.io.checkpoint.shards import INDEX, ONE_FILE
from deepspeed_ext.io.regular_file import sync_folder
from deepspeed_ext.io.tensors import byte_view
from deepspeed_ext.ops.optimizers.state_formats import join_float32
from deepspeed_ext.optim.formats import MASTER, REMAINDER
from deepspeed_ext.zero.checkpoint.folder import folder_of
from deepspeed_ext.zero.checkpoint.training_state import MODEL, OPTIMIZER, TrainingReader

_OP = "zero.consolidate"
_ASIDE = ".consolidating-"
_RESULT = re.compile(rf"{re.escape(ONE_FILE)}|{re.escape(INDEX)}|model-\d+-of-\d+\.safetensors")
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

    Extra state of modules is not in them. One tensor is in memory at a time, and 256 MiB of what is
    being written. Of weights that were trained with float32 master weights, these are
    written.

    Args:
        folder: that zero.save was given.
        out: a folder, made if it is not there. What it has of an earlier result goes when all of
            the new one is on the disk: model.safetensors, model-00001-of-00002.safetensors and
            others of such names, and the index.
        tag: of the checkpoint; None: the latest.
        dtype: of floating-point weights; None: of the master weights, or as they were saved.
        max_shard_bytes: of a file; a larger tensor has one of its own.
        progress: called with bytes that were written.

    Returns:
        The files: model.safetensors, or several and their index, which comes last.

    Raises:
        OSError: a file cannot be read or written, or EBADMSG: bytes are not what was saved.
        ValueError: the checkpoint is not one of zero.save, or dtype is none for weights.
    """
    if dtype not in (None, *DTYPES):
        raise ValueError(f"{_OP}: dtype is {dtype}, expected float32, bfloat16, float16 or None")
    if max_shard_bytes < 1:
        raise ValueError(f"{_OP}: max_shard_bytes is {max_shard_bytes}, expected 1 or more")
    path = folder_of(_OP, folder, tag)
    source = _Weights(path, dtype)
    home = Path(out)
    home.mkdir(parents=True, exist_ok=True)
    shards = _shards(source.described, max_shard_bytes)
    index: dict[str, str] = {}
    names: list[str] = []
    with AsyncIO() as engine, tempfile.TemporaryDirectory(prefix=_ASIDE, dir=home) as aside:
        made = Path(aside)
        for i, inside in enumerate(shards, 1):
            names.append(ONE_FILE)
            if len(shards) > 1:
                names[-1] = f"model-{i:05}-of-{len(shards):05}.safetensors"
            _write(made / names[-1], inside, source, engine, progress)
            index |= dict.fromkeys(inside, names[-1])
        if len(shards) > 1:
            total = sum(tensor.nbytes for tensor in source.described.values())
            content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
            text = bytearray(json.dumps(content, indent=2).encode())
            names.append(INDEX)
            with NewFile(made / INDEX) as new:
                engine.write(torch.frombuffer(text, dtype=torch.uint8), new.file).result()
                new.publish()
        _put_in_place(made, names, home)
    return [home / name for name in names]


def _put_in_place(made: Path, names: list[str], home: Path) -> None:
    """Move what is on the disk to where an older result may be, of which nothing remains.

    At each moment readers find the old model, the new one or none: never an old index beside new
    files. As in Hugging Face's libraries, the one file counts where there is an index too.
    """
    old = {path.name for path in home.iterdir() if _RESULT.fullmatch(path.name)}
    if len(names) > 1 and INDEX in old and old & set(names[:-1]):
        _remove(home, [INDEX])  # it would tell of files that are about to be replaced
    for name in names:
        if name == INDEX:
            sync_folder(home)  # all that it tells of has its name
        os.replace(made / name, home / name)
    sync_folder(home)
    stale = old - set(names)
    _remove(home, [name for name in (INDEX, ONE_FILE) if name in stale])
    _remove(home, sorted(stale - {INDEX, ONE_FILE}))


def _remove(home: Path, names: list[str]) -> None:
    for name in names:
        (home / name).unlink(missing_ok=True)
    if names:
        sync_folder(home)


class _Weights:
    """The weights of a checkpoint, as they are to be written."""

    def __init__(self, path: Path, dtype: torch.dtype | None) -> None:
        self._reader = TrainingReader(path)
        self._metadata = self._reader.read_metadata()
        self.described: dict[str, Tensor] = {}  # on meta
        for full, entry in self._metadata.state_dict_metadata.items():
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
            return self._reader.tensor(self._metadata, engine, master).to(described.dtype)
        weight = self._reader.tensor(self._metadata, engine, MODEL + name)
        if lower is not None and weight.dtype == torch.bfloat16:
            weight = join_float32(
                weight, self._reader.tensor(self._metadata, engine, lower).to(torch.int16)
            )
        return weight.to(described.dtype)

    def _key(self, name: str, key: str) -> str | None:
        full = f"{OPTIMIZER}{name}.{key}"
        return full if full in self._metadata.state_dict_metadata else None


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
