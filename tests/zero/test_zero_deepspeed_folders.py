"""import_deepspeed: each number of DeepSpeed's folders is where it belongs."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed_folder
import pytest
import torch
from deepspeed_folder import KEYS, Run, drawn
from torch import Tensor

from deepspeed_ext import io, zero
from deepspeed_ext.zero.__main__ import main
from deepspeed_ext.zero.checkpoint.storage import Reader
from deepspeed_ext.zero.deepspeed_folders.shard_files import find_shard_files
from deepspeed_ext.zero.deepspeed_folders.source import source_of

SHAPES = [{"a.weight": (5, 7), "a.norm.weight": (3,), "b": (11,)}, {"a.bias": (2, 3), "c": (1,)}]


def run(**options: Any) -> Run:
    """Return a run in which everything is there that may be."""
    dtype = options.get("dtype", torch.float32)
    made = Run(
        [drawn(shapes) for shapes in SHAPES],
        frozen={"frozen.weight": torch.rand(4, 5).to(dtype), "frozen.b": torch.rand(3).to(dtype)},
        buffers={"scale": torch.rand(2).to(dtype), "count": torch.tensor(7)},
        ties={"head.weight": "a.weight"},
        options=[{"weight_decay": 0.1}, {"lr": 0.5}],
        client={"mine": {"epoch": 2, "t": torch.arange(3)}},
    )
    return replace(made, **options)


CASES: dict[str, Callable[[], Run]] = {
    f"stage {stage}, {processes} processes, {dtype}": (
        lambda stage=stage, processes=processes, dtype=dtype: run(
            stage=stage, processes=processes, dtype=dtype, sub_group=10
        )
    )
    for stage, processes, dtype in [
        *((stage, n, torch.float32) for stage in (1, 2, 3) for n in (1, 2, 3, 12)),
        *((stage, 2, dtype) for stage in (1, 2, 3) for dtype in (torch.bfloat16, torch.float16)),
    ]
} | {
    "0.9, stage 2": lambda: run(stage=2, processes=3, is_old=True),
    "0.9, stage 3": lambda: run(stage=3, processes=2, is_old=True, dtype=torch.bfloat16),
    "experts": lambda: experts(4, 2),
    "experts of one process": lambda: experts(2, 1),
    "BF16_Optimizer": lambda: run(stage=1, processes=3, dtype=torch.bfloat16, is_wrapped=True),
    "no frozen ones": lambda: run(stage=3, frozen={}, buffers={}, ties={}, client={}),
}


def experts(processes: int, kinds: int) -> Run:
    """Return a run with four experts, which are apart in the files."""
    names = [
        f"moe.deepspeed_moe.experts.deepspeed_experts.{i}.{n}" for i in range(4) for n in ("w", "b")
    ]
    shapes: dict[str, tuple[int, ...]] = {n: (3, 5) if n.endswith("w") else (3,) for n in names}
    made = run(processes=processes, kinds=kinds, dtype=torch.bfloat16)
    groups = [made.groups[0], drawn(shapes)]
    return replace(made, groups=groups, ties={})


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_read_as_it_was(case: str, tmp_path: Path) -> None:
    made = CASES[case]()
    made.write(tmp_path / "theirs")
    check_import(made, tmp_path, "global_step4")


@pytest.mark.parametrize("stage, processes", [(1, 2), (2, 1), (3, 3)])
def test_universal_folders_hold_the_same(stage: int, processes: int, tmp_path: Path) -> None:
    made = run(stage=stage, processes=processes, dtype=torch.bfloat16, sub_group=10)
    made.write_universal(tmp_path / "theirs")
    check_import(made, tmp_path, "global_step4_universal")


def check_import(made: Run, tmp_path: Path, tag: str) -> None:
    told: list[int] = []
    path = zero.import_deepspeed(tmp_path / "theirs", tmp_path / "out", progress=told.append)
    assert path == tmp_path / "out" / tag
    assert (tmp_path / "out" / "latest").read_text() == f"{tag}\n"
    expected = {f"model.{n}": t for n, t in (made.frozen | made.buffers).items()}
    for group in made.groups:
        for name, value in group.items():
            expected[f"model.{name}"] = value["fp32"]
            for key in KEYS[1:]:
                expected[f"optimizer.{name}.{key}"] = value[key]
            expected[f"optimizer.{name}.step"] = torch.tensor(4.0)
    found = tensors_of(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same(found[name], tensor), name
    assert sum(told) == sum(tensor.nbytes for tensor in expected.values())


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint of ours."""
    reader = Reader(path)
    metadata = reader.read_metadata()
    with io.AsyncIO() as engine:
        return {
            name: reader.tensor(metadata, engine, name)
            for name in metadata.state_dict_metadata
            if name.startswith(("model.", "optimizer."))
        }


