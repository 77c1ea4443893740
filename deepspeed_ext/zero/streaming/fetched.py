"""Weights that are on the device for a while, or on their way there."""

import os
import sys

import torch
from torch import Tensor

from deepspeed_ext.captures import beside_captures
from deepspeed_ext.offload.arriving import is_on_its_way
from deepspeed_ext.offload.copies import Copy, CopyStreams, Event
from deepspeed_ext.zero.streaming.pieces import Piece
from deepspeed_ext.zero.streaming.staging import Reading, Staging


class Fetched:
    """A copy of a piece on the device.

    Its memory is of the current stream's pool, so the copy comes behind all that this stream was
    given before: whatever had the memory until now.

    Args:
        piece: of parameters at rest.
        streams: of the device.
        staging: for what rests on a disk.

    Attributes:
        piece: likewise.
        memory: of all; to be read behind `wait`.
    """

    def __init__(self, piece: Piece, streams: CopyStreams, staging: Staging | None = None) -> None:
        self._events: list[Event] = []
        self._staging = staging
        self._reading: Reading | None = None  # until it is copied
        self._staged: Reading | None = None  # while it is
        self._has_begun = False
        self._process = os.getpid()
        self.piece = piece
        self._streams = streams
        self._stream = _current_stream(streams.device)
        self.memory = torch.empty(piece.nbytes, dtype=torch.uint8, device=streams.device)
        self._after = streams.event_now()

    def begin(self) -> None:
        """Begin to copy, if that has not; this waits for who still writes a parameter at rest."""
        if self._has_begun:
            return
        piece = self.piece
        if any(map(is_on_its_way, piece.params)):
            piece.look_again()
        if self._staging is not None:
            self._reading = self._staging.begin(piece)
        read = frozenset[int]() if self._reading is None else self._reading.rows
        straight = [(i, param) for i, param in enumerate(piece.params) if i not in read]
        self._send([Copy(piece.weight(self.memory, i), param.detach()) for i, param in straight])
        self._has_begun = True

    def _send(self, copies: list[Copy]) -> None:
        if not copies:
            return
        self._streams.has_room()  # which lets go of copies that are over
        event = self._streams.send(copies, self._after)
        if event is not None:
            self._events.append(event)

    @property
    def waits_for_a_step(self) -> bool:
        """Whether `begin` would wait."""
        return not self._has_begun and any(map(is_on_its_way, self.piece.params))

    def is_of_current_stream(self) -> bool:
        """Tell whether the current stream may use the memory without a word to the allocator."""
        return self._stream == _current_stream(self._streams.device)

    def wait(self) -> None:
        """Let the current stream wait for it, and the caller for what is read from a disk.

        Raises:
            OSError: that cannot be read.
        """
        if self._reading is not None:
            self._send(self._reading.copies_to(self.memory))
            self._reading, self._staged = None, self._reading
        if self._stream is not None:
            for event in self._events:
                self._stream.wait_event(event)

    def finish(self) -> None:
        """Wait until nothing is read at rest any more: others may write there then."""
        events, self._events = self._events, []
        if os.getpid() == self._process and not sys.is_finalizing():
            if self._reading is not None:
                self._reading.settle()
            for event in events:
                event.synchronize()
        self._staged = None

    def weight(self, i: int) -> Tensor:
        """Return a weight, as a tensor that nobody else has."""
        return self.piece.weight(self.memory, i)

    def __del__(self) -> None:
        if sys is None or sys.is_finalizing():  # a module that is gone is None
            return
        if "_staged" in self.__dict__:
            with beside_captures():
                self.finish()  # or its memory would be used again while something is copied to it


def _current_stream(device: torch.device) -> "torch.cuda.Stream | None":
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
