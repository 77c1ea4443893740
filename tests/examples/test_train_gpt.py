"""The training example: what it leaves, exact resumption, also after Ctrl-C, and clear refusals."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.op_builder import BuildError
from examples import compare_states, gpt_engine, train_gpt, trainer
from examples.gpt import GPT
from examples.optimizers import STATES
from examples.options import parse, settings_of
from examples.run_folder import RunFolder
from examples.text import encode, standard_library
from examples.trainer import Settings, Trainer

TINY = ["--device", "cpu", "--steps", "6", "--batch-size", "2"]
TINY += ["--context", "16", "--width", "32", "--layers", "1"]
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")


def train(out: Path, *arguments: str) -> int:
    """Run the example in this process and return its exit status."""
    return train_gpt.main(["--out", str(out), *arguments])


def measured(out: Path) -> list[dict[str, float]]:
    """Return what has been measured, without the speed."""
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in entry.items() if k != "tokens_per_second"} for entry in entries]


def saved(out: Path) -> dict[str, Any]:
    """Return the checkpoint as numbers and text that can be compared, without the speed."""
    checkpoint: dict[str, Any] = torch.load(out / "checkpoint.pt", weights_only=True)
    for entry in checkpoint["history"]:
        del entry["tokens_per_second"]
    return tree_map_only(torch.Tensor, lambda t: (t.dtype, t.tolist()), checkpoint)


def assert_same_run(one: Path, other: Path) -> None:
    """Compare every number that two runs have measured and saved, bit for bit."""
    assert measured(one) == measured(other)
    assert saved(one) == saved(other)
    assert (one / "sample.txt").read_bytes() == (other / "sample.txt").read_bytes()


def stop_after(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """Press Ctrl-C during training step `last` of the next run."""
    step = Trainer.step

    def interrupted(self: Trainer, number: int) -> float:
        if number == last:
            signal.raise_signal(signal.SIGINT)
        return step(self, number)

    monkeypatch.setattr(Trainer, "step", interrupted)


@pytest.fixture(scope="module", autouse=True)
def short_sample() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "_SAMPLE_BYTES", 50)
        patch.setattr(gpt_engine, "_ROUNDS", 1)
        patch.setattr(gpt_engine, "_BYTES", 4)
        yield


CHOICES = {
    "cpu_adam": ["--optimizer", "cpu_adam"],
    "torch": ["--optimizer", "torch"],
    "offloaded": ["--offload", "cpu"],
}


@pytest.fixture(scope="module", params=CHOICES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / request.param
    assert train(out, *TINY, *CHOICES[request.param]) == 0
    return out


def test_state_on_disk_changes_nothing(tmp_path: Path) -> None:
    where = ["--offload", "nvme", "--nvme-path", str(tmp_path), "--memory-budget", "4MiB"]
    runs = {"memory": ["--offload", "cpu"], "disk": where}
    for name, options in runs.items():
        assert train(tmp_path / name, *TINY, *options) == 0
    first, second = (measured(tmp_path / name) for name in runs)
    assert [entry["loss"] for entry in first] == [entry["loss"] for entry in second]


def test_leaves_what_it_says(whole: Path) -> None:
    names = {"checkpoint.pt", "loss.png", "metrics.jsonl", "sample.txt"}
    assert {path.name for path in whole.iterdir()} == names
    entries = measured(whole)
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5, 6]
    assert all(entry.keys() == {"step", "loss", "lr", "validation_loss"} for entry in entries)
    assert entries[0]["loss"] > entries[-1]["loss"] > 0
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (whole / "sample.txt").read_bytes().startswith(b"class Model:\n    def __init__(self")


def test_the_sample_comes_from_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or, where its ops cannot be built, from the module, and that is said."""
    engines: list[Any] = []
    make = train_gpt.engine_of

    def noted(*args: Any, **options: Any) -> Any:
        engines.append(make(*args, **options))
        return engines[-1]

    monkeypatch.setattr(train_gpt, "engine_of", noted)
    assert train(tmp_path / "one", *TINY) == 0
    said = r"^sample: [\d,]+ bytes a second by the inference engine, [\d,]+ by the plain module: "
    assert re.search(said + r"[\d.]+ times as fast$", capsys.readouterr().out, re.MULTILINE)
    [engine] = engines
    prompt = list(encode(train_gpt._PROMPT))
    again = engine.generate(prompt, max_new_tokens=50, temperature=0.7, seed=0)[0]
    sample = (tmp_path / "one" / "sample.txt").read_bytes()
    assert encode(sample) == bytes(prompt + again.tokens)

    def missing(*args: Any, **options: Any) -> Any:
        raise BuildError("cpu_kv_cache", "there is no compiler", "install one")

    monkeypatch.setattr(train_gpt, "engine_of", missing)
    assert train(tmp_path / "two", *TINY) == 0
    out = capsys.readouterr().out
    assert "sample: by the plain module, as the engine's ops are not there\n" in out
    assert "there is no compiler" in out
    assert len((tmp_path / "two" / "sample.txt").read_bytes()) > 50