def test_what_is_beside_tensors(tmp_path: Path) -> None:
    extra = {"a._extra_state": {"calls": 3}}
    scaler = {"cur_scale": 256.0, "dynamic": True, "cur_iter": 9, "last_overflow_iter": 2}
    scaler |= {"scale_factor": 2.0, "scale_window": 4, "min_scale": 1, "cur_hysteresis": 2}
    made = run(dtype=torch.float16, scaler=scaler, extra=extra)
    made.write(tmp_path / "theirs")
    path = zero.import_deepspeed(tmp_path / "theirs", tmp_path / "out")
    client = zero.inspect(tmp_path / "out")
    assert torch.equal(client["mine"].pop("t"), torch.arange(3))
    state = {"scale": 256.0, "good_steps": 1, "hysteresis_left": 2}
    assert client == {
        "mine": {"epoch": 2},
        "global_steps": 5,
        "global_samples": 60,
        "skipped_steps": 1,
        "lr_scheduler": {"last_batch_iteration": 3},
        "loss_scaler": state,
    }
    zero.LossScaler(growth_interval=4).load_state_dict(state)
    reader = Reader(path)
    common = reader.value(reader.read_metadata(), "common")
    assert common["processes"] == 0 and common["extra"] == extra
    assert [group["params"] for group in common["groups"]] == [list(group) for group in SHAPES]
    assert [group["lr"] for group in common["groups"]] == [0.01, 0.5]
    assert [group["weight_decay"] for group in common["groups"]] == [0.1, 0.0]


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_a_loss_scale_grows_when_deepspeeds_does(window: int) -> None:
    """DeepSpeed's grows after a step if (cur_iter - last_overflow_iter - 1) % window is 0."""
    from deepspeed_ext.zero.deepspeed_folders.optimizer_files import scaler_of
    from deepspeed_ext.zero.deepspeed_folders.pickles import DynamicScaler, Fields

    for cur_iter in range(1, 12):
        saved = DynamicScaler()
        saved.saved = {"cur_scale": 8.0, "cur_iter": cur_iter, "last_overflow_iter": -1}
        saved.saved["scale_window"] = window
        state = scaler_of(Fields(Path("x"), {"loss_scaler": saved}))
        assert state is not None
        more = int(window - state["good_steps"])  # steps until ours grows
        theirs = next(k for k in range(1, 99) if (cur_iter + k - 1) % window == 0)
        assert more == theirs, cur_iter


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_are_those_of_zero_to_fp32(stage: int, tmp_path: Path) -> None:
    made = run(stage=stage, dtype=torch.bfloat16)
    folder = made.write(tmp_path / "theirs")
    expected = {n: v["fp32"] for group in made.groups for n, v in group.items()}
    expected |= made.frozen | made.buffers
    for place, tag in ((tmp_path / "theirs", None), (folder, None), (folder.parent, folder.name)):
        (file,) = zero.import_deepspeed_weights(place, tmp_path / "out", tag=tag)
        found = io.load(file)
        assert found.keys() == expected.keys()
        assert all(same(found[name], tensor) for name, tensor in expected.items())
    files = zero.import_deepspeed_weights(
        folder, tmp_path / "out", dtype=torch.float16, max_shard_bytes=60
    )
    named = json.loads(files[-1].read_text())["weight_map"]
    for name, file_name in named.items():
        wanted = expected[name]
        wanted = wanted.half() if wanted.is_floating_point() else wanted
        assert same(io.load(tmp_path / "out" / file_name)[name], wanted), name


