"""Tuned settings: where they are kept, for which device, and what happens to wrong ones."""

import errno
import inspect
import json
import logging
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
from file_systems import TMPFS, file_system_of

from deepspeed_ext.io._native import native
from deepspeed_ext.io.engine.arguments import BACKENDS, LIMITS, Settings
from deepspeed_ext.io.engine.async_io import AsyncIO
from deepspeed_ext.io.tuning import settings
from deepspeed_ext.io.tuning.settings import device_of, save, saved, tuned
from deepspeed_ext.io.tuning.tune import tune
from deepspeed_ext.op_builder import cache

DEFAULTS = asdict(Settings())
FOUND = Settings(block_size=1 << 19, queue_depth=64, threads=2, backend="threads")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    native()  # from the usual cache, so that no test compiles it
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("DS_EXT_CACHE", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))  # the other place that is looked at
    monkeypatch.delenv("DS_EXT_AIO_BACKEND", raising=False)
    return folder


def test_the_defaults_are_those_of_the_engine(tmp_path: Path) -> None:
    parameters = inspect.signature(AsyncIO).parameters
    assert {name: parameters[name].default for name in DEFAULTS} == DEFAULTS
    assert tuned(tmp_path) == DEFAULTS
    assert set(native().probe_backends()) == set(BACKENDS)


@pytest.mark.parametrize("name", LIMITS)
def test_the_limits_are_those_of_the_native_engine(name: str) -> None:
    sizes = {"block_size": 1, "queue_depth": 1, "threads": 1}
    for value in (0, LIMITS[name] + 1):
        texts = set()
        for make in (AsyncIO, partial(native().Engine, backend="threads")):
            with pytest.raises(ValueError, match=f"expected 1 to {LIMITS[name]}") as caught:
                make(**sizes | {name: value})
            texts.add(str(caught.value))
        assert len(texts) == 1


def test_no_path_is_not_the_working_folder() -> None:
    for ask in (tuned, tune):
        with pytest.raises(ValueError, match=r"path is '', expected the path of a file or folder"):
            ask("")
        with pytest.raises(TypeError, match=r"path is an int, expected a str or os.PathLike"):
            ask(7)
    assert tuned(os.fsencode(os.getcwd())) == DEFAULTS


def test_what_was_saved_is_for_the_whole_device(tmp_path: Path, own_cache: Path) -> None:
    file = save(tmp_path, FOUND, measured={"read": 1.0})
    assert file.is_relative_to(own_cache)
    for path in (tmp_path, tmp_path / "not" / "yet" / "there", str(tmp_path)):
        assert saved(path) == FOUND
        assert tuned(path) == asdict(FOUND)
    with AsyncIO(**tuned(tmp_path)) as engine:
        assert (engine.block_size, engine.threads, engine.backend) == (1 << 19, 2, "threads")
    save(tmp_path, Settings(backend="libaio"))
    assert saved(tmp_path) == Settings(backend="libaio")


def test_another_device_has_other_settings(tmp_path: Path) -> None:
    if file_system_of(TMPFS) != "tmpfs" or device_of(TMPFS) == device_of(tmp_path):
        pytest.skip(f"{TMPFS} is no device of its own here")
    save(tmp_path, FOUND)
    assert tuned(TMPFS) == DEFAULTS
    save(TMPFS, Settings(threads=4, backend="threads"))
    assert saved(tmp_path) == FOUND and tuned(TMPFS)["threads"] == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        '{"device": ',
        {"block_size": 0},
        {"block_size": 1 << 40},
        {"threads": LIMITS["threads"] + 1},
        {"queue_depth": "32"},
        {"threads": True},
        {"backend": "magic"},
        {"unknown": 1},
    ],
)
def test_a_damaged_file_is_not_used(
    text: "str | dict[str, object]", tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = save(tmp_path, FOUND)
    if isinstance(text, dict):
        record = json.loads(file.read_text())
        record["settings"] |= text
        text = json.dumps(record)
    file.write_text(text)
    with caplog.at_level(logging.WARNING, logger="deepspeed_ext"):
        assert tuned(tmp_path) == DEFAULTS
    assert f"the I/O settings in {file} are not used" in caplog.text


def test_a_file_of_another_device_is_not_used(tmp_path: Path) -> None:
    file = save(tmp_path, FOUND)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"source": "/dev/other"}))
    assert saved(tmp_path) is None


def test_another_machine_has_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have one home, and disks of one name."""
    save(tmp_path, FOUND)
    with monkeypatch.context() as patch:
        patch.setattr(platform, "node", lambda: "another")
        assert saved(tmp_path) is None
        save(tmp_path, Settings(threads=7, backend="threads"))
    assert saved(tmp_path) == FOUND


def test_the_backend_of_the_environment_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, FOUND)
    monkeypatch.setenv("DS_EXT_AIO_BACKEND", "threads")
    assert tuned(tmp_path) == asdict(FOUND) | {"backend": "auto"}


def test_a_backend_that_does_not_work_here_is_not_insisted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, FOUND)

    class Native:
        def probe_backends(self) -> dict[str, int]:
            return {"io_uring": 0, "libaio": 0, "threads": errno.EPERM}

    monkeypatch.setattr(settings, "native", Native)
    assert tuned(tmp_path) == asdict(FOUND) | {"backend": "auto"}


def test_readers_see_old_or_new_settings_but_no_mixture(tmp_path: Path, own_cache: Path) -> None:
    choices = [Settings(block_size=4096 * n, queue_depth=n, backend="threads") for n in (1, 2, 3)]
    save(tmp_path, choices[0])

    def work(index: int) -> Settings | None:
        save(tmp_path, choices[index % 3])
        return saved(tmp_path)

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(work, range(300))) <= set(choices)
    assert len(list((own_cache / "io").iterdir())) == 1


def test_a_failing_save_leaves_the_old_settings_and_nothing_else(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save(tmp_path, FOUND)

    def full(path: Path, text: str) -> int:
        with path.open("w") as half:
            half.write(text[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, Settings(threads=9, backend="threads"))
    assert saved(tmp_path) == FOUND
    assert list(file.parent.iterdir()) == [file]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DS_EXT_CACHE", str(tmp_path / "file"))
    with pytest.raises(NotADirectoryError):
        save(tmp_path, FOUND)
    monkeypatch.setattr(cache, "configured_root", lambda: None)
    with pytest.raises(FileNotFoundError, match="no home folder; set DS_EXT_CACHE"):
        save(tmp_path, FOUND)
    assert tuned(tmp_path) == DEFAULTS


def test_the_innermost_and_last_mount_is_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "with space"
    inner.mkdir()
    escaped = str(inner).replace(" ", r"\040")
    lines = [
        "22 1 254:0 / / rw - ext4 /dev/root rw",
        f"23 22 0:40 / {tmp_path} rw shared:1 - xfs /dev/hidden rw",
        f"24 23 0:41 / {escaped} rw master:2 - btrfs /dev/in\\040ner rw",
        f"25 22 0:42 / {tmp_path} rw - xfs /dev/visible rw",
        f"26 22 0:43 / {tmp_path}-other rw - nfs server:/share rw",
    ]
    read_text = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path: "\n".join(lines) if "mountinfo" in path.name else read_text(path),
    )
    inner_device, outer_device = device_of(inner / "file"), device_of(tmp_path / "file")
    assert (inner_device.source, inner_device.file_system) == ("/dev/in ner", "btrfs")
    assert (outer_device.source, outer_device.file_system) == ("/dev/visible", "xfs")
    status = os.stat(tmp_path)
    assert outer_device.number == f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
