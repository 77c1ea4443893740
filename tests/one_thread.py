"""A fixture for the conftest.py of a folder: its tests run on one thread, unless they say."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """A second thread is no gain for tiny tensors, and a loss where another test runs beside.

    It waits for work in a loop: attention's tests took ten times as much processor time with it.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # for child processes
        yield
    torch.set_num_threads(threads)