def test_stage_0_is_read_by_the_order_of_parameters(tmp_path: Path) -> None:
    """Of the module, if a group has all; or of an optimizer's groups. Ties share memory there."""
    one = run(stage=0, groups=[drawn(SHAPES[0])], options=[], frozen={})
    one.write(tmp_path / "theirs")
    check_import(one, tmp_path, "global_step4")
    names = [list(shapes) for shapes in SHAPES]
    scaler = {"cur_scale": 64.0, "cur_iter": 9, "last_overflow_iter": 2, "scale_window": 100}
    for i, is_flat in enumerate((False, True)):
        made = run(stage=0, dtype=torch.float16, scaler=scaler, is_flat=is_flat)
        folder = made.write(tmp_path / f"two{i}")
        source = source_of(find_shard_files(folder), names)
        assert [g["params"] for g in source.groups or ()] == names
        assert [g["weight_decay"] for g in source.groups or ()] == [0.1, 0.0]
        assert source.client["loss_scaler"]["scale"] == 64
        for name, value in ((n, v) for group in made.groups for n, v in group.items()):
            assert same(source.weights[name].read(), value["fp32"])
            assert source.state[name]["step"].read().item() == 4
            for key in KEYS[1:]:
                assert same(source.state[name][key].read(), value[key])
        others = made.frozen | made.buffers
        assert source.weights.keys() == {*others, *names[0], *names[1]}
        with pytest.raises(ValueError, match="is of stage 0 with 2 groups, whose files do not nam"):
            zero.import_deepspeed(tmp_path / f"two{i}", tmp_path / "checkpoint")
        wrong = source_of(find_shard_files(folder), [names[0][:-1], names[1]])
        assert wrong.groups is None and "expected" in wrong.reason
    other = source_of(find_shard_files(folder), names[:1])
    assert "has 2 groups, expected 1 as the optimizer here has" in other.reason
    backwards = [names[0][::-1], names[1]]
    swapped = source_of(find_shard_files(tmp_path / "two0" / folder.name), backwards)
    assert "it is of another parameter" in swapped.reason


def test_layers_of_a_pipeline(tmp_path: Path) -> None:
    """Their names are <layer>.<name>; tied ones are in several stages, with the same values."""
    tied = drawn({"tied_modules.e.weight": (5, 3)})
    stages = [drawn({"0.weight": (3, 2), "0.bias": (3,)}), drawn({"12.weight": (2, 3)})]
    runs = [
        run(groups=[tied | own], stage=1, pipe=i, frozen={}, buffers={}, ties={}, options=[])
        for i, own in enumerate(stages)
    ]
    for made in runs:
        made.write(tmp_path / "theirs")
    whole = run(groups=[tied | stages[0] | stages[1]], frozen={}, buffers={}, ties={}, options=[])
    check_import(whole, tmp_path, "global_step4")
    groups = [list(whole.groups[0])]
    source = source_of(find_shard_files(tmp_path / "theirs" / "global_step4"))
    assert [g["params"] for g in source.groups or ()] == groups
    (tmp_path / "theirs" / "global_step4" / "layer_12-model_states.pt").unlink()
    with pytest.raises(ValueError, match=r"no model file with '12\.weight', expected the weight"):
        zero.import_deepspeed_weights(tmp_path / "theirs", tmp_path / "other")
    other = replace(runs[1], groups=[drawn({"tied_modules.e.weight": (5, 3)}) | stages[1]])
    other.write(tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"has another .tied_modules.* than the stage before"):
        zero.import_deepspeed_weights(tmp_path / "theirs", tmp_path / "other")


