"""What has left, what is back for a while, and what autograd holds of both."""

import weakref
from collections import deque
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed_ext.offload.activations.forms import Counter, Form, check_version
from deepspeed_ext.torch_internals.tensors import version_of


class Leaving(Protocol):
    """Bytes on their way out; see host.CopyOut."""

    @property
    def source(self) -> Tensor | None:
        """What leaves; None: it has been let go of."""

    def has_ended(self) -> bool:
        """Tell whether it is over, and let go of the source if so."""

    def let_go(self) -> None:
        """Let go of the source, however that is made to be right."""


class Arrival(Protocol):
    """Bytes on their way back; see host.CopyBack."""

    @property
    def memory(self) -> Tensor:
        """The bytes, on the device; to be read behind `wait`."""

    def is_of_current_stream(self) -> bool:
        """Tell whether the current stream may use the memory without a word to the allocator."""

    def wait(self) -> None:
        """Let its stream, or the host, wait for the bytes."""


class Bytes(Protocol):
    """Bytes that have left; see host.HostBytes."""

    @property
    def leaving(self) -> Leaving:
        """How they leave."""

    def fetch(self) -> Arrival:
        """Begin to bring them back."""


class Place(Protocol):
    """Where bytes rest."""

    def take(self, source: Tensor) -> Bytes:
        """Begin to bring bytes of a device there."""


class Back:
    """Bytes that are back: those that hold it have not been unpacked yet.

    Args:
        arrival: of bytes that had left; None: they have not, or do not.
        memory: the bytes.
    """

    def __init__(self, arrival: Arrival | None, memory: Tensor) -> None:
        self._arrival = arrival
        self._version = version_of(memory)
        self.memory = memory
        self.new_bytes = 0 if arrival is None else memory.nbytes

    def is_usable(self) -> bool:
        """Tell whether it is what it was, and the current stream's.

        Raises:
            RuntimeError: it was written, and has not left.
        """
        # The backward of somebody may write to what it has saved.
        if self._arrival is None:
            check_version(self.memory, self._version)
            return True
        is_written = version_of(self.memory) != self._version
        return not is_written and self._arrival.is_of_current_stream()

    def wait(self) -> None:
        """Wait for the bytes, or let the stream wait."""
        if self._arrival is not None:
            self._arrival.wait()


class Ended(NamedTuple):
    """What went.

    Attributes:
        storage: number of the storage that it was of.
        nbytes: its bytes.
        was_away: whether they had left.
    """

    storage: int
    nbytes: int
    was_away: bool


class Kept:
    """A storage, or a part of one, that has left, or for which there was no room.

    Args:
        storage: which one it is: the address of no other one while this object is there.
        owner: the tensor whose view was saved, or that itself: it has the version counter.
        counter: of the version that it has.
        begin: byte of the storage.
        source: the bytes.
        place: where they go; None: they stay.
        ended: is told when this object goes.

    Attributes:
        position: among all that have been saved, in their order.
    """

    position = -1

    def __init__(
        self,
        storage: StorageWeakRef,
        owner: Tensor,
        counter: Counter,
        begin: int,
        source: Tensor,
        place: Place | None,
        ended: deque[Ended],
    ) -> None:
        self.storage = storage
        self.counter = counter
        self.begin, self.end = begin, begin + source.nbytes
        self._owner = weakref.ref(owner)
        self._packed: list[weakref.ref[Packed]] = []
        self._back: weakref.ref[Back] | None = None
        self._source = source if place is None else None
        self._bytes = None if place is None else place.take(source)
        self._ended = ended

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.end - self.begin

    @property
    def leaving(self) -> Leaving | None:
        """How it leaves, or None."""
        return None if self._bytes is None else self._bytes.leaving

    @property
    def is_away(self) -> bool:
        """Whether it has left, or will have."""
        return self._bytes is not None

    def has(self, owner: Tensor, version: int, begin: int, end: int) -> bool:
        """Tell whether bytes of the same storage are among these.

        Args:
            owner: the tensor whose view was saved, or that itself: it has the version counter.
            version: of that.
            begin: first byte.
            end: the one behind the last.
        """
        same = self._owner() is owner and self.counter.version == version
        return same and self.begin <= begin and end <= self.end

    def pack(self, form: Form) -> "Packed":
        """Return what autograd is to hold for a tensor in these bytes."""
        packed = Packed(self, form._replace(begin=form.begin - self.begin))
        self._packed.append(weakref.ref(packed))
        return packed

    def back(self) -> Back | None:
        """Return the bytes if they are back."""
        return None if self._back is None else self._back()

    def bring_back(self) -> Back:
        """Bring the bytes back, for all that hold them and have not been unpacked since."""
        source = self._source
        if self._bytes is not None:
            source = self._bytes.leaving.source
        if source is not None:  # not gone yet
            back = Back(None, source)
        else:
            assert self._bytes is not None
            arrival = self._bytes.fetch()
            back = Back(arrival, arrival.memory)
        self._back = weakref.ref(back)
        alive = [packed for ref in self._packed if (packed := ref()) is not None]
        self._packed = [weakref.ref(packed) for packed in alive]
        for packed in alive:
            packed.back = back
        return back

    def __del__(self) -> None:
        if "_ended" in self.__dict__:
            self._ended.append(Ended(self.storage.cdata, self.nbytes, self.is_away))


class Packed:
    """What autograd holds for a tensor that may have left.

    Attributes:
        kept: the bytes that it is in.
        form: how.
        back: these bytes, from when they are back until this was unpacked.
    """

    def __init__(self, kept: Kept, form: Form) -> None:
        self.kept = kept
        self.form = form
        self.back: Back | None = None


class Staying:
    """What autograd holds for a tensor that stays as it is.

    Args:
        tensor: itself, or what shares its memory and counter.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = version_of(tensor)

    def unpack(self) -> Tensor:
        """Return it, or raise RuntimeError if it was written since."""
        check_version(self._tensor, self._version)
        return self._tensor


def staying(tensor: Tensor) -> Staying:
    """Return what autograd is to hold for a tensor that stays.

    What has a graph holds that; so there must be no way back from it to the tensor.
    """
    return Staying(tensor if tensor.is_leaf else tensor.detach())
