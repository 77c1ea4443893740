"""The tuner: it finds the best settings of a made-up device, and measures a real one."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed_ext.io._native import native
from deepspeed_ext.io.engine.arguments import Settings
from deepspeed_ext.io.tuning import raw_device, settings, tune
from deepspeed_ext.io.tuning.rates import Rates, best_of, compare, median
from deepspeed_ext.op_builder import cache

MIB = 1 << 20
MadeUp = Callable[[Callable[[Settings], Rates]], list[Settings]]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    native()  # from the usual cache, so that no test compiles it
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(cache, "readable_roots", lambda: [folder])
    monkeypatch.setattr(cache, "configured_root", lambda: folder)
    return folder


class Native:
    """The native module, with backends that all work and an engine that may be another."""

    Engine: Callable[..., object]

    def probe_backends(self) -> dict[str, int]:
        return dict.fromkeys(settings.BACKENDS, 0)

    def __getattr__(self, name: str) -> object:
        return getattr(native(), name)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    """Let a function of the settings stand for the device; the list is of what was tried."""

    def set_up(rates_of: Callable[[Settings], Rates]) -> list[Settings]:
        tried: list[Settings] = []

        def trial(search: tune._Search, asked: Settings, *, write: bool, size: int = 0) -> float:
            if not size:
                tried.append(asked)
                search._advance(1)
            return rates_of(asked).write if write else rates_of(asked).read

        monkeypatch.setattr(tune, "native", Native)
        monkeypatch.setattr(tune._Search, "_trial", trial)
        monkeypatch.setattr(raw_device, "ways_to_measure", lambda *_: {})
        return tried

    return set_up


def test_the_best_settings_are_found_without_the_grid(made_up: MadeUp, tmp_path: Path) -> None:
    want = Settings(block_size=512 << 10, queue_depth=64, threads=2, backend="libaio")

    def rates_of(asked: Settings) -> Rates:
        hits = sum(getattr(asked, n) == getattr(want, n) for n in Settings.__dataclass_fields__)
        return Rates(1e9 * (1 + hits), 2e9 * (1 + hits))

    tried = made_up(rates_of)
    report = tune.tune(tmp_path, 20, 64 * MIB)
    assert report.best == want
    assert report.finalists[want] == Rates(5e9, 10e9)
    assert Settings(backend="libaio") in report.finalists  # what the search began with
    assert len(set(tried)) < 20
    assert report.achieved is None


def test_no_direction_is_given_up_and_noise_is_nothing(made_up: MadeUp, tmp_path: Path) -> None:
    def rates_of(asked: Settings) -> Rates:
        if asked.queue_depth == 8:
            return Rates(1.9, 0.5)  # reads much faster, but is worse on the whole
        return Rates(1.02, 1.02) if asked.block_size == 2 * MIB else Rates(1, 1)

    made_up(rates_of)
    assert tune.tune(tmp_path, 20, 64 * MIB).best == Settings(backend="io_uring")


def test_the_search_ends_with_its_time(
    made_up: MadeUp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = [0.0]
    monkeypatch.setattr(tune.time, "monotonic", lambda: now[0])

    def rates_of(asked: Settings) -> Rates:
        now[0] += 1
        return Rates(1, 1)

    tried = made_up(rates_of)
    tune.tune(tmp_path, 20, 64 * MIB)
    assert len(set(tried)) < 16 and now[0] < 60  # 38 seconds, and the rounds that were begun


def test_settings_that_the_system_refuses_do_not_end_the_search(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = native().Engine

    def engine(**arguments: object) -> object:
        if arguments["queue_depth"] != 32:
            raise OSError(errno.EAGAIN, "made up")
        return made(**arguments)

    monkeypatch.setattr(Native, "Engine", staticmethod(engine), raising=False)
    monkeypatch.setattr(tune, "native", Native)
    monkeypatch.setattr(raw_device, "ways_to_measure", lambda *_: {})
    assert tune.tune(tmp_path, 0.2, 64 * MIB).best.queue_depth == 32


def test_a_real_device(tmp_path: Path) -> None:
    parts: list[float] = []
    report = tune.tune(tmp_path, 1.0, 64 * MIB, parts.append)
    assert report.best in report.finalists
    for rates in (*report.finalists.values(), *report.raw.values()):
        assert rates.read > 1e6 and rates.write > 1e6
    assert report.file_bytes == 64 * MIB
    assert report.device == settings.device_of(tmp_path)
    assert parts == sorted(parts) and parts[-1] == 1.0
    assert list(tmp_path.iterdir()) == []
    if report.direct:
        assert report.raw and report.achieved is not None
        best_read = max(rates.read for rates in report.raw.values())
        assert report.achieved.read == report.finalists[report.best].read / best_read


@pytest.mark.parametrize("write", [True, False])
def test_a_trial_moves_the_bytes_that_it_counts(write: bool, tmp_path: Path) -> None:
    file = native().File.scratch(str(tmp_path))
    search = tune._Search(file, 64 * MIB, tune.time.monotonic(), 1.0, lambda part: None)
    pattern = bytes(memoryview(search._pages)[: 8 * MIB])
    assert file.size() == 64 * MIB
    for offset in range(0, 64 * MIB, 8 * MIB):  # the preparation wrote all of it
        assert os.pread(file.fileno(), 8 * MIB, offset) == pattern
    engine = native().Engine(1 * MIB, 8, 1, "threads")
    settings = Settings(backend="threads")
    seconds = 24 * MIB / search._move(engine, settings, write=write, size=24 * MIB)
    engine.close()
    moved = engine.stats()["bytes_written" if write else "bytes_read"]
    assert moved == 24 * MIB and 0 < seconds < 60


def test_a_small_disk() -> None:
    class Disk:
        def __init__(self, free: int) -> None:
            self.free_bytes = lambda: free

    assert tune._fitting(Disk(300 * MIB), 1024 * MIB, "/d") == 144 * MIB
    assert tune._fitting(Disk(300 * MIB), 64 * MIB, "/d") == 64 * MIB
    with pytest.raises(
        OSError, match=r"tune: /d has 104857600 bytes free, expected 134217728; "
    ) as caught:
        tune._fitting(Disk(100 * MIB), 1024 * MIB, "/d")
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((0, 64 * MIB), "seconds is 0, expected more"), ((1, MIB), "size is 1048576, expected at")],
)
def test_wrong_arguments(arguments: tuple[float, int], text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"tune: {text}"):
        tune.tune(tmp_path, *arguments)


def test_contenders_take_turns_and_medians_are_of_each_direction() -> None:
    order: list[str] = []

    def measure(name: str) -> Rates:
        order.append(name)
        return Rates(len(order), -len(order))

    found = compare(["a", "b", "c"], measure, 3, lambda: False)
    assert "".join(order) == "abcbcacab"
    assert found == {"a": Rates(6, -6), "b": Rates(4, -4), "c": Rates(5, -5)}
    assert len(compare(["a", "b"], measure, 5, lambda: True)) == 2 and len(order) == 11
    assert median([Rates(1, 9), Rates(2, 1), Rates(7, 2)]) == Rates(2, 2)
    assert best_of({"first": Rates(1, 1), "noise": Rates(1.02, 1.02)}) == "first"
    assert best_of({"first": Rates(1, 1), "better": Rates(1.1, 1)}) == "better"
