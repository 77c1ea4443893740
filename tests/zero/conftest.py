"""What the ZeRO tests share: helpers of the optimizer tests, one thread, groups of processes."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "optim")]

import processes


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """A second thread is no gain for tiny parameters, and a loss where another test runs beside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # for child processes
    yield
    torch.set_num_threads(threads)
    os.environ.pop("OMP_NUM_THREADS")
    if before is not None:
        os.environ["OMP_NUM_THREADS"] = before


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
