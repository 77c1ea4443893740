"""The header of safetensors files: what is refused and why; the safetensors package agrees."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import example, given, settings, strategies as st

from deepspeed_ext.io.checkpoint.format import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    BadFile,
    Header,
    HeaderEntry,
    header_bytes,
    make_header,
    parse_header,
)

PATH = "folder/model.safetensors"
MANY = settings(deadline=None, max_examples=250, derandomize=True)
STRICTER = (  # what the package lets pass, though its documentation does not
    "stands twice",
    "the keys",  # unknown ones; or a list in place of an object
    "__metadata__ of folder/model.safetensors is None",
    ", expected one of F4",  # {"U8":null} for "U8"
    "fewer than 2**63 bits",  # strides that no tensor can have
)


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def file_of(header: object, data: int = 8) -> bytes:
    """Return a file with this header and so many bytes of data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def parse(file: bytes) -> Header:
    length = header_bytes(file[:8], len(file), PATH)
    return parse_header(file[8 : 8 + length], len(file), PATH)


def refusal(file: bytes) -> str:
    """Return why a file is refused."""
    with pytest.raises(BadFile) as caught:
        parse(file)
    assert PATH in str(caught.value)
    return str(caught.value)


def package_takes(file: bytes) -> bool:
    try:
        safetensors.deserialize(file)
    except safetensors.SafetensorError:
        return False
    return True


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"shape": [3]}, "data_offsets [0, 8], 8 bytes, expected 12 bytes for shape [3] of F32"),
        ({"shape": [-2]}, None),
        ({"shape": [2.0]}, None),
        ({"shape": [True, 2]}, "shape [True, 2], expected a list of whole numbers"),
        ({"shape": ["2"]}, "shape ['2'], expected a list of whole numbers"),
        ({"shape": 2}, "shape 2, expected a list of whole numbers"),
        ({"shape": None}, "shape None, expected a list of whole numbers"),
        ({"shape": [1 << 62, 1]}, f"shape [{1 << 62}, 1], expected fewer than 2**63 bits"),
        (
            {"shape": [0, 1 << 40, 1 << 40], "data_offsets": [0, 0]},
            f"shape [0, {1 << 40}, {1 << 40}], expected fewer than 2**63 bits",
        ),
        ({"dtype": "F31"}, f"dtype 'F31', expected one of {', '.join(DTYPE_BITS)}"),
        ({"dtype": ["F32"]}, f"dtype ['F32'], expected one of {', '.join(DTYPE_BITS)}"),
        (
            {"dtype": "F4", "shape": [17]},
            "shape [17] of F4, 68 bits, expected whole bytes",
        ),
        (
            {"data_offsets": [8, 0]},
            "data_offsets [8, 0], expected [begin, end] with begin <= end",
        ),
        ({"data_offsets": [0]}, "data_offsets [0], expected [begin, end] with begin <= end"),
        ({"data_offsets": "08"}, "data_offsets '08', expected [begin, end] with begin <= end"),
        (
            {"data_offsets": [4, 12]},
            "data_offsets [4, 12], expected 0 as their begin: there are no holes and no overlaps",
        ),
        (
            {"more": 1},
            "the keys ['data_offsets', 'dtype', 'more', 'shape'],"
            " expected ['data_offsets', 'dtype', 'shape']",
        ),
    ],
)
def test_a_claim_about_a_tensor_is_refused(change: dict[str, Any], text: str | None) -> None:
    why = refusal(file_of({"x": {**entry(), **change}}))
    assert text is None or why == f"tensor 'x' of {PATH} has {text}"


def test_a_tensor_that_is_no_object_is_refused() -> None:
    keys = "expected ['data_offsets', 'dtype', 'shape']"
    assert refusal(file_of({"x": 3})) == f"tensor 'x' of {PATH} has the keys 3, {keys}"
    assert refusal(file_of({"x": {}})) == f"tensor 'x' of {PATH} has the keys [], {keys}"


def test_tensors_that_overlap_or_leave_holes_are_refused() -> None:
    for begin in (4, 9):
        second = entry("U8", [4], [begin, begin + 4])
        assert refusal(file_of({"b": second, "a": entry()}, begin + 4)) == (
            f"tensor 'b' of {PATH} has data_offsets [{begin}, {begin + 4}],"
            " expected 8 as their begin: there are no holes and no overlaps"
        )


@pytest.mark.parametrize(("data", "why"), [(7, "it was cut short"), (9, "something follows")])
def test_another_length_is_refused(data: int, why: str) -> None:
    file = file_of({"x": entry()}, data)
    expected = len(file) - data + 8
    assert (
        refusal(file) == f"{PATH} has {len(file)} bytes, expected {expected} by its header: {why}"
    )


