"""What the offload tests share: helpers of the optimizer tests, one thread, no hangs."""

import faulthandler
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from one_thread import one_thread as one_thread

LONGEST_TEST = 120.0  # seconds; what takes longer hangs

sys.path.append(str(Path(__file__).parents[1] / "optim"))
import processes  # noqa: E402


@pytest.fixture(scope="package")
def _real_stderr(request: pytest.FixtureRequest) -> Iterator[int]:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        descriptor = os.dup(2)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(autouse=True)
def _no_hang(_real_stderr: int, request: pytest.FixtureRequest) -> Iterator[None]:
    """End the run with the stacks of all threads when a test hangs."""
    longest = LONGEST_TEST * (5 if request.node.get_closest_marker("long") else 1)
    faulthandler.dump_traceback_later(longest, exit=True, file=_real_stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def threads_that_take_turns() -> Iterator[None]:
    """So that the worker may come in between anywhere."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def groups(request, tmp_path_factory):
    """Return groups of processes for each device, that call functions of the test's module."""
    groups = {
        device: processes.Groups(request.module.__name__, tmp_path_factory.mktemp(device))
        for device in ("cpu", "cuda")
    }
    yield groups
    for each in groups.values():
        each.end()
