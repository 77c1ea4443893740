"""TRL trains over this library as over DeepSpeed, which was recorded."""

import json
import os
from pathlib import Path

import pytest
import warm_python
from train_by_trl import CASES, FILE

ROOT = Path(__file__).parents[2]
RECORDED = json.loads(FILE.read_text())["cases"]
CLOSE = {"float32": 1e-4, "bf16": 2**-7}  # of differences of logarithms that are nearly equal


@pytest.mark.long
def test_losses_norms_rewards_and_divergences_are_deepspeeds(tmp_path):
    for package in ("trl", "datasets"):
        pytest.importorskip(package)
    program = Path(__file__).with_name("train_by_trl.py")
    path = os.pathsep.join(map(str, (ROOT, program.parent)))
    done = warm_python.run(program, tmp_path, *CASES, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for case in CASES:
        assert found[case] is not None, done.stderr
        close = CLOSE[case.split("-")[2]]
        for name, wanted in RECORDED[case].items():
            assert found[case][name] == pytest.approx(wanted, rel=close, abs=1e-7), (case, name)
