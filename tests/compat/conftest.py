"""What the tests of DeepSpeed's names share: the model of the ZeRO tests, and processes."""

import sys
from pathlib import Path

import pytest
from one_thread import one_thread as one_thread

sys.path += [str(Path(__file__).parents[1] / name) for name in ("zero", "optim")]

import processes


@pytest.fixture(scope="module")
def groups(request: pytest.FixtureRequest, tmp_path_factory):
    """Processes that run the functions of the test's module."""
    name = request.module.__name__
    made = processes.Groups(name, tmp_path_factory.mktemp(name))
    yield made
    made.end()
