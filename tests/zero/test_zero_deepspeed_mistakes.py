"""import_deepspeed: what is no checkpoint of one run is refused by file and name, and never run."""

import errno
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed_folder
import pytest
import torch
from checkpoint_writes import fail_writes_of, files_of
from deepspeed_folder import Run, drawn

from deepspeed_ext import zero
from deepspeed_ext.io.checkpoint.new_file import NewFile

OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"
MODEL_3 = "zero_pp_rank_{}_mp_rank_00_model_states.pt"


def made(**options: Any) -> Run:
    groups = [drawn({"a.weight": (5, 7), "b": (11,)}), drawn({"c": (3, 2)})]
    frozen = {"frozen": torch.rand(7)}
    return Run(groups, frozen=frozen, **{"stage": 2, "processes": 3, **options})


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a file has, whose classes are those of DeepSpeed."""
    with deepspeed_folder._as_deepspeed():
        content = torch.load(path, weights_only=False)
    change(content)
    deepspeed_folder.save(content, path)


def refused(home: Path, *texts: str, kind: type[Exception] = ValueError) -> None:
    """See both functions refuse a folder with these texts, and leave nothing that looks whole."""
    for write in (zero.import_deepspeed, zero.import_deepspeed_weights):
        with pytest.raises(kind) as caught:
            write(home / "theirs", home / "out")
        for text in (*texts, "zero.import_deepspeed: ", "expected "):
            assert text in str(caught.value), caught.value
        assert not list((home / "out").rglob("*.safetensors"))
        assert not (home / "out" / "latest").exists()


class Hostile:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("name", [OPTIMIZER.format(1), MODEL])
@pytest.mark.parametrize(
    "function, arguments, shown",
    [
        (os.system, ("touch {}",), "posix.system"),
        (eval, ("open({!r}, 'w')",), "builtins.eval"),
        (exec, ("open({!r}, 'w')",), "builtins.exec"),
        (getattr, ("text", "upper"), "builtins.getattr"),
        (subprocess.check_call, (["touch", "{}"],), "check_call"),
        (open, ("{}", "w"), "open"),
    ],
)
def test_hostile_pickles_do_nothing(
    name: str, function: Any, arguments: tuple[Any, ...], shown: str, tmp_path: Path
) -> None:
    folder, mark = made().write(tmp_path / "theirs"), tmp_path / "mark"
    filled = [
        argument.format(str(mark))
        if isinstance(argument, str)
        else [item.format(str(mark)) for item in argument]
        if isinstance(argument, list)
        else argument
        for argument in arguments
    ]
    edit(folder / name, lambda content: content.update(hidden=Hostile(function, *filled)))
    refused(tmp_path, name, shown, "nothing of it was run")
    assert not mark.exists()


def test_pickles_that_are_no_zip_files_do_nothing(tmp_path: Path) -> None:
    """Files of torch before 1.6 are such pickles, and are read if there is nothing else in them."""
    folder, mark = made().write(tmp_path / "theirs"), tmp_path / "mark"
    path = folder / MODEL
    edit(path, lambda content: content.update(ds_config={}))
    content = torch.load(path, weights_only=True)
    torch.save(content, path, _use_new_zipfile_serialization=False)
    zero.import_deepspeed(tmp_path / "theirs", tmp_path / "whole")
    path.write_bytes(pickle.dumps(Hostile(os.system, f"touch {mark}"), protocol=2))
    refused(tmp_path, MODEL, "no content that can be read")
    assert not mark.exists()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("name", [OPTIMIZER.format(1), MODEL])
def test_truncated_files(name: str, share: float, tmp_path: Path) -> None:
    path = made().write(tmp_path / "theirs") / name
    os.truncate(path, int(path.stat().st_size * share))
    refused(tmp_path, name, "no content that can be read, expected a file of torch.save, whole")


@pytest.mark.parametrize("stage, rank", [(2, 1), (2, 2), (3, 1), (3, 0)])
def test_missing_files(stage: int, rank: int, tmp_path: Path) -> None:
    folder = made(stage=stage).write(tmp_path / "theirs")
    kinds = [OPTIMIZER, MODEL_3] if stage == 3 else [OPTIMIZER]
    for kind in kinds:
        name = kind.format(rank)
        (folder / name).rename(tmp_path / "aside")
        refused(tmp_path, name, kind=FileNotFoundError)
        (tmp_path / "aside").rename(folder / name)
    zero.import_deepspeed(tmp_path / "theirs", tmp_path / "out")


def test_missing_model_files_and_folders(tmp_path: Path) -> None:
    folder = made().write(tmp_path / "theirs")
    (folder / MODEL).unlink()
    refused(tmp_path, "has no file *_model_states.pt", kind=FileNotFoundError)
    for name in [OPTIMIZER.format(i) for i in range(3)]:
        (folder / name).unlink()
    refused(tmp_path, "has no file *_model_states.pt", kind=FileNotFoundError)
    folder.rmdir()
    refused(tmp_path, "global_step4 is not there", kind=FileNotFoundError)
    for outside in ("../elsewhere", "/etc", "a/../../b", "a\0b"):
        (tmp_path / "theirs" / "latest").write_text(outside)
        refused(tmp_path, f"latest is {outside!r}", "expected the name of a folder inside")
    (tmp_path / "theirs" / "latest").unlink()
    refused(tmp_path, "has no file 'latest'", kind=FileNotFoundError)


def test_doubled_processes(tmp_path: Path) -> None:
    folder = made().write(tmp_path / "theirs")
    for name in ("bf16_" + OPTIMIZER.format(1), OPTIMIZER.format("01")):
        (folder / name).write_bytes((folder / OPTIMIZER.format(1)).read_bytes())
        refused(tmp_path, "is of process 1 as", "expected one file of each")
        (folder / name).unlink()
    (folder / MODEL_3.format(0)).write_bytes((folder / MODEL).read_bytes())
    refused(tmp_path, MODEL, MODEL_3.format(0), "expected the files of one checkpoint")


@pytest.mark.parametrize(
    "name",
    [
        "layer_00-model_00-model_states.pt",
        "layer_0_expert_1_mp_rank_01_model_states.pt",
        "mp_rank_01_model_states.pt",
        "zero_pp_rank_0_mp_rank_01_optim_states.pt",
    ],
)
def test_what_is_not_data_parallel(name: str, tmp_path: Path) -> None:
    (made().write(tmp_path / "theirs") / name).touch()
    refused(tmp_path, name, "is of model parallelism, or of nothing known")


def apart(home: Path) -> dict[str, Path]:
    """Write a pipeline, experts and a universal folder, and return a file of each."""
    stages = [drawn({"0.w": (3, 2)}), drawn({"1.w": (2, 3)})]
    for i, stage in enumerate(stages):
        Run([stage], stage=1, pipe=i).write(home / "layers")
    names = [f"m.deepspeed_moe.experts.deepspeed_experts.{i}.w" for i in range(2)]
    groups = [drawn({"a": (3,)}), drawn(dict.fromkeys(names, (2, 2)))]
    Run(groups, kinds=2).write(home / "experts")
    made(processes=1).write_universal(home / "universal")
    return {
        "layers": home / "layers/global_step4/layer_01-model_states.pt",
        "experts": home / "experts/global_step4/layer_0_expert_1_mp_rank_00_model_states.pt",
        "universal": home / "universal/global_step4_universal/zero/optimizer_state.pt",
    }


def test_files_of_layers_experts_and_universal_folders(tmp_path: Path) -> None:
    """Hostile, cut short, doubled, missing and of another moment."""
    mark = tmp_path / "mark"
    for kind, path in apart(tmp_path).items():
        (tmp_path / "theirs").unlink(missing_ok=True)
        (tmp_path / "theirs").symlink_to(tmp_path / kind)
        zero.import_deepspeed(tmp_path / "theirs", tmp_path / f"whole {kind}")
        whole = path.read_bytes()
        edit(path, lambda content: content.update(hidden=Hostile(os.system, f"touch {mark}")))
        refused(tmp_path, path.name, "posix.system", "nothing of it was run")
        path.write_bytes(whole[: len(whole) // 2])
        refused(tmp_path, path.name, "no content that can be read")
        if kind == "universal":
            continue
        path.write_bytes(whole)
        edit(path, lambda content: next(iter(content.values())).mul_(3))
        refused(tmp_path, "another '", "they are of two moments, or of two runs")
        path.unlink()
        refused(tmp_path, "has no model file with '")
        path.write_bytes(whole)
        other = path.name.replace("layer_0", "layer_00", 1)
        (path.parent / other).write_bytes(whole)
        refused(tmp_path, "expected one file of each", path.name, other)
        (path.parent / other).unlink()
    assert not mark.exists()


def test_stages_of_a_pipeline_that_are_not_of_one_run(tmp_path: Path) -> None:
    path = apart(tmp_path)["layers"]
    os.rename(tmp_path / "layers", tmp_path / "theirs")
    folder = tmp_path / "theirs" / path.parent.name
    edit(folder / "mp_rank_01_model_states.pt", lambda content: content.update(global_steps=6))
    refused(tmp_path, "mp_rank_01_model_states.pt has 6 as 'global_steps'")
    edit(folder / "mp_rank_01_model_states.pt", lambda content: content.update(global_steps=5))
    (folder / "zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()
    refused(tmp_path, "no zero_pp_rank_1_mp_rank_01_optim_states.pt", kind=FileNotFoundError)
    (folder / "mp_rank_01_model_states.pt").unlink()
    refused(tmp_path, "has no file mp_rank_01_model_states.pt", kind=FileNotFoundError)
    (folder / "zero_pp_rank_0_mp_rank_01_optim_states.pt").unlink()
    refused(tmp_path, "is of 2 model-parallel ranks, expected 1 as there are files")


def test_files_of_more_processes(tmp_path: Path) -> None:
    """A folder that a larger run has written before."""
    folder = made(processes=4).write(tmp_path / "theirs")
    made(processes=3).write(tmp_path / "theirs")
    refused(tmp_path, OPTIMIZER.format(3), "is of process 3, expected files of 3 processes")
    (folder / OPTIMIZER.format(3)).unlink()
    zero.import_deepspeed(tmp_path / "theirs", tmp_path / "out")


MIXED: dict[str, tuple[int, str, Callable[[dict[str, Any]], object], str]] = {
    "another version": (
        2,
        OPTIMIZER.format(1),
        lambda c: c["optimizer_state_dict"].update(ds_version="0.9.0"),
        "'0.9.0'",
    ),
    "another version of the model": (
        2,
        MODEL,
        lambda c: c.update(ds_version="0.9.0"),
        "is of DeepSpeed '0.19.8', expected '0.9.0'",
    ),
    "another number of processes": (
        2,
        OPTIMIZER.format(2),
        lambda c: c["optimizer_state_dict"].update(partition_count=[2, 2]),
        "[2, 2]",
    ),
    "a model of another number": (2, MODEL, lambda c: c.update(dp_world_size=2), "of 2 processes"),
    "another step": (
        2,
        OPTIMIZER.format(1),
        lambda c: c["optimizer_state_dict"]["base_optimizer_state"]["state"][0].update(
            step=torch.tensor(5.0)
        ),
        "other steps",
    ),
    "other options": (
        3,
        OPTIMIZER.format(2),
        lambda c: c["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"][1].update(
            lr=7.0
        ),
        "other options",
    ),
    "other shapes": (
        3,
        MODEL_3.format(2),
        lambda c: c["param_shapes"][0].update(b=torch.Size([12])),
        "'param_shapes'",
    ),
    "another moment": (3, MODEL_3.format(1), lambda c: c.update(global_steps=6), "global_steps"),
    "another stage": (
        2,
        OPTIMIZER.format(1),
        lambda c: c["optimizer_state_dict"].update(zero_stage=1),
        "'zero_stage'",
    ),
    "other names": (
        2,
        OPTIMIZER.format(0),
        lambda c: c["optimizer_state_dict"]["param_slice_mappings"][0].update(x=1),
        "'x' in group 0",
    ),
}


@pytest.mark.parametrize("case", MIXED)
def test_files_of_two_runs(case: str, tmp_path: Path) -> None:
    stage, name, change, text = MIXED[case]
    edit(made(stage=stage).write(tmp_path / "theirs") / name, change)
    refused(tmp_path, "of another run", name if name != MODEL else "", text)


def test_weights_of_two_moments(tmp_path: Path) -> None:
    """The model file has the weights too, rounded: they are compared, and rounding is none."""
    run = made(dtype=torch.bfloat16)
    run.groups[1]["c"]["fp32"].view(-1)[:4] = torch.tensor([1e-30, -3e38, 0.0, 1.0])
    folder = run.write(tmp_path / "theirs")
    zero.import_deepspeed(tmp_path / "theirs", tmp_path / "whole")
    edit(folder / MODEL, lambda content: content["module"]["c"].mul_(1.02))
    refused(tmp_path, MODEL, "another 'c' than", "same but for rounding")


SIZES: dict[str, tuple[int, str, Callable[[dict[str, Any]], object], str]] = {
    "a shape that is too large": (
        2,
        MODEL,
        lambda c: c["param_shapes"][0].update(b=torch.Size([1 << 40])),
        "elements left for 'b', expected 1099511627776",
    ),
    "a shape that is a little too small": (
        2,
        MODEL,
        lambda c: c["param_shapes"][0].update({"b": torch.Size([4])}),
        "46 elements of weights in group 0, expected 39 to 44",
    ),
    "state that is too small": (
        2,
        OPTIMIZER.format(1),
        lambda c: shorten(c["optimizer_state_dict"]["base_optimizer_state"]["state"][0]),
        "15 elements of torch.float32 as 'exp_avg' of group 0, expected 16",
    ),
    "a weight that is too small in stage 3": (
        3,
        OPTIMIZER.format(2),
        lambda c: shorten(c["optimizer_state_dict"]["fp32_flat_groups"], 0),
        "15 elements of torch.float32 as weights of flat tensor 0, expected 16",
    ),
    "a frozen part that is too small": (
        3,
        MODEL_3.format(1),
        lambda c: shorten(c["frozen_param_fragments"], "frozen"),
        "2 elements of torch.float32 for the frozen 'frozen', expected 3",
    ),
    "a group too few": (
        2,
        MODEL,
        lambda c: c["param_shapes"].pop(),
        "has 1 groups in param_shapes, expected 2",
    ),
    "no state": (
        2,
        OPTIMIZER.format(1),
        lambda c: c["optimizer_state_dict"].pop("base_optimizer_state"),
        "has no 'optimizer_state_dict'['base_optimizer_state'], expected dict or list",
    ),
    "a number as weights": (
        2,
        OPTIMIZER.format(1),
        lambda c: c["optimizer_state_dict"].update(single_partition_of_fp32_groups=[1, 2]),
        "is an int, expected a torch.Tensor",
    ),
    "a shape of text": (
        2,
        MODEL,
        lambda c: c["param_shapes"][0].update(b="11"),
        "has shape '11' for 'b', expected sizes",
    ),
}


def shorten(holder: Any, key: Any = "exp_avg") -> None:
    holder[key] = holder[key][:-1].detach().clone()


@pytest.mark.parametrize("case", SIZES)
def test_numbers_that_are_missing_or_left_over(case: str, tmp_path: Path) -> None:
    stage, name, change, text = SIZES[case]
    edit(made(stage=stage).write(tmp_path / "theirs") / name, change)
    refused(tmp_path, text)


def test_results_are_never_among_their_files(tmp_path: Path) -> None:
    folder = made().write(tmp_path / "theirs")
    before = files_of(folder)
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    link = tmp_path / "link"
    outs = [folder.parent, folder, folder / "x", link, link / folder.name / "y" / "z"]
    inside = [(folder.parent, folder.parent / "y"), (link, folder.parent / "y" / "z")]
    pairs = [(place, out) for place in (folder.parent, folder, link) for out in outs] + inside
    for write in (zero.import_deepspeed, zero.import_deepspeed_weights):
        for place, out in pairs:
            with pytest.raises(ValueError, match=r"out is .*, expected a folder outside of"):
                write(place, out)
    assert files_of(folder) == before and len(list((tmp_path / "theirs").iterdir())) == 2


def test_links_are_followed(tmp_path: Path) -> None:
    """A hub's cache is made of them; pipes and folders are no files."""
    folder = made().write(tmp_path / "real")
    theirs = tmp_path / "theirs" / "global_step4"
    theirs.mkdir(parents=True)
    (tmp_path / "theirs" / "latest").write_text("global_step4\n")
    for path in folder.iterdir():
        (theirs / path.name).symlink_to(path)
    zero.import_deepspeed(tmp_path / "theirs", tmp_path / "whole")
    (theirs / MODEL).unlink()
    os.mkfifo(theirs / MODEL)
    refused(tmp_path, MODEL, kind=OSError)


