"""Tensors on disk: asynchronous reads and writes, stores, checkpoints, pinned memory.

Nothing is compiled or loaded before it is used. Each room imports the ground floor and what stands
before it here; tests/test_layering.py has the order:

- ground floor: _native (the compiled engine), file, file_map, tensors, regular_file, extents.
- engine/: AsyncIO, Future, PinnedBuffer, PinnedPool, aio_handle.
- store/: TensorStore. checkpoint/: save, load, inspect, file_bytes.
- tuning/: tuned, and what finds it.
- __main__ (the command line), environment and self_checks (for ds_report) use all of these.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_ext.io.checkpoint.state_dict import (
        SavedStateDict,
        SavedTensor,
        file_bytes,
        inspect,
        load,
        save,
    )
    from deepspeed_ext.io.engine.async_io import AsyncIO
    from deepspeed_ext.io.engine.future import Future
    from deepspeed_ext.io.engine.handle import aio_handle
    from deepspeed_ext.io.engine.pinned import PinnedBuffer, PinnedPool
    from deepspeed_ext.io.file import File
    from deepspeed_ext.io.store.tensor_store import TensorStore
    from deepspeed_ext.io.tuning.settings import tuned

__all__ = [
    "AsyncIO",
    "File",
    "Future",
    "PinnedBuffer",
    "PinnedPool",
    "SavedStateDict",
    "SavedTensor",
    "TensorStore",
    "aio_handle",
    "file_bytes",
    "inspect",
    "load",
    "save",
    "tuned",
]

_HOMES = {
    "AsyncIO": "engine.async_io",
    "Future": "engine.future",
    "PinnedBuffer": "engine.pinned",
    "PinnedPool": "engine.pinned",
    "SavedStateDict": "checkpoint.state_dict",
    "SavedTensor": "checkpoint.state_dict",
    "TensorStore": "store.tensor_store",
    "aio_handle": "engine.handle",
    "file_bytes": "checkpoint.state_dict",
    "inspect": "checkpoint.state_dict",
    "load": "checkpoint.state_dict",
    "save": "checkpoint.state_dict",
    "tuned": "tuning.settings",
}


def __getattr__(name: str) -> object:
    if name == "File":  # the native class, which deepspeed_ext.io.file describes
        return import_module("deepspeed_ext.io._native").native().File
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"deepspeed_ext.io.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