def test_a_header_that_does_not_fit_is_refused() -> None:
    whole = file_of({"x": entry()})
    assert refusal(b"") == f"{PATH} has 0 bytes, expected at least 8"
    assert refusal(whole[:7]) == f"{PATH} has 7 bytes, expected at least 8"
    assert refusal(whole[:20]) == (
        f"{PATH} has 20 bytes, expected at least {len(whole) - 8} by the length of its header:"
        " it was cut short"
    )
    assert refusal(b"\xff" * 100) == (
        f"{PATH} has a header of {2**64 - 1} bytes, expected at most 100000000:"
        " is it a safetensors file?"
    )
    header_bytes(struct.pack("<Q", MAX_HEADER_BYTES), 1 << 40, PATH)
    with pytest.raises(ValueError, match="at most 100000000"):
        header_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 1), 1 << 40, PATH)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"", "a header that begins with b'', expected b'{'"),
        (b" {}", "a header that begins with b' ', expected b'{'"),
        (b"[]", "a header that begins with b'[', expected b'{'"),
        (b"{} x", "JSON"),
        (b"{}\0", "JSON"),
        (b'{"x', "JSON"),
        (b'{"\xff": 1}', "JSON"),
        (b'{"x": NaN}', "the number NaN, expected whole numbers from 0 to 2**63 - 1"),
        (b'{"x": 1e3}', "the number 1e3, expected whole numbers"),
        (b'{"x": -1}', "the number -1, expected whole numbers"),
        (b'{"x": 9223372036854775808}', "the number 9223372036854775808, expected whole"),
        (b'{"x": ' + b"9" * 5000 + b"}", "the number " + "9" * 40 + ", expected whole numbers"),
        (b'{"x": ' + b"[" * 200_000, "JSON"),
        (b'{"x": 1, "x": 1}', "the name 'x' stands twice"),
        (b'{"x": {"dtype": 1, "dtype": 1}}', "the name 'dtype' stands twice"),
        (b'{"\\ud800": ' + json.dumps(entry()).encode() + b"}", "half a surrogate pair"),
        (b'{"__metadata__": {"a": "\\udfff"}}', "half a surrogate pair"),
        (b'{"__metadata__": {"a": 1}}', "has 1 as 'a', expected a string"),
        (b'{"__metadata__": ["a"]}', "is ['a'], expected an object of strings"),
        (b'{"__metadata__": null}', "is None, expected an object of strings"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_header_is_refused(header: bytes, why: str) -> None:
    assert why in refusal(file_of(header, 0))


def test_long_lists_and_names_cost_little() -> None:
    """The product of so many sizes would take minutes; the text must not be as long as the file."""
    assert len(refusal(file_of({"x": entry("U8", [1 << 62] * 200_000)}))) < 400
    assert len(refusal(file_of({"x" * 1_000_000: 1}))) < 400


def test_what_is_unusual_is_taken() -> None:
    assert parse(file_of(b"{}", 0)) == Header({}, {}, 10)
    assert parse(file_of(b"{}   \n", 0)) == Header({}, {}, 14)
    tensors = {
        "late": entry("U8", [1], [8, 9]),
        "empty": entry("F64", [3, 0], [8, 8]),
        "": entry("I8", [], [9, 10]),
        "früh\0\n\U0001f600": entry(),
    }
    header = parse(file_of({**tensors, "__metadata__": {"": "ä"}}, 10))
    assert list(header.tensors) == list(tensors)
    assert header.tensors["late"] == HeaderEntry("U8", (1,), 8, 9)
    assert header.tensors["empty"] == HeaderEntry("F64", (3, 0), 8, 8)
    assert header.metadata == {"": "ä"}


def test_the_dtypes_are_those_of_the_package() -> None:
    """It names those that it knows when it meets another; each has as many bits as it says."""
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(file_of({"x": entry("none")}))
    known = str(caught.value).split("expected one of ")[1].split(" at line")[0]
    assert {name.strip("` ") for name in known.split(",")} == DTYPE_BITS.keys()
    for dtype, bits in DTYPE_BITS.items():
        file = file_of({"x": entry(dtype, [8], [0, bits])}, bits)
        assert package_takes(file) and parse(file).tensors["x"].end == bits


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[dict[str, HeaderEntry], int]:
    """Draw the tensors of a file, in an order that is not that of their bytes; their bytes."""
    shapes = st.lists(st.integers(0, 4), max_size=3)
    drawn = draw(
        st.dictionaries(
            names.filter(lambda name: name != "__metadata__"),
            st.tuples(st.sampled_from(sorted(DTYPE_BITS)), shapes),
            max_size=5,
        )
    )
    entries, position = {}, 0
    for name, (dtype, shape) in drawn.items():
        shape = [*shape, 8]  # whole bytes
        end = position + torch.Size(shape).numel() * DTYPE_BITS[dtype] // 8
        entries[name] = HeaderEntry(dtype, tuple(shape), position, end)
        position = end
    return {name: entries[name] for name in draw(st.permutations(list(entries)))}, position


@MANY
@given(tensors(), st.dictionaries(names, names, max_size=3), st.sampled_from([1, 8, 512, 4096]))
def test_made_headers_are_read_by_both(
    drawn: tuple[dict[str, HeaderEntry], int], metadata: dict[str, str], alignment: int
) -> None:
    entries, data = drawn
    made = make_header(entries, metadata, alignment)
    assert len(made) % alignment == 0
    file = made + bytes(data)
    header = parse(file)
    assert list(header.tensors.items()) == list(entries.items())
    assert (header.metadata, header.data_start) == (metadata, len(made))
    theirs = {name: value for name, value in safetensors.deserialize(file)}
    assert {name: (v["dtype"], tuple(v["shape"])) for name, v in theirs.items()} == {
        name: (e.dtype, e.shape) for name, e in entries.items()
    }


VALID = (
    file_of({"x": entry()}),
    file_of({"x": entry("U8", [8], [0, 8]), "y": entry("I16", [0], [8, 8])}),
    file_of({"__metadata__": {"a": "b"}, "w": entry("BF16", [2, 2], [0, 8])}),
    file_of(b'{"\\u00e4":{"dtype":"BOOL","shape":[8],"data_offsets":[0,8]}}   '),
)
SPICE = [b"0", b"9", b"-", b".", b"e", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b" "]
SPICE += [b"null", b"true", b"NaN", b"\\u", b"\xff", b"\0", b"dtype", b"__metadata__", b"1" * 30]


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """Draw a valid file in which some bytes were flipped, put in, taken out or doubled."""
    file = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(file)))
        kind = draw(st.sampled_from(["flip", "insert", "remove", "repeat", "length"]))
        if kind == "flip" and at < len(file):
            file[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "insert":
            file[at:at] = draw(st.sampled_from(SPICE))
        elif kind == "remove":
            del file[at : at + draw(st.integers(1, 9))]
        elif kind == "repeat":
            file[at:at] = file[at : at + draw(st.integers(1, 70))]
        elif len(file) >= 8:  # of the header, for what the other kinds have moved
            file[:8] = struct.pack("<Q", max(0, len(file) - 16 + draw(st.integers(-2, 2))))
    if draw(st.booleans()) and len(file) >= 16:
        file[:8] = struct.pack("<Q", len(file) - 16)
    return bytes(file)


@settings(MANY, max_examples=2000)
@given(spoiled())
@example(file_of(b'{"x":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}', 0))
@example(file_of(b'{"x":["U8",[8],[0,8]]}'))
def test_spoiled_files_are_read_as_the_package_reads_them_or_refused(file: bytes) -> None:
    try:
        header = parse(file)
    except BadFile as error:
        text = str(error)
        assert PATH in text
        assert not package_takes(file) or any(reason in text for reason in STRICTER), text
        return
    theirs = dict(safetensors.deserialize(file))
    assert {name: (v["dtype"], tuple(v["shape"])) for name, v in theirs.items()} == {
        name: (e.dtype, e.shape) for name, e in header.tensors.items()
    }


def test_files_of_the_package_are_taken(tmp_path: Path) -> None:
    state = {"b": torch.ones(3, 5), "a": torch.ones(7, dtype=torch.int8), "c": torch.ones(0, 2)}
    file = safetensors.torch.save(state, {"format": "pt"})
    header = parse(file)
    assert header.metadata == {"format": "pt"}
    assert {name: e.shape for name, e in header.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }
    begin = header.data_start + header.tensors["b"].begin
    assert file[begin : begin + 60] == struct.pack("<f", 1.0) * 15


def test_make_header_refuses_what_cannot_be_written() -> None:
    good = HeaderEntry("U8", (1,), 0, 1)
    with pytest.raises(ValueError, match=r"io.save: state_dict has the name '__metadata__', which"):
        make_header({"__metadata__": good}, {}, 8)
    with pytest.raises(ValueError, match=r"the metadata has .\\ud800., expected text"):
        make_header({"a\ud800": good}, {}, 8)
    with pytest.raises(ValueError, match="expected text that UTF-8 can express"):
        make_header({}, {"a": "\udfff"}, 8)
    with pytest.raises(ValueError, match="expected at most 100000000; save it in several files"):
        make_header({}, {"a": "b" * MAX_HEADER_BYTES}, 4096)
