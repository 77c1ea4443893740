"""The native module of the I/O engine, loaded or built on first use."""

import functools
from typing import Any

from deepspeed_ext import op_builder


@functools.cache
def native() -> Any:
    """Return the native module.

    Raises:
        BuildError: it could not be built or loaded.
    """
    return op_builder.load_module("async_io")
