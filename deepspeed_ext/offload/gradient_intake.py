"""How gradients that do not stay on the device come to host memory, and where there is room."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.dtensors import local
from deepspeed_ext.offload.copies import CopyStreams
from deepspeed_ext.offload.host_gradients import Adder
from deepspeed_ext.offload.memory import Memory
from deepspeed_ext.offload.param_table import Row
from deepspeed_ext.offload.worker import Worker


class Intake:
    """Takes gradients from devices, within the memory that there is for them.

    Args:
        worker: adds them up.
        memory: that they may take.

    Attributes:
        streams: of each device that gradients or weights have been on.
    """

    def __init__(self, worker: Worker, memory: Memory) -> None:
        self.streams: dict[torch.device, CopyStreams] = {}
        self._memory = memory
        self._adder = Adder(worker)

    @property
    def bytes_out(self) -> int:
        """Bytes of gradients that have left to be added up."""
        return self._adder.bytes_out

    def streams_of(self, param: Tensor) -> CopyStreams:
        """Return the streams of the device that a parameter is on."""
        return self._streams_on(local(param).device)

    def _streams_on(self, device: torch.device) -> CopyStreams:
        if device not in self.streams:
            self.streams[device] = CopyStreams(device)
        return self.streams[device]

    def has_room(self, nbytes: int) -> bool:
        """Return whether gradients fit beside those that are in host memory."""
        most = self._memory.gradients
        if most is None or not nbytes:
            return True
        in_use = sum(streams.staged_bytes for streams in self.streams.values())
        return not in_use or in_use + nbytes <= most

    def send_away(self, row: Row[Any]) -> None:
        """Have added to its sum what a parameter has that is not in it."""
        known = row.summed()
        known.follow()
        source = known.more()
        if source is not None:
            self.add(row, source)

    def add(self, row: Row[Any], grad: Tensor) -> None:
        """Have a gradient added to the sum of a parameter, in the layout of which it is."""
        if not self.has_room(grad.nbytes):
            self.finish()
        self._adder.take(row.summed(), grad, self._streams_on(grad.device))

    def finish(self) -> None:
        """Wait until all gradients are added that are on their way."""
        self._adder.finish()
