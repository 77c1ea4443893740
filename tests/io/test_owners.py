"""Copies of what has open files, locked memory or transfers: there are none."""

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ext import io

MAKE: dict[str, Callable[[Path], Any]] = {
    "AsyncIO": lambda folder: io.AsyncIO(),
    "aio_handle": lambda folder: io.aio_handle(),
    "PinnedBuffer": lambda folder: io.PinnedBuffer(4096),
    "PinnedPool": lambda folder: io.PinnedPool(),
    "TensorStore": io.TensorStore,
    "Future": lambda folder: io.TensorStore(folder).put_async("x", torch.ones(3)),
}


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("name", MAKE)
def test_no_copies(how: Callable[[Any], Any], name: str, tmp_path: Path) -> None:
    made = MAKE[name](tmp_path)
    with pytest.raises(TypeError, match=rf"^{name}: it was to be copied or pickled, expected no"):
        how(made)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
@pytest.mark.filterwarnings("error")
def test_a_store_is_open_after_what_tried_to_copy_it(
    how: Callable[[Any], Any], tmp_path: Path
) -> None:
    with io.TensorStore(tmp_path) as store:
        store.put("a", torch.ones(3))
        with pytest.raises(TypeError):
            how(store)
        gc.collect()
        assert torch.equal(store.get("a"), torch.ones(3))


@pytest.mark.filterwarnings("error")
def test_a_store_that_was_never_made_ends_in_silence() -> None:
    made = io.TensorStore.__new__(io.TensorStore)
    del made
    gc.collect()
