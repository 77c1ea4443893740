"""Names of one and the same tensor: how files note them, and whose notes are believed."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from state_dict_cases import assert_same, header_of

from deepspeed_ext.io.checkpoint import state_dict
from deepspeed_ext.io.checkpoint.state_dict import inspect, load, save

LIST = "deepspeed_ext.tied"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 8)
        self.head = torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight


def metadata_in(path: Path) -> dict[str, str] | None:
    with safetensors.safe_open(path, "pt") as opened:
        return opened.metadata()


def save_as_before(
    state: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str]
) -> None:
    """Save as the first versions did, which listed nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_dict, "texts_with_ties", lambda texts, _, ties: {**texts, **ties})
        save(state, path, metadata=metadata)


def test_tied_tensors_are_kept_once_as_the_package_does(path: Path, tmp_path: Path) -> None:
    model, theirs = Tied(), tmp_path / "theirs"
    save(model.state_dict(), path)
    safetensors.torch.save_model(model, str(theirs))
    ours = header_of(path)[0]
    assert ours["__metadata__"].pop(LIST) == '["head.weight"]'
    assert ours == header_of(theirs)[0]
    for file in (path, theirs):
        other = Tied()
        assert safetensors.torch.load_model(other, str(file)) == (set(), [])
        assert torch.equal(other.head.weight, model.head.weight)
        kept = {"embedding.weight": model.embedding.weight.detach()}
        assert_same(safetensors.torch.load_file(file), kept)
    loaded = load(path)
    assert loaded["head.weight"] is loaded["embedding.weight"]
    assert_same(loaded, model.state_dict())
    about = inspect(path)
    assert about.tensors["head.weight"].tied_to == "embedding.weight"
    assert about.tensors["head.weight"].shape == (50, 8) and about.metadata == {}


@pytest.mark.parametrize(
    "metadata",
    [
        {"main_output": "w"},
        {"z": "w", "format": "pt"},
        {"z": "w", LIST: '["y"]'},
        {"z": "w", LIST: "no list"},
        {"z": "w", LIST: '{"z": 1}'},
        {"z": "w", LIST: "[" * 100_000},
        {"z": "w", LIST: "[1, [], null]"},
    ],
)
def test_metadata_of_others_are_no_tensors(path: Path, metadata: dict[str, str]) -> None:
    """A text that happens to be the name of a tensor is a text."""
    state = {"w": torch.arange(10.0), "v": torch.ones(3)}
    safetensors.torch.save_file(state, path, metadata)
    assert_same(load(path), state)
    about = inspect(path)
    assert sorted(about.tensors) == ["v", "w"]
    assert about.metadata == {name: text for name, text in metadata.items() if name != LIST}
    with pytest.raises(ValueError, match=r"names has '(z|main_output)'"):
        load(path, names=[next(iter(metadata))])
    save(state, path, metadata=about.metadata)  # and they can be saved again
    assert_same(load(path), state)
    assert inspect(path) == about


def test_ties_beside_metadata_that_look_like_ties(path: Path) -> None:
    one = torch.arange(5.0)
    metadata = {"best": "a", "format": "pt", "note": "x"}
    save({"a": one, "b": one}, path, metadata=metadata)
    loaded = load(path)
    assert list(loaded) == ["a", "b"] and loaded["a"] is loaded["b"]
    assert inspect(path).metadata == metadata
    assert metadata_in(path) == {**metadata, "b": "a", LIST: '["b"]'}


def test_a_file_without_ties_has_nothing_added(path: Path) -> None:
    """Programs may refuse a file with metadata among which they miss theirs."""
    save({"w": torch.ones(3)}, path)
    assert metadata_in(path) is None
    save({"w": torch.ones(3)}, path, metadata={"format": "pt"})
    assert metadata_in(path) == {"format": "pt"}


@pytest.mark.parametrize("odd", [0, 1])
def test_files_of_the_first_versions(path: Path, odd: int) -> None:
    one = torch.arange(5000.0 + odd)
    state = {
        **{"z": one, "b": one, "page": torch.ones(1024), "none": torch.ones(0)},
        **{"half": torch.ones(7).half(), "double": torch.ones(3).double()},
    }
    save_as_before(state, path, {"format": "pt"})
    assert LIST not in header_of(path)[0]["__metadata__"]
    loaded = load(path)
    assert_same(loaded, state)
    assert loaded["z"] is loaded["b"]
    assert inspect(path).metadata == {"format": "pt"}
    # Another program has taken it over: its layout is another one.
    safetensors.torch.save_file({"b": one}, path, metadata_in(path))
    assert list(load(path)) == ["b"]


def test_what_only_looks_like_a_file_of_the_first_versions(path: Path) -> None:
    """Its data begin on a page, as of some other programs; the rest is not as ours."""
    state = {"w": torch.arange(10.0), "v": torch.ones(2048)}
    save_as_before(state, path, {"main_output": "w"})
    assert sorted(load(path)) == ["v", "w"], "the first name is kept, and m comes before w"
    save_as_before(state, path, {"z": "w"})
    file = path.read_bytes()
    header, start = header_of(path)
    header["w"]["data_offsets"], header["v"]["data_offsets"] = [0, 40], [40, 8232]
    text = json.dumps(header).encode()
    path.write_bytes(file[:8] + text + b" " * (start - 8 - len(text)) + file[start:])
    assert sorted(load(path)) == ["v", "w"], "whole pages would be first"


def test_the_format_is_never_a_tie(path: Path) -> None:
    """Files commonly say {"format": "pt"}, and a tensor may have that name."""
    one = torch.ones(2)
    for write in (
        lambda: save({"pt": one}, path, metadata={"format": "pt"}),
        lambda: safetensors.torch.save_file({"pt": one}, path, {"format": "pt"}),
    ):
        write()
        assert list(load(path)) == ["pt"]
        about = inspect(path)
        assert list(about.tensors) == ["pt"] and about.metadata == {"format": "pt"}
        with pytest.raises(ValueError, match="names has 'format'"):
            load(path, names=["format"])
    save({"a": one, "format": one}, path, metadata={"b": "text"})
    loaded = load(path)
    assert sorted(loaded) == ["a", "format"] and loaded["a"] is loaded["format"]
    assert inspect(path).tensors["a"].tied_to == "format"
    save({"a": one, "b": one, "format": one}, path, metadata={"format": "a"})
    assert sorted(load(path)) == ["a", "b", "format"]
    assert inspect(path).metadata == {"format": "a"}
