"""Keep the state of many parameters in a few flat tensors, and find the part of each parameter."""

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.dtensors import first_index, is_dtensor, local, part_for, spread
from deepspeed_ext.ops.optimizers.state_formats import BLOCK, blocks_of
from deepspeed_ext.optim.formats import (
    MASTER,
    REMAINDER,
    SCALE,
    has_same_codes,
    master_weights_in,
    restored,
    store,
)
from deepspeed_ext.torch_internals.tensors import spec_of, version_of

STEP = "step"

_ALIGNMENT = 64  # elements between the beginnings of parameters: whole cache lines in every dtype
_MAX_ELEMENTS = 2**28  # of a flat buffer, so that large state can move, and be freed, in parts
# Of a bucket. Python and torch look at about 1 KB of a parameter and its gradient: those of so many
# stay in the processor's cache from the first look to the last, which makes a step over small ones
# up to a fifth faster than going over all of them each time; three CUDA launches take them.
_MAX_PARAMS = 896
_SMALL_ELEMENTS = 2**24  # a step over fewer is short enough for the cost of a call to matter

_device = attrgetter("device")
_dtype = attrgetter("dtype")
_grad = attrgetter("grad")
_shape = attrgetter("shape")

Stamps = tuple[list[Any], list[int]]  # of a bucket: version and address of each parameter
Zeros = Callable[[int, torch.dtype, torch.device], Tensor]
LookAt = Callable[[str, Tensor, Tensor], None]  # given a state key, a parameter and values


