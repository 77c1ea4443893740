"""What the tests of quantized models share with pytest: the devices to run on."""

import pytest
import torch
from one_thread import one_thread as one_thread

_NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=_NEEDS_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device in turn."""
    return str(request.param)


@pytest.fixture(params=[pytest.param("cuda", marks=_NEEDS_GPU)])
def cuda(request: pytest.FixtureRequest) -> str:
    """The GPU."""
    return str(request.param)
