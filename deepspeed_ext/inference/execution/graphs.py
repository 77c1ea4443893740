"""Steps that are recorded once, and then replayed: as CUDA graphs, or on the CPU without Python."""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.ops import Recorded, record


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    out: Tensor


class Graphs:
    """Runs functions from memory that stays to memory that stays.

    The first call of a function runs it as it is, as libraries may have to be loaded; the second
    records it. All graphs have their memory in one pool, as none runs beside another.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, _Recorded] = {}

    def run(self, key: Hashable, step: Callable[[], Tensor]) -> Tensor:
        """Queue a step on the current stream, and return its result, which the next one overwrites.

        Args:
            key: the same for steps that do the same with the same memory.
            step: reads nothing on the host, and allocates by torch alone.
        """
        recorded = self._recorded.get(key)
        if recorded is None and key not in self._seen:
            self._seen.add(key)
            return step()
        if recorded is None:
            graph = torch.cuda.CUDAGraph()
            # Stricter modes forbid in all of the process, or in this thread, what the step has
            # nothing to do with: other threads train models, and Python collects graphs that were
            # in a cycle whenever it likes. They would notice some steps that are none, too.
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="relaxed"),
            ):
                out = step()
            recorded = self._recorded[key] = _Recorded(graph, out)
        recorded.graph.replay()
        return recorded.out


class Recordings:
    """Runs functions on the CPU, from the second call on without Python between their ops."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, Recorded] = {}

    def run(self, key: Hashable, step: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return what a step does with x.

        The first call of a function runs it as it is, as libraries may have to be loaded; the
        second records it. One that does what cannot be recorded is always run as it is.

        Args:
            key: the same for steps that do the same with the same memory, apart from x.
            step: reads no values of tensors.
            x: of the same shape for a key.
        """
        recorded = self._recorded.get(key)
        if recorded is None and key not in self._seen:
            self._seen.add(key)
            return step(x)
        if recorded is None:
            out, self._recorded[key] = record(step, x)
            return out
        return step(x) if recorded.problem is not None else recorded(x)
