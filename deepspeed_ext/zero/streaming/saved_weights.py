"""What autograd saves of streamed weights: not the memory, but where to fetch it."""

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from deepspeed_ext.offload.activations.forms import Form, check_version, form_of
from deepspeed_ext.offload.activations.kept import Staying, staying
from deepspeed_ext.torch_internals.dispatch import saved_tensors_hooks_here
from deepspeed_ext.torch_internals.tensors import past_torch_function, storage_id
from deepspeed_ext.zero.streaming.fetched import Fetched
from deepspeed_ext.zero.streaming.pieces import Piece

Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]


class Source(Protocol):
    """What fetches weights for backward."""

    def fetched(self, piece: Piece) -> Fetched:
        """Return a copy of a piece on the device, behind which the current stream waits."""


class _Saved(NamedTuple):
    """A weight, or a view of one."""

    source: Source
    piece: Piece
    row: int
    form: Form

    def unpack(self) -> Tensor:
        param, look = self.piece.params[self.row], self.piece.looks[self.row]
        with past_torch_function():
            check_version(param, look.version)
        return self.form.of(self.source.fetched(self.piece).memory)


class _Elsewhere(NamedTuple):
    """What hooks have packed that were there before."""

    unpack_it: Callable[[Any], Any]
    packed: Any

    def unpack(self) -> Any:
        return self.unpack_it(self.packed)


class Packer:
    """Packs what autograd saves while modules compute with fetched weights.

    Args:
        source: fetches them again.
        got: what there is now.
    """

    def __init__(self, source: Source, got: Fetched) -> None:
        self._source, self._piece = source, got.piece
        self._storage = got.memory.untyped_storage()  # held, so nothing else has its number
        self._number = storage_id(self._storage)

    def with_hooks_here(self) -> "_Pack":
        """Return a hook that packs weights, and leaves all else to the hooks that there are."""
        return _Pack(self, saved_tensors_hooks_here())

    def packs_here(self) -> bool:
        """Tell whether the innermost hooks are of this one."""
        hooks = saved_tensors_hooks_here()
        return hooks is not None and getattr(hooks[0], "packer", None) is self

    def packed(self, tensor: Tensor) -> _Saved | None:
        """Return what autograd is to hold of a weight; of anything else None."""
        if _number_of(tensor) != self._number:
            return None
        form = form_of(tensor)
        row = bisect_right(self._piece.begins, form.begin) - 1
        return _Saved(self._source, self._piece, row, form)


class _Pack:
    def __init__(self, packer: Packer, beneath: Hooks | None) -> None:
        self.packer: Packer | None = packer
        self._beneath = beneath

    def __call__(self, tensor: Tensor) -> _Saved | _Elsewhere | Staying:
        saved = None if self.packer is None else self.packer.packed(tensor)
        if saved is not None:
            return saved
        if self._beneath is not None:
            pack, unpack = self._beneath
            return _Elsewhere(unpack, pack(tensor))
        return staying(tensor)

    def end(self) -> None:
        """Leave all to other hooks from now on."""
        self.packer = None


def is_innermost(pack: _Pack) -> bool:
    """Tell whether no hooks have come after these."""
    hooks = saved_tensors_hooks_here()
    return hooks is not None and hooks[0] is pack


def unpack(packed: _Saved | _Elsewhere | Staying) -> Any:
    """Return the tensor."""
    return packed.unpack()


def _number_of(tensor: Tensor) -> int:
    try:
        return storage_id(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # such as sparse ones, which have none
        return -1
