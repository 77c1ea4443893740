"""What a durable tensor store holds: the text of its manifest, and the checks when it is read."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from deepspeed_ext.io.extents import PAGE, whole_pages

FORMAT = 1
LARGEST_TEXT = 256 << 20  # bytes; of more than a million tensors
LARGEST = 2**63 - 1  # of a file offset, and of a tensor's bytes

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_DIGITS = hashlib.sha256().digest_size * 2
_SEAL = ',"sha256":"{}"}}\n'  # ends the text: of all that stands before it
_KEYS = {"name", "dtype", "shape", "offset", "nbytes", "crc32c"}


@dataclass(frozen=True)
class TensorInfo:
    """What a store knows about a tensor: type, shape, bytes, and their CRC-32C if it has one."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    checksum: int | None = None


class ManifestEntry(NamedTuple):
    """A tensor and where its bytes start in the data file."""

    info: TensorInfo
    offset: int


class BadManifest(ValueError):
    """The text is not what `encode` writes, or does not fit the data file."""


def encode(entries: Mapping[str, ManifestEntry]) -> bytes:
    """Return the text of a manifest: JSON that ends with a checksum of itself."""
    rows = [
        {
            "name": name,
            "dtype": str(info.dtype).removeprefix("torch."),
            "shape": list(info.shape),
            "offset": offset,
            "nbytes": info.nbytes,
            "crc32c": info.checksum,
        }
        for name, (info, offset) in entries.items()
    ]
    body = json.dumps({"format": FORMAT, "tensors": rows}, separators=(",", ":"))[:-1].encode()
    return body + _seal(body)


def decode(text: bytes, file_bytes: int) -> dict[str, ManifestEntry]:
    """Return the entries of a manifest; nothing in it is taken on trust.

    Args:
        text: the manifest.
        file_bytes: length of the data file; every tensor has to lie inside.

    Raises:
        BadManifest: says what is wrong.
    """
    body = text[: -len(_seal(b""))]
    if text[len(body) :] != _seal(body):
        raise BadManifest("has a wrong checksum, expected the one of its content")
    try:
        document = json.loads(body + b"}")
    except (ValueError, RecursionError) as error:
        raise BadManifest(f"is no JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise BadManifest(f"is not of format {FORMAT}")
    rows = document.get("tensors")
    if document.keys() != {"format", "tensors"} or not isinstance(rows, list):
        raise BadManifest("has other keys, expected format and tensors")
    entries: dict[str, ManifestEntry] = {}
    for row in rows:
        name, entry = _entry(row)
        if name in entries:
            raise BadManifest(f"has {name!r} twice")
        entries[name] = entry
    _check_places(entries, file_bytes)
    return entries


def _seal(body: bytes) -> bytes:
    return _SEAL.format(hashlib.sha256(body).hexdigest()).encode()


def _entry(row: object) -> tuple[str, ManifestEntry]:
    if not isinstance(row, dict) or row.keys() != _KEYS:
        raise BadManifest(f"has the row {str(row)[:200]}, expected the keys {sorted(_KEYS)}")
    name, shape = row["name"], row["shape"]
    if not isinstance(name, str) or not name:
        raise BadManifest(f"has the name {str(name)[:200]!r}, expected text that is not empty")
    dtype = _DTYPES.get(row["dtype"]) if isinstance(row["dtype"], str) else None
    if dtype is None:
        raise BadManifest(f"has the dtype {str(row['dtype'])[:200]!r} for {name!r}")
    if not isinstance(shape, list) or not all(_is_count(size, LARGEST) for size in shape):
        raise BadManifest(f"has the shape {str(shape)[:200]} for {name!r}")
    span = dtype.itemsize
    for size in shape:
        span *= max(
            size, 1
        )  # torch computes strides as if no size were 0: they must be in range too
        if span > LARGEST:
            raise BadManifest(f"has the shape {str(shape)[:200]} for {name!r}, which is too large")
    nbytes = math.prod(shape) * dtype.itemsize
    if not _is_count(row["nbytes"], LARGEST) or row["nbytes"] != nbytes:
        raise BadManifest(f"has {str(row['nbytes'])[:40]} bytes for {name!r}, expected {nbytes}")
    if not _is_count(row["crc32c"], 2**32 - 1):
        raise BadManifest(f"has the crc32c {str(row['crc32c'])[:40]} for {name!r}")
    if not _is_count(row["offset"], LARGEST) or row["offset"] % PAGE:
        raise BadManifest(f"has the offset {str(row['offset'])[:40]} for {name!r}")
    return name, ManifestEntry(
        TensorInfo(dtype, tuple(shape), nbytes, row["crc32c"]), row["offset"]
    )


def _is_count(value: object, largest: int) -> bool:
    return type(value) is int and 0 <= value <= largest


def _check_places(entries: Mapping[str, ManifestEntry], file_bytes: int) -> None:
    end, owner = 0, ""
    for name, (info, offset) in sorted(entries.items(), key=lambda item: item[1].offset):
        if info.nbytes == 0:
            continue
        if offset < end:
            raise BadManifest(f"has {name!r} at {offset}, which is inside {owner!r}")
        if offset + info.nbytes > file_bytes:
            raise BadManifest(
                f"has {name!r} to byte {offset + info.nbytes}, but the data file has {file_bytes}"
            )
        end, owner = offset + whole_pages(info.nbytes), name
