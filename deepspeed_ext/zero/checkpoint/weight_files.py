"""Weights as safetensors files with Hugging Face's index, put into a folder all at once."""

import json
import math
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from deepspeed_ext.dtypes import DTYPES
from deepspeed_ext.io import AsyncIO
from deepspeed_ext.io.checkpoint.format import make_header
from deepspeed_ext.io.checkpoint.new_file import NewFile
from deepspeed_ext.io.checkpoint.packed_writer import PackedWriter
from deepspeed_ext.io.checkpoint.saved_tensors import lay_out
from deepspeed_ext.io.checkpoint.saved_ties import texts_with_ties
from deepspeed_ext.io.checkpoint.shards import INDEX, ONE_FILE
from deepspeed_ext.io.regular_file import sync_folder
from deepspeed_ext.io.tensors import byte_view

_KIND = {"format": "pt"}
_ASIDE = ".consolidating-"
_RESULT = re.compile(rf"{re.escape(ONE_FILE)}|{re.escape(INDEX)}|model-\d+-of-\d+\.safetensors")
Progress = Callable[[int], object]
Read = Callable[[str, AsyncIO], Tensor]


def check_options(op: str, dtype: torch.dtype | None, max_shard_bytes: int) -> None:
    """Refuse what no weights can be written with.

    Args:
        op: for the text of the error.
        dtype: of weights; None: as they are.
        max_shard_bytes: of a file.
    """
    if dtype not in (None, *DTYPES):
        raise ValueError(f"{op}: dtype is {dtype}, expected float32, bfloat16, float16 or None")
    if max_shard_bytes < 1:
        raise ValueError(f"{op}: max_shard_bytes is {max_shard_bytes}, expected 1 or more")


def write_weight_files(
    out: str | os.PathLike[str],
    described: Mapping[str, Tensor],
    read: Read,
    max_shard_bytes: int,
    progress: Progress | None,
) -> list[Path]:
    """Write weights, one of which is in memory at a time, in the place of an older result.

    Args:
        out: a folder, made if it is not there.
        described: the weights on meta, by name.
        read: returns the weight of a name.
        max_shard_bytes: of a file; a larger tensor has one of its own.
        progress: called with bytes that were written.

    Returns:
        The files; the index, if there is one, comes last.

    Raises:
        OSError: a file cannot be written.
    """
    home = Path(out)
    home.mkdir(parents=True, exist_ok=True)
    shards = _shards(described, max_shard_bytes)
    index: dict[str, str] = {}
    names: list[str] = []
    with AsyncIO() as engine, tempfile.TemporaryDirectory(prefix=_ASIDE, dir=home) as aside:
        made = Path(aside)
        for i, inside in enumerate(shards, 1):
            names.append(ONE_FILE)
            if len(shards) > 1:
                names[-1] = f"model-{i:05}-of-{len(shards):05}.safetensors"
            _write(made / names[-1], {n: described[n] for n in inside}, read, engine, progress)
            index |= dict.fromkeys(inside, names[-1])
        if len(shards) > 1:
            total = sum(tensor.nbytes for tensor in described.values())
            content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
            text = bytearray(json.dumps(content, indent=2).encode())
            names.append(INDEX)
            with NewFile(made / INDEX) as new:
                engine.write(torch.frombuffer(text, dtype=torch.uint8), new.file).result()
                new.publish()
        _put_in_place(made, names, home)
    return [home / name for name in names]


def write_weight_file(
    path: str | os.PathLike[str],
    described: Mapping[str, Tensor],
    read: Read,
    ties: Mapping[str, str],
) -> None:
    """Write weights, one of which is in memory at a time, to one file.

    Args:
        path: of the file; its folder is there.
        described: the weights on meta, by name.
        read: returns the weight of a name.
        ties: other names of these, with theirs, which the file notes.

    Raises:
        OSError: the file cannot be written.
    """
    with AsyncIO() as engine:
        _write(Path(path), described, read, engine, None, texts_with_ties(_KIND, described, ties))


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


def _shards(described: Mapping[str, Tensor], most: int) -> list[list[str]]:
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
    described: Mapping[str, Tensor],
    read: Read,
    engine: AsyncIO,
    progress: Progress | None,
    metadata: Mapping[str, str] = _KIND,
) -> None:
    entries = lay_out(described, mmap.PAGESIZE)
    with NewFile(path) as new:
        page = max(mmap.PAGESIZE, new.file.offset_alignment)
        header = make_header(entries, metadata, page)
        new.reserve(len(header) + max(entry.end for entry in entries.values()))
        writer = PackedWriter(engine, new.file, page)
        try:
            writer.add(torch.frombuffer(bytearray(header), dtype=torch.uint8))
            for name in entries:
                weight = read(name, engine)
                assert weight.numel() == math.prod(described[name].shape)
                writer.add(byte_view(weight.contiguous()))
                if progress is not None:
                    progress(weight.nbytes)
            writer.finish()
        finally:
            writer.abandon()
        new.publish()
