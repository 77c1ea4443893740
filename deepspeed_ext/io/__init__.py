"""Tensors on disk: asynchronous reads and writes, stores, checkpoints, pinned memory.

Nothing is compiled or loaded before it is used. The modules, by what they serve:

- AsyncIO: async_io, future, watcher, in_flight, tensors, file, _native (the compiled engine);
  CUDA tensors go through cuda, bounce and ring; handle is aio_handle.
- PinnedBuffer, PinnedPool: pinned.
- TensorStore: tensor_store, store_checks, store_job, ledger (names and requests), space and extents
  (the file's bytes), store_folder, manifest and durable (commits).
- save, load, inspect: state_dict, saved_tensors, saved_ties, safetensors_format, new_file,
  packed_writer, grouped_reader, fresh_pages, window; regular_file for these and the store.
- Tuning and the report: __main__, tune, rates, raw_device, settings, environment, self_checks.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_ext.io.async_io import AsyncIO
    from deepspeed_ext.io.file import File
    from deepspeed_ext.io.future import Future
    from deepspeed_ext.io.handle import aio_handle
    from deepspeed_ext.io.pinned import PinnedBuffer, PinnedPool
    from deepspeed_ext.io.settings import tuned
    from deepspeed_ext.io.state_dict import SavedStateDict, SavedTensor, inspect, load, save
    from deepspeed_ext.io.tensor_store import TensorStore

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
    "inspect",
    "load",
    "save",
    "tuned",
]

_HOMES = {
    "AsyncIO": "async_io",
    "Future": "future",
    "PinnedBuffer": "pinned",
    "PinnedPool": "pinned",
    "SavedStateDict": "state_dict",
    "SavedTensor": "state_dict",
    "TensorStore": "tensor_store",
    "aio_handle": "handle",
    "inspect": "state_dict",
    "load": "state_dict",
    "save": "state_dict",
    "tuned": "settings",
}


def __getattr__(name: str) -> object:
    if name == "File":  # the native class, which deepspeed_ext.io.file describes
        return import_module("deepspeed_ext.io._native").native().File
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"deepspeed_ext.io.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
