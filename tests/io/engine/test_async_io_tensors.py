"""Every kind of tensor, by its dtype, shape, strides and place in autograd."""

from pathlib import Path

import pytest
import torch
from aio_cases import BLOCK, bytes_of, payload

from deepspeed_ext import io

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(
    engine: io.AsyncIO, tmp_path: Path, dtype: torch.dtype
) -> None:
    data = payload(BLOCK * 16 * 3 + 16 * 5)
    if dtype is torch.bool:
        data = data % 2
    tensor = data.view(dtype).reshape(-1, 1)
    assert engine.write(tensor, tmp_path / "file").result() is tensor
    assert (tmp_path / "file").read_bytes() == bytes_of(data)
    got = torch.zeros_like(tensor)
    assert engine.read(got, tmp_path / "file").result() is got
    assert bytes_of(got) == bytes_of(data)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7, 11, 13)], ids=str)
def test_every_shape(engine: io.AsyncIO, tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    engine.write(tensor, tmp_path / "file").result()
    assert (tmp_path / "file").read_bytes() == bytes_of(tensor)
    assert torch.equal(engine.read(torch.zeros(shape), tmp_path / "file").result(), tensor)


STRIDED = {
    "transposed": lambda: torch.randn(300, 70).t(),
    "every third column": lambda: torch.randn(90, 90)[:, ::3],
    "middle rows": lambda: torch.randn(300, 70)[100:200],
    "channels last": lambda: torch.randn(2, 3, 40, 50).to(memory_format=torch.channels_last),
    "conjugate": lambda: torch.randn(50, 60, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(50, 60, dtype=torch.complex64).conj().imag,
    "one element": lambda: torch.randn(8, 8)[3:4, 5:6],
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_tensors_travel_in_their_logical_order(
    engine: io.AsyncIO, tmp_path: Path, name: str
) -> None:
    tensor = STRIDED[name]()
    engine.write(tensor, tmp_path / "file", offset=3).result()
    assert (tmp_path / "file").read_bytes()[3:] == bytes_of(tensor)
    got = STRIDED[name]()
    around = got._base.detach().clone() if got._base is not None else None
    assert engine.read(got, tmp_path / "file", offset=3).result() is got
    assert torch.equal(got, tensor)
    if around is not None and around.dtype == got.dtype:  # what lies between stays as it was
        inside = torch.as_strided(around, got.shape, got.stride(), got.storage_offset())
        inside.copy_(tensor)
        assert torch.equal(got._base, around) or name in ("conjugate", "negative")


@pytest.mark.parametrize("see", ["result", "done", "wait", "exception"])
def test_a_strided_read_has_landed_when_it_is_seen_to_be_done(
    engine: io.AsyncIO, tmp_path: Path, see: str
) -> None:
    tensor = torch.randn(100, 200)
    engine.write(tensor, tmp_path / "file").result()
    got = torch.zeros(200, 100).t()
    future = engine.read(got, tmp_path / "file")
    if see == "result":
        future.result()
    elif see == "exception":
        assert future.exception() is None
    elif see == "wait":
        engine.wait()
    else:
        while not future.done():
            pass
    assert torch.equal(got, tensor)


def test_expanded_tensors_are_written_as_their_value(engine: io.AsyncIO, tmp_path: Path) -> None:
    tensor = torch.arange(5).reshape(5, 1).expand(5, 7)
    engine.write(tensor, tmp_path / "file").result()
    assert (tmp_path / "file").read_bytes() == bytes_of(tensor)


def test_what_is_done_to_a_strided_source_afterwards_does_not_matter_to_the_copy(
    engine: io.AsyncIO, tmp_path: Path
) -> None:
    source = torch.arange(6).reshape(2, 3).t()
    future = engine.write(source, tmp_path / "file")
    del source
    future.result()
    assert (tmp_path / "file").read_bytes() == bytes_of(torch.arange(6).reshape(2, 3).t())


@pytest.mark.parametrize("strided", [False, True])
def test_reading_into_a_leaf_changes_its_version(
    engine: io.AsyncIO, tmp_path: Path, strided: bool
) -> None:
    value = torch.randn(6, 4)
    engine.write(value.clone().requires_grad_(), tmp_path / "file").result()
    base = torch.zeros(4, 6).t() if strided else torch.zeros(6, 4)
    leaf = base.detach().requires_grad_()
    product = (leaf * leaf).sum()
    version = leaf._version
    engine.read(leaf, tmp_path / "file").result()
    assert torch.equal(leaf, value)
    assert leaf.requires_grad and leaf.is_leaf
    assert leaf._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_parameters_and_inference_tensors(engine: io.AsyncIO, tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(3, 5))
    engine.write(parameter, tmp_path / "file").result()
    with torch.inference_mode():
        inside = torch.zeros(3, 5)
        engine.read(inside, tmp_path / "file").result()
    assert torch.equal(inside, parameter)
    outside = torch.nn.Parameter(torch.zeros(3, 5))
    assert engine.read(outside, tmp_path / "file").result() is outside
    assert torch.equal(outside, parameter)
