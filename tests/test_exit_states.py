"""Programs end as they should, whatever of ours is under way; exit_states.py has the states."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_programs_end_as_they_should() -> None:
    """All states by one program, as a process that has loaded everything forks in no time."""
    program = Path(__file__).with_name("exit_states.py")
    done = subprocess.run(
        [sys.executable, program, "--rounds", "3"],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "")
