"""What an optimizer knows of each of its parameters: a row for each, all of it in one table."""

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from deepspeed_ext.dtensors import local, rests_on_host
from deepspeed_ext.offload.host_gradients import Sum
from deepspeed_ext.offload.host_tensors import host_copies, untouched_copy
from deepspeed_ext.offload.streamed import are_apart, at_rest, home_of
from deepspeed_ext.ops.optimizers.state_formats import is_dense
from deepspeed_ext.optim.buckets import cut
from deepspeed_ext.optim.spec import Group
from deepspeed_ext.processors import Share

BUCKET = 2**25  # elements of parameters that travel and are stepped together: less than a block

B = TypeVar("B")  # a bucket, which is made of rows


class Row(Generic[B]):
    """What is known of one parameter.

    Attributes:
        param: the parameter.
        copy: its host copy; the parameter itself if it is stepped where it is.
        is_kept_on_device: it is to be stepped where it is.
        is_on_disk: its state is: the copy has no memory of its own then.
        sum: of its gradients that left the device at once; None: none did so far.
        look: of the parameter, when the copy was seen to fit it; None: it was not looked at.
        hits: gradients accumulated since the last step.
        expected: the same when the last step was taken.
    """

    __slots__ = (
        "_bucket",
        "copy",
        "expected",
        "hits",
        "is_kept_on_device",
        "is_on_disk",
        "look",
        "param",
        "sum",
    )

    def __init__(self, param: Tensor) -> None:
        self.param = self.copy = param
        self.is_kept_on_device = self.is_on_disk = False
        self._bucket: weakref.ref[B] | None = None  # it holds its rows
        self.sum: Sum | None = None
        self.look: object = None
        self.hits = self.expected = 0

    @property
    def bucket(self) -> B | None:
        """What steps it in host memory; None: nothing does, or not yet."""
        return None if self._bucket is None else self._bucket()

    @bucket.setter
    def bucket(self, bucket: B | None) -> None:
        self._bucket = None if bucket is None else weakref.ref(bucket)

    @property
    def is_copied(self) -> bool:
        """Whether the host copy is another tensor."""
        return self.copy is not self.param

    @property
    def has_sum(self) -> bool:
        """Whether there are gradients that have left."""
        return self.sum is not None and self.sum.count > 0

    def summed(self) -> Sum:
        """Return the sum of gradients, which may be of none yet."""
        if self.sum is None:
            self.sum = Sum(self.param, keeps_first=home_of(self.param) is not None)
        return self.sum

    def lacks_copy(self) -> bool:
        """Return whether a parameter is to have a copy, and has memory to copy by now."""
        if self.is_copied or self.is_kept_on_device or self.rests_in_memory():
            return False
        param = self.param
        has_memory = not is_lazy(param) and local(param).device.type in ("cpu", "cuda")
        return has_memory and is_dense(local(param))

    def rests_in_memory(self) -> bool:
        """Return whether a parameter is in host memory, and its state is: a copy is for nothing."""
        return not self.is_on_disk and rests_on_host(self.param)

    def has_new_look(self) -> bool:
        """Return whether the copy does not fit the parameter as it is now, and remember that."""
        now = look_of(self.param)
        before = look_of(self.copy) if self.look is None else self.look
        self.look = now
        return self.is_copied and before != now