def test_state_without_a_step_takes_that_of_its_group(tmp_path: Path) -> None:
    """FusedAdam has one there; where there is none at all, there is none here either."""
    made = run(step=None, options=[{"step": 9}, {"step": 8}])
    made.write(tmp_path / "theirs")
    found = tensors_of(zero.import_deepspeed(tmp_path / "theirs", tmp_path / "out"))
    assert found["optimizer.b.step"].item() == 9 and found["optimizer.c.step"].item() == 8
    run(step=None).write(tmp_path / "none")
    with pytest.raises(ValueError, match=r"optim_states.pt has no step for .*, expected one"):
        zero.import_deepspeed(tmp_path / "none", tmp_path / "out2")


@pytest.mark.parametrize("step", [4.0, None])
def test_elastic_checkpoints_have_no_options(step: float | None, tmp_path: Path) -> None:
    """Only tensors; FusedAdam's step stands beside them."""
    made = run(is_elastic=True, processes=3, step=step)
    folder = made.write(tmp_path / "theirs")
    for path in folder.glob("*optim_states.pt") if step is None else ():
        rank = int(path.name.split("_")[3])
        inside = made._across(rank) | {"base_optimizer_state_step": 4}
        deepspeed_folder.save({"optimizer_state_dict": inside}, path)
    check_import(made, tmp_path, "global_step4")
    source = source_of(find_shard_files(folder))
    assert source.groups == [{"params": list(shapes)} for shapes in SHAPES]


def test_parameters_may_be_aligned(tmp_path: Path) -> None:
    """param_alignment_paddings: what follows each parameter and is not its own."""
    made = run(processes=1, stage=2)
    folder = made.write(tmp_path / "theirs")
    path = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    inside = made._across(0)
    inside["param_alignment_paddings"] = [[1, 5, 0], [0, 0]]
    value = made.groups[0]
    for key, flats in (("fp32", inside["single_partition_of_fp32_groups"]), *state_of(inside)):
        parts = [value["a.weight"][key].view(-1), torch.full((1,), 9.0)]
        parts += [value["a.norm.weight"][key], torch.full((5,), 9.0), value["b"][key]]
        flats[0 if key == "fp32" else key] = torch.cat(parts)
    deepspeed_folder.save({"optimizer_state_dict": inside}, path)
    source = source_of(find_shard_files(folder))
    for name in value:
        assert same(source.weights[name].read(), value[name]["fp32"])
        assert same(source.state[name]["exp_avg"].read(), value[name]["exp_avg"])


def state_of(inside: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(key, inside["base_optimizer_state"]["state"][0]) for key in KEYS[1:]]


def test_only_what_is_asked_for_is_in_memory(tmp_path: Path) -> None:
    """Tensors are mapped: to know what there is, none is read."""
    made = Run([drawn({f"w{i}": (300, 100) for i in range(4)})], processes=3)
    source = source_of(find_shard_files(made.write(tmp_path)))
    assert all(one.described.is_meta for one in source.weights.values())
    one, other = (source.weights["w1"].read() for _ in range(2))
    assert one.data_ptr() != other.data_ptr() and one.untyped_storage().nbytes() == one.nbytes


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = str(tmp_path / "theirs"), str(tmp_path / "out")
    run().write(tmp_path / "theirs")
    assert main(["import", folder, out]) == 0
    assert capsys.readouterr().out == f"wrote {out}/global_step4\n"
    assert main(["import", folder, out]) == 1
    assert "global_step4 is there, expected no checkpoint" in capsys.readouterr().err
    assert main(["import", folder, f"{out}2", "--weights", "--dtype", "float16"]) == 0
    assert capsys.readouterr().out == f"wrote {out}2/model.safetensors\n"
    assert main(["import", folder, f"{out}3", "--dtype", "float16"]) == 1
    assert "--dtype is float16, expected --weights with it" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["import", "--help"])
    assert "zero.load goes on from" in " ".join(capsys.readouterr().out.split())
