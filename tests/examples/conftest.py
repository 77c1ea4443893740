"""What the tests of the examples share: one thread for tiny models."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """A second thread is no gain for a tiny model, and a loss where another test runs beside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # for child processes
        yield
    torch.set_num_threads(threads)
