"""python -m deepspeed_ext.io tune: its table, its JSON, what it saves, how it fails."""

import errno
import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_ext.io import __main__ as program
from deepspeed_ext.io.engine.arguments import Settings
from deepspeed_ext.io.tuning import tune
from deepspeed_ext.io.tuning.rates import Rates
from deepspeed_ext.io.tuning.settings import Device, saved
from deepspeed_ext.op_builder import cache

MIB = 1 << 20


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(cache, "readable_roots", lambda: [folder])
    monkeypatch.setattr(cache, "configured_root", lambda: folder)
    return folder


BEST = Settings(block_size=512 << 10, queue_depth=64, backend="io_uring")
REPORT = tune.Report(
    device=Device("259:1", "/dev/nvme0n1p1", "ext4"),
    direct=True,
    file_bytes=1 << 30,
    best=BEST,
    finalists={Settings(backend="io_uring"): Rates(2.5e9, 1.0e9), BEST: Rates(3.0e9, 1.25e9)},
    raw={"fio io_uring": Rates(3e9, 1e9), "fio libaio": Rates(2e9, 2.5e9)},
    refused={"libaio": errno.EPERM},
)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run the command with a tuner that knows the answer, or raises it."""

    def run(*options: str, answer: object = REPORT) -> tuple[int, str, str]:
        def tuner(
            path: str, seconds: float, size: int, progress: Callable[[float], None]
        ) -> object:
            assert (path, seconds, size) == (str(tmp_path), 2.0, 512 * MIB)
            progress(0.5)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        monkeypatch.setattr(program, "tune", tuner)
        code = program.main(["tune", str(tmp_path), "--seconds", "2", "--size", "512M", *options])
        return code, *capsys.readouterr()

    return run


def test_the_table(run: Run, tmp_path: Path) -> None:
    code, out, err = run()
    lines = out.splitlines()
    assert code == 0 and err == ""  # no progress bar without a terminal
    assert all(len(line) <= 80 or str(tmp_path) in line or "saved in" in line for line in lines)
    assert "libaio does not work here: EPERM (Operation not permitted)" in lines
    (best,) = [line for line in lines if line.endswith("<- best")]
    assert best.split()[:7] == ["io_uring", "512", "KiB", "64", "1", "3.00", "1.25"]
    assert "achieved 100% of the raw device when reading, 50% when writing" in lines
    assert not any("trusted" in line for line in lines)
    assert saved(tmp_path) == BEST
    assert f"AsyncIO(**io.tuned('{tmp_path}'))" in lines[-1]


@pytest.mark.parametrize(("slower", "trusted"), [(1.05, True), (1.06, False)])
def test_more_than_the_device_can_do_is_not_trusted(run: Run, slower: float, trusted: bool) -> None:
    raw = {"fio io_uring": Rates(3e9, 1.25e9 / slower), "16 plain threads": Rates(3e9, 1e9)}
    report = replace(REPORT, raw=raw)
    _, out, _ = run("--dry-run", answer=report)
    assert ("more than 105% cannot be trusted" in out) is not trusted
    record = json.loads(run("--dry-run", "--json", answer=report)[1])
    assert record["trusted"] is trusted


def test_the_same_for_machines(run: Run, tmp_path: Path, own_cache: Path) -> None:
    code, out, _ = run("--json")
    record = json.loads(out)
    assert code == 0
    assert record["best"]["block_size"] == 512 << 10
    assert record["finalists"][1] == record["best"] | {"read": 3.0e9, "write": 1.25e9}
    assert record["achieved"] == {"read": 1.0, "write": 0.5}
    file = Path(record["saved"])
    assert file.is_relative_to(own_cache)
    assert json.loads(file.read_text())["measured"] == {"read": 3.0e9, "write": 1.25e9}


def test_a_dry_run_saves_nothing(run: Run, tmp_path: Path, own_cache: Path) -> None:
    code, out, _ = run("--dry-run")
    assert code == 0 and "saved" not in out
    assert saved(tmp_path) is None and list(own_cache.iterdir()) == []


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (OSError(errno.ENOSPC, "the disk is full"), 1, "the disk is full"),
        (ValueError("wrong"), 1, "wrong"),
        (KeyboardInterrupt(), 130, "stopped; nothing was saved"),
    ],
)
def test_failures_are_one_line(
    run, raised: BaseException, code: int, text: str, tmp_path: Path
) -> None:
    got, out, err = run(answer=raised)
    assert (got, out) == (code, "")
    assert text in err and err.count("\n") == 1
    assert saved(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "size"), [("1G", 1 << 30), ("512MiB", 512 * MIB), ("1.5kb", 1536), ("7", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert program._bytes(text) == size


def test_a_size_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["tune", "/tmp", "--size", "much"])
    assert "'much' is no size, expected one such as 1G" in capsys.readouterr().err


def test_saved_settings_are_for_this_user_only_and_whole(run: Run, own_cache: Path) -> None:
    run()
    assert stat.S_IMODE((own_cache / "io").stat().st_mode) == 0o700
    assert [path.suffix for path in (own_cache / "io").iterdir()] == [".json"]
