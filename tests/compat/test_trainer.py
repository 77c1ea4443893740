"""Trainer and accelerate train over this library as over DeepSpeed, which was recorded."""

import json
import os
from pathlib import Path

import pytest
import warm_python
from train_by_trainer import CASES, FILE, LAUNCHED, LORA, RESTING, launched

from deepspeed_ext.compat.environment import Environment

ROOT = Path(__file__).parents[2]
RECORDED = json.loads(FILE.read_text())["cases"]
# Relative: in float32 gradients are added up in another order; of 16 bits, half a digit.
CLOSE = {"float32": 1e-5, "bf16": 2**-8, "fp16": 2**-11}


SHORT = ("1-float32-cpu-trainer-1", "2-bf16-cpu-config-1", RESTING[0])
_found = {}


def found(cases, folder):
    """Return what came of cases, of one program that forks for each, once."""
    pytest.importorskip("accelerate")
    if cases not in _found:
        program = Path(__file__).with_name("train_by_trainer.py")
        path = os.pathsep.join(map(str, (ROOT, program.parent)))
        done = warm_python.run(program, folder, *cases, env=os.environ | {"PYTHONPATH": path})
        assert done.returncode == 0, done.stderr
        _found[cases] = json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr
    return _found[cases]


def compare(case, found, output):
    assert found[case] is not None, output
    close = CLOSE[case.split("-")[1]]
    of_others = [case.replace("params", device) for device in ("none", "cpu")]
    recorded = next(RECORDED[name] for name in of_others if name in RECORDED)
    for name, wanted in recorded.items():
        if wanted == []:
            continue  # in float32 and stage 0 DeepSpeed tells no norm
        is_rate = name == "learning_rate"
        assert found[case][name] == pytest.approx(wanted, rel=1e-9 if is_rate else close), name
    # What save_model wrote, read by from_pretrained.
    assert found[case]["reloaded_loss"] == pytest.approx(found[case]["eval_loss"], rel=close)


@pytest.mark.parametrize("case", SHORT)
def test_losses_norms_and_rates_are_deepspeeds(case, tmp_path):
    compare(case, *found(SHORT, tmp_path))


LONG = tuple(sorted({*CASES, *RESTING} - {*SHORT} - {*LORA}))


@pytest.mark.long
@pytest.mark.parametrize("case", LONG)
def test_those_of_other_configs_are_too(case, tmp_path):
    compare(case, *found(LONG, tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("case", LORA)
def test_those_of_adapters_are_too(case, tmp_path):
    pytest.importorskip("peft")
    compare(case, *found(LORA, tmp_path))


@pytest.mark.long
def test_accelerate_launch_finds_the_package_that_enable_wrote(tmp_path):
    pytest.importorskip("accelerate")
    place = Environment(tmp_path / "packages", tmp_path)
    place.packages.mkdir()
    place.enable()
    path = os.pathsep.join(map(str, (ROOT, place.packages)))
    found = launched(tmp_path, {"PYTHONPATH": path})
    for name, wanted in RECORDED[LAUNCHED].items():
        close = wanted if name == "sizes" else pytest.approx(wanted, rel=CLOSE["float32"])
        assert found[name] == close, name
