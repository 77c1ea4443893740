"""Keep the state of many parameters in a few flat tensors, and find the part of each parameter."""

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

MASTER = "master_param"
STEP = "step"

_ALIGNMENT = 64  # elements between the beginnings of parameters: whole cache lines in every dtype
_MAX_ELEMENTS = 2**28  # of a slab, so that large state can move, and be freed, slab by slab
# Of a bucket. Python and torch look at about 1 KB of a parameter and its gradient: those of so many
# stay in the processor's cache from the first look to the last, which makes a step over small ones
# up to a fifth faster than going over all of them each time; three CUDA launches take them.
_MAX_PARAMS = 896
_SMALL_ELEMENTS = 2**24  # a step over fewer is short enough for the cost of a call to matter

_grad = attrgetter("grad")
_nbytes = attrgetter("nbytes")
_version = attrgetter("_version")


class Work(NamedTuple):
    """What an optimizer op takes: parameters that have gradients, and where their state lies.

    Attributes:
        params: of one device and dtype.
        grads: their gradients.
        slabs: for each state key a list of one flat tensor, as the ops take it.
        offsets: where each parameter begins in the slabs, in elements, ascending.
        slots: place of each parameter in the slab of steps, ascending.

    Offsets and slots are int64 tensors on the CPU, (n,), as the ops take them.
    """

    params: list[Tensor]
    grads: list[Tensor]
    slabs: dict[str, list[Tensor]]
    offsets: Tensor
    slots: Tensor

    def split_by_grad_dtype(self) -> list["Work"]:
        """Return one part for each dtype among the gradients."""
        indices: dict[torch.dtype, list[int]] = {}
        for i, grad in enumerate(self.grads):
            indices.setdefault(grad.dtype, []).append(i)
        return [
            Work(
                [self.params[i] for i in part],
                [self.grads[i] for i in part],
                self.slabs,
                self.offsets[part],
                self.slots[part],
            )
            for part in indices.values()
        ]


class Bucket:
    """Parameters of one group, device and dtype, and the slabs of their state, zeros at first.

    Args:
        params: at least one; dense, in any order of dimensions.
        dtypes: for each state key except "step", the dtype of its slab.
    """

    def __init__(self, params: list[Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
        self.params = params
        self.dtypes = dict(dtypes)
        self.device, self.dtype = params[0].device, params[0].dtype
        *begins, end = accumulate((_padded(param) for param in params), initial=0)
        self.offsets = torch.tensor(begins)
        self.slots = torch.arange(len(params))
        self.slabs = {STEP: [torch.zeros(len(params), device=self.device, dtype=torch.float32)]}
        for key, dtype in dtypes.items():
            self.slabs[key] = [torch.zeros(end, device=self.device, dtype=dtype)]
        self.is_small = end < _SMALL_ELEMENTS and 2 * len(params) < _MAX_PARAMS
        self._masters_written: tuple[list[int], list[int]] = ([], [])
        self._describe_layout()

    def _describe_layout(self) -> None:
        """Note what the parameters look like, in the form that is fastest to compare."""
        self._nbytes = list(map(_nbytes, self.params))
        matrices = [param for param in self.params if param.dim() > 1]
        self._contiguous = [param for param in matrices if param.is_contiguous()]
        self._permuted = [param for param in matrices if not param.is_contiguous()]
        self._strides = [param.stride() for param in self._permuted]

    def fits(self) -> bool:
        """Return whether the parameters still look as they did when the bucket was made.

        Looks at the device of the first one only: an op refuses parameters on several devices.
        Another shape of as many contiguous elements fits: each of them keeps its state.
        """
        first = self.params[0]
        return (
            first.device == self.device
            and first.dtype == self.dtype
            and list(map(_nbytes, self.params)) == self._nbytes
            and all(map(Tensor.is_contiguous, self._contiguous))
            and list(map(Tensor.stride, self._permuted)) == self._strides
        )

    def views(self, i: int) -> dict[str, Tensor]:
        """Return the state of parameter i: parts of the slabs with its shape and strides."""
        shape, strides = self.params[i].shape, self.params[i].stride()
        return {
            key: slab.as_strided((), (), i)
            if key == STEP
            else slab.as_strided(shape, strides, int(self.offsets[i]))
            for key, [slab] in self.slabs.items()
        }

    def fill(self, i: int, values: Mapping[str, Any]) -> dict[str, Tensor]:
        """Copy state of parameter i into the slabs and return its views.

        Args:
            values: tensors of the parameter's shape, any dtype and device; "step" may be a number.
                A missing master becomes a copy of the parameter; what else is missing stays zero.
        """
        views = self.views(i)
        for key, view in views.items():
            value = values.get(key)
            if isinstance(value, Tensor):
                view.copy_(value.reshape(view.shape))
            elif value is not None:
                view.fill_(value)
            elif key == MASTER:
                view.copy_(self.params[i])
        self._masters_written = ([], [])
        return views

    def gather(self, done: Container[int] = ()) -> Work | None:
        """Return the parameters that have a gradient now, or None if there are none.

        Args:
            done: identities of parameters to leave out.
        """
        grads = list(map(_grad, self.params))
        if not done and type(None) not in map(type, grads):
            return Work(self.params, grads, self.slabs, self.offsets, self.slots)
        chosen = [
            i
            for i, (param, grad) in enumerate(zip(self.params, grads, strict=True))
            if grad is not None and id(param) not in done
        ]
        if not chosen:
            return None
        return Work(
            [self.params[i] for i in chosen],
            [grads[i] for i in chosen],
            self.slabs,
            self.offsets[chosen],
            self.slots[chosen],
        )

    def refresh_masters(self) -> None:
        """Give masters the values of parameters that somebody else has written since the last step.

        Where a parameter is its rounded master, the master keeps the bits that the parameter lacks:
        so loading a checkpoint, in whichever order, or moving a model away and back loses nothing.
        """
        if MASTER not in self.slabs:
            return
        marks = self._write_marks()
        if marks == self._masters_written:
            return
        before = dict(enumerate(zip(*self._masters_written, strict=True)))
        for i, mark in enumerate(zip(*marks, strict=True)):
            if mark != before.get(i):
                param, master = self.params[i], self.views(i)[MASTER]
                changed = master.to(param.dtype) != param
                master.copy_(torch.where(changed, param, master))
        self._masters_written = marks

    def note_own_write(self) -> None:
        """Take the parameters as they are now for rounded masters, after refresh and op."""
        if MASTER in self.slabs:
            _, addresses = self._masters_written
            self._masters_written = list(map(_version, self.params)), addresses

    def _write_marks(self) -> tuple[list[int], list[int]]:
        """Return numbers of which one changes when a parameter is written or gets other memory."""
        return list(map(_version, self.params)), list(map(Tensor.data_ptr, self.params))

    def reset_masters(self) -> None:
        """Make every master an exact copy of its parameter."""
        if MASTER in self.slabs:
            for i, param in enumerate(self.params):
                self.views(i)[MASTER].copy_(param)


def cut(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut a list of parameters where a bucket would become too large; a huge one gets its own."""
    part: list[Tensor] = []
    elements = 0
    for param in params:
        if part and (elements + _padded(param) > _MAX_ELEMENTS or len(part) == _MAX_PARAMS):
            yield part
            part, elements = [], 0
        part.append(param)
        elements += _padded(param)
    if part:
        yield part


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _padded(param: Tensor) -> int:
    return -(-param.numel() // _ALIGNMENT) * _ALIGNMENT
