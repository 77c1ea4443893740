"""The reference for the tuner: fio where it works, else plain threads, else nothing."""

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepspeed_ext.io.tuning import raw_device
from deepspeed_ext.io.tuning.rates import Rates

MIB = 1 << 20
MEMORY = memoryview(mmap.mmap(-1, 2 * MIB))


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    file = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.posix_fallocate(file, 0, 4 * MIB)
    yield file
    os.close(file)


@pytest.fixture
def fio(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Make a shell script the only program, as fio; the file gets its arguments."""
    folder = tmp_path_factory.mktemp("bin")

    def make(script: str) -> Path:
        (folder / "fio").write_text(f'#!/bin/sh\necho "$@" >> {folder}/arguments\n{script}\n')
        (folder / "fio").chmod(0o755)
        return folder / "arguments"

    monkeypatch.setenv("PATH", str(folder))
    return make


def direct_or_skip(descriptor: int) -> None:
    if not raw_device._is_direct(f"/proc/self/fd/{descriptor}"):
        pytest.skip("the temporary folder has no direct I/O")


def test_fio_is_believed(descriptor: int, fio: Callable[[str], Path]) -> None:
    direct_or_skip(descriptor)
    found = '{"jobs": [{"read": {"bw_bytes": 123}}, {"write": {"bw_bytes": 45}}]}'
    arguments = fio(f"echo 'a note'; echo '{found}'")
    ways = raw_device.ways_to_measure(descriptor, 4 * MIB, MEMORY)
    names = ["fio io_uring", "fio io_uring, not fixed", "fio libaio", "16 plain threads"]
    assert list(ways) == names
    assert ways["fio io_uring"](0.25) == Rates(123, 45)
    last = arguments.read_text().splitlines()[-1]
    assert "--direct=1" in last and "--runtime=250ms" in last and "--fixedbufs=1" in last
    assert f"--filename=/proc/{os.getpid()}/fd/{descriptor}" in last


@pytest.mark.parametrize("script", ["exit 1", "echo nothing", "echo '{}'"])
def test_without_a_fio_that_works_plain_threads_measure(
    script: str, descriptor: int, fio: Callable[[str], Path]
) -> None:
    direct_or_skip(descriptor)
    fio(script)
    ways = raw_device.ways_to_measure(descriptor, 4 * MIB, MEMORY)
    assert list(ways) == ["16 plain threads"]
    rates = ways["16 plain threads"](0.05)
    assert rates.read > 1e6 and rates.write > 1e6


def test_plain_threads_report_their_failure(descriptor: int, tmp_path: Path) -> None:
    direct_or_skip(descriptor)
    with pytest.raises(FileNotFoundError):
        raw_device._plain(str(tmp_path / "missing"), 4 * MIB, MEMORY, 0.05, write=False)


def test_a_file_system_without_direct_io_has_no_raw_rate(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_device, "_is_direct", lambda path: False)
    assert raw_device.ways_to_measure(descriptor, 4 * MIB, MEMORY) == {}
