"""train_gpt on several processes: the same losses, and a run that goes on with another number."""

import contextlib
import io
import json
import os
import subprocess
import sys

import pytest
import torch.distributed as dist
from processes import Case

from deepspeed_ext import zero
from examples.options import parse, settings_of
from examples.sharded import ShardedFolder, ShardedTrainer
from examples.text import standard_library
from examples.train_gpt import Run, main

SIZE = ["--steps", "6", "--context", "16", "--width", "32", "--layers", "2", "--batch-size", "4"]
SIZE += ["--device", "cpu"]  # where the groups are run, too


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open()]


def starts(row, folder):
    """Three steps of six, then it is as if it had been killed."""
    name, *experts = row.split()
    options = parse(
        [*SIZE, *experts, "--zero-stage", "3", "--offload", "cpu", "--out", str(folder / name)]
    )
    settings = settings_of(options, None)
    run = Run(ShardedFolder(options.out), ShardedTrainer(settings, standard_library(16)))
    run.folder.make()
    for number in range(1, 4):
        run._step(number)
    run.save()


def goes_on(row, folder):
    assert main(["--zero-stage", "1", "--resume", "--out", str(folder / row)]) == 0
    dist.barrier()
    client = zero.inspect(folder / row / "checkpoint")
    assert [entry["step"] for entry in client["history"]] == [1, 2, 3, 4, 5, 6]


def refuses(row, folder):
    for out, more, text in (
        ("run", [], "which has the checkpoint of another run"),
        ("other", ["--batch-size", "5"], "--batch-size is 5, expected a multiple of 2, the number"),
    ):
        arguments = [*SIZE, *more, "--zero-stage", "2", "--out", str(folder / out)]
        with contextlib.redirect_stderr(io.StringIO()) as said:
            assert main(arguments) == 1
        assert text in said.getvalue()


@pytest.mark.long
def test_a_run_goes_on_with_another_number_of_processes(groups, tmp_path):
    groups.run(Case(2, "starts", "run"), "cpu")
    groups.run(Case(1, "goes_on", "run"), "cpu")
    groups.run(Case(2, "refuses", ""), "cpu")
    assert main([*SIZE, "--offload", "cpu", "--out", str(tmp_path)]) == 0
    assert losses(groups.folder("cpu") / "run") == pytest.approx(losses(tmp_path), rel=1e-5)


@pytest.mark.long
def test_a_run_with_experts_goes_on_with_another_number_of_processes(groups, tmp_path):
    """Losses differ by a little more: each process balances the load of its own examples."""
    experts = "--experts 4 --top-k 2"
    groups.run(Case(2, "starts", f"run_of_experts {experts}"), "cpu")
    groups.run(Case(1, "goes_on", "run_of_experts"), "cpu")
    assert main([*SIZE, *experts.split(), "--offload", "cpu", "--out", str(tmp_path)]) == 0
    run = groups.folder("cpu") / "run_of_experts"
    assert losses(run) == pytest.approx(losses(tmp_path), rel=1e-3)
    one, other = (
        json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["expert_load"]
        for folder in (run, tmp_path)
    )
    assert one == other  # of the first step: counts of all processes


def torchrun(processes, *arguments):
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program += ["--nproc-per-node", str(processes), "-m", "examples.train_gpt"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*program, *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.long
def test_by_torchrun(tmp_path):
    done = torchrun(2, *SIZE, "--zero-stage", "2", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss on files it has not seen") == 1
    assert len(losses(tmp_path / "run")) == 6