def zeros(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a flat tensor of zeros."""
    return torch.zeros(elements, dtype=dtype, device=device)


class BucketView(NamedTuple):
    """What an optimizer op takes: parameters that have gradients, and where their state lies.

    Attributes:
        params: of one device and dtype.
        grads: their gradients.
        buffers: for each state key a list of one flat tensor, as the ops take it.
        scales: of state in 8-bit codes, a flat buffer for each state key.
        offsets: where each parameter begins in the flat buffers, in elements, ascending.
        slots: place of each parameter in the flat buffer of steps, ascending.
        noise: how the ops round state at random, or None.
        owners: the parameters of the optimizer; params are those themselves, or what this process
            holds of them, and so are grads.

    Offsets, slots and noise are int64 tensors on the CPU, as the ops take them.
    """

    params: list[Tensor]
    grads: list[Tensor]
    buffers: dict[str, list[Tensor]]
    scales: list[Tensor]
    offsets: Tensor
    slots: Tensor
    noise: Tensor | None
    owners: list[Tensor]

    @property
    def places(self) -> dict[str, Any]:
        """The arguments of a step op that say where state is and how it is stored."""
        return dict(
            scales=self.scales,
            master_params=master_weights_in(self.buffers),
            offsets=self.offsets,
            slots=self.slots,
            noise=self.noise,
        )

    def of_this_process(self) -> "BucketView":
        """Return the same for parameters and gradients that are DTensors: the parts held here."""
        parts = map(part_for, self.grads, self.owners)
        grads = [part.to(p.device) for part, p in zip(parts, map(local, self.owners), strict=True)]
        return self._replace(params=list(map(local, self.owners)), grads=grads)

    def split_by_grad_dtype(self) -> list["BucketView"]:
        """Return one part for each dtype among the gradients."""
        indices: dict[torch.dtype, list[int]] = {}
        for i, grad in enumerate(self.grads):
            indices.setdefault(grad.dtype, []).append(i)
        return list(map(self.part, indices.values()))

    def part(self, indices: list[int]) -> "BucketView":
        """Return the same for some of the parameters, in ascending order."""
        return BucketView(
            [self.params[i] for i in indices],
            [self.grads[i] for i in indices],
            self.buffers,
            self.scales,
            self.offsets[indices],
            self.slots[indices],
            None if self.noise is None else self.noise[indices],
            [self.owners[i] for i in indices],
        )


class Bucket:
    """Parameters of one group, device and dtype, and flat buffers of their state, zeros at first.

    Of DTensors, the flat buffers hold the state of the parts that are in this process.

    Args:
        params: at least one; dense, in any order of dimensions; all of them DTensors, or none.
        dtypes: for each state key except "step", the dtype of its flat buffer; uint8 for 8-bit
            codes.
        signed: keys of state that may be negative.
        noise_keys: of the parameters, if their state is rounded at random.
        may_move: whether some of the parameters may go to another device.
        make: returns a flat buffer of so many zeros, given its dtype and device.
    """

    def __init__(
        self,
        params: list[Tensor],
        dtypes: Mapping[str, torch.dtype],
        signed: Container[str],
        noise_keys: Sequence[int] | None = None,
        may_move: bool = False,
        make: Zeros = zeros,
    ) -> None:
        self.params = params
        self._signed = signed
        self.may_move = may_move
        self.dtypes = dict(dtypes)
        self.is_sharded = is_dtensor(params[0])
        parts = self.parts()
        self.device, self.dtype = parts[0].device, parts[0].dtype
        coded = [key for key, dtype in dtypes.items() if dtype == torch.uint8]
        alignment = BLOCK if coded else _ALIGNMENT
        *begins, end = accumulate((_padded(part, alignment) for part in parts), initial=0)
        self.elements = end
        self.offsets = torch.tensor(begins, device="cpu")
        self.slots = torch.arange(len(params), device="cpu")
        self.buffers = {STEP: [make(len(params), torch.float32, self.device)]}
        for key, dtype in dtypes.items():
            self.buffers[key] = [make(end, dtype, self.device)]
        self.scales = {key: make(end // BLOCK, torch.float32, self.device) for key in coded}
        self.noise = None
        if noise_keys is not None:
            rows = list(zip(noise_keys, map(first_index, params), strict=True))
            self.noise = torch.tensor(rows, device="cpu")
        # Merging small ones changes their order, which must be the same in all processes where
        # parameters are sharded, while the sizes of the parts need not be.
        few = end < _SMALL_ELEMENTS and 2 * len(params) < _MAX_PARAMS
        self.is_small = few and not self.is_sharded
        self._stamps_seen: Stamps = ([], [])
        self._describe_layout()

    def parts(self) -> list[Tensor]:
        """Return what is stepped: the parameters, or those parts of them that are here now."""
        return list(map(local, self.params)) if self.is_sharded else self.params

    def _describe_layout(self) -> None:
        """Note what the parameters look like, in the form that is fastest to compare."""
        self._types = list(map(type, self.params))
        if self.is_sharded:
            self._shards = self._describe_shards()
            return
        self._dtypes = [self.dtype] * len(self.params)
        self._shapes = list(map(_shape, self.params))
        matrices = [param for param in self.params if param.dim() > 1]
        self._contiguous = [param for param in matrices if param.is_contiguous()]
        self._permuted = [param for param in matrices if not param.is_contiguous()]
        self._strides = [param.stride() for param in self._permuted]

    def _describe_shards(self) -> list[tuple[object, ...]]:
        parts = [(part.device, part.dtype, part.shape, part.stride()) for part in self.parts()]
        return list(zip(map(spec_of, self.params), parts, strict=True))

    def fits(self) -> bool:
        """Return whether the parameters still look as they did when the bucket was made.

        Sees another class, dtype, device, shape, order in memory or sharding, of any of them, as a
        step may be for any; of devices only that of the first, unless they `may_move`: an op
        refuses what is not where the flat buffers are. Does not see another address, which a step
        reads anyway, nor other values.
        """
        if list(map(type, self.params)) != self._types:
            return False
        if self.is_sharded:
            return self._describe_shards() == self._shards
        return (
            self.params[0].device == self.device
            and list(map(_dtype, self.params)) == self._dtypes
            and (not self.may_move or set(map(_device, self.params)) == {self.device})
            and list(map(_shape, self.params)) == self._shapes
            and all(map(Tensor.is_contiguous, self._contiguous))
            and list(map(Tensor.stride, self._permuted)) == self._strides
        )

    def holds(
        self,
        params: Sequence[Tensor],
        dtypes: Mapping[str, torch.dtype],
        values: Sequence[Mapping[str, Any]],
    ) -> bool:
        """Return whether these are the parameters, and this state of them views of flat buffers."""
        if len(params) != len(self.params) or self.dtypes != dtypes:
            return False
        if any(map(is_not, params, self.params)) or not self.fits():
            return False
        return all(
            _is_same_memory(values[i].get(key), view)
            for i in range(len(params))
            for key, view in self.views(i).items()
        )

    def views(self, i: int) -> dict[str, Tensor]:
        """Return the state of parameter i: parts of the flat buffers with its shape and strides."""
        part, offset = local(self.params[i]), int(self.offsets[i])
        buffers = {key: buffer for key, [buffer] in self.buffers.items()}
        return views_of(buffers, self.scales, i, offset, part.shape, part.stride())

    def shown(self, i: int) -> dict[str, Tensor]:
        """Return the state of parameter i as users see it: sharded as the parameter is."""
        param, views = self.params[i], self.views(i)
        if not is_dtensor(param):
            return views
        return {key: spread(v, param) if key in self.dtypes else v for key, v in views.items()}

    def fill(
        self, i: int, values: Mapping[str, Any], look_at_source: LookAt | None = None
    ) -> dict[str, Tensor]:
        """Copy state of parameter i into the flat buffers and return what users see of it.

        Args:
            values: tensors of the parameter's shape, any dtype, device and sharding; "step" may be
                a number. A missing master weight becomes a copy of the parameter; what else is
                missing stays zero.
            look_at_source: is called with what is converted: no buffer shows it as it was.
        """
        param, views = self.params[i], self.views(i)
        if isinstance(step := values.get(STEP), Tensor):
            views[STEP].copy_(part_for(step, views[STEP]).reshape(()))
        elif step is not None:
            views[STEP].fill_(step)
        for key in self.dtypes:
            if has_same_codes(key, values, param, views):
                views[key].copy_(local(values[key]))
                views[key + SCALE].copy_(values[key + SCALE])
                continue
            signed = key in self._signed
            value = restored(key, values, param, signed=signed)
            if value is not None:
                if look_at_source is not None:
                    self._show_source(look_at_source, key, param, values, value)
                store(views[key], views.get(key + SCALE), value, signed=signed)
            elif key == MASTER:
                views[key].copy_(local(param))
        return self.shown(i)

    def _show_source(
        self,
        look_at: LookAt,
        key: str,
        param: Tensor,
        values: Mapping[str, Any],
        value: Tensor,
    ) -> None:
        source = values.get(key)
        if isinstance(source, Tensor) and source.dtype == torch.uint8:
            look_at(key + SCALE, param, values[key + SCALE])
        if key in self.scales or value.dtype == torch.int32:
            look_at(key, param, value)

    def gather(self, done: Container[int] = ()) -> BucketView | None:
        """Return the parameters that have a gradient now, or None if there are none.

        Of DTensors, these are the parameters: see BucketView.of_this_process.

        Args:
            done: identities of parameters to leave out.
        """
        grads = list(map(_grad, self.params))
        scales = list(self.scales.values())
        all_of_them = BucketView(
            self.params,
            grads,
            self.buffers,
            scales,
            self.offsets,
            self.slots,
            self.noise,
            self.params,
        )
        if not done and type(None) not in map(type, grads):
            return all_of_them
        chosen = [
            i
            for i, (param, grad) in enumerate(zip(self.params, grads, strict=True))
            if grad is not None and id(param) not in done
        ]
        if not chosen:
            return None
        return all_of_them.part(chosen)

    def is_written(self) -> bool:
        """Return whether parameters with master weights may have been written since the last step.

        Sees what version counters and addresses tell. Does not see a write through `.data`, a
        collective, or a kernel of somebody else's: `FlatStateOptimizer.reset_master` lists them.
        """
        return MASTER in self.buffers and self._stamps() != self._stamps_seen

    def refresh_master_weights(self) -> None:
        """Give master weights the values of parameters that somebody has written since the last
        step.

        Where a parameter is its rounded master weight, that keeps the bits that the parameter
        lacks: so loading a checkpoint, in whichever order, or moving a model away and back loses
        nothing.
        """
        if not self.is_written():
            return
        stamps = self._stamps()
        before = dict(enumerate(zip(*self._stamps_seen, strict=True)))
        for i, stamp in enumerate(zip(*stamps, strict=True)):
            if stamp != before.get(i):
                follow(self.views(i)[MASTER], local(self.params[i]))
        self._stamps_seen = stamps

    def note_own_write(self) -> None:
        """Take the parameters as they are now for rounded master weights, after refresh and op."""
        if MASTER in self.buffers:
            _, addresses = self._stamps_seen
            self._stamps_seen = self._versions(), addresses

    def _stamps(self) -> Stamps:
        """Return values of which one changes when a parameter is written or gets other memory."""
        return self._versions(), list(map(Tensor.data_ptr, self.parts()))

    def _versions(self) -> list[Any]:
        versions = list(map(version_of, self.params))
        if self.is_sharded:  # a write to a DTensor counts there, one to its part only there
            return list(zip(versions, map(version_of, self.parts()), strict=True))
        return versions

    def take(self, buffers: dict[str, list[Tensor]], scales: dict[str, Tensor]) -> None:
        """Go on with other flat buffers, which hold the state of the parameters as they are now."""
        self.buffers, self.scales = buffers, scales
        if MASTER in self.buffers:
            self._stamps_seen = self._stamps()

    def reset_master_weights(self) -> None:
        """Make every master weight an exact copy of its parameter."""
        if REMAINDER in self.buffers:
            self.buffers[REMAINDER][0].zero_()
        if MASTER in self.buffers:
            for i, part in enumerate(self.parts()):
                self.views(i)[MASTER].copy_(part)


def views_of(
    buffers: Mapping[str, Tensor],
    scales: Mapping[str, Tensor],
    i: int,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> dict[str, Tensor]:
    """Return the state of one parameter as views of flat buffers.

    Args:
        buffers: for each state key.
        scales: of state in 8-bit codes, for its keys.
        i: number of the parameter in the bucket.
        offset: where it begins, in elements.
        shape: of what is stepped of it.
        strides: of that.
    """
    views = {
        key: buffer.as_strided((), (), buffer.storage_offset() + i)
        if key == STEP
        else buffer.as_strided(shape, strides, buffer.storage_offset() + offset)
        for key, buffer in buffers.items()
    }
    for key, flat in scales.items():
        begin = offset // BLOCK
        views[key + SCALE] = flat[begin : begin + blocks_of(math.prod(shape))]
    return views


def follow(master: Tensor, param: Tensor) -> None:
    """Give master weights the values of a parameter wherever it is not what they are rounded to."""
    changed = master.to(param.dtype) != param
    master.copy_(torch.where(changed, param, master))


def cut(params: Sequence[Tensor], most: int | None = None) -> Iterator[list[Tensor]]:
    """Cut a list of parameters where a bucket would become too large; a huge one gets its own.

    All processes that hold shards cut alike, whatever the sizes of their parts.

    Args:
        params: in their order.
        most: elements of a bucket; None: as many as a flat buffer may have.
    """
    most = _MAX_ELEMENTS if most is None else most
    part: list[Tensor] = []
    elements = 0
    for param in params:
        processes = param.device_mesh.size() if is_dtensor(param) else 1
        padded = param.numel() // processes + _ALIGNMENT
        if part and (elements + padded > most or len(part) == _MAX_PARAMS):
            yield part
            part, elements = [], 0
        part.append(param)
        elements += padded
    if part:
        yield part


def _is_same_memory(value: object, view: Tensor) -> bool:
    if not isinstance(value, Tensor):
        return False
    part = local(value)
    return (
        part.data_ptr() == view.data_ptr()
        and part.dtype == view.dtype
        and part.shape == view.shape
        and part.stride() == view.stride()
    )


def _padded(param: Tensor, alignment: int) -> int:
    return -(-param.numel() // alignment) * alignment
