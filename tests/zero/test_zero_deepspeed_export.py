"""export_deepspeed: the files, field by field, are those that DeepSpeed's load_universal reads."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_folder import KEYS, Run, drawn
from test_zero_deepspeed_folders import check_import, run

from deepspeed_ext import zero
from deepspeed_ext.zero.__main__ import main
from deepspeed_ext.zero.checkpoint.streaming import save_streamed
from deepspeed_ext.zero.deepspeed_folders import exporting
from deepspeed_ext.zero.deepspeed_folders.contents import contents_of
from deepspeed_ext.zero.deepspeed_folders.lazy import lazy_number

MODELS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_the_layout(tmp_path: Path) -> None:
    """DeepSpeed 0.19.8 has loaded such folders in stages 1, 2 and 3; fields are what it reads."""
    made = run(stage=3, dtype=torch.bfloat16)
    made.write(tmp_path / "theirs")
    zero.import_deepspeed(tmp_path / "theirs", tmp_path / "ours")
    told: list[int] = []
    path = zero.export_deepspeed(tmp_path / "ours", tmp_path / "out", progress=told.append)
    assert (tmp_path / "out" / "latest_universal").read_text() == path.name == "global_step4"
    assert sorted(os.listdir(tmp_path / "out")) == ["global_step4", "latest_universal"]
    assert set(os.listdir(path)) == {*MODELS, "zero"}
    names = {name: value for group in made.groups for name, value in group.items()}
    assert set(os.listdir(path / "zero")) == {*names, "optimizer_state.pt"}
    for name, value in names.items():
        for key in KEYS:
            content = loaded(path / "zero" / name / f"{key}.pt")
            assert content.pop("cat_dim") == 0 and content.keys() == {"param"}
            assert content["param"].dtype == torch.float32
            assert torch.equal(content["param"], value[key])
        assert loaded(path / "zero" / name / "step.pt") == torch.tensor(4.0)
    rest = loaded(path / "zero" / "optimizer_state.pt")
    assert rest["ds_version"] == "0.19.8"  # from 0.3.17 on
    for groups in (rest["param_groups"], rest["optimizer_state_dict"]["param_groups"]):
        assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.01, 0.1), (0.5, 0.0)]
        assert [group["params"] for group in groups] == [[0], [1]]
    assert rest["optimizer_state_dict"]["state"][0]["step"] == torch.tensor(4.0)
    assert sum(told) == sum(t.nbytes for value in names.values() for t in value.values())
    first, second = (loaded(path / name) for name in MODELS)
    assert first["module"].keys() == (made.frozen | made.buffers).keys()
    assert not second["module"]
    for model in (first, second):
        counts = [model[key] for key in ("global_steps", "global_samples", "skipped_steps")]
        assert counts == [5, 60, 1] and (model["dp_world_size"], model["mp_world_size"]) == (1, 1)
        assert model["lr_scheduler"] == {"last_batch_iteration": 3}
        assert model["mine"]["epoch"] == 2 and model["optimizer"] is None
        shapes = [{n: v["fp32"].shape for n, v in group.items()} for group in made.groups]
        assert model["param_shapes"] == shapes
    os.rename(tmp_path / "out", tmp_path / "again")
    (tmp_path / "all").mkdir()
    os.rename(tmp_path / "again", tmp_path / "all" / "theirs")
    check_import(made, tmp_path / "all", "global_step4")


def imported(tmp_path: Path, **options: Any) -> Path:
    made = Run([drawn({"a.weight": (5, 7), "b": (11,)})], **options)
    made.write(tmp_path / "theirs")
    zero.import_deepspeed(tmp_path / "theirs", tmp_path / "ours")
    return tmp_path / "ours"


def test_what_deepspeed_would_take_for_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of the client's, and steps, of which it has one for a group."""
    imported(tmp_path)
    out = tmp_path / "out"
    contents = contents_of(tmp_path / "theirs" / "global_step4")
    values: Any = contents.values
    tensors = {**contents.tensors, "optimizer.b.step": lazy_number(5)}

    def save(tag: str) -> None:
        described = {name: one.described for name, one in tensors.items()}
        save_streamed(
            "test",
            tmp_path / "ours",
            tag,
            described,
            lambda name: tensors[name].small_parts(),
            values,
        )

    save("steps")
    with pytest.raises(ValueError, match=r"step 5 for 'b' of group 0, expected 4 as 'a\.weight'"):
        zero.export_deepspeed(tmp_path / "ours", out)
    tensors = {name: one for name, one in tensors.items() if name != "optimizer.b.step"}
    values["process.0"]["client"]["module"] = 3
    save("names")
    with pytest.raises(ValueError, match="'module' in the client's state, expected none of Deep"):
        zero.export_deepspeed(tmp_path / "ours", out)
    values["common"]["groups"].clear()
    save("weights")
    assert main(["export", str(tmp_path / "ours"), str(out), "--format", "universal"]) == 1
    assert "weights has no state of an optimizer, expected one" in capsys.readouterr().err
    assert not out.exists()


def test_the_command_and_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, out = imported(tmp_path), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(exporting.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 9}))
        with pytest.raises(OSError, match="has 552 bytes, expected at most the 9 that are free"):
            zero.export_deepspeed(ours, out)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(exporting.torch, "save", full)
        with pytest.raises(OSError, match=r"writing .*fp32.pt failed: No space left on device"):
            zero.export_deepspeed(ours, out)
    assert os.listdir(out) == []
    assert main(["export", str(ours), str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}/global_step4\n"
    with pytest.raises(FileExistsError, match="global_step4 is there, expected no checkpoint"):
        zero.export_deepspeed(ours, out)
    with pytest.raises(FileNotFoundError):
        zero.export_deepspeed(tmp_path / "theirs", tmp_path / "more")
