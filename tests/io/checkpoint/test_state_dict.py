"""Saving and loading state dicts: bit for bit, both ways with the safetensors package."""

import json
import os
import random
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from state_dict_cases import (
    DTYPES,
    MIB,
    assert_same,
    assert_same_tensor,
    files_in,
    header_of,
    mixed_state,
    random_tensor,
)

from deepspeed_ext import io
from deepspeed_ext.io.checkpoint import grouped_reader, packed_writer
from deepspeed_ext.io.checkpoint.saved_tensors import TORCH_DTYPES
from deepspeed_ext.io.checkpoint.state_dict import inspect, load, save


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def owned(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's storage is its elements and no more, where they may be."""
    return (
        tensor.untyped_storage().nbytes() == tensor.nbytes
        and tensor.data_ptr() % tensor.element_size() == 0
    )


@pytest.mark.parametrize("durable", [True, False])
def test_a_round_trip(path: Path, durable: bool) -> None:
    state = mixed_state()
    save(state, path, metadata={"step": "3"}, durable=durable)
    loaded = load(path)
    assert list(loaded) == list(state)
    assert_same(loaded, state)
    assert all(owned(tensor) for tensor in loaded.values())
    assert files_in(path.parent) == [path.name]


def test_each_backend_and_small_blocks(path: Path, engine: io.AsyncIO) -> None:
    state = mixed_state()
    save(state, path, engine=engine)
    assert_same(load(path, engine=engine), state)
    assert engine.wait() >= 0  # it is still open


def test_a_file_system_without_direct_io(tmpfs: Path) -> None:
    state = mixed_state()
    save(state, tmpfs / "model")
    assert_same(load(tmpfs / "model"), state)
    assert files_in(tmpfs) == ["model"]


def test_the_package_reads_what_we_save(path: Path) -> None:
    state = mixed_state()
    save(state, path, metadata={"format": "pt"})
    assert_same(safetensors.torch.load_file(path), state)
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert_same({name: file.get_tensor(name) for name in file.keys()}, state)  # noqa: SIM118


def test_we_read_what_the_package_saves(path: Path) -> None:
    state = mixed_state(seed=5)
    safetensors.torch.save_file(state, path, {"format": "pt"})
    loaded = load(path)
    assert_same(loaded, state)
    assert all(owned(tensor) for tensor in loaded.values())
    assert inspect(path).metadata == {"format": "pt"}


def test_all_dtypes_of_the_package_are_taken() -> None:
    known = {dtype for dtype in safetensors.torch._SIZE if dtype is not None}
    assert set(TORCH_DTYPES.values()) == known and len(DTYPES) == 20


def test_tensors_at_odd_places_of_a_file(path: Path) -> None:
    """A header of odd length is within the format; so are elements that are not on boundaries."""
    large, small = random_tensor((MIB // 4 + 3,)), random_tensor((9,), torch.float64)
    header = json.dumps(
        {
            "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "large": {
                "dtype": "F32",
                "shape": [large.numel()],
                "data_offsets": [1, 1 + large.nbytes],
            },
            "small": {
                "dtype": "F64",
                "shape": [9],
                "data_offsets": [1 + large.nbytes, 73 + large.nbytes],
            },
        }
    ).encode()
    header += b" " * ((1 - 8 - len(header)) % 4)
    content = b"".join(tensor.numpy().tobytes() for tensor in (large, small))
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\7" + content)
    loaded = load(path)
    assert_same(
        loaded, {"byte": torch.tensor([7], dtype=torch.uint8), "large": large, "small": small}
    )
    assert all(owned(tensor) for tensor in loaded.values())


def test_whole_pages_travel_directly(path: Path) -> None:
    """Only what follows the last whole page of the file goes through the page cache."""
    state = {
        name: random_tensor((MIB + n,)) for name, n in (("whole", 0), ("odd", 5), ("odder", 3))
    }
    state |= {f"small {i}": random_tensor((i,)) for i in range(100)}
    with io.AsyncIO() as engine:
        save(state, path, engine=engine)
        if not io.File(str(path), "read").direct:
            pytest.skip("this file system has no direct I/O")
        rest = path.stat().st_size % 4096
        written = engine.stats()
        assert (
            written["direct_bytes"] == path.stat().st_size - rest == written["bytes_written"] - rest
        )
    with io.AsyncIO() as engine:
        load(path, engine=engine)
        read = engine.stats()
        assert read["copied_bytes"] == 0
        assert read["direct_bytes"] == read["bytes_read"] - rest


def test_buffers_are_used_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (packed_writer, grouped_reader):
        monkeypatch.setattr(module, "BUFFER_BYTES", 256 << 10)
        monkeypatch.setattr(module, "LARGE_BYTES", 100 << 10)
        monkeypatch.setattr(module, "HELD_BYTES", 1 << 20)
        monkeypatch.setattr(module, "PIECE_BYTES", 128 << 10)
    made: list[int] = []
    pages = packed_writer.new_pages
    for module in (packed_writer, grouped_reader):
        monkeypatch.setattr(module, "new_pages", lambda n: made.append(n) or pages(n))
    written: dict[int, io.Future] = {}
    write = io.AsyncIO.write

    def watched(engine: io.AsyncIO, tensor: torch.Tensor, *rest: Any) -> io.Future:
        earlier = written.get(tensor.data_ptr())
        assert earlier is None or earlier._settled, "a buffer is used while it is being written"
        written[tensor.data_ptr()] = future = write(engine, tensor, *rest)
        return future

    monkeypatch.setattr(io.AsyncIO, "write", watched)
    state = mixed_state() | {f"more {i}": random_tensor((9999,), seed=i) for i in range(200)}
    save(state, path)
    assert len(made) <= 6
    assert_same(safetensors.torch.load_file(path), state)
    assert_same(load(path), state)
    assert len(made) <= 12


def test_data_begin_on_pages(path: Path) -> None:
    """Tensors of whole pages stay on pages; others on multiples of their elements."""
    save(mixed_state(), path)
    header, start = header_of(path)
    assert start % 4096 == 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        itemsize = TORCH_DTYPES[entry["dtype"]].itemsize
        assert begin % (4096 if (end - begin) % 4096 == 0 else itemsize) == 0, name


@pytest.mark.parametrize("device_order", ["saved", "shuffled"])
def test_many_small_tensors_are_few_requests(path: Path, device_order: str) -> None:
    state = {f"layer.{i}": random_tensor((i % 97, 3), torch.float16, i) for i in range(2000)}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    with io.AsyncIO() as engine:
        save(state, path, engine=engine)
        assert engine.stats()["submitted"] <= 2 + nbytes // MIB
        names = list(state)
        if device_order == "shuffled":
            random.Random(0).shuffle(names)
        loaded = load(path, engine=engine, names=names)
        assert engine.stats()["submitted"] <= 4 + 2 * (nbytes // MIB)
    assert list(loaded) == names
    assert_same(loaded, state)
    assert all(owned(tensor) for tensor in loaded.values())


def test_only_what_is_asked_is_read(path: Path) -> None:
    state = mixed_state()
    state["tied"] = state["zero-dim"]
    save(state, path)
    names = ["zero-dim", "float32 8192", "torch.int8.(2, 0)", "tied"]
    with io.AsyncIO() as engine:
        loaded = load(path, names=iter(names), engine=engine)
        assert engine.stats()["bytes_read"] <= 3 * 4096 + 8192
    assert list(loaded) == names
    assert_same(loaded, {name: state[name] for name in names})
    assert loaded["tied"] is loaded["zero-dim"]
    assert load(path, names=[]) == {}
    assert list(load(path, names=["tied"])) == ["tied"]


def test_nothing_at_all(path: Path) -> None:
    save({}, path)
    assert load(path) == {} and safetensors.torch.load_file(path) == {}
    save({"empty": torch.empty(3, 0, 2)}, path)
    assert_same(load(path), {"empty": torch.empty(3, 0, 2)})


def test_what_a_result_holds_goes_with_it(path: Path) -> None:
    """Every tensor has memory of its own, so dropping one frees it."""
    save({f"t{i}": torch.full((2 * MIB,), i, dtype=torch.uint8) for i in range(8)}, path)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    loaded = load(path)
    before = resident()
    for i in range(7):
        del loaded[f"t{i}"]
    assert before - resident() > 6 * 2 * MIB
    assert torch.equal(loaded["t7"], torch.full((2 * MIB,), 7, dtype=torch.uint8))
    loaded["t7"].add_(1)  # it may be written


def test_inspect_reads_the_header_only(path: Path) -> None:
    state = {"a": torch.ones(3, 4, dtype=torch.bfloat16), "b": torch.ones(())}
    state["four bits"] = torch.zeros(2, 6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    save(state, path, metadata={"a text": "ä"})
    about = inspect(str(path))
    assert about.metadata == {"a text": "ä"}
    assert list(about.tensors) == list(state)
    for name, tensor in about.tensors.items():
        expected = state[name]
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert (tensor.nbytes, tensor.tied_to) == (expected.nbytes, None)
    assert about.tensors["a"].format_dtype == "BF16"


def test_dtypes_that_torch_lacks(path: Path) -> None:
    header = json.dumps(
        {
            "six": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
            "four": {"dtype": "F4", "shape": [2, 3], "data_offsets": [3, 6]},
            "one": {"dtype": "U8", "shape": [1], "data_offsets": [6, 7]},
        }
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(7))
    assert load(path, names=["one"])["one"].tolist() == [0]
    about = inspect(path).tensors
    assert (about["six"].dtype, about["six"].shape, about["six"].nbytes) == (None, (4,), 3)
    for name, what in (("six", "[4] of F6_E2M3"), ("four", "[2, 3] of F4")):
        with pytest.raises(ValueError) as caught:
            load(path, names=[name])
        assert str(caught.value) == (
            f"io.load: tensor {name!r} of {path} has shape {what}, expected one that torch can have"
        )


def test_any_mapping_and_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = OrderedDict(b=torch.ones(2), a=torch.zeros(2))
    for path in ("plain", os.fsencode("bytes"), Path("path"), b"odd \xff name"):
        save(state, path)  # type: ignore[arg-type]
        assert list(load(path)) == ["b", "a"]  # type: ignore[arg-type]
        assert list(inspect(path).tensors) == ["b", "a"]  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda(path: Path) -> None:
    state = mixed_state()
    on_device = {name: tensor.cuda() for name, tensor in state.items()}
    on_device["on host"] = state["on host"] = random_tensor((5,))
    on_device["strided"] = random_tensor((999, 333)).cuda().t()
    state["strided"] = on_device["strided"].cpu()
    save(on_device, path)
    assert_same(load(path), state)
    loaded = load(path, device="cuda")
    assert all(tensor.is_cuda and owned(tensor) for tensor in loaded.values())
    assert_same(loaded, state)
    assert_same_tensor(load(path, names=["zero-dim"], device=0)["zero-dim"], state["zero-dim"])


def test_every_dtype_in_deterministic_mode(path: Path) -> None:
    """torch.empty then fills what it makes, which it cannot do with every dtype."""
    state = mixed_state()
    save(state, path)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(load(path), state)
    finally:
        torch.use_deterministic_algorithms(before)
