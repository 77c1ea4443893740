"""The arguments of AsyncIO: their defaults, their limits, and what is said of wrong ones."""

import os
from dataclasses import dataclass

from deepspeed_ext.io.tensors import a

BACKENDS = ("io_uring", "libaio", "threads")  # the best first
LIMITS = {"block_size": 1 << 30, "queue_depth": 4096, "threads": 256}


@dataclass(frozen=True)
class Settings:
    """The arguments of AsyncIO, with its defaults.

    Args:
        block_size: bytes that are asked of the kernel at once.
        queue_depth: such requests in flight for each thread.
        threads: how many threads keep the device busy.
        backend: "auto", or one of `BACKENDS`.
    """

    block_size: int = 1 << 20
    queue_depth: int = 32
    threads: int = 1
    backend: str = "auto"


def check_sizes(**sizes: object) -> None:
    """Raise TypeError or ValueError unless each is a whole number from 1 to its limit."""
    for name, value in sizes.items():
        if type(value) is not int:
            raise TypeError(f"AsyncIO: {name} is {a(value)}, expected an int")
        if not 1 <= value <= LIMITS[name]:
            raise ValueError(f"AsyncIO: {name} is {value}, expected 1 to {LIMITS[name]}")


def backend_to_ask_for(name: str) -> str:
    """Return what the native engine is to be given: the environment may say what auto is.

    Raises:
        ValueError: this name, or that in the environment, is of no backend.
    """
    asked = os.environ.get("DS_EXT_AIO_BACKEND", "") if name == "auto" else ""
    for argument, value in (("DS_EXT_AIO_BACKEND", asked or "auto"), ("backend", name)):
        if value not in ("auto", *BACKENDS):
            raise ValueError(
                f"AsyncIO: {argument} is {value!r}, expected auto, io_uring, libaio or threads"
            )
    return asked or name
