"""Save state dicts as safetensors files, whole or not at all, and load them at disk speed."""

import contextlib
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deepspeed_ext.io._native import native
from deepspeed_ext.io.checkpoint.format import (
    PREFIX_BYTES,
    BadFile,
    Header,
    HeaderEntry,
    header_bytes,
    make_header,
    parse_header,
)
from deepspeed_ext.io.checkpoint.grouped_reader import GroupedReader, Span
from deepspeed_ext.io.checkpoint.neighbour_reader import NeighbourReader, ReusedPages
from deepspeed_ext.io.checkpoint.new_file import NewFile
from deepspeed_ext.io.checkpoint.packed_writer import PackedWriter
from deepspeed_ext.io.checkpoint.saved_tensors import (
    TORCH_DTYPES,
    check_tensors,
    lay_out,
    tied_names,
    torch_shape,
)
from deepspeed_ext.io.checkpoint.saved_ties import texts_with_ties, ties_in, without_ties
from deepspeed_ext.io.engine.async_io import AsyncIO
from deepspeed_ext.io.file import File
from deepspeed_ext.io.regular_file import open_regular, path_text
from deepspeed_ext.io.tensors import byte_view, empty, plain


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
        metadata: text by name, kept with the tensors. Tied names stand in the file's metadata too.
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
    entries, texts = _laid_out(tensors, metadata)
    with _opened(engine) as running, NewFile(path, durable=durable) as new:
        page = max(mmap.PAGESIZE, new.file.offset_alignment)
        header, nbytes = _header_of(tensors, entries, texts, page)
        new.reserve(nbytes)
        writer = PackedWriter(running, new.file, page)
        try:
            writer.add(torch.frombuffer(bytearray(header), dtype=torch.uint8))
            for name in entries:
                writer.add(byte_view(plain(tensors[name])))
            writer.finish()
        finally:
            writer.abandon()
        new.publish()


