"""SavedFile: a header is parsed once, and again when the file is another one by then."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepspeed_ext.io import AsyncIO, save
from deepspeed_ext.io.checkpoint import state_dict
from deepspeed_ext.io.checkpoint.neighbour_reader import ReusedPages
from deepspeed_ext.io.checkpoint.state_dict import SavedFile

CPU = torch.device("cpu")
TENSORS = {
    "a.codes": torch.randint(2**31, (300, 1000)).int(),
    "a.order": torch.arange(1000).int(),
    "b.odd": torch.arange(7).byte(),
    "b.order": torch.arange(5000).int().flip(0),
    "b.empty": torch.empty(0, 3),
    "b.codes": torch.randn(70000),
}


@pytest.fixture
def engine() -> Iterator[AsyncIO]:
    with AsyncIO() as engine:
        yield engine


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note which headers are parsed."""
    paths: list[str] = []
    parse = state_dict.parse_header

    def noted(text: bytes, file_bytes: int, path: str) -> object:
        paths.append(path)
        return parse(text, file_bytes, path)

    monkeypatch.setattr(state_dict, "parse_header", noted)
    return paths


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("room", [0, 1 << 14, 1 << 22])
@pytest.mark.parametrize("on_host", [(), ("a.order", "b.order"), tuple(TENSORS)])
def test_what_is_on_the_host_is_read_too(
    on_host: tuple[str, ...], room: int, tmp_path: Path, engine: AsyncIO
) -> None:
    save(TENSORS, tmp_path / "file", durable=False)
    file = SavedFile(tmp_path / "file")
    assert_same(file.load_together(TENSORS, CPU, engine, ReusedPages(room), on_host), TENSORS)
    some = {name: TENSORS[name] for name in ("b.codes", "a.order")}
    assert_same(file.load_together(some, CPU, engine, ReusedPages(room), on_host), some)


def test_a_header_is_parsed_once(tmp_path: Path, engine: AsyncIO, parsed: list[str]) -> None:
    save(TENSORS, tmp_path / "file", metadata={"kind": "test"}, durable=False)
    file = SavedFile(tmp_path / "file")
    said = file.inspect()
    assert said.metadata == {"kind": "test"} and said.tensors.keys() == TENSORS.keys()
    for name in TENSORS:
        some = {name: TENSORS[name]}
        assert_same(file.load([name], CPU, engine), some)
        assert_same(file.load_together([name], CPU, engine, ReusedPages(0)), some)
    assert file.inspect() == said and len(parsed) == 1


def test_tied_names(tmp_path: Path, engine: AsyncIO) -> None:
    tensor = torch.randn(1000)
    save({"a": tensor, "b": tensor}, tmp_path / "file", durable=False)
    file = SavedFile(tmp_path / "file")
    assert file.inspect().tensors["b"].tied_to == "a"
    found = file.load_together(["b", "a"], CPU, engine, ReusedPages(0))
    assert found["a"] is found["b"] and torch.equal(found["a"], tensor)


@pytest.mark.parametrize("in_place", [False, True])
def test_another_file_by_then(
    in_place: bool, tmp_path: Path, engine: AsyncIO, parsed: list[str]
) -> None:
    """One of the same length, and where it has another name of the same time."""
    path, other = tmp_path / "file", tmp_path / "other"
    save({"a": torch.zeros(10), "b": torch.ones(10)}, path, durable=False)
    file = SavedFile(path)
    file.inspect()
    save({"c": torch.full((10,), 2.0), "b": torch.full((10,), 3.0)}, other, durable=False)
    status = path.stat()
    assert status.st_size == other.stat().st_size
    if in_place:
        path.write_bytes(other.read_bytes())
    else:
        other.replace(path)
    os.utime(path, ns=(0, status.st_mtime_ns + in_place))
    assert_same(file.load(["b"], CPU, engine), {"b": torch.full((10,), 3.0)})
    assert len(parsed) == 2
    with pytest.raises(ValueError, match=r"^io.load: names has 'a', expected names of tensors in"):
        file.load_together(["a"], CPU, engine, ReusedPages(0))


def test_a_file_that_is_no_longer_whole(tmp_path: Path, engine: AsyncIO) -> None:
    path = tmp_path / "file"
    save(TENSORS, path, durable=False)
    file = SavedFile(path)
    file.inspect()
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"^io.load: .* by its header: it was cut short$"):
        file.load_together(TENSORS, CPU, engine, ReusedPages(0))
    path.write_bytes(content)  # as it was, and it is read
    assert_same(file.load_together(TENSORS, CPU, engine, ReusedPages(0)), TENSORS)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        file.load_together(TENSORS, CPU, engine, ReusedPages(0))
