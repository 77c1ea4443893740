"""The command deepspeed: its arguments become torchrun's, or are refused."""

import json
import os
import sys

import pytest
import torch
from torch.distributed.run import get_args_parser

from deepspeed_ext.compat import launch


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """A machine of four GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def options_of(text):
    command, variables = launch.torchrun_command(text.split())
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    return get_args_parser().parse_args(command[3:]), variables.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("text", "processes", "devices"),
    [
        ("train.py --lr 1", 4, None),
        ("--num_gpus 2 --master_port 29501 train.py --num_gpus 7", 2, None),
        ("--include localhost:0,2 train.py", 2, "0,2"),
        ("--include localhost train.py", 4, "0,1,2,3"),
        ("--exclude localhost:1 train.py", 3, "0,2,3"),
        ("--num_nodes 1 train.py", 4, None),
    ],
)
def test_arguments_become_torchruns(text, processes, devices):
    options, named = options_of(text)
    assert (options.nproc_per_node, named) == (str(processes), devices)
    assert options.master_port == (29501 if "29501" in text else 29500)
    assert options.module and options.training_script == "deepspeed_ext.compat.launch"
    assert options.training_script_args[:2] == ["path", "train.py"]
    assert options.training_script_args[2:] == text.split("train.py")[1].split()


def test_ways_to_start_the_script():
    options, _ = options_of("--module --num_gpus 1 pkg.train a")
    assert options.training_script_args == ["module", "pkg.train", "a"]
    options, _ = options_of("--no_local_rank --module --num_gpus 1 pkg.train a")
    assert options.module and options.training_script == "pkg.train"
    options, _ = options_of("--no_python --num_gpus 1 ./program a")
    assert options.no_python and options.training_script == "./program"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--num_nodes 2 train.py", "--num_nodes is 2, expected one host"),
        ("--include a:0@b:1 train.py", "--include is a:0@b:1, expected one host"),
        ("--hostfile HOSTS train.py", "hosts has 2 hosts, expected one host"),
        ("--include localhost:0,9 train.py", "expected some of 0 to 3"),
        ("--include localhost:x train.py", "expected such as localhost:0,2"),
        ("--exclude localhost:0,1,2,3 train.py", "leave no GPU"),
        ("--num_gpus 5 train.py", "--num_gpus is 5, expected at most 4"),
    ],
)
def test_what_is_not_for_one_host_is_refused(text, sentence, tmp_path, capsys):
    hosts = tmp_path / "hosts"
    hosts.write_text("# names\na slots=2\nb slots=2\n")
    assert launch.main(text.replace("HOSTS", str(hosts)).split()) == 2
    assert sentence in capsys.readouterr().err


def test_other_arguments_are_errors(capsys):
    with pytest.raises(SystemExit):
        launch.main(["--launcher", "mpich", "train.py"])


def test_the_command_is_shown_and_run(monkeypatch, capsys):
    called = []
    monkeypatch.setattr(os, "execve", lambda *arguments: called.append(arguments))
    launch.main(["--include", "localhost:1", "train it.py"])
    [(program, command, variables)] = called
    assert program == sys.executable and variables["CUDA_VISIBLE_DEVICES"] == "1"
    shown = capsys.readouterr().err
    assert shown.startswith("CUDA_VISIBLE_DEVICES=1 ") and "'train it.py'" in shown
    assert command[-1] == "train it.py"


def test_a_script_gets_its_local_rank(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys, beside\nopen(sys.argv[2], 'w').write(json.dumps(sys.argv))"
    )
    (tmp_path / "beside.py").write_text("")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(sys, "argv", ["launch"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    out = tmp_path / "out"
    launch._run_script("path", str(script), [str(out)])
    assert json.loads(out.read_text()) == [str(script), "--local_rank=3", str(out)]
    launch._run_script("module", "script", [str(out)])
    assert json.loads(out.read_text())[1:] == ["--local_rank=3", str(out)]
