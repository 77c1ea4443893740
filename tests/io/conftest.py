"""What the I/O tests share: each backend, folders on file systems of several kinds, no hangs."""

import contextlib
import errno
import faulthandler
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from file_systems import TMPFS, file_system_of

if TYPE_CHECKING:
    from deepspeed_ext import io

HERE = Path(__file__).parent
BACKENDS = ("io_uring", "libaio", "threads")
LONGEST_TEST = 120.0  # seconds; what takes longer hangs
SMALL_DISK = 16 << 20


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn; one that this machine refuses is skipped with the errno."""
    from deepspeed_ext.io._native import native  # here, for the tests that need no native code

    name = str(request.param)
    code = native().probe_backends()[name]
    if code:
        pytest.skip(f"{name} does not work here: {errno.errorcode[code]}: {os.strerror(code)}")
    return name


@pytest.fixture
def engine(backend: str) -> "Iterator[io.AsyncIO]":
    """An engine with small blocks, so that small files have many of them."""
    from deepspeed_ext import io

    with io.AsyncIO(block_size=8192, queue_depth=8, backend=backend) as opened:
        yield opened


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A folder on a file system without direct I/O."""
    if file_system_of(TMPFS) != "tmpfs":
        pytest.skip(f"{TMPFS} is no tmpfs here")
    with tempfile.TemporaryDirectory(dir=TMPFS, prefix="deepspeed-ext-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def _mounted_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    image = tmp_path_factory.mktemp("disk") / "image"
    mounted = image.with_name("mounted")
    mounted.mkdir()
    image.touch()
    os.truncate(image, SMALL_DISK)
    for command in (["mkfs.ext4", "-q", "-m", "0", image], ["mount", "-o", "loop", image, mounted]):
        if shutil.which(command[0]) is None:
            pytest.skip(f"needs {command[0]}")
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no small file system here: {done.stderr.strip()}")
    descriptor = os.open(mounted, os.O_RDONLY | os.O_DIRECTORY)
    # Without a name it goes with this process, also when that is killed.
    subprocess.run(["umount", "--lazy", mounted], check=True)
    yield Path(f"/proc/self/fd/{descriptor}")
    os.close(descriptor)


@pytest.fixture
def small_disk(_mounted_disk: Path) -> Iterator[Path]:
    """An empty folder on a file system of its own, 16 MiB in all."""
    folder = _mounted_disk / "folder"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def as_nobody() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context in which this process may do no more than any other user."""
    if os.geteuid():
        return contextlib.nullcontext

    @contextlib.contextmanager
    def without_rights() -> Iterator[None]:
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

    return without_rights


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter, unlike tmp_path."""
    with tempfile.TemporaryDirectory(prefix="deepspeed-ext-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)  # child processes find helpers
    monkeypatch.delenv("DS_EXT_AIO_BACKEND", raising=False)


@pytest.fixture(scope="session")
def _real_stderr(request: pytest.FixtureRequest) -> Iterator[int]:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        descriptor = os.dup(2)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(autouse=True)
def _no_hang(_real_stderr: int) -> Iterator[None]:
    """End the run with the stacks of all threads when a test hangs, also with the GIL held."""
    faulthandler.dump_traceback_later(LONGEST_TEST, exit=True, file=_real_stderr)
    yield
    faulthandler.cancel_dump_traceback_later()
