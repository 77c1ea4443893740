"""consolidate: what the files hold, how they are cut, and what is left when the power fails."""

import errno
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_writes import Engine, fail_writes_of, files_of
from torch import Tensor

from deepspeed_ext import io, zero
from deepspeed_ext.io.checkpoint.shards import INDEX, ONE_FILE
from deepspeed_ext.ops.optimizers.state_formats import split_float32
from deepspeed_ext.optim.formats import MASTER, REMAINDER
from deepspeed_ext.zero.checkpoint import weight_files

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved(home: Path, weights: dict[str, Tensor], state: dict[str, Tensor] | None = None) -> None:
    content = {f"model.{name}": tensor for name, tensor in weights.items()}
    content |= {f"optimizer.{name}": tensor for name, tensor in (state or {}).items()}
    dcp.save(content, storage_writer=zero.Writer(home / "a"), no_dist=True)


WEIGHTS = {  # 60, 60 and 60 bytes
    "b": torch.arange(15.0),
    "a": torch.arange(30.0).view(5, 6).bfloat16(),
    "c": torch.arange(15, dtype=torch.int32),
}


@pytest.mark.parametrize(
    "most, cut", [(180, 1), (179, 2), (120, 2), (119, 3), (60, 3), (59, 3), (1, 3)]
)
def test_files_are_as_large_as_they_may_be(most: int, cut: int, tmp_path: Path) -> None:
    saved(tmp_path, WEIGHTS)
    told: list[int] = []
    out = tmp_path / "out"
    files = zero.consolidate(
        tmp_path, out, tag="a", max_shard_bytes=most, progress=lambda n: told.append(n)
    )
    assert told == [60, 60, 60]
    tensors = [path for path in files if path.name != INDEX]
    assert len(tensors) == cut and files_of(out).keys() == {path.name for path in files}
    found = {name: tensor for path in tensors for name, tensor in io.load(path).items()}
    assert found.keys() == WEIGHTS.keys()
    for name, tensor in found.items():
        assert tensor.dtype == WEIGHTS[name].dtype and torch.equal(tensor, WEIGHTS[name]), name
    if cut > 1:
        index = json.loads(files[-1].read_text())
        assert index["metadata"]["total_size"] == 180
        assert index["weight_map"] == {n: p.name for p in tensors for n in io.load(p)}


def test_weights_are_master_weights(tmp_path: Path) -> None:
    """Bit for bit, also where their lower halves are apart; of a weight that has got another
    dtype since, what is left of these says nothing."""
    values = {name: torch.randn(40) for name in ("master", "remainder", "cast", "half", "none")}
    uppers = {name: split_float32(value)[0] for name, value in values.items()}
    lowers = {name: split_float32(value)[1] for name, value in values.items()}
    weights = uppers | {"cast": values["cast"], "half": values["half"].half()}
    state = {f"master.{MASTER}": values["master"], "none.exp_avg": values["none"]}
    state |= {f"{name}.{REMAINDER}": lowers[name] for name in ("remainder", "cast", "half")}
    saved(tmp_path, weights, state)
    (file,) = zero.consolidate(tmp_path, tmp_path / "out", tag="a")
    found = io.load(file)
    expected = values | {"none": uppers["none"], "half": values["half"].half().float()}
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    (file,) = zero.consolidate(tmp_path, tmp_path / "out", tag="a", dtype=torch.float16)
    for name, value in io.load(file).items():
        assert torch.equal(value, expected[name].half()), name


@pytest.mark.parametrize("most", [0, -1])
def test_files_without_room_are_refused(most: int, tmp_path: Path) -> None:
    text = f"^zero.consolidate: max_shard_bytes is {most}, expected 1 or more$"
    with pytest.raises(ValueError, match=text):
        zero.consolidate(tmp_path, tmp_path / "out", max_shard_bytes=most)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("beginning", [b'{\n  "metadata"', b""], ids=["index", "tensors"])