def file_bytes(
    state_dict: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> int:
    """Return how many bytes the file has that `save` makes of a state dict.

    So it is on every disk whose direct transfers need no more alignment than a page of memory has.

    Args:
        state_dict: as of `save`; tensors may be on meta too.
        metadata: as of `save`.

    Raises:
        TypeError: a value is no tensor of a dtype that the format has.
        ValueError: a name or the metadata cannot be saved.
    """
    tensors = check_tensors(state_dict, op="io.file_bytes", or_meta=True)
    entries, texts = _laid_out(tensors, metadata)
    return _header_of(tensors, entries, texts, mmap.PAGESIZE)[1]


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
        memory of its own, but tied names have one and the same tensor, if `save` made the file;
        what other programs have noted as tied is metadata, for `inspect`.

    Raises:
        ValueError: the file breaks a rule of the format or was cut short, has no tensor of such a
            name, or one whose dtype torch lacks.
        OSError: the file cannot be read.
    """
    return SavedFile(path).load(names, device, engine)


class SavedFile:
    """A file in the safetensors format, whose header is parsed once, unless the file is changed.

    Args:
        path: of the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._parsed: tuple[tuple[int, ...], Header, dict[str, str]] | None = None

    def inspect(self) -> SavedStateDict:
        """See `inspect`."""
        name = path_text("io.inspect", self._path)
        with open(open_regular("io.inspect", name, os.O_RDONLY), "rb", buffering=0) as file:
            header, ties = self._header("io.inspect", file.fileno(), name)
        tensors = {name: _described(entry) for name, entry in header.tensors.items()}
        tied = {name: _described(header.tensors[kept], kept) for name, kept in ties.items()}
        return SavedStateDict(tensors | tied, without_ties(header.metadata, ties))

    def load(
        self,
        names: Iterable[str] | None = None,
        device: str | int | torch.device = "cpu",
        engine: AsyncIO | None = None,
    ) -> dict[str, Tensor]:
        """See `load`."""
        return self._load(names, device, engine, GroupedReader)

    def load_together(
        self,
        names: Iterable[str],
        device: torch.device,
        engine: AsyncIO,
        pages: ReusedPages,
        on_host: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """Load tensors as `load` does, but neighbours at once, into memory that they share.

        Args:
            names: of the tensors.
            device: where to, cpu or cuda.
            engine: what reads.
            pages: where the tensors are that are on the CPU.
            on_host: names of those that are on the CPU whatever the device.
        """
        reader = partial(NeighbourReader, pages=pages, on_host=on_host)
        return self._load(names, device, engine, reader)

    def _load(
        self,
        names: Iterable[str] | None,
        device: str | int | torch.device,
        engine: AsyncIO | None,
        reader_of: Callable[[AsyncIO, File, torch.device], GroupedReader | NeighbourReader],
    ) -> dict[str, Tensor]:
        name = path_text("io.load", self._path)
        device = _checked_device(device)
        with (
            _opened(engine, threads=2) as running,  # memory is fresh: each thread has it cleared
            contextlib.closing(native().File(os.fsencode(name), "read")) as file,
        ):
            header, ties = self._header("io.load", file.fileno(), name)
            wanted = _checked_names(names, header, ties, name)
            kept = dict.fromkeys(ties.get(one, one) for one in wanted)
            spans = [_span(one, header, name) for one in kept]
            reader = reader_of(running, file, device)
            try:
                flat = reader.read(span for span in spans if span.nbytes)
            finally:
                reader.abandon()
        loaded = {
            name: _shaped(flat.pop(name, None), header.tensors[name], device) for name in kept
        }
        return {name: loaded[ties.get(name, name)] for name in wanted}

    def _header(self, op: str, fd: int, path: str) -> tuple[Header, dict[str, str]]:
        """Return what an open file says of itself, and which names are tied."""
        status = os.fstat(fd)
        state = (
            *(status.st_dev, status.st_ino, status.st_size),
            *(status.st_mtime_ns, status.st_ctime_ns),
        )
        parsed = self._parsed
        if parsed is None or parsed[0] != state:
            header = _read_header(op, fd, path)
            parsed = self._parsed = state, header, ties_in(header)
        return parsed[1:]


def inspect(path: str | os.PathLike[str]) -> SavedStateDict:
    """Return what a file in the safetensors format holds, reading nothing but its header.

    Args:
        path: of the file.

    Raises:
        ValueError: the file breaks a rule of the format or was cut short.
        OSError: the file cannot be read.
    """
    return SavedFile(path).inspect()


def _laid_out(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Return where tensors lie in the data, without those that are tied, and all metadata."""
    ties = tied_names(tensors)
    texts = texts_with_ties(metadata or {}, tensors, ties)
    kept = {name: tensor for name, tensor in tensors.items() if name not in ties}
    return lay_out(kept, mmap.PAGESIZE), texts


def _header_of(
    tensors: Iterable[str],
    entries: Mapping[str, HeaderEntry],
    texts: Mapping[str, str],
    alignment: int,
) -> tuple[bytes, int]:
    """Return the beginning of a file, with entries in the order of the tensors, and its length."""
    in_order = {name: entries[name] for name in tensors if name in entries}
    header = make_header(in_order, texts, alignment)
    return header, len(header) + max((entry.end for entry in entries.values()), default=0)


def _opened(engine: AsyncIO | None, threads: int = 1) -> contextlib.AbstractContextManager[AsyncIO]:
    return AsyncIO(threads=threads) if engine is None else contextlib.nullcontext(engine)


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


def _read_header(op: str, fd: int, path: str) -> Header:
    file_bytes = os.fstat(fd).st_size
    try:
        length = header_bytes(os.pread(fd, PREFIX_BYTES, 0), file_bytes, path)
        parts, position = [], PREFIX_BYTES
        while position < PREFIX_BYTES + length:
            part = os.pread(fd, PREFIX_BYTES + length - position, position)
            if not part:
                raise BadFile(f"{path} ends at {position}, expected {file_bytes} bytes")
            parts.append(part)
            position += len(part)
        return parse_header(b"".join(parts), file_bytes, path)
    except BadFile as error:
        raise ValueError(f"{op}: {error}") from error.__cause__


def _span(name: str, header: Header, path: str) -> Span:
    """Return where a tensor lies in the file, if torch can have such a tensor."""
    entry = header.tensors[name]
    if torch_shape(entry) is None:
        raise ValueError(
            f"io.load: tensor {name!r} of {path} has shape {list(entry.shape)} of {entry.dtype},"
            " expected one that torch can have"
        )
    return Span(name, header.data_start + entry.begin, header.data_start + entry.end)


def _shaped(flat: Tensor | None, entry: HeaderEntry, device: torch.device) -> Tensor:
    """Make a tensor of bytes; of none, an empty one."""
    dtype, shape = TORCH_DTYPES[entry.dtype], torch_shape(entry)
    assert shape is not None
    if flat is None:
        return empty(shape, dtype, device)
    if flat.data_ptr() % dtype.itemsize:  # the file has it at an odd place
        flat = flat.clone()
    return flat.view(dtype).view(shape)


def _described(entry: HeaderEntry, tied_to: str | None = None) -> SavedTensor:
    shape = torch_shape(entry)
    dtype = TORCH_DTYPES.get(entry.dtype) if shape is not None else None
    nbytes = entry.end - entry.begin
    return SavedTensor(dtype, entry.shape if shape is None else shape, nbytes, entry.dtype, tied_to)
