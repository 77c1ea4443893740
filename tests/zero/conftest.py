"""What the ZeRO tests share: helpers of the optimizer tests, one thread, groups of processes."""

import sys
from pathlib import Path

import pytest
from one_thread import one_thread as one_thread

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "optim")]

import processes


@pytest.fixture(scope="package")
def shared_groups(tmp_path_factory: pytest.TempPathFactory):
    """Processes for all modules: to begin some costs more than most tests."""
    made = processes.Groups("", tmp_path_factory.mktemp("zero"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def groups(shared_groups, request: pytest.FixtureRequest, tmp_path_factory):
    """Processes that run the functions of the test's module."""
    name = request.module.__name__
    return processes.Groups(name, tmp_path_factory.mktemp(name), shared_groups)
