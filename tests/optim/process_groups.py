"""Fixtures for the conftest.py of a folder: processes that run functions of its modules."""

from collections.abc import Iterator

import processes
import pytest


@pytest.fixture(scope="package")
def shared_groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[processes.Groups]:
    """Processes for all modules: to begin some costs more than most tests."""
    made = processes.Groups("", tmp_path_factory.mktemp("processes"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def groups(
    shared_groups: processes.Groups,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> processes.Groups:
    """Processes that run the functions of the test's module."""
    name = request.module.__name__
    return processes.Groups(name, tmp_path_factory.mktemp(name), shared_groups)
