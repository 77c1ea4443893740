"""What `save` and `load` refuse, in which words; the folder stays as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from state_dict_cases import files_in

from deepspeed_ext.io.checkpoint.state_dict import inspect, load, save

KINDS = ("object", "dict", "none", "sparse", "meta", "quantized", "nested", "lazy", "fake")
KINDS += ("double complex", "freed")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def bad_tensors() -> dict[str, tuple[Any, str]]:
    lazy = torch.nn.LazyLinear(3).weight
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(3)
    scale: dict[str, Any] = dict(scale=1.0, zero_point=0, dtype=torch.qint8)
    return {
        "object": (object(), "is an object, expected "),
        "dict": ({"a": torch.ones(2)}, "is a dict, expected "),
        "none": (None, "is a NoneType, expected "),
        "sparse": (torch.eye(3).to_sparse(), "has layout torch.sparse_coo, expected torch.strided"),
        "meta": (torch.ones(3, device="meta"), "is on meta, expected cpu or cuda"),
        "quantized": (
            torch.quantize_per_tensor(torch.ones(3), **scale),
            "has quantized dtype torch.qint8, expected ",
        ),
        "nested": (
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "is a nested tensor, expected a dense one; see to_padded_tensor",
        ),
        "lazy": (lazy, "has no shape yet, expected values; run the model once"),
        "fake": (fake, "is a FakeTensor, expected a torch.Tensor that has values"),
        "double complex": (torch.ones(3, dtype=torch.complex128), "has dtype torch.complex128, "),
        "freed": (
            freed,
            "has 0 bytes of memory, expected at least 32: its storage was freed or resized",
        ),
    }


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_saved_is_named(path: Path, kind: str) -> None:
    value, text = bad_tensors()[kind]
    with pytest.raises(ValueError if kind == "freed" else TypeError) as caught:
        save({"good": torch.ones(2), "a.b": value}, path)
    assert str(caught.value).startswith(f"io.save: state_dict['a.b'] {text}")
    assert files_in(path.parent) == []


def test_a_dtensor_is_named_with_the_fix(path: Path) -> None:
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        shard = DTensor.from_local(torch.ones(2), mesh)
        with pytest.raises(TypeError, match=r"state_dict\['w'\] is a DTensor, .*full_tensor\(\)"):
            save({"w": shard}, path)
    finally:
        torch.distributed.destroy_process_group()


def test_other_arguments_are_checked(path: Path) -> None:
    one = torch.ones(2)
    with pytest.raises(TypeError, match=r"io.save: state_dict is a list, expected a mapping"):
        save([one], path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"io.save: state_dict has the key 1, expected strings"):
        save({1: one}, path)  # type: ignore[dict-item]
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(TypeError, match=r"io.save: metadata has 'a': \[.{5,60}, expected strings"):
        save({"w": one}, path, metadata={"a": deep})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"io.save: metadata has 'a': 1, expected strings"):
        save({"w": one}, path, metadata={"a": 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"metadata\['v'\] is another name of a tensor"):
        save({"w": one, "v": one, "u": one}, path, metadata={"v": "text"})
    for state, metadata in (
        ({"w": one}, {"deepspeed_ext.tied": "[]"}),
        ({"a": one, "deepspeed_ext.tied": one}, {}),
    ):
        with pytest.raises(ValueError, match=r"has the name 'deepspeed_ext.tied', under which"):
            save(state, path, metadata=metadata)
    with pytest.raises(ValueError, match="state_dict has the name '__metadata__'"):
        save({"__metadata__": one}, path)
    assert files_in(path.parent) == []
    save({"w": one}, path, metadata={"w": "w", "a": "b"})
    with pytest.raises(ValueError) as caught:
        load(path, names=["w", "x"])
    assert str(caught.value) == f"io.load: names has 'x', expected names of tensors in {path}"
    with pytest.raises(TypeError, match=r"io.load: names is the string 'w', expected several"):
        load(path, names="w")
    with pytest.raises(ValueError, match=r"io.load: device is meta, expected cpu or cuda"):
        load(path, device="meta")


@pytest.mark.parametrize(
    ("call", "op"),
    [
        (load, "io.load"),
        (inspect, "io.inspect"),
        (lambda path: save({"w": torch.ones(2)}, path), "io.save"),
    ],
)
def test_paths_that_are_none(
    tmp_path: Path, call: Any, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for bad, kind, text in (
        ("", ValueError, "path is '', expected the path of a file or folder"),
        (b"a\0b", ValueError, "path is 'a\\x00b', expected one without zero bytes"),
        (7, TypeError, "path is an int, expected a str or os.PathLike"),
    ):
        with pytest.raises(kind) as caught:
            call(bad)
        assert str(caught.value) == f"{op}: {text}"
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(("call", "op"), [(load, "io.load"), (inspect, "io.inspect")])
def test_who_refuses_a_file_says_its_own_name(path: Path, call: Any, op: str) -> None:
    path.write_bytes(b"ab")
    with pytest.raises(ValueError) as caught:
        call(path)
    assert str(caught.value) == f"{op}: {path} has 2 bytes, expected at least 8"
    save({"w": torch.ones(2000)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"^{op}: {path} has 12095 bytes, .* it was cut short$"):
        call(path)
