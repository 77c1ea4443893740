"""Tensors that share memory, overlap, have strides, or begin anywhere: which bytes are saved."""

import ctypes
from pathlib import Path

import pytest
import safetensors.torch
import torch
from state_dict_cases import MIB, assert_same, bits, random_tensor

from deepspeed_ext.io.checkpoint.state_dict import load, save


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_what_only_overlaps_is_kept_apart(path: Path) -> None:
    base = random_tensor((64, 64))
    state = {
        "base": base,
        "transposed": base.t(),
        "flat": base.view(-1),
        "bits": base.view(torch.int32),
        "row": base[3],
        "rows": base[2:7],
        "same rows": base[2:7],
        "parameter": torch.nn.Parameter(base),
        "conjugate": random_tensor((9,), torch.complex64).conj(),
        "negative": random_tensor((9,), torch.complex64).conj().imag,
        "expanded": torch.arange(3.0).expand(5, 3),
    }
    save(state, path)
    loaded = load(path)
    assert_same(loaded, {name: tensor.detach() for name, tensor in state.items()})
    same = {(a, b) for a in loaded for b in loaded if a < b and loaded[a] is loaded[b]}
    assert same == {("base", "parameter"), ("rows", "same rows")}
    pointers = {tensor.data_ptr() for tensor in loaded.values()}
    assert len(pointers) == len(loaded) - 2
    conjugated = {"a": base.view(torch.complex64), "b": base.view(torch.complex64).conj()}
    save(conjugated, path)
    assert_same(load(path), {name: tensor.resolve_conj() for name, tensor in conjugated.items()})


@pytest.mark.parametrize("nbytes", [400, MIB, 3 * MIB + 12])
def test_strided_tensors_are_saved_in_a_row(path: Path, nbytes: int) -> None:
    tensor = random_tensor((4, nbytes // 16)).t()
    state = {
        "a": tensor,
        "b": tensor[::2],
        "c": random_tensor((2, 3, 5, 7)).to(memory_format=torch.channels_last),
    }
    save(state, path)
    loaded = load(path)
    assert_same(loaded, state)
    assert all(value.is_contiguous() for value in loaded.values())
    assert_same(safetensors.torch.load_file(path), state)


def test_tensors_that_require_grad_and_inference_tensors(path: Path) -> None:
    with torch.inference_mode():
        inference = torch.ones(3)
    state = {"p": torch.ones(2, requires_grad=True) * 2, "i": inference}
    save(state, path)
    loaded = load(path)
    assert not loaded["p"].requires_grad and loaded["p"].is_leaf
    assert_same(loaded, state)


def test_unaligned_memory(path: Path) -> None:
    """Tensors may begin anywhere, also between elements."""
    room = ctypes.create_string_buffer(random_tensor((2 * MIB,), torch.uint8).numpy().tobytes())
    state = {
        f"{shift}": torch.frombuffer(room, dtype=torch.float32, offset=shift, count=MIB // 4 + 9)
        for shift in (0, 1, 2, 3, 5)
    }
    save(state, path)
    loaded = load(path)
    for shift in (0, 1, 2, 3, 5):
        expected = torch.frombuffer(room, dtype=torch.uint8, offset=shift, count=MIB + 36)
        assert torch.equal(bits(loaded[f"{shift}"]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_a_single_element_of_any_stride(path: Path, dtype: torch.dtype) -> None:
    """It is contiguous whatever its strides are."""
    base = random_tensor((9,), torch.uint8).view(torch.uint8).to(dtype)
    state = {"one": base[3::2][:1], "square": base.as_strided((1, 1), (5, 7), 4), "none": base[9:]}
    assert all(tensor.is_contiguous() for tensor in state.values())
    save(state, path)
    assert_same(load(path), state)