def test_a_checkpoint_that_is_there_stays(tmp_path: Path) -> None:
    made().write(tmp_path / "theirs")
    path = zero.import_deepspeed(tmp_path / "theirs", tmp_path / "out")
    before = files_of(path)
    with pytest.raises(FileExistsError, match="is there, expected no checkpoint of this tag"):
        zero.import_deepspeed(tmp_path / "theirs", tmp_path / "out")
    assert files_of(path) == before


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is written, and when a write fails; nothing is left but the folder."""
    made().write(tmp_path / "theirs")

    def full(self: NewFile, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, f"io.save: {self.path} has {nbytes} bytes, expected at most 7")

    with monkeypatch.context() as patch:
        patch.setattr(NewFile, "reserve", full)
        for write in (zero.import_deepspeed, zero.import_deepspeed_weights):
            with pytest.raises(OSError, match=r"io.save: .* bytes, expected at most 7"):
                write(tmp_path / "theirs", tmp_path / "out")
    with monkeypatch.context() as patch:
        fail_writes_of(patch, b"")
        with pytest.raises(OSError, match="the disk has gone"):
            zero.import_deepspeed(tmp_path / "theirs", tmp_path / "out")
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []
    zero.import_deepspeed(tmp_path / "theirs", tmp_path / "out")


UNIVERSAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "a weight is missing": (lambda f: (f / "zero/b/fp32.pt").unlink(), "b has no fp32.pt"),
    "a parameter of nobody": (lambda f: (f / "zero/x").mkdir(), "x is of no parameter of"),
    "no rest": (lambda f: (f / "zero/optimizer_state.pt").unlink(), "no file *_optim_states.pt"),
    "no step": (lambda f: (f / "zero/b/step.pt").unlink(), "b has no step.pt, expected one"),
    "another shape": (
        lambda f: deepspeed_folder.save({"param": torch.rand(12)}, f / "zero/b/fp32.pt"),
        "fp32.pt has torch.float32 of shape [12], expected float32 of [11]",
    ),
    "a name that leads out": (
        lambda f: edit(f / MODEL, lambda c: c["param_shapes"][0].update({"../b": (1,)})),
        "has the name '../b', expected no path",
    ),
    "another weight": (
        lambda f: deepspeed_folder.save({"param": torch.rand(11)}, f / "zero/b/fp32.pt"),
        "another 'b' than",
    ),
}


@pytest.mark.parametrize("case", UNIVERSAL)
def test_universal_folders_that_are_not_whole(case: str, tmp_path: Path) -> None:
    change, text = UNIVERSAL[case]
    change(made(processes=1).write_universal(tmp_path / "theirs"))
    refused(tmp_path, text, kind=FileNotFoundError if "no f" in text else ValueError)
