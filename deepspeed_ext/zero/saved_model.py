"""Models in safetensors files: where each tensor lies, and rows of it read."""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deepspeed_ext.io import AsyncIO
from deepspeed_ext.io.checkpoint.format import (
    PREFIX_BYTES,
    BadFile,
    Header,
    header_bytes,
    parse_header,
)
from deepspeed_ext.io.checkpoint.saved_tensors import TORCH_DTYPES, torch_shape
from deepspeed_ext.io.checkpoint.saved_ties import ties_in
from deepspeed_ext.io.checkpoint.shards import INDEX, ONE_FILE
from deepspeed_ext.io.engine.window import Window
from deepspeed_ext.io.regular_file import open_regular

_MAX_INDEX_BYTES = 1 << 28
Then = Callable[[], object]


@dataclass(frozen=True)
class TensorSlice:
    """Where a tensor lies: a slice of a file.

    Args:
        path: of the file.
        begin: of its first byte in the file.
        dtype: of torch.
        shape: of the tensor.
    """

    path: str
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def slices_in(op: str, path: str | os.PathLike[str]) -> dict[str, TensorSlice]:
    """Return where the tensors of a saved model lie.

    Args:
        op: for the texts of errors.
        path: a safetensors file, a Hugging Face index, or a folder with either.

    Raises:
        ValueError: a file breaks a rule of its format, or the index names what is not there.
        OSError: a file cannot be read.
    """
    file = Path(path)
    if file.is_dir():
        # As in Hugging Face's libraries the one file counts where there is an index too.
        is_sharded = (file / INDEX).exists() and not (file / ONE_FILE).exists()
        file = file / (INDEX if is_sharded else ONE_FILE)
    if file.suffix != ".json":
        return dict(_slices_of(op, file))
    weight_map = _weight_map(op, file)
    found: dict[str, TensorSlice] = {}
    for name in sorted(set(weight_map.values())):
        inside = dict(_slices_of(op, file.parent / name))
        found |= {key: saved for key, saved in inside.items() if weight_map.get(key) == name}
    missing = [key for key in weight_map if key not in found]
    if missing:
        raise ValueError(
            f"{op}: {file} has {missing[0]!r} in {weight_map[missing[0]]}, expected names of"
            " tensors in that file"
        )
    return found


def read_rows(
    engine: AsyncIO,
    window: Window,
    saved: TensorSlice,
    first: int,
    into: Tensor,
    then: Then | None = None,
) -> None:
    """Begin to read elements of a tensor, as they follow one another.

    Args:
        engine: that reads.
        window: takes over what is under way.
        saved: where the tensor lies.
        first: index of the first element, in the tensor as it lies in the file.
        into: gets them, if it has another dtype, cast.
        then: called when they are there.
    """
    is_like = into.dtype == saved.dtype and into.is_contiguous()
    buffer = into if is_like else torch.empty(into.shape, dtype=saved.dtype, device=into.device)

    def end() -> None:
        if not is_like:
            into.copy_(buffer)
        if then is not None:
            then()

    if into.numel():
        offset = saved.begin + first * saved.dtype.itemsize
        window.add(engine.read(buffer, saved.path, offset), buffer.nbytes, end)


def _slices_of(op: str, path: Path) -> Iterator[tuple[str, TensorSlice]]:
    header = _header(op, path)
    ties = ties_in(header)
    for name, entry in header.tensors.items():
        shape, dtype = torch_shape(entry), TORCH_DTYPES.get(entry.dtype)
        if shape is None or dtype is None:
            raise ValueError(
                f"{op}: tensor {name!r} of {path} has dtype {entry.dtype} and shape"
                f" {list(entry.shape)}, expected one that torch can have"
            )
        assert math.prod(shape) * dtype.itemsize == entry.end - entry.begin
        saved = TensorSlice(os.fspath(path), header.data_start + entry.begin, dtype, shape)
        yield name, saved
        yield from ((tied, saved) for tied, kept in ties.items() if kept == name)


def _header(op: str, path: Path) -> Header:
    name = os.fspath(path)
    with open(open_regular(op, name, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            length = header_bytes(file.read(PREFIX_BYTES), size, name)
            return parse_header(file.read(length), size, name)
        except BadFile as error:
            raise ValueError(f"{op}: {error}") from error.__cause__


def _weight_map(op: str, path: Path) -> dict[str, str]:
    """Return the file of each tensor; files of other folders are refused."""
    with open(open_regular(op, os.fspath(path), os.O_RDONLY), "rb") as file:
        text = file.read(_MAX_INDEX_BYTES)
    try:
        fields = json.loads(text)
        found = fields["weight_map"]
        is_map = isinstance(found, dict) and all(isinstance(v, str) for v in found.values())
    except (ValueError, KeyError, TypeError, RecursionError):
        is_map = False
    if not is_map:
        raise ValueError(f"{op}: {path} has no weight_map of names to files, expected an index")
    for name in found.values():
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ValueError(f"{op}: {path} has the file {name!r}, expected files beside it")
    return {str(key): value for key, value in found.items()}
