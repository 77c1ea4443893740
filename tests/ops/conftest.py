"""What the op tests share with pytest: helpers of all rooms, devices and instruction sets."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from one_thread import one_thread as one_thread

from deepspeed_ext.environment import _ISA_FEATURES, _features

_NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ROOMS = sorted({str(path.parent) for path in Path(__file__).parent.rglob("*.py")})

sys.path += ROOMS  # names of files are unique, and tests of all ops take from each room


@pytest.fixture(scope="package", autouse=True)
def _rooms_for_child_processes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(ROOMS), prepend=os.pathsep)
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=_NEEDS_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device in turn."""
    return str(request.param)


@pytest.fixture(params=[pytest.param("cuda", marks=_NEEDS_GPU)])
def cuda(request: pytest.FixtureRequest) -> str:
    """The GPU."""
    return str(request.param)


@pytest.fixture(params=["scalar", "sse2", "neon", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set in turn; no process is started to hear that this CPU lacks it.

    tests/test_report.py compares what is known here with what the kernels say.
    """
    name = str(request.param)
    if name not in _ISA_FEATURES or not _ISA_FEATURES[name] <= set(_features()):
        pytest.skip(f"needs a CPU with {name}")
    return name
