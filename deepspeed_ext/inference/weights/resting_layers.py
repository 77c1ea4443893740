"""Where the layers of a model rest that has no room on the device: host memory, or a disk."""

import contextlib
import os
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from deepspeed_ext.captures import beside_captures
from deepspeed_ext.inference.weights.flat_layer import copied_to, flat_bytes, without_memory
from deepspeed_ext.inference.weights.loader import Layer
from deepspeed_ext.io import Future, PinnedBuffer, TensorStore
from deepspeed_ext.io.extents import whole_pages

_OP = "init_inference"


class RestingLayers(Protocol):
    """Layers that are somewhere else than on the device, each in one piece."""

    def add(self, layer: Layer) -> Layer:
        """Take the next layer; return what is left of it, as of `without_memory`."""

    def bring(self, i: int, into: Tensor) -> Callable[[], object]:
        """Begin to copy a layer to the device, after what the current stream does there now.

        Args:
            i: of the layer.
            into: as many bytes as it has, which stay until `settle` was called.

        Returns:
            What has the current stream, or the caller, wait until they are there.

        Raises:
            OSError: the disk cannot be read; or waiting does.
        """

    def settle(self) -> None:
        """Wait until nothing is copied any more."""

    def close(self) -> None:
        """Give the memory, or the disk, back."""


class HostLayers:
    """Layers in host memory, each in one buffer, which is pinned for copies to a GPU.

    Args:
        device: that layers come from and go to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flats: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._last: torch.cuda.Event | None = None  # behind all copies
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def add(self, layer: Layer) -> Layer:
        """See `RestingLayers`, as of the others."""
        nbytes = flat_bytes(layer)
        if self._stream is None:
            flat = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        else:
            flat = PinnedBuffer(nbytes).tensor()
        copied_to(layer, flat)
        self._flats.append(flat)
        return without_memory(layer)

    def bring(self, i: int, into: Tensor) -> Callable[[], object]:
        if self._stream is None:
            into.copy_(self._flats[i])
            return _nothing
        device, ready, there = self._device, torch.cuda.Event(), torch.cuda.Event()
        ready.record(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            into.copy_(self._flats[i], non_blocking=True)
            there.record(self._stream)
        self._last = there
        return lambda: torch.cuda.current_stream(device).wait_event(there)

    def settle(self) -> None:
        if self._last is not None:
            with beside_captures():  # garbage may be collected in the middle of one
                self._last.synchronize()

    def close(self) -> None:
        self.settle()
        self._flats.clear()


def _nothing() -> None:
    """Nobody has to wait."""


class StoredLayers:
    """Layers in a file without a name, which goes with the process however that ends.

    Args:
        path: a folder on the disk to use.
        sizes: the bytes of all layers.
        device: that they come from and go to.

    Raises:
        OSError: there is no such folder, or not so much room.
    """

    def __init__(self, path: str, sizes: list[int], device: torch.device) -> None:
        try:
            self._store = TensorStore(path)
        except OSError as error:
            why = f"{_OP}: nvme_path is {path}, expected a folder to write in: {error.strerror}"
            raise OSError(error.errno, why) from error
        self._device, self._process = device, os.getpid()
        self._count = 0  # of layers that were added
        self._largest = max(sizes, default=0)
        self._flat: Tensor | None = None  # that is written, while layers are added
        self._writing: Future | None = None
        self._reads: dict[int, Future] = {}  # the last one into the memory of an address
        try:
            self._store.reserve(sum(map(whole_pages, sizes)))
        except OSError as error:
            self._store.close()
            why = f"{_OP}: nvme_path is {path} with too little room: {error.strerror}"
            raise OSError(error.errno, why) from error

    def add(self, layer: Layer) -> Layer:
        """See `RestingLayers`, as of the others."""
        nbytes = flat_bytes(layer)
        if self._flat is None:
            self._flat = torch.empty(self._largest, dtype=torch.uint8, device=self._device)
        self._written()
        copied_to(layer, self._flat)
        self._writing = self._store.put_async(str(self._count), self._flat[:nbytes])
        self._count += 1
        return without_memory(layer)

    def _written(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def bring(self, i: int, into: Tensor) -> Callable[[], object]:
        if self._flat is not None:
            self._written()
            self._flat = None
        before = self._reads.pop(into.data_ptr(), None)
        if before is None:  # the first one, or an interruption has come in between
            self.settle()
        else:
            before.exception()  # it is over; who waited for it was told
        self._reads[into.data_ptr()] = future = self._store.get_async(str(i), out=into)
        return future.result

    def settle(self) -> None:
        if self._process == os.getpid():
            # Of a read that nobody waits for, or that Ctrl-C has given up; all are over then.
            with contextlib.suppress(OSError, RuntimeError):
                self._store.wait()

    def close(self) -> None:
        self.settle()
        self._reads.clear()
        self._store.close()