def test_a_result_that_cannot_be_written(
    beginning: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before stays, and nothing else."""
    saved(tmp_path, WEIGHTS)
    out = tmp_path / "out"
    zero.consolidate(tmp_path, out, tag="a", max_shard_bytes=60, dtype=torch.bfloat16)
    before = files_of(out)
    fail_writes_of(monkeypatch, beginning)
    with pytest.raises(OSError, match="the disk has gone"):
        zero.consolidate(tmp_path, out, tag="a", max_shard_bytes=60)
    assert files_of(out) == before


def test_writes_have_ended_when_one_has_failed(tmp_path: Path) -> None:
    weights = {name: torch.rand(1 << 20) for name in "abc"}
    described = {name: tensor.to("meta") for name, tensor in weights.items()}
    engine: Any = Engine(OSError(errno.EIO, "broken"))
    with pytest.raises(OSError, match="broken"):
        weight_files._write(
            tmp_path / "file", described, lambda name, _: weights[name], engine, None
        )
    assert len(engine.answers) > 3 and all(answer.is_asked for answer in engine.answers)
    assert files_of(tmp_path) == {}


def test_files_with_names_that_begin_alike_stay(tmp_path: Path) -> None:
    """They are somebody's, and no results."""
    saved(tmp_path, WEIGHTS)
    out = tmp_path / "out"
    zero.consolidate(tmp_path, out, tag="a", max_shard_bytes=60)
    names = {f"{name}.orig" for name in files_of(out)}
    names |= {f"{ONE_FILE}.orig", f"my-{ONE_FILE}", "model-1-of-x.safetensors", "model.bin"}
    for name in names:
        (out / name).touch()
    zero.consolidate(tmp_path, out, tag="a")
    assert files_of(out).keys() == names | {ONE_FILE}
    zero.consolidate(tmp_path, out, tag="a", max_shard_bytes=60)
    assert len(files_of(out)) == len(names) + 4


def names_of(files: int) -> list[str]:
    """What a result has, in the order in which it comes; none: no result."""
    if files < 2:
        return [ONE_FILE][:files]
    return [*(f"model-{i:05}-of-{files:05}.safetensors" for i in range(1, files + 1)), INDEX]


Folder = dict[str, tuple[str, int]]  # by name: of which model, and of how many files


def model_in(folder: Folder) -> str:
    """Return which model readers find, as Hugging Face's do: "none", or "mixed" of two."""
    if ONE_FILE in folder:
        return folder[ONE_FILE][0]
    if INDEX not in folder or not set(names_of(folder[INDEX][1])) <= folder.keys():
        return "none"
    found = {folder[name][0] for name in names_of(folder[INDEX][1])}
    return found.pop() if len(found) == 1 else "mixed"


def after_power_failures(begin: Folder, steps: list[tuple[str, str]], new: int) -> Iterator[Folder]:
    """Yield what may be there after each step: of those since the last sync, any may be lost."""
    kept, since = begin, []
    for step in [*steps, ("end", "")]:
        for done in itertools.product((False, True), repeat=len(since)):
            yield applied(kept, [s for s, is_done in zip(since, done, strict=True) if is_done], new)
        if step[0] == "sync":
            kept, since = applied(kept, since, new), []
        else:
            since.append(step)


def applied(folder: Folder, steps: list[tuple[str, str]], new: int) -> Folder:
    made = dict(folder)
    for what, name in steps:
        if what == "replace":
            made[name] = ("new", new)
        elif what == "unlink":
            made.pop(name, None)
    return made


@pytest.mark.parametrize("old, new", [(old, new) for old in range(4) for new in (1, 2, 3)])
def test_power_failures_leave_one_model(
    old: int, new: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never an old index beside new files, and when it has returned the new one only."""
    made, home = tmp_path / "made", tmp_path / "home"
    for where, count in ((made, new), (home, old)):
        where.mkdir()
        for name in names_of(count):
            (where / name).touch()
    steps: list[tuple[str, str]] = []

    def noting(what: str, function: Any) -> Any:
        def call(path: Any, *rest: Any) -> None:
            steps.append((what, os.path.basename(rest[0] if rest else path)))
            function(path, *rest)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", noting("replace", os.replace))
        patch.setattr(os, "unlink", noting("unlink", os.unlink))
        patch.setattr(weight_files, "sync_folder", noting("sync", lambda path: None))
        weight_files._put_in_place(made, names_of(new), home)
    begin: Folder = {name: ("old", old) for name in names_of(old)}
    found = [model_in(folder) for folder in after_power_failures(begin, steps, new)]
    assert "mixed" not in found
    assert "new" in found and (not old or "old" in found)
    if old and not set(names_of(old)) & set(names_of(new)) - {INDEX}:
        assert "none" not in found, "each name is another's: one of the models is always there"
    end: Folder = {name: ("new", new) for name in names_of(new)}
    folders = list(after_power_failures(begin, steps, new))
    assert folders[-1] == end and steps[-1][0] == "sync"
    assert files_of(home).keys() == end.keys()
