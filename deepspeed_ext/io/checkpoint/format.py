"""The safetensors file format: its header, read with every claim checked, and made.

A file is 8 bytes, the length of the header, lowest byte first; the header, a JSON object that may
end in spaces; then the data, whose every byte belongs to exactly one tensor. Nothing here opens a
file or knows a tensor.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # what the safetensors package reads and writes
METADATA = "__metadata__"
DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E8M0", "F8_E4M3", "F8_E5M2"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_KEYS = {"dtype", "shape", "data_offsets"}
_LIMIT = 1 << 63  # of sizes and offsets, which are signed 64-bit numbers everywhere


class BadFile(ValueError):
    """What a file says breaks a rule of the format or does not fit it; tells how."""


@dataclass(frozen=True)
class HeaderEntry:
    """What a header says of one tensor.

    Args:
        dtype: a key of DTYPE_BITS.
        shape: elements along each dimension; of an F4 tensor these are elements of half a byte.
        begin: where its bytes begin in the data.
        end: where they end.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A header that keeps all rules of the format and fits its file.

    Args:
        tensors: by name, in the order of the header; the data may have another order.
        metadata: what a program wrote for others, text by name.
        data_start: where the data begin in the file.
    """

    tensors: dict[str, HeaderEntry]
    metadata: dict[str, str]
    data_start: int


def header_bytes(prefix: bytes, file_bytes: int, path: str) -> int:
    """Return the length of the header.

    Args:
        prefix: the first 8 bytes of the file, or all if there are fewer.
        file_bytes: length of the file.
        path: for the texts of errors.

    Raises:
        BadFile: the file is too short for a header, or says that it is too long.
    """
    if len(prefix) < PREFIX_BYTES:
        _refuse(f"{path} has {len(prefix)} bytes, expected at least {PREFIX_BYTES}")
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        _refuse(
            f"{path} has a header of {length} bytes, expected at most {MAX_HEADER_BYTES}:"
            " is it a safetensors file?"
        )
    if PREFIX_BYTES + length > file_bytes:
        _refuse(
            f"{path} has {file_bytes} bytes, expected at least {PREFIX_BYTES + length}"
            " by the length of its header: it was cut short"
        )
    return length


def parse_header(text: bytes, file_bytes: int, path: str) -> Header:
    """Read a header, believing nothing that it says.

    Args:
        text: the header, without the 8 bytes before it.
        file_bytes: length of the file.
        path: for the texts of errors.

    Raises:
        BadFile: the header breaks a rule of the format or does not fit the file.
    """
    fields = _json_object(text, path)
    metadata = _metadata(fields.pop(METADATA, {}), path)
    tensors = {name: _entry(name, value, path) for name, value in fields.items()}
    _check_text([*tensors, *metadata, *metadata.values()], path)
    data_start = PREFIX_BYTES + len(text)
    _check_coverage(tensors, data_start, file_bytes, path)
    return Header(tensors, metadata, data_start)


def make_header(
    tensors: Mapping[str, HeaderEntry], metadata: Mapping[str, str], alignment: int
) -> bytes:
    """Return the beginning of a file, up to the data, which then start at a multiple of a number.

    Args:
        tensors: what to say of each; their bytes cover the data without holes.
        metadata: text by name.
        alignment: of the start of the data, bytes; the header is filled up with spaces.

    Raises:
        ValueError: a name or a text cannot stand in a header, or the header would be too long.
    """
    fields: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for name, entry in tensors.items():
        if name == METADATA:
            raise ValueError(
                f"io.save: state_dict has the name {METADATA!r}, which the file format keeps for"
                " itself, expected another one"
            )
        fields[name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (entry.begin, entry.end),
        }
    try:
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"io.save: a name or the metadata has {_shown(error.object[error.start : error.end])},"
            " expected text that UTF-8 can express"
        ) from None
    text += b" " * (-(PREFIX_BYTES + len(text)) % alignment)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"io.save: state_dict has names, shapes and metadata that take {len(text)} bytes,"
            f" expected at most {MAX_HEADER_BYTES}; save it in several files"
        )
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def _json_object(text: bytes, path: str) -> dict[str, Any]:
    if not text.startswith(b"{"):
        _refuse(f"{path} has a header that begins with {text[:1]!r}, expected b'{{'")
    try:
        fields: dict[str, Any] = json.loads(
            text.decode(),
            object_pairs_hook=_without_duplicates,
            parse_int=_integer,
            parse_float=_no_number,
            parse_constant=_no_number,
        )
    except (ValueError, RecursionError) as error:
        _refuse(f"{path} has a header that is not the JSON of this format: {error}", error)
    return fields


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"the name {_shown(name)} stands twice")
        fields[name] = value
    return fields


def _integer(digits: str) -> int:
    if len(digits) > 19 or digits.startswith("-") or int(digits) >= _LIMIT:
        _no_number(digits)
    return int(digits)


def _no_number(digits: str) -> NoReturn:
    raise ValueError(f"the number {digits[:40]}, expected whole numbers from 0 to 2**63 - 1")


def _metadata(value: Any, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        _refuse(f"{METADATA} of {path} is {_shown(value)}, expected an object of strings")
    for name, text in value.items():
        if not isinstance(text, str):
            _refuse(f"{METADATA} of {path} has {_shown(text)} as {_shown(name)}, expected a string")
    return value


def _entry(name: str, value: Any, path: str) -> HeaderEntry:
    """Check what a header says of one tensor, apart from its place among the others."""

    def refuse(what: str) -> NoReturn:
        _refuse(f"tensor {_shown(name)} of {path} has {what}")

    if not isinstance(value, dict) or value.keys() != _KEYS:
        keys = sorted(value) if isinstance(value, dict) else value
        refuse(f"the keys {_shown(keys)}, expected {sorted(_KEYS)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        refuse(f"dtype {_shown(dtype)}, expected one of {', '.join(DTYPE_BITS)}")
    if not _are_integers(shape):
        refuse(f"shape {_shown(shape)}, expected a list of whole numbers")
    bits = _bits(shape, DTYPE_BITS[dtype])
    if bits is None:
        refuse(f"shape {_shown(shape)}, expected fewer than 2**63 bits")
    if not _are_integers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse(f"data_offsets {_shown(offsets)}, expected [begin, end] with begin <= end")
    if bits % 8 != 0:
        refuse(f"shape {_shown(shape)} of {dtype}, {bits} bits, expected whole bytes")
    if offsets[1] - offsets[0] != bits // 8:
        refuse(
            f"data_offsets {_shown(offsets)}, {offsets[1] - offsets[0]} bytes, expected"
            f" {bits // 8} bytes for shape {_shown(shape)} of {dtype}"
        )
    return HeaderEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _bits(shape: list[int], bits: int) -> int | None:
    """Return the size of a tensor, or None if it or a stride of it is out of range.

    Zeros count as ones until the end, as in strides. Stops before a number gets long.
    """
    for size in shape:
        bits *= max(size, 1)
        if bits >= _LIMIT:
            return None
    return 0 if 0 in shape else bits


def _are_integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)  # bool is an int


def _check_text(texts: list[str], path: str) -> None:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        _refuse(f"{path} has half a surrogate pair in its header, expected Unicode text", error)


def _check_coverage(
    tensors: dict[str, HeaderEntry], data_start: int, file_bytes: int, path: str
) -> None:
    """Refuse holes, overlaps, and a file of another length than the header says."""
    reached = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != reached:
            _refuse(
                f"tensor {_shown(name)} of {path} has data_offsets [{entry.begin}, {entry.end}],"
                f" expected {reached} as their begin: there are no holes and no overlaps"
            )
        reached = entry.end
    if data_start + reached != file_bytes:
        why = "it was cut short" if file_bytes < data_start + reached else "something follows"
        _refuse(
            f"{path} has {file_bytes} bytes, expected {data_start + reached} by its header: {why}"
        )


def _shown(value: Any) -> str:
    """Return a value as Python writes it, of bounded length."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _refuse(what: str, cause: BaseException | None = None) -> NoReturn:
    raise BadFile(what) from cause