def test_the_same_run_gives_the_same_bits(whole: Path, tmp_path: Path) -> None:
    train(tmp_path / "again", *TINY, *CHOICES[whole.name])
    assert_same_run(whole, tmp_path / "again")


def test_an_offloaded_run_speculates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[OffloadOptimizer] = []
    start = OffloadOptimizer.__init__

    def noted(self: OffloadOptimizer, *args: Any, **options: Any) -> None:
        made.append(self)
        start(self, *args, **options)

    monkeypatch.setattr(OffloadOptimizer, "__init__", noted)
    assert train(tmp_path / "out", *TINY, "--offload", "cpu", "--state", "compact") == 0
    counts = made[0].stats()
    assert counts["early"] > counts["late"] and counts["bytes_back"] > 0


def test_a_checkpoint_from_before_there_was_offloading() -> None:
    older = {name: value for name, value in asdict(Settings(steps=6)).items() if name != "offload"}
    settings = settings_of(parse(["--resume", "--offload", "none"]), older)
    assert settings == Settings(steps=6)


def test_another_seed_gives_others(whole: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    train(other, *TINY, *CHOICES[whole.name], "--seed", "1")
    pairs = zip(measured(whole), measured(other), strict=True)
    assert all(a["loss"] != b["loss"] for a, b in pairs)


def test_resumes_identically(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "parts"
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(out, *TINY, *CHOICES[whole.name]) == 130
    assert len(saved(out)["history"]) == 3
    assert f"--out {out} --resume" in capsys.readouterr().out
    assert train(out, "--resume") == 0
    assert_same_run(whole, out)


def test_a_run_with_experts_resumes_identically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = ["--offload", "cpu", "--experts", "3", "--top-k", "2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(whole, *TINY, *choices) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(parts, *TINY, *choices) == 130
    assert train(parts, "--resume") == 0
    assert_same_run(whole, parts)
    assert (whole / "experts.png").read_bytes() == (parts / "experts.png").read_bytes()


def test_resumes_a_killed_run_from_its_last_checkpoint(whole: Path, tmp_path: Path) -> None:
    """Metrics of steps after the checkpoint are written a second time, not doubled."""
    out = tmp_path / "killed"
    train(out, *TINY, *CHOICES[whole.name])
    for path in (out / "metrics.jsonl", out / "sample.txt"):
        path.write_bytes(b"not whole")
    assert train(out, "--resume") == 0
    assert_same_run(whole, out)


@pytest.mark.long
def test_ctrl_c_in_a_terminal(tmp_path: Path) -> None:
    """The signal comes at any moment; the two parts are still the run that nothing interrupted."""
    steps = [*TINY, "--steps", "300", "--optimizer", "cpu_adam"]
    command = [sys.executable, "-m", "examples.train_gpt"]
    parts = [*command, "--out", str(tmp_path / "parts")]
    with subprocess.Popen([*parts, *steps], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stderr is not None
        progress = iter(lambda: run.stderr.read(1), b"")
        text = b"".join(itertools.takewhile(lambda c: c != b"%", progress))
        run.send_signal(signal.SIGINT)
        out, rest = run.communicate()
    assert run.returncode == 130, (text + rest).decode()
    stopped = int(re.search(rb"stopped after step (\d+); go on with:\n  (.*)\n", out)[1])
    assert 1 <= stopped < 300
    assert b"Traceback" not in rest
    subprocess.run([*parts, "--resume"], check=True, capture_output=True)
    subprocess.run([*command, "--out", tmp_path / "whole", *steps], check=True, capture_output=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize(
    ("arguments", "name"), [([], "DeepSpeedCPUAdam"), (["--offload", "cpu"], "OffloadOptimizer")]
)
def test_compares_with_torch(
    arguments: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, *TINY, *arguments, "--steps", "5", "--compare") == 0
    printed = capsys.readouterr().out
    assert f"{name} and torch.optim.AdamW, from equal weights" in printed
    rows = re.findall(r"^ +(\d+)((?: +\S+){6})$", printed, re.MULTILINE)
    assert [int(step) for step, _ in rows] == [1, 2, 5]
    for _, row in rows:
        ours, theirs, *differences = map(float, row.split())
        assert ours == pytest.approx(theirs, abs=2e-5)
        assert max(differences) < 1e-5
        assert differences[1] > 0  # the weights: two trainers, not one twice


def test_comparison_sees_another_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make = trainer.make_optimizer

    def wrong(name: str, model: GPT, lr: float, *how: str, **where: str | None) -> Any:
        optimizer = make(name, model, lr, *how, **where)
        optimizer.param_groups[0]["eps"] = 1e-4 if name == "cpu_adam" else 1e-8
        return optimizer

    monkeypatch.setattr(trainer, "make_optimizer", wrong)
    assert train(tmp_path, *TINY, "--steps", "2", "--compare") == 0
    last = re.findall(r"^ +2 .*$", capsys.readouterr().out, re.MULTILINE)[0]
    weights_ours, weights_usual = float(last.split()[4]), float(last.split()[6])
    assert weights_ours > 100 * weights_usual


def test_comparison_has_the_largest_differences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(self: Trainer, number: int) -> float:
        away = {"cpu_adam": 0.5, "torch": 0.0, "torch_fused": -0.25}[self.settings.optimizer]
        return 1 + away / number

    monkeypatch.setattr(Trainer, "step", step)
    assert train(tmp_path, *TINY, "--steps", "2", "--compare") == 0
    last = re.findall(r"^ +2 .*$", capsys.readouterr().out, re.MULTILINE)[0]
    assert " ".join(last.split()) == "2 1.25000 1.00000 5.0e-01 0.0e+00 2.5e-01 0.0e+00"


REFUSALS = {
    "--resume": "--out is {out}, which has no checkpoint.pt; leave out --resume",
    "--optimizer fused_adam": "--optimizer is fused_adam, expected cpu_adam or torch or torch_fused"
    " with --device cpu",
    "--offload nvme": "--nvme-path is None, expected a folder with --offload nvme, and only then",
    "--offload cpu --optimizer torch": "--optimizer is torch, expected cpu_adam with --offload cpu",
    "--top-k 2": "--top-k is 2, expected to be left out without --experts",
    "--experts 2 --top-k 3": "--top-k is 3, expected at most 2, the number of --experts",
}


@pytest.mark.parametrize("arguments", REFUSALS)
def test_refuses(arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new"
    assert train(out, "--device", "cpu", *arguments.split()) == 1
    assert capsys.readouterr().err == f"train_gpt: {REFUSALS[arguments].format(out=out)}\n"
    assert not out.exists()


@NO_GPU
def test_refuses_a_gpu_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "--device", "cuda") == 1
    assert re.fullmatch(
        "train_gpt: --device is cuda, expected cpu: torch .*\n", capsys.readouterr().err
    )


def test_refuses_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "file" / "out"
    out.parent.write_text("")
    assert train(out, *TINY) == 1
    wanted = f"train_gpt: --out is {out}, expected a folder that can be written: Not a directory\n"
    assert capsys.readouterr().err == wanted


def test_refuses_to_write_over_another_run(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (whole / "checkpoint.pt").read_bytes()
    assert train(whole, *TINY) == 1
    assert "which has the checkpoint of another run" in capsys.readouterr().err
    assert (whole / "checkpoint.pt").read_bytes() == before


def test_refuses_to_resume_with_other_settings(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(whole, "--resume", "--steps", "7") == 1
    assert "--steps is 7, expected 6 as in the checkpoint" in capsys.readouterr().err
    assert train(whole, "--resume", "--lr", "1") == 1
    assert "--lr is 1.0, expected 0.004 as in the checkpoint" in capsys.readouterr().err
    assert train(whole, "--resume", "--optimizer", "torch_fused") == 1
    assert "--optimizer is torch_fused, expected" in capsys.readouterr().err


def test_refuses_to_resume_on_another_text(
    whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = replace(standard_library(16), digest="other")
    monkeypatch.setattr(train_gpt, "standard_library", lambda context: other)
    assert train(whole, "--resume") == 1
    assert "was trained on another standard library" in capsys.readouterr().err


def test_refuses_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoint.pt").write_text("nonsense")
    assert train(tmp_path, "--resume") == 1
    error = capsys.readouterr().err
    assert error.startswith(f"train_gpt: {tmp_path}/checkpoint.pt cannot be loaded: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--experts 1025", "--experts: is 1025, expected a whole number from 1 to 1024"),
        ("--experts 2 --top-k 0", "--top-k: is 0, expected a whole number above 0"),
        ("--steps 0", "--steps: is 0, expected a whole number above 0"),
        ("--steps many", "--steps: is many, expected a whole number above 0"),
        ("--width 48", "--width: is 48, expected a multiple of 32"),
        ("--lr nan", "--lr: is nan, expected a number above 0"),
        ("--seed -1", "--seed: is -1, expected a whole number from 0 to 1000000"),
        ("--resume --compare", "--compare starts from equal weights"),
    ],
)
def test_refuses_arguments(
    arguments: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        train(tmp_path, *arguments.split())
    assert error in capsys.readouterr().err


def test_says_when_training_diverges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Trainer, "step", lambda self, number: float("nan"))
    assert train(tmp_path, *TINY) == 1
    assert "the loss of step 1 is nan, expected a number: lower --lr" in capsys.readouterr().err
    assert not (tmp_path / "checkpoint.pt").exists()


def test_keeps_the_old_checkpoint_when_the_disk_is_full(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, names = (whole / "checkpoint.pt").read_bytes(), set(whole.iterdir())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        RunFolder(whole).save({"new": 1})
    assert (whole / "checkpoint.pt").read_bytes() == before
    assert set(whole.iterdir()) == names


@pytest.mark.long
def test_every_format_of_state_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_states.main(["--out", str(tmp_path), "--steps", "3"]) == 0
    printed = capsys.readouterr().out
    sizes = re.findall(r"^ +(\w+) +([\d.]+) +[\d.]+ +-?[\d.]+ %$", printed, re.MULTILINE)
    assert [name for name, _ in sizes] == list(STATES)
    found = {name: round(float(size)) for name, size in sizes}
    assert found == dict(float32=12, bfloat16=8, remainder=12, compact=6) | {"8bit": 6}
    assert (tmp_path / "states.png").stat().st_size > 1000


def test_a_state_that_does_not_go_with_the_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, *TINY, "--optimizer", "torch", "--state", "8bit") == 1
    assert "--state is 8bit, expected float32 with --optimizer torch" in capsys.readouterr().err
