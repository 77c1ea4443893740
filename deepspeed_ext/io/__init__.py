"""Tensors on disk: asynchronous reads and writes, stores, checkpoints, pinned memory.

Nothing is compiled or loaded before it is used.
"""

from typing import TYPE_CHECKING

from deepspeed_ext.io._native import native
from deepspeed_ext.io.async_io import AsyncIO
from deepspeed_ext.io.future import Future

if TYPE_CHECKING:
    from deepspeed_ext.io.file import File

__all__ = ["AsyncIO", "File", "Future"]


def __getattr__(name: str) -> object:
    if name == "File":  # the native class
        return native().File
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
