"""Transfers of CUDA tensors: through pinned memory, on streams of their own."""

from collections.abc import Callable

import torch
from torch import Tensor

from deepspeed_ext.io.engine.bounce import PIECE_BYTES, RING_BYTES, BounceTransfers
from deepspeed_ext.io.engine.ring import Submit


class CudaCopies:
    """Copy between host memory and any CUDA device, in each direction on a stream of its own."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}

    def mark(self, tensor: Tensor) -> torch.cuda.Event:
        """Return the point behind all that the caller has queued on its stream of this device."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "AsyncIO: the current stream is capturing a CUDA graph, expected transfers outside "
                "of it"
            )
        return _mark(torch.cuda.current_stream(tensor.device))

    def copy(self, destination: Tensor, source: Tensor) -> torch.cuda.Event:
        """Begin to copy bytes between host and device; return the point behind that.

        What must come before has completed, and the host looks at the event before it says that the
        copy has, so no other stream needs to know of this one.
        """
        to_device = destination.is_cuda
        device = (destination if to_device else source).device
        torch.cuda.set_device(device)  # of this thread; a fresh one would open device 0
        stream = self._streams.get((device, to_device))
        if stream is None:
            stream = self._streams[device, to_device] = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)
        return _mark(stream)


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


class CudaTransfers(BounceTransfers):
    """Read and write contiguous CUDA tensors of any device; see BounceTransfers.

    A transfer begins when the work has completed that the current stream of the tensor's device
    had queued at the call: a write sees its results, a read does not overwrite what it still needs.
    Call under another stream (`with torch.cuda.stream(side):`) to read ahead while the current one
    computes. When a job is done its bytes are there for every stream. Nothing is allocated on the
    device. A capture of a CUDA graph meanwhile needs
    `capture_error_mode="thread_local"`, or "relaxed".
    """

    def __init__(
        self,
        submit: Submit,
        register: Callable[[int, int], int] | None = None,
        unregister: Callable[[int], object] | None = None,
        ring_bytes: int = RING_BYTES,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        super().__init__(submit, CudaCopies(), register, unregister, ring_bytes, piece_bytes)
