"""What a checkpoint holds: the text of its manifest, and the checks when it is read."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from deepspeed_ext.zero.checkpoint.plain_values import dtype_name, dtype_of, dumps, loads

FORMAT = 1
BLOCK = 4 << 20  # bytes that have a checksum together
_SEAL = ',"sha256":"{}"}}\n'  # ends the text: of all that stands before it
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Piece:
    """Where the bytes of a chunk lie.

    Args:
        file: beside the manifest.
        offset: of its first byte in the file.
        nbytes: how many they are.
        checksums: CRC-32C of each block of `BLOCK` bytes, counted from its first.
    """

    file: str
    offset: int
    nbytes: int
    checksums: tuple[int, ...]


class BadManifest(ValueError):
    """The text is not what `encode` writes."""


def encode(metadata: Metadata) -> bytes:
    """Return the text: JSON that ends with a checksum of itself.

    Args:
        metadata: of DCP; storage_data has a Piece for each chunk.

    Raises:
        ValueError: the chunks of a tensor are not all of it, as when a process takes itself for the
            only one.
    """
    rows = []
    for name, entry in metadata.state_dict_metadata.items():
        row: dict[str, Any] = {"name": name}
        if isinstance(entry, TensorStorageMetadata):
            if not _are_whole(entry.chunks, entry.size):
                count = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
                raise ValueError(
                    f"zero.save: {name!r} has parts of {count} elements, expected all"
                    f" {math.prod(entry.size)} of shape {list(entry.size)}, each once"
                )
            row["dtype"] = dtype_name(entry.properties.dtype)
            row["shape"] = list(entry.size)
            row["chunks"] = [
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    **_row(metadata.storage_data[MetadataIndex(name, chunk.offsets)]),
                }
                for chunk in entry.chunks
            ]
        else:
            row["value"] = _row(metadata.storage_data[MetadataIndex(name)])
        rows.append(row)
    planner = dumps(metadata.planner_data)
    document = {"format": FORMAT, "entries": rows, "planner": planner}
    body = json.dumps(document, separators=(",", ":"))[:-1].encode()
    return body + _seal(body)


def decode(text: bytes, path: str) -> Metadata:
    """Return what a manifest says; nothing in it is taken on trust.

    Args:
        text: the manifest.
        path: of it, for the texts of errors.

    Raises:
        BadManifest: it was changed or cut short, or contradicts itself.
    """
    body = text[: -len(_seal(b""))]
    if text[len(body) :] != _seal(body):
        raise BadManifest(f"{path} has a wrong checksum, expected the one of its content")
    try:
        document = json.loads(body + b"}")
        if document["format"] != FORMAT:
            raise BadManifest(f"{path} has format {document['format']!r}, expected {FORMAT}")
        metadata = Metadata({}, loads(document["planner"]), {})
        for row in document["entries"]:
            _add(metadata, row, path)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadManifest(f"{path} has no manifest of this format in it: {error!r}") from error
    return metadata


def _seal(body: bytes) -> bytes:
    return _SEAL.format(hashlib.sha256(body).hexdigest()).encode()


def _row(piece: Piece) -> dict[str, Any]:
    return {
        "file": piece.file,
        "offset": piece.offset,
        "nbytes": piece.nbytes,
        "crc32c": list(piece.checksums),
    }


def _add(metadata: Metadata, row: dict[str, Any], path: str) -> None:
    name = row["name"]
    if not isinstance(name, str) or name in metadata.state_dict_metadata:
        raise BadManifest(f"{path} has the name {str(name)[:80]!r} twice or as no text")
    if "value" in row:
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(name)] = _piece(row["value"], name, path)
        return
    dtype, size = dtype_of(row["dtype"]), _sizes(row["shape"], name, path)
    chunks = []
    for chunk in row["chunks"]:
        offsets, sizes = (_sizes(chunk[key], name, path) for key in ("offsets", "sizes"))
        both = zip(offsets, sizes, size, strict=False)
        fits = len(offsets) == len(sizes) == len(size)
        if not fits or any(begin + length > end for begin, length, end in both):
            raise BadManifest(f"{path} has a chunk of {name!r} that lies outside of it")
        piece = _piece(chunk, name, path)
        if piece.nbytes != math.prod(sizes) * dtype.itemsize:
            raise BadManifest(
                f"{path} has {piece.nbytes} bytes for a chunk {list(sizes)} of {name!r}"
            )
        chunks.append(ChunkStorageMetadata(offsets, sizes))
        metadata.storage_data[MetadataIndex(name, offsets)] = piece
    if not _are_whole(chunks, size):
        raise BadManifest(f"{path} has chunks of {name!r} that are not all of it, expected all")
    properties = TensorProperties(dtype=dtype)
    metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, size, chunks)


def _are_whole(chunks: Sequence[ChunkStorageMetadata], size: torch.Size) -> bool:
    """Tell whether chunks, which lie inside of a tensor, are all of it, each element once."""
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        return False
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if len(filled) < 2:
        return True
    # Along the dimension with the most cuts, few of them are open at a time.
    sweep = max(range(len(size)), key=lambda d: len({chunk.offsets[d] for chunk in filled}))
    still: list[ChunkStorageMetadata] = []
    for chunk in sorted(filled, key=lambda chunk: chunk.offsets[sweep]):
        still = [s for s in still if s.offsets[sweep] + s.sizes[sweep] > chunk.offsets[sweep]]
        if any(_overlap(chunk, other) for other in still):
            return False
        still.append(chunk)
    return True


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    """Tell whether two chunks have an element in common."""
    return all(
        a < b + m and b < a + n
        for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


def _piece(row: dict[str, Any], name: str, path: str) -> Piece:
    file, checksums = row["file"], row["crc32c"]
    if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
        raise BadManifest(
            f"{path} has the file {str(file)[:80]!r} for {name!r}, expected one beside it"
        )
    offset, nbytes = _count(row["offset"], name, path), _count(row["nbytes"], name, path)
    if not isinstance(checksums, list) or len(checksums) != -(-nbytes // BLOCK):
        raise BadManifest(f"{path} has other checksums for {name!r} than one for each block")
    return Piece(file, offset, nbytes, tuple(_count(each, name, path) for each in checksums))


def _sizes(value: Any, name: str, path: str) -> torch.Size:
    return torch.Size([_count(item, name, path) for item in value])


def _count(value: Any, name: str, path: str) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise BadManifest(f"{path} has the number {str(value)[:40]} for {name!r}")
    return value
