"""What tests cost: the option --cpu-seconds tells, --share leaves out a part of what costs most.

And a fixture for tests of garbage.
"""

import gc
import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from zlib import crc32

import pytest
import warm_python

SLOWEST = 40
LONG_SHARES = 64
CASE_SHARES = {9: 16, 3: 2}  # by how many cases a test has at least; with fewer it runs all


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        metavar="I",
        type=int,
        help="run a share of the long tests and of the cases of tests that have many, another one"
        " for each whole number I",
    )
    parser.addoption(
        "--cpu-seconds",
        action="store_true",
        help="sum the processor time of each folder's tests, child processes included",
    )
    parser.addoption(
        "--on-gpus",
        action="store_true",
        help="run the tests of several processes, and no others, with a GPU for each process",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is of other shares, and with --on-gpus all but the tests of processes."""
    if config.getoption("--on-gpus"):
        left_out = [item for item in items if "groups" not in getattr(item, "fixturenames", ())]
        _leave_out(config, items, left_out)
    number = config.getoption("--share")
    if number is None:
        return
    cases = Counter(map(_test_of, items))

    def shares(item: pytest.Item) -> int:
        if item.get_closest_marker("long"):
            return LONG_SHARES
        count = cases[_test_of(item)]
        return next((shares for least, shares in CASE_SHARES.items() if count >= least), 1)

    left_out = [item for item in items if (crc32(item.nodeid.encode()) - number) % shares(item)]
    _leave_out(config, items, left_out)


def _leave_out(config: pytest.Config, items: list[pytest.Item], those: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=those)
    items[:] = [item for item in items if item not in {*those}]


def _test_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the collector of garbage leave out what tests are made of: many ask it for all else."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def garbage_stays() -> Iterator[None]:
    """Garbage is there until the test calls gc.collect().

    While some thread collects by itself, that call does nothing.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Note when the test begins; its fixtures belong to it."""
    _leave_out_what_stays(item.path)
    item.stash[_BEGIN] = _seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give each phase what it took; as a property it reaches the process that reports."""
    report = yield
    now = _seconds()
    report.user_properties = [("cpu", now - item.stash[_BEGIN])]
    item.stash[_BEGIN] = now
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the two tables."""
    if not terminalreporter.config.getoption("--cpu-seconds"):
        return
    folders: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds = sum(value for name, value in report.user_properties if name == "cpu")
                path = report.nodeid.partition("::")[0]
                folder, _, rest = path.removeprefix("tests/").partition("/")
                folders[folder if rest else "."] += seconds
                tests[report.nodeid] += seconds
    terminalreporter.section("seconds of processor time")
    for what, rows in (("folders", folders.most_common()), ("tests", tests.most_common(SLOWEST))):
        terminalreporter.write_line(f"{sum(dict(rows).values()):8.1f} {what}, of which")
        for name, seconds in rows:
            terminalreporter.write_line(f"{seconds:8.1f} {name}")


def _leave_out_what_stays(path: Path) -> None:
    """Do it again for each module: what others have imported stays, too."""
    if path not in _seen:
        _seen.add(path)
        gc.collect()
        gc.freeze()


def _seconds() -> float:
    """Return what this process and its children have taken, and the children of one of these."""
    return sum(os.times()[:4]) + warm_python.seconds


_seen: set[Path] = set()
_BEGIN = pytest.StashKey[float]()
