"""A disk as the place of what autograd saves: a scratch file in a folder."""

import itertools
import os
from collections import deque

import torch
from torch import Tensor

from deepspeed_ext.io import Future, TensorStore


class WriteOut:
    """A write that is under way, or over.

    Attributes:
        source: what is written, on its device; None: it has been let go of.
    """

    def __init__(self, store: TensorStore, name: str, source: Tensor) -> None:
        self._future = store.put_async(name, source)
        self.source: Tensor | None = source

    def has_ended(self) -> bool:
        """Tell whether it is over, and let go of what was written if so."""
        if self._future.done():
            self._future.exception()  # which whoever reads it is told
            self.source = None
            return True
        return False

    def let_go(self) -> None:
        """Wait until it is over, and let go of what was written."""
        if self.source is not None:
            self._future.exception()
            self.source = None


class ReadBack:
    """Bytes that are read, or are there.

    Attributes:
        memory: on the device; it may be read behind `wait`.
    """

    def __init__(self, store: TensorStore, name: str, nbytes: int, device: torch.device) -> None:
        self._device = device
        self._stream = _stream_of(device)
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._future: Future | None = store.get_async(name, self.memory)

    def is_of_current_stream(self) -> bool:
        """Tell whether the current stream may use the memory without a word to the allocator."""
        return self._stream == _stream_of(self._device)

    def wait(self) -> None:
        """Wait for them.

        Raises:
            OSError: they could not be written, or read.
        """
        if self._future is not None:
            self._future.result()
            self._future = None


class DiskBytes:
    """Bytes of a device in a file; they go with this object, at the next call of its place.

    Attributes:
        leaving: the write.
    """

    def __init__(self, place: "DiskPlace", name: str, source: Tensor) -> None:
        self._place = place
        self._name = name
        self._nbytes, self._device = source.nbytes, source.device
        self.leaving = WriteOut(place.store, name, source)

    def fetch(self) -> ReadBack:
        """Begin to read them to new memory of the device."""
        return ReadBack(self._place.store, self._name, self._nbytes, self._device)

    def __del__(self) -> None:
        if "leaving" in self.__dict__:
            self._place.unwanted.append(self._name)  # garbage is collected in the middle of all


class DiskPlace:
    """Keeps bytes in a file without a name, which goes with the process.

    Args:
        folder: on the disk to use.
        budget: bytes to reserve there now, or None.

    Attributes:
        store: what has them.
        unwanted: names in it that nobody wants any more.
    """

    def __init__(self, folder: str | os.PathLike[str], budget: int | None) -> None:
        self.store = TensorStore(folder)
        self.unwanted: deque[str] = deque()
        self._numbers = itertools.count()
        if budget is not None:
            self.store.reserve(budget, in_parts=True)

    def take(self, source: Tensor) -> DiskBytes:
        """Begin to write bytes of a device."""
        while self.unwanted:
            self.store.delete(self.unwanted.popleft())
        return DiskBytes(self, f"{next(self._numbers)}", source)


def _stream_of(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
