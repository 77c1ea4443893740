"""The manifest of a tensor store: round trips, and damage of any kind is one clean error."""

import copy
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from deepspeed_ext.io.extents import PAGE
from deepspeed_ext.io.store.manifest import (
    _DTYPES,
    BadManifest,
    ManifestEntry,
    TensorInfo,
    _seal,
    decode,
    encode,
)

LENGTH = 64 * PAGE
SAMPLE = {
    "a": ManifestEntry(TensorInfo(torch.float32, (3, 5), 60, 7), 0),
    "\ud800 \0 ü / .. \n": ManifestEntry(TensorInfo(torch.bfloat16, (), 2, 2**32 - 1), 2 * PAGE),
    "empty": ManifestEntry(TensorInfo(torch.int64, (0, 2**40), 0, 0), 0),
    "b": ManifestEntry(TensorInfo(torch.bool, (PAGE + 1,), PAGE + 1, 0), 4 * PAGE),
}


def sealed(document: object) -> bytes:
    """Return a text whose own checksum is right, whatever it says."""
    body = json.dumps(document, separators=(",", ":")).encode()[:-1]
    return body + _seal(body)


def document_of(entries: dict[str, ManifestEntry]) -> Any:
    document = json.loads(encode(entries))
    del document["sha256"]
    return document


def test_round_trip() -> None:
    assert decode(encode(SAMPLE), LENGTH) == SAMPLE
    assert decode(encode({}), 0) == {}
    assert sealed(document_of(SAMPLE)) == encode(SAMPLE)
    assert json.loads(encode(SAMPLE))["format"] == 1


def test_every_dtype_has_a_name() -> None:
    for dtype in set(_DTYPES.values()):
        entry = ManifestEntry(TensorInfo(dtype, (3,), 3 * dtype.itemsize, 0), 0)
        assert decode(encode({"x": entry}), PAGE) == {"x": entry}


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 10**9), bit=st.integers(0, 7))
def test_every_flipped_bit_is_found(place: int, bit: int) -> None:
    text = bytearray(encode(SAMPLE))
    text[place % len(text)] ^= 1 << bit
    with pytest.raises(BadManifest, match="wrong checksum"):
        decode(bytes(text), LENGTH)


@given(cut=st.integers(0, 10**9))
def test_every_cut_is_found(cut: int) -> None:
    text = encode(SAMPLE)
    with pytest.raises(BadManifest, match="wrong checksum"):
        decode(text[: cut % len(text)], LENGTH)


def test_the_last_tensor_may_end_with_the_file() -> None:
    """Whatever its place among the names, and of a file that ends within its last page."""
    entries = {
        "last": ManifestEntry(TensorInfo(torch.uint8, (2 * PAGE,), 2 * PAGE, 1), 3 * PAGE),
        "first": ManifestEntry(TensorInfo(torch.uint8, (3 * PAGE,), 3 * PAGE, 2), 0),
    }
    assert decode(encode(entries), 5 * PAGE) == entries
    for length in (5 * PAGE - 1, 3 * PAGE, 0):
        with pytest.raises(BadManifest, match=f"but the data file has {length}$"):
            decode(encode(entries), length)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from([2**63, -1, 1 << 40, "float32", "a", 2**70, 10**30]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_what_is_wrong_inside_is_found(data: st.DataObject) -> None:
    """The checksum is right, but one value is another: it is refused, or all of it is usable."""
    document = copy.deepcopy(document_of(SAMPLE))
    spot: Any = document
    while True:
        keys = list(spot) if isinstance(spot, dict) else list(range(len(spot)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(spot[key], dict | list) or not spot[key] or data.draw(st.booleans()):
            break
        spot = spot[key]
    if isinstance(spot, dict) and data.draw(st.booleans()):
        del spot[key]
    else:
        spot[key] = data.draw(JSON)
    try:
        entries = decode(sealed(document), LENGTH)
    except BadManifest:
        return
    for info, offset in entries.values():
        assert offset % PAGE == 0
        assert offset + info.nbytes <= LENGTH or info.nbytes == 0
        if info.nbytes <= LENGTH:
            tensor = torch.empty(info.shape, dtype=info.dtype)
            assert tensor.numel() * tensor.element_size() == info.nbytes
    assert decode(encode(entries), LENGTH) == entries


def row(**changes: object) -> dict[str, object]:
    good = {"name": "x", "dtype": "uint8", "shape": [2], "offset": 0, "nbytes": 2, "crc32c": 0}
    return {**good, **changes}


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([row(name="")], "has the name ''"),
        ([row(name=3)], "has the name '3'"),
        ([row(dtype="nn")], "has the dtype 'nn'"),
        ([row(dtype=["uint8"])], "has the dtype"),
        ([row(shape=[-1, -2])], "has the shape"),
        ([row(shape=[True, 2])], "has the shape"),
        ([row(shape=2)], "has the shape"),
        ([row(shape=[2.0])], "has the shape"),
        ([row(shape=[2**62, 2**62], nbytes=0)], "too large"),
        ([row(shape=[0, 2**62, 4], nbytes=0)], "too large"),
        ([row(shape=[2**62] * 10000 + [0], nbytes=0)], "too large"),
        ([row(nbytes=3)], "has 3 bytes for 'x', expected 2"),
        ([row(nbytes=2.0)], "has 2.0 bytes"),
        ([row(crc32c=None)], "has the crc32c None"),
        ([row(crc32c=2**32)], "has the crc32c"),
        ([row(offset=-PAGE)], "has the offset"),
        ([row(offset=7)], "has the offset 7"),
        ([row(offset=LENGTH)], f"to byte {LENGTH + 2}, but the data file has {LENGTH}"),
        ([row(), row()], "has 'x' twice"),
        ([row(), row(name="y")], "has 'y' at 0, which is inside 'x'"),
        ([row(extra=1)], "expected the keys"),
        ([[]], "expected the keys"),
        ({}, "has other keys"),
    ],
)
def test_texts(rows: object, text: str) -> None:
    with pytest.raises(BadManifest) as caught:
        decode(sealed({"format": 1, "tensors": rows}), LENGTH)
    assert text in str(caught.value)


def test_another_format_and_no_json() -> None:
    with pytest.raises(BadManifest, match="is not of format 1"):
        decode(sealed({"format": 2, "tensors": []}), LENGTH)
    with pytest.raises(BadManifest, match="has other keys"):
        decode(sealed({"format": 1, "tensors": [], "more": 1}), LENGTH)
    for body in (b"", b"[", b'{"a":' * 100_000, b'{"format":' + b"1" * 10_000, b"\xff"):
        with pytest.raises(BadManifest, match="is no JSON"):
            decode(body + _seal(body), LENGTH)
