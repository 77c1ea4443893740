"""Processes that end or fork while work is under way."""

import subprocess
from pathlib import Path

import pytest
import warm_python
from aio_cases import bytes_of, payload
from aio_child import FILES, NBYTES

from deepspeed_ext.io._native import native

CHILD = Path(__file__).with_name("aio_child.py")
PATIENCE = 90.0


def run_child(case: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a case in a process of its own, with all backends that work; return how, and these."""
    backends = [name for name, code in native().probe_backends().items() if code == 0]
    return warm_python.run(CHILD, case, folder, *backends, timeout=PATIENCE), backends


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("raise", 1)])
def test_pending_writes_are_on_disk_when_a_process_has_ended(
    tmp_path: Path, how: str, code: int
) -> None:
    done, backends = run_child(how, tmp_path)
    assert done.returncode == code, done.stderr
    for backend in backends:
        for i in range(FILES + 1):
            written = (tmp_path / backend / f"{i}").read_bytes()
            assert written == bytes_of(payload(NBYTES, seed=i)), (backend, i)
        assert f"{tmp_path}/{backend}/missing/file failed: No such file or dir" in done.stderr
    assert done.stderr.count("Traceback") == (how == "raise"), done.stderr
    assert ("the child's own error" in done.stderr) == (how == "raise")


def test_after_fork(tmp_path: Path) -> None:
    done, backends = run_child("forks", tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.splitlines() == [f"{backend} done" for backend in backends]
    for backend in backends:
        assert (tmp_path / backend / "child").read_bytes() == bytes_of(payload(7))
        assert (tmp_path / backend / "after").read_bytes() == bytes_of(payload(5))
