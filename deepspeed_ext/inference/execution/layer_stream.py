"""LayerStream: layers that rest elsewhere pass through two places on the device."""

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from deepspeed_ext.inference.weights.flat_layer import flat_bytes, view_of
from deepspeed_ext.inference.weights.loader import Layer
from deepspeed_ext.inference.weights.resting_layers import RestingLayers

_SLOTS = 2  # one is computed with, one is filled


def slot_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the bytes of each slot, for layers of these sizes, which take turns in them."""
    return [max(sizes[slot::_SLOTS]) for slot in range(min(_SLOTS, len(sizes)))]


class LayerStream:
    """Has each layer on the device when its turn comes, and brings the next one meanwhile.

    Layer i is always in slot i % 2, at the same addresses. When it has been computed with, the next
    layer of that slot is brought, which after the last ones is one of the first again: so it is on
    its way while the head and the host do their part. A slot is overwritten only after what the
    current stream did with it. One that has its slot for itself stays there.

    One thread at a time may take turns, on one stream.

    Args:
        layers: as of `without_memory`.
        rest: has them.
        device: where they are computed with.

    Raises:
        OSError: layers could not be written, or read.

    Attributes:
        layers: as they are when their turn has come.
        nbytes: that come by for a pass over all layers.
    """

    def __init__(self, layers: Sequence[Layer], rest: RestingLayers, device: torch.device) -> None:
        sizes = [flat_bytes(layer) for layer in layers]
        self._slots = [
            torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in slot_sizes(sizes)
        ]
        self._flats = [self._slots[i % _SLOTS][:nbytes] for i, nbytes in enumerate(sizes)]
        self.layers = [view_of(*each) for each in zip(layers, self._flats, strict=True)]
        in_slot = [sizes[slot::_SLOTS] for slot in range(_SLOTS)]
        self.nbytes = sum(sum(some) for some in in_slot if len(some) > 1)
        self._rest = rest
        self._coming: list[tuple[int, Callable[[], object]] | None] = [None] * len(self._slots)
        # Slots may not be freed, and used for something else, before copies to them are over.
        weakref.finalize(self, rest.settle).atexit = False
        for i in range(len(self._slots)):
            self._bring(i)

    def turns(self) -> Iterator[Layer]:
        """Go through all layers; what is queued in a turn may read its layer.

        Raises:
            OSError: a layer could not be read; the next pass reads it once more.
        """
        count = len(self.layers)
        for i, layer in enumerate(self.layers):
            self._wait_for(i)
            yield layer
            following = i + _SLOTS if i + _SLOTS < count else i % _SLOTS
            if following != i:
                self._bring(following)

    def close(self) -> None:
        """Give back what layers rest in."""
        self._rest.close()

    def _wait_for(self, i: int) -> None:
        """Have the current stream wait for a layer, which is mostly on its way."""
        coming = self._coming[i % _SLOTS]
        if coming is None or coming[0] != i:  # the pass before did not come to its end
            coming = self._bring(i)
        try:
            coming[1]()
        except Exception:
            self._coming[i % _SLOTS] = None
            raise

    def _bring(self, i: int) -> tuple[int, Callable[[], object]]:
        self._coming[i % _SLOTS] = None  # an interruption may come before it is known
        found = self._coming[i % _SLOTS] = i, self._rest.bring(i, self._flats[i])
        return found
