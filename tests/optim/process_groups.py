"""Fixtures for the conftest.py of a folder: processes that run functions of its modules."""

from collections.abc import Iterator, Sequence
from typing import Any

import processes
import pytest


@pytest.fixture(scope="package")
def shared_groups(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[processes.Groups]:
    """Processes for all modules: to begin some costs more than most tests."""
    folder = tmp_path_factory.mktemp("processes")
    made = processes.Groups("", folder, on_gpus=request.config.getoption("--on-gpus"))
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


def with_long(cases: Sequence[processes.Case], *names: str) -> list[Any]:
    """Return cases as parameters of a test, those of these names marked long."""
    made: list[Any] = []
    for case in cases:
        name = f"{case.function}-{case.row}-{case.world}"
        made.append(pytest.param(case, id=name, marks=[pytest.mark.long] * (name in names)))
    assert {*names} <= {param.id for param in made}
    return made
