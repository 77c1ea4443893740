"""How much memory an offloaded optimizer takes, by kind, before anything of it is allocated.

The optimizer is planned with parameters that have no memory, so what is counted is what it makes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from deepspeed_ext.dtensors import is_dtensor, local, rests_on_host, spread
from deepspeed_ext.offload.host_optimizer import HostOptimizer, offloaded
from deepspeed_ext.offload.host_tensors import host_bytes
from deepspeed_ext.offload.memory import Memory
from deepspeed_ext.offload.memory_budget import budget_for, bytes_at_rest
from deepspeed_ext.offload.param_table import BUCKET, ParamTable
from deepspeed_ext.offload.streamed import home_of, is_in_memory, set_home
from deepspeed_ext.offload.tiers.disk_state import shape_of
from deepspeed_ext.offload.tiers.room import (
    RingRoom,
    bytes_in,
    gradient_bytes,
    resident_bytes,
    ring_room,
    sum_width,
)
from deepspeed_ext.op_builder.toolchain import free_memory
from deepspeed_ext.optim import DeepSpeedCPUAdam
from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.optim.buckets import STEP, Bucket
from deepspeed_ext.optim.formats import SCALE
from deepspeed_ext.optim.plans import dtypes_of
from deepspeed_ext.processors import local_processes

WEIGHTS, GRADIENTS, SUMS, SHADOW = "weights", "gradients", "sums of gradients", "steps ahead"
RING, AT_REST = "ring of pieces", "weights at rest"
CONTENTS, NEXT = "contents of a commit", "the next commit"
_CONTENTS = 1 << 20  # bytes, about: the file grows if it takes more
_ADVICE = "compact state takes less: state_dtype=torch.uint8, master='remainder'"


@dataclass(frozen=True)
class Estimate:
    """The bytes that training with an OffloadOptimizer takes, beside activations.

    As text it is a table.

    Attributes:
        title: of the table.
        elements: of all parameters in this process.
        gpu: bytes where the parameters are, by kind: "weights", "gradients", and the state of those
            that are stepped there by its key.
        disk: bytes on disk, by state key, without what `zero.stream` has there; where it is
            durable also of weights, the description of a commit, and as much again for the next.
        host: bytes of host memory by kind: "weights at rest", of parameters that are there, and
            copies of other weights; gradients, of the former, and on their way, at the most; with
            free_grads also "sums of gradients", state by its key, and "steps ahead": the
            shadow buffers of speculative steps, which are made only while there is room.
        memory: most bytes for gradients and shadow buffers.
        memory_budget: as it was given; with state on disk, else what there is for it.
        available: bytes of host memory that were to be had.
        ring: the memory by which state on disk comes and goes; None: none is there.
        on_disk: numbers of the parameters whose state is.
        there: bytes of host memory that are in use already.
    """

    title: str
    elements: int
    gpu: Mapping[str, int]
    host: Mapping[str, int]
    memory: Memory
    memory_budget: int | None
    available: int
    disk: Mapping[str, int] = field(default_factory=dict)
    ring: RingRoom | None = None
    on_disk: frozenset[int] = frozenset()
    there: int = 0

    @property
    def disk_bytes(self) -> int:
        """All bytes on disk."""
        return sum(self.disk.values())

    @property
    def gpu_bytes(self) -> int:
        """All bytes where the parameters are."""
        return sum(self.gpu.values())

    @property
    def host_bytes(self) -> int:
        """All bytes of host memory."""
        return sum(self.host.values())

    @property
    def needed_bytes(self) -> int:
        """Bytes of host memory to be had, or it does not work: all but shadow buffers."""
        return self.host_bytes - self.host[SHADOW] - self.there

    def check(self, name: str) -> None:
        """Refuse what cannot work.

        Args:
            name: of who asks, for errors.

        Raises:
            ValueError: the budget does not hold weights and state.
            MemoryError: there is not so much host memory.
        """
        kept = self.needed_bytes + self.there - self.host[GRADIENTS]
        if self.memory_budget is not None and self.memory_budget < kept:
            raise ValueError(
                f"{name}: memory_budget is {self.memory_budget}, expected at least {kept} for"
                f" weights and state; {_ADVICE}\n{self}"
            )
        if self.needed_bytes > self.available:
            raise MemoryError(
                f"{name}: available host memory is {self.available} bytes, expected at least"
                f" {self.needed_bytes}; {_ADVICE}\n{self}"
            )

    def __str__(self) -> str:
        columns = {"GPU": self.gpu, "host": self.host, **({"disk": self.disk} if self.ring else {})}
        kinds = dict.fromkeys(kind for column in columns.values() for kind in column)
        lines = [(kind, [column.get(kind) for column in columns.values()]) for kind in kinds]
        lines.append(("total", [sum(column.values()) for column in columns.values()]))
        lines.append(("available", [None, self.available]))
        if self.memory_budget is not None:
            lines.append(("memory_budget", [None, self.memory_budget]))
        if self.needed_bytes > self.available:
            lines.append(("lacking", [None, self.needed_bytes - self.available]))
        width = max(len(kind) for kind, _ in lines)
        table = [
            f"{kind:{width}}{''.join(f'{_size(size):>12}' for size in sizes)}"
            for kind, sizes in lines
        ]
        head = f"{'':{width}}{''.join(f'{name:>12}' for name in columns)}"
        return "\n".join([f"{self.title}, {self.elements:,} parameters", head, *table])


def estimate(
    model: nn.Module | Iterable[Any],
    optimizer_class: type[FlatStateOptimizer] = DeepSpeedCPUAdam,
    *,
    device: str = "cpu",
    memory_budget: int | str | None = None,
    nvme_fraction: float | None = None,
    durable: bool = False,
    free_grads: bool = False,
    gpu_fraction: float = 0.0,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> Estimate:
    """Return how much memory training with an OffloadOptimizer would take; allocates nothing.

    Gradients are taken to have the dtype of their parameters. Frozen parameters have neither
    gradients nor state.

    Args:
        model: a model, on any device, `meta` too; or what an optimizer takes: parameters, groups,
            (name, parameter) pairs; or shapes.
        optimizer_class: as OffloadOptimizer has it.
        device: likewise.
        memory_budget: likewise.
        nvme_fraction: likewise.
        durable: likewise.
        free_grads: likewise.
        gpu_fraction: likewise.
        dtype: of parameters that are given by their shape; None: torch's default.
        kwargs: of the optimizer class.

    Raises:
        ValueError: an option or a parameter is out of range, named in the text.
        TypeError: optimizer_class cannot be offloaded.
    """
    if not 0 <= gpu_fraction <= 1:
        raise ValueError(f"estimate: gpu_fraction is {gpu_fraction}, expected 0 to 1")
    given_budget = bytes_in("estimate: memory_budget", memory_budget)
    plan = _Plan(gpu_fraction, dtype or torch.get_default_dtype())
    given = model.parameters() if isinstance(model, nn.Module) else model
    groups = list(plan.without_memory(given))
    memory_budget = budget_for(device, given_budget, plan.owners())
    host_optimizer = offloaded(optimizer_class, plan.table.cut, plan.table.share)(groups, **kwargs)
    available = free_memory()
    ring = None
    if device == "nvme" and memory_budget is not None:
        ring = plan.put_on_disk(host_optimizer, memory_budget, nvme_fraction, free_grads)
    gpu, host = (Counter[str]({WEIGHTS: 0, GRADIENTS: 0}) for _ in range(2))
    disk = Counter[str]()
    _add_weights(gpu, host, plan, host_optimizer)
    if ring is not None:
        host[RING] = ring.nbytes
    buckets, on_disk, kept = list[Bucket](), list[Bucket](), list[Bucket]()
    for bucket in _buckets(host_optimizer, plan.table):
        rests = plan.rests(bucket.params[0])
        if plan.keeps_on_device(bucket.params[0]):
            gpu.update(_state_bytes(bucket))
            gpu[GRADIENTS] += _weight_bytes(bucket)
            kept.append(bucket)
        elif ring is not None and plan.is_on_disk(bucket.params[0]):
            disk.update(_disk_bytes(bucket, ring))
            host[STEP] += bucket.buffers[STEP][0].nbytes
            gpu[GRADIENTS] += 0 if rests else _weight_bytes(bucket)
            on_disk.append(bucket)
        else:
            host.update(_state_bytes(bucket))
            (kept if rests else buckets).append(bucket)
    if durable and ring is not None:
        _add_commits(disk, sum(local(p).nbytes for p in plan.owners()), [*kept, *buckets])
    gradients = list(map(_weight_bytes, buckets))
    largest = max(gradients, default=0)
    gpu[GRADIENTS] += largest if free_grads else sum(gradients)
    if free_grads:
        summed = [p for bucket in (*buckets, *on_disk) for p in bucket.params]
        host[SUMS] = sum(local(p).numel() * sum_width(p) for p in summed)
        largest = max((local(p).nbytes for p in summed), default=0)  # each leaves by itself
    there, others = bytes_at_rest(plan.owners()), (*kept, *on_disk)
    host[GRADIENTS] = sum(_weight_bytes(b) for b in others if plan.rests(b.params[0]))
    share = available // local_processes()
    memory = _shared(sum(host.values()), largest, memory_budget, share + there)
    host[GRADIENTS] += largest if free_grads else min(sum(gradients), memory.gradients or 0)
    host[SHADOW] = _shadow_bytes(buckets, memory.shadow)
    return Estimate(
        f"OffloadOptimizer of {optimizer_class.__name__}",
        sum(local(p).numel() for params in _group_params(host_optimizer) for p in params),
        dict(gpu),
        dict(host),
        memory,
        memory_budget,
        available,
        dict(disk),
        ring,
        plan.numbers_on_disk(),
        there,
    )


def bytes_of(param: Tensor) -> int:
    """Return the bytes of a parameter; of one that has no shape yet, none."""
    return 0 if is_lazy(param) else param.nbytes


def kept_on_device(params: Sequence[Tensor], bytes_left: float) -> tuple[list[bool], float]:
    """Return which parameters are kept on the device, and stepped there: the first ones by bytes.

    Args:
        params: in their order.
        bytes_left: how many may be kept.

    Returns:
        For each whether it is; and how many bytes are left for those that come after.
    """
    found = []
    for param in params:
        bytes_left -= bytes_of(param)
        found.append(bytes_left >= 0)
    return found, bytes_left


class _Plan:
    """Parameters without memory in place of others."""

    def __init__(self, gpu_fraction: float, dtype: torch.dtype) -> None:
        self.table = ParamTable[Any]()
        self._fraction, self._dtype = gpu_fraction, dtype
        self._made: dict[Tensor, Tensor] = {}  # and what it is for

    def without_memory(self, given: Iterable[Any]) -> Iterator[Any]:
        """Return what an optimizer takes, in the same form."""
        items = [_with_list(item) for item in given]
        made = [self._item(item) for item in items]
        params = [param for item in made for param in _params_of(item)]
        chosen, _ = kept_on_device(params, self._fraction * sum(param.nbytes for param in params))
        for param, is_kept in zip(params, chosen, strict=True):
            is_kept = is_kept and not self.rests(param)
            self.table.add(param if is_kept else self._made[param], param)
        return iter(made)

    def put_on_disk(
        self,
        host_optimizer: HostOptimizer,
        budget: int,
        fraction: float | None,
        free_grads: bool,
    ) -> RingRoom:
        """Choose the parameters whose state rests on disk: the last ones, and what is frozen.

        Gradients of the first ones come last, and their weights are wanted first: while others
        come from the disk, the next forward can go on with these.
        """
        rows = [
            (param, dtypes_of(host_optimizer, group, param.dtype))
            for group in host_optimizer.param_groups
            for param in group["params"]
            if not self.keeps_on_device(param)
        ]
        kinds = [(dtypes, param.dtype) for param, dtypes in rows]
        # Gradients of all of them are in host memory, until they are stepped.
        freed = [param for param, _ in rows if param.requires_grad and free_grads]
        gradients = sum(gradient_bytes(param, is_summed=True) for param in freed)
        gradients += max((gradient_bytes(param, is_summed=False) for param in freed), default=0)
        # Numbers of steps, and weights that stream, also of what is stepped where it rests.
        beside = 4 * len(rows) + sum(p.nbytes for p in self._made if is_in_memory(p))
        room = ring_room("OffloadOptimizer", budget, kinds, gradients, beside)
        left = budget - room.nbytes - gradients - beside
        total = sum(param.nbytes for param, _ in rows)
        most = total if fraction is None else round((1 - fraction) * total)
        staged = largest = 0  # gradients of parameters in memory; as few as of a bucket are enough
        for param, dtypes in rows:
            if not param.requires_grad:  # its state would come when it is thawed
                self.table.put_on_disk([self._made[param]])
                continue
            left -= resident_bytes(param, dtypes)
            most -= param.nbytes
            if not free_grads:
                staged += gradient_bytes(param, is_summed=False)
                largest = max(largest, gradient_bytes(param, is_summed=False))
            bucket = max(largest, BUCKET * param.element_size())
            if left < min(staged, bucket) or most < 0:
                left = most = -1
                self.table.put_on_disk([self._made[param]])
        on_disk = sum(
            resident_bytes(param, dtypes) + gradient_bytes(param, is_summed=True)
            for param, dtypes in rows
            if self.is_on_disk(param)
        )
        return room.for_no_more_than(on_disk)

    def copies(self, param: Tensor) -> bool:
        """Return whether a parameter has a copy in host memory."""
        return not (self.keeps_on_device(param) or self.is_on_disk(param) or self.rests(param))

    def rests(self, param: Tensor) -> bool:
        """Return whether a parameter rests in host memory."""
        return rests_on_host(self._made[param])

    def owners(self) -> Iterable[Tensor]:
        """Return the parameters that it has others in place of."""
        return self._made.values()

    def is_on_disk(self, param: Tensor) -> bool:
        """Return whether the state of a parameter rests on disk."""
        return self.table.of_copy(param).is_on_disk

    def numbers_on_disk(self) -> frozenset[int]:
        """Return the numbers of the parameters whose state rests on disk."""
        return frozenset(i for i, param in enumerate(self._made) if self.is_on_disk(param))

    def keeps_on_device(self, param: Tensor) -> bool:
        """Return whether a parameter is kept on the device, and stepped there."""
        return not self.table.of_copy(param).is_copied

    def _item(self, item: Any) -> Any:
        if isinstance(item, dict):
            return {**item, "params": [self._item(param) for param in item["params"]]}
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Tensor):
            return item[0], self._param(item[1])
        return self._param(item)

    def _param(self, given: Any) -> Tensor:
        owner = given
        if not isinstance(given, Tensor):
            owner = torch.empty(tuple(given), dtype=self._dtype, device="meta", requires_grad=True)
        if is_lazy(owner):  # nothing is known of it yet
            owner = torch.empty(0, dtype=owner.dtype, device="meta", requires_grad=True)
        part = local(owner).detach()
        memory = torch.empty(part.shape, dtype=part.dtype, device="meta")
        if part.layout is torch.strided:
            memory = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="meta")
        whole = spread(memory, owner) if is_dtensor(owner) else memory
        made = nn.Parameter(whole, requires_grad=owner.requires_grad)
        set_home(made, home_of(owner))
        self._made[made] = owner
        return made


def _with_list(item: Any) -> Any:
    """Return a group with its parameters in a list; anything else as it is."""
    if not isinstance(item, dict):
        return item
    params = item["params"]
    return {**item, "params": [params] if isinstance(params, Tensor) else list(params)}


def _params_of(item: Any) -> list[Tensor]:
    if isinstance(item, dict):
        return [param for part in item["params"] for param in _params_of(part)]
    return [item[1]] if isinstance(item, tuple) else [item]


def _group_params(host_optimizer: FlatStateOptimizer) -> Iterator[list[Tensor]]:
    return (group["params"] for group in host_optimizer.param_groups)


def _buckets(host_optimizer: HostOptimizer, table: ParamTable[Any]) -> Iterator[Bucket]:
    """Return the buckets that the first step makes."""
    for group in host_optimizer.param_groups:
        kinds: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
        for param in group["params"]:
            if param.requires_grad:
                kinds.setdefault((param.dtype, is_dtensor(param)), []).append(param)
        for (dtype, _), members in kinds.items():
            for part in table.cut(members):
                dtypes = dtypes_of(host_optimizer, group, dtype)
                yield Bucket(part, dtypes, host_optimizer.spec.signed)


def _add_weights(
    gpu: Counter[str], host: Counter[str], plan: _Plan, host_optimizer: HostOptimizer
) -> None:
    """Add weights where they are, and copies of them."""
    for params in _group_params(host_optimizer):
        for param in params:
            if plan.rests(param) or is_in_memory(param):
                host[AT_REST] += local(param).nbytes
            elif home_of(param) is None:  # else it is streamed
                gpu[WEIGHTS] += local(param).nbytes
        copied = [local(p) for p in params if plan.copies(p) and home_of(p) is None]
        host[WEIGHTS] += host_bytes(copied)


def _state_bytes(bucket: Bucket) -> Counter[str]:
    found = Counter({key: buffer.nbytes for key, [buffer] in bucket.buffers.items()})
    found.update({key + SCALE: scale.nbytes for key, scale in bucket.scales.items()})
    return found


def _disk_bytes(bucket: Bucket, ring: RingRoom) -> Counter[str]:
    """Return what the pieces of a bucket take on disk."""
    largest = max(part.dtype.itemsize for part in bucket.parts())
    shape = shape_of(bucket.dtypes, ring.slab_bytes, largest + 4, bucket.elements)
    count = -(-bucket.elements // shape.elements)
    return Counter({key: count * part.nbytes for key, part in shape.parts.items()})


def _add_commits(disk: Counter[str], weights: int, buckets: Sequence[Bucket]) -> None:
    """Add what commits take: of weights, of state that is elsewhere, and as much once more."""
    for bucket in buckets:
        disk.update(_state_bytes(bucket))
    disk[WEIGHTS] = weights
    disk[CONTENTS] = _CONTENTS
    disk[NEXT] = sum(disk.values())


def _weight_bytes(bucket: Bucket) -> int:
    return sum(part.nbytes for part in bucket.parts())


def _shared(kept: int, largest: int, memory_budget: int | None, available: int) -> Memory:
    """Return how much host memory gradients and shadow buffers may take beside weights and state.

    Args:
        kept: bytes of the latter.
        largest: bytes of the gradients of a bucket, which must have room.
        memory_budget: as the optimizer has it.
        available: bytes that there are for this process.
    """
    left = 3 * (available - kept) // 4 if memory_budget is None else memory_budget - kept
    gradients = max(left - left // 2, largest)
    return Memory(shadow=max(0, left - gradients), gradients=gradients)


def _shadow_bytes(buckets: Sequence[Bucket], most: int) -> int:
    """Return what shadow buffers of buckets take, the last ones first, as long as there is room."""
    total = 0
    for bucket in reversed(buckets):
        state = sum(_state_bytes(bucket).values())
        most -= state + _weight_bytes(bucket)
        if most >= 0:
            total += state + host_bytes(bucket.parts())
    return total


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return ""
    power = max(0, min(3, (nbytes.bit_length() - 1) // 10))
    unit = ("B", "KiB", "MiB", "GiB")[power]
    return f"{nbytes} B" if power == 0 else f"{nbytes / 1024**power:.2f} {unit}"