class ParamTable(Generic[B]):
    """The rows of all parameters of an optimizer, found by the parameter or by its host copy.

    A row goes when `forget` finds that nothing is left of its parameter: no group has it, and it
    has no state. The table holds parameters and copies until then, as torch's `Optimizer.state`
    does: so no other tensor can have got the identity that a row is found by. It cannot hold them
    weakly: `torch.utils.swap_tensors`, by which `Module.to` moves DTensors, refuses a tensor that
    somebody has a weak reference to.

    Attributes:
        share: where copies are stepped, which touches their memory first.
        has_disk: the state of parameters that are added from now on is to be on the disk.
    """

    def __init__(self, share: Share | None = None) -> None:
        self.share = share or Share()
        self.has_disk = False  # what comes later has its state there
        self._rows: dict[Tensor, Row[B]] = {}  # tensors are hashed, and found, by identity
        self._by_copy: dict[Tensor, Row[B]] = {}

    def __iter__(self) -> Iterator[Row[B]]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, param: Tensor) -> Row[B]:
        return self._rows[param]

    def get(self, param: Tensor) -> Row[B] | None:
        """Return the row of a parameter, if it has one."""
        return self._rows.get(param)

    def of_copy(self, copy: Tensor) -> Row[B]:
        """Return the row of the parameter that a host copy is of."""
        return self._by_copy[copy]

    def param_of(self, copy: Any) -> Any:
        """Return the parameter that a host copy is of; anything else as it is."""
        row = self._by_copy.get(copy)
        return copy if row is None else row.param

    def copy_of(self, param: Any) -> Any:
        """Return the host copy of a parameter; anything else as it is."""
        row = self._rows.get(param)
        return param if row is None else row.copy

    def sums(self) -> Iterator[Sum]:
        """Yield the sums of gradients that there are."""
        return (row.sum for row in self if row.sum is not None)

    def add(self, param: Tensor, copy: Tensor) -> Row[B]:
        """Take note of the host copy of a parameter, known or not."""
        row = self._rows.get(param)
        if row is None:
            row = self._rows[param] = Row(param)
        else:
            del self._by_copy[row.copy]
        row.copy, row.look = copy, None
        self._by_copy[copy] = row
        return row

    def keep_on_device(self, params: Iterable[Tensor]) -> None:
        """Take note of parameters that are to be stepped where they are."""
        for param in params:
            self._row_of(param).is_kept_on_device = True

    def put_on_disk(self, params: Iterable[Tensor]) -> None:
        """Take note of parameters whose state is to be on the disk."""
        for param in params:
            self._row_of(param).is_on_disk = True

    def copies_of(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the host copies of parameters, made now for those that have none."""
        rows = list(map(self._row_of, params))
        lacking = [row for row in rows if row.lacks_copy()]
        for row in lacking:
            if not row.is_on_disk and home_of(row.param) is not None:
                self.add(row.param, at_rest(row.param))
        bare = [row.param for row in lacking if not row.is_on_disk and not row.is_copied]
        for param, copy in zip(bare, host_copies(bare, self.share), strict=True):
            self.add(param, copy)
        for row in lacking:
            if row.is_on_disk:
                self.add(row.param, untouched_copy(row.param))
        return [row.copy for row in rows]

    def _row_of(self, param: Tensor) -> Row[B]:
        row = self._rows.get(param)
        if row is None:
            row = self.add(param, param)
            row.is_on_disk = self.has_disk
        return row

    def move_state(self, params: Sequence[Tensor], state: MutableMapping[Tensor, Any]) -> None:
        """Give copies the state that parameters got by themselves, as they had no copy then."""
        for param in params:
            copy = self._rows[param].copy
            if copy is not param and param in state:
                state[copy] = state.pop(param)

    def forget(self, groups: Sequence[Group], state: Container[Tensor]) -> None:
        """Let go of parameters that are in no group and have no state.

        Args:
            groups: of parameters.
            state: of copies.
        """
        wanted = {param for group in groups for param in group["params"]}
        if len(wanted) == len(self._rows):  # it has a row for each of them
            return
        for param in self._rows.keys() - wanted:
            if self._rows[param].copy not in state:
                del self._by_copy[self._rows.pop(param).copy]

    def update_others(self) -> None:
        """Give copies the weights of parameters that are in no bucket, as they have no state."""
        for row in self:
            bare = row.is_copied and row.bucket is None and not row.is_on_disk
            if bare and are_apart(local(row.copy), local(row.param)):
                local(row.copy).detach().copy_(local(row.param).detach())

    def cut(self, copies: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Put copies into buckets whose parameters are on one device; a huge one gets its own."""
        kinds: dict[tuple[torch.device, bool, bool], list[Tensor]] = {}
        for copy in copies:
            row = self._by_copy[copy]
            kind = (local(row.param).device, row.is_copied, row.is_on_disk)
            kinds.setdefault(kind, []).append(copy)
        for (_, is_copied, _), members in kinds.items():
            yield from cut(members, BUCKET) if is_copied else cut(members)


def weakly(table: ParamTable[Any]) -> Callable[[Sequence[Tensor]], Iterator[list[Tensor]]]:
    """Return the cut of a table for a class, which is garbage long after the table could go."""
    reference = weakref.ref(table)

    def cut_by_table(copies: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        known = reference()
        assert known is not None  # an optimizer with parameters has one
        return known.cut(copies)

    return cut_by_table


def look_of(param: Tensor) -> object:
    """Return what a parameter and its host copy have in common, but for the device."""
    part = local(param)
    return (part.device.type == "meta", part.dtype, part.shape, part.stride())
