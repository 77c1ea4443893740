"""Trainer and accelerate train over this library as over DeepSpeed, which was recorded."""

import json
import os
from pathlib import Path

import pytest
import warm_python
from train_by_trainer import CASES, FILE, LAUNCHED, launched

from deepspeed_ext.compat.environment import Environment

ROOT = Path(__file__).parents[2]
RECORDED = json.loads(FILE.read_text())["cases"]
# Relative; of float32, gradients are added up in another order; of 16 bits, weights are rounded.
CLOSE = {"float32": 2e-5, "bf16": 2e-3, "fp16": 5e-4}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What came of all cases, of one program that forks for each."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("trainer")
    program = Path(__file__).with_name("train_by_trainer.py")
    path = os.pathsep.join(map(str, (ROOT, program.parent)))
    done = warm_python.run(program, folder, *CASES, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES)
def test_losses_norms_and_rates_are_deepspeeds(found, case):
    cases, output = found
    assert cases[case] is not None, output
    close = CLOSE[case.split("-")[1]]
    for name, wanted in RECORDED[case].items():
        is_rate = name == "learning_rate"
        assert cases[case][name] == pytest.approx(wanted, rel=1e-9 if is_rate else close), name


def test_accelerate_launch_finds_the_package_that_enable_wrote(tmp_path):
    pytest.importorskip("accelerate")
    place = Environment(tmp_path / "packages", tmp_path)
    place.packages.mkdir()
    place.enable()
    path = os.pathsep.join(map(str, (ROOT, place.packages)))
    found = launched(tmp_path, {"PYTHONPATH": path})
    for name, wanted in RECORDED[LAUNCHED].items():
        close = wanted if name == "sizes" else pytest.approx(wanted, rel=CLOSE["bf16"])
        assert found[name] == close, name
