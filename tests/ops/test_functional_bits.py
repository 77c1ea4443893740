"""Activations and rope: the same bits with every instruction set.

One process for each, with all of their digests, as importing torch takes most of the time.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import test_bias_activation
import test_gated_activation
import test_rope_contract

MODULES = (test_bias_activation, test_gated_activation, test_rope_contract)


@cache
def digests() -> str:
    """Return a line for each op, here with the widest instruction set."""
    return "\n".join(f"{module.__name__} {module.digest()}" for module in MODULES)


@pytest.mark.parametrize("isa", ["scalar", "sse2", "avx2", "avx512"], indirect=True)
def test_every_isa(isa: str) -> None:
    environment = os.environ | {"DSX_FORCE_ISA": isa}
    command = [sys.executable, str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == digests(), done.stderr


if __name__ == "__main__":
    print(digests())
