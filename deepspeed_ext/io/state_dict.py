"""Save state dicts as safetensors files, whole or not at all, and load them at disk speed."""

import contextlib
import mmap
import os
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_ext.io._native import native
from deepspeed_ext.io.async_io import AsyncIO
from deepspeed_ext.io.grouped_reader import GroupedReader
from deepspeed_ext.io.new_file import NewFile
from deepspeed_ext.io.packed_writer import PackedWriter
from deepspeed_ext.io.regular_file import open_regular
from deepspeed_ext.io.safetensors_format import (
    PREFIX_BYTES,
    Entry,
    Header,
    header_bytes,
    make_header,
    parse_header,
)
from deepspeed_ext.io.saved_tensors import (
    NEVER_TIED,
    TORCH_DTYPES,
    check_tensors,
    lay_out,
    tied_names,
    torch_shape,
)
from deepspeed_ext.io.tensors import empty, plain


@dataclass(frozen=True)
class SavedTensor:
    """What a file says of a tensor.

    Args:
        dtype: of torch; None if torch has no such dtype.
        shape: in elements of that dtype.
        nbytes: in the file.
        format_dtype: the dtype as the file names it, such as "BF16".
        tied_to: name of the tensor that this one is the same as; None if it has bytes of its own.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    nbytes: int
    format_dtype: str
    tied_to: str | None = None


@dataclass(frozen=True)
class SavedStateDict:
    """What a file holds.

    Args:
        tensors: by name, tied ones included.
        metadata: text by name, as it was saved.
    """

    tensors: dict[str, SavedTensor]
    metadata: dict[str, str]


def save(
    state_dict: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    durable: bool = True,
    engine: AsyncIO | None = None,
) -> None:
    """Save tensors into a file in the safetensors format.

    The file appears under its name when it is whole; until then, and whatever happens, an old one
    stays as it was. Space for all of it is reserved first. Names of one and the same tensor, such
    as tied weights, share their bytes, and `load` makes them one tensor again. Tensors that overlap
    in other ways are saved as if they did not. A file that is replaced passes on its mode, and its
    owner if this process may set it; symbolic links are followed.

    Args:
        state_dict: tensors by name, of any shape and strides, on the CPU or on CUDA. They must not
            change meanwhile.
        path: of the file; its folder has to exist.
        metadata: text by name, kept with the tensors.
        durable: return when the file is on the disk, sure to survive a loss of power; else when
            the kernel has it.
        engine: what writes; one is made for this call if there is none.

    Raises:
        TypeError: a value is no tensor, or one that cannot be saved: sparse, quantized, nested, on
            meta, a DTensor, or of a dtype that the format lacks. The text names it.
        ValueError: a name or the metadata cannot be saved.
        OSError: the disk is full, the folder is missing or cannot be written, or a write failed.
    """
    tensors = check_tensors(state_dict)
    ties = tied_names(tensors)
    texts = _checked_metadata(metadata or {}, tensors, ties)
    entries = lay_out({n: t for n, t in tensors.items() if n not in ties}, mmap.PAGESIZE)
    in_order = {name: entries[name] for name in tensors if name in entries}
    with _opened(engine) as running, NewFile(path, durable) as new:
        page = max(mmap.PAGESIZE, new.file.offset_alignment)
        header = make_header(in_order, texts, page)
        new.reserve(len(header) + max((entry.end for entry in entries.values()), default=0))
        writer = PackedWriter(running, new.file, page)
        try:
            writer.add(torch.frombuffer(bytearray(header), dtype=torch.uint8))
            for name in entries:
                writer.add(plain(tensors[name]).reshape(-1).view(torch.uint8))
            writer.finish()
        finally:
            writer.abandon()
        new.publish()


def load(
    path: str | os.PathLike[str],
    *,
    names: Iterable[str] | None = None,
    device: str | int | torch.device = "cpu",
    engine: AsyncIO | None = None,
) -> dict[str, Tensor]:
    """Load tensors from a file in the safetensors format, checking all that its header claims.

    Args:
        path: of the file.
        names: of the tensors to load, no others are read; None loads all.
        device: where to, cpu or cuda.
        engine: what reads; one is made for this call if there is none.

    Returns:
        Tensors by name, in the order of `names`, else in that of the file, tied ones last. Each has
        memory of its own, but tied names have one and the same tensor.

    Raises:
        ValueError: the file breaks a rule of the format or was cut short, has no tensor of such a
            name, or one whose dtype torch lacks.
        OSError: the file cannot be read.
    """
    device = _checked_device(device)
    with (
        _opened(engine) as running,
        contextlib.closing(native().File(os.fsencode(path), "read")) as file,
    ):
        header = _read_header(file.fileno(), os.fsdecode(path))
        ties = _tied_in(header)
        wanted = _checked_names(names, header, ties, os.fsdecode(path))
        kept = dict.fromkeys(ties.get(name, name) for name in wanted)
        places = {name: _place(name, header, os.fsdecode(path)) for name in kept}
        reader = GroupedReader(running, file, device)
        try:
            flat = reader.read([(n, *place) for n, place in places.items() if place[0] < place[1]])
        finally:
            reader.abandon()
    loaded = {name: _shaped(flat.pop(name, None), header.tensors[name], device) for name in kept}
    return {name: loaded[ties.get(name, name)] for name in wanted}


def inspect(path: str | os.PathLike[str]) -> SavedStateDict:
    """Return what a file in the safetensors format holds, reading nothing but its header.

    Args:
        path: of the file.

    Raises:
        ValueError: the file breaks a rule of the format or was cut short.
        OSError: the file cannot be read.
    """
    with open(open_regular("io.inspect", path, os.O_RDONLY), "rb", buffering=0) as file:
        header = _read_header(file.fileno(), os.fsdecode(path))
    ties = _tied_in(header)
    tensors = {name: _described(entry) for name, entry in header.tensors.items()}
    tensors.update({name: _described(header.tensors[kept], kept) for name, kept in ties.items()})
    metadata = {name: text for name, text in header.metadata.items() if name not in ties}
    return SavedStateDict(tensors, metadata)


def _opened(engine: AsyncIO | None) -> contextlib.AbstractContextManager[AsyncIO]:
    return AsyncIO() if engine is None else contextlib.nullcontext(engine)


def _checked_metadata(
    metadata: Mapping[str, str], tensors: Mapping[str, Tensor], ties: Mapping[str, str]
) -> dict[str, str]:
    """Return the metadata with the ties, as the safetensors package writes them."""
    for name, text in metadata.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"io.save: metadata has {name!r}: {text!r}, expected strings")
        if name in ties or _is_tie(name, text, tensors):
            why = "is another name of a tensor" if name in ties else "has a tensor's name as text"
            raise ValueError(
                f"io.save: metadata[{name!r}] {why}, expected something else: the file notes tied"
                " tensors in this way"
            )
    return {**metadata, **ties}


def _checked_device(device: str | int | torch.device) -> torch.device:
    checked = torch.device(device)
    if checked.type not in ("cpu", "cuda"):
        raise ValueError(f"io.load: device is {checked}, expected cpu or cuda")
    return checked


def _checked_names(
    names: Iterable[str] | None, header: Header, ties: Mapping[str, str], path: str
) -> list[str]:
    if names is None:
        return [*header.tensors, *ties]
    if isinstance(names, str):
        raise TypeError(f"io.load: names is the string {names!r}, expected several in a list")
    wanted = list(names)
    for name in wanted:
        if name not in header.tensors and name not in ties:
            raise ValueError(f"io.load: names has {name!r}, expected names of tensors in {path}")
    return wanted


def _read_header(fd: int, path: str) -> Header:
    file_bytes = os.fstat(fd).st_size
    length = header_bytes(os.pread(fd, PREFIX_BYTES, 0), file_bytes, path)
    parts, position = [], PREFIX_BYTES
    while position < PREFIX_BYTES + length:
        part = os.pread(fd, PREFIX_BYTES + length - position, position)
        if not part:
            raise ValueError(f"io.load: {path} ends at {position}, expected {file_bytes} bytes")
        parts.append(part)
        position += len(part)
    return parse_header(b"".join(parts), file_bytes, path)


def _tied_in(header: Header) -> dict[str, str]:
    """Return the names that stand for tensors of other names, with these."""
    return {
        name: text for name, text in header.metadata.items() if _is_tie(name, text, header.tensors)
    }


def _is_tie(name: str, text: str, tensors: Container[str]) -> bool:
    """Tell whether metadata say that a name stands for the tensor of another one."""
    return text in tensors and name not in tensors and name != NEVER_TIED


def _place(name: str, header: Header, path: str) -> tuple[int, int]:
    """Return where a tensor lies in the file, if torch can have such a tensor."""
    entry = header.tensors[name]
    if torch_shape(entry) is None:
        raise ValueError(
            f"io.load: tensor {name!r} of {path} has shape {list(entry.shape)} of {entry.dtype},"
            " expected one that torch can have"
        )
    return header.data_start + entry.begin, header.data_start + entry.end


def _shaped(flat: Tensor | None, entry: Entry, device: torch.device) -> Tensor:
    """Make a tensor of bytes; of none, an empty one."""
    dtype, shape = TORCH_DTYPES[entry.dtype], torch_shape(entry)
    assert shape is not None
    if flat is None:
        return empty(shape, dtype, device)
    if flat.data_ptr() % dtype.itemsize:  # the file has it at an odd place
        flat = flat.clone()
    return flat.view(dtype).view(shape)


def _described(entry: Entry, tied_to: str | None = None) -> SavedTensor:
    shape = torch_shape(entry)
    dtype = TORCH_DTYPES.get(entry.dtype) if shape is not None else None
    nbytes = entry.end - entry.begin
    return SavedTensor(dtype, entry.shape if shape is None else shape, nbytes, entry.dtype, tied_to)
