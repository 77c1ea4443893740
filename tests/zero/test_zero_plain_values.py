"""Plain values in checkpoints: what comes back is of the kind that it was, and what has no text."""

import base64
import io
import json

import numpy
import pytest
import torch
from torch import Tensor, nn

from deepspeed_ext.zero.checkpoint.plain_values import NotPlain, dumps, loads

LARGE = (1 << 14) + 3  # elements of float32: more bytes than a text has

ARRAYS = (
    numpy.arange(6, dtype=numpy.int16).reshape(2, 3),
    numpy.array([[1.5, -0.0, float("inf")]]).T,
    numpy.array([True, False]),
    numpy.array(2.5 + 1j),
    numpy.zeros((0, 2), dtype=">f4"),
    numpy.arange(6).reshape(2, 3)[:, ::2],
)
NUMBERS = (numpy.float32(0.1), numpy.int8(-3), numpy.bool_(True), numpy.complex128(1j))


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype.str}{list(a.shape)}")
def test_arrays_come_back_as_arrays(array: numpy.ndarray) -> None:
    """That may be written, as the state of a generator or of a sampler is."""
    restored = loads(dumps(array))
    assert type(restored) is numpy.ndarray and restored.dtype == array.dtype
    assert restored.shape == array.shape and restored.tobytes() == array.tobytes()
    assert restored.flags.writeable
    restored[...] = 0


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_numbers_of_numpy_come_back_as_numbers(number: numpy.generic) -> None:
    """Those have a hash, so that they can be keys."""
    restored = loads(dumps({number: [number]}))
    assert restored == {number: [number]}
    ((key, (value,)),) = restored.items()
    assert type(key) is type(value) is type(number)


def test_files_in_memory_come_back_from_their_beginning() -> None:
    file = io.BytesIO(b"abc\0\xff")
    file.seek(3)
    restored = loads(dumps(file))
    assert type(restored) is io.BytesIO and restored.read() == b"abc\0\xff"


@pytest.mark.parametrize(
    "value",
    [
        numpy.array([object()]),
        numpy.array(["text"]),
        numpy.array([b"bytes"]),
        numpy.array([1], dtype="M8[s]"),
        numpy.array([1], dtype="m8[s]"),
        numpy.zeros(2, dtype=[("a", "f4")]),
        numpy.str_("text"),
        numpy.datetime64(1, "s"),
    ],
    ids=lambda value: f"{type(value).__name__} {value.dtype}",
)
def test_arrays_of_other_things_than_numbers_are_refused(value: object) -> None:
    """Of objects, there would be addresses in the file."""
    with pytest.raises(NotPlain, match=r"^value\['a'\] is a numpy\..*, expected numbers, text"):
        dumps({"a": value})


def text_of(kind: str, dtype: str, nbytes: int) -> str:
    content = base64.b64encode(bytes(nbytes)).decode()
    return json.dumps({kind: [dtype, [1], content]})


@pytest.mark.parametrize("kind", ["array", "number"])
@pytest.mark.parametrize("dtype", ["|O", "<M8[s]", "<m8[s]", "|S8", "<U2", "|V8"])
def test_texts_of_other_arrays_are_refused(dtype: str, kind: str) -> None:
    with pytest.raises(ValueError, match=r"plain value has an array of .*, expected numbers"):
        loads(text_of(kind, dtype, 8))


@pytest.mark.parametrize("text", ["A$A=", "AA=A", "AAA", "AA\n=="])
def test_bytes_that_were_changed_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        loads(json.dumps({"bytes": text}))


def apart(value: object) -> tuple[str, dict[str, Tensor]]:
    found: dict[str, Tensor] = {}
    return dumps(value, found, "name"), found


def test_large_tensors_stand_apart_each_under_its_own_name() -> None:
    first, second = (torch.full((LARGE,), value) for value in (1.0, 2.0))
    text, found = apart({"a": [first], "b": second, "small": torch.ones(3)})
    assert len(found) == 2 and all(name.startswith("name.") for name in found)
    restored = loads(text, found.__getitem__)
    assert torch.equal(restored["a"][0], first) and torch.equal(restored["b"], second)
    assert torch.equal(restored["small"], torch.ones(3))


def test_large_tensors_that_files_lack_are_in_the_text() -> None:
    value = torch.randn(LARGE // 4, dtype=torch.complex128)
    text, found = apart([value])
    assert found == {} and torch.equal(loads(text)[0], value)


def test_large_parameters_stand_apart_without_their_graph() -> None:
    """Copies of them are made in memory that is used again: it would need a gradient from then."""
    param = nn.Parameter(torch.rand(LARGE))
    _, found = apart({"ema": param, "made": param * 2})
    assert [tensor.requires_grad for tensor in found.values()] == [False, False]
    assert found["name.0"].data_ptr() == param.data_ptr()
