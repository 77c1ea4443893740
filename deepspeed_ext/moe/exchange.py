"""Rows of tokens on their way to the processes that have their experts, and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed_ext.torch_internals.compiler import untraced

_OP = "moe"
_MOST_EXPERTS = 1024  # as of moe_route; what is sent of counts has a size that depends on no model
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Exchange:
    """Rows that go to the processes that have their experts, and what these make of them, back.

        exchange = Exchange(moe_permute(x, routing), routing.offsets, group)
        beside = shared_expert(x)  # while rows are under way
        rows, offsets = exchange.arrived()
        exchange.send_back(experts(rows, offsets))
        out = beside + moe_unpermute(exchange.returned(), routing)

    All processes of the group make one together, and go through its steps in this order, each once,
    also where no row comes or goes. The host waits once, for how many rows go where. Gradients go
    the same ways: what is computed between two steps runs beside its gradients' way, too. Rows have
    one gradient only: a second one is an error.

    Args:
        rows: (rows, n), sorted by expert over the experts of all processes, as of moe_permute.
        offsets: (experts,), int32, where the rows of each expert end. Process i of p has experts
            i * experts / p to (i + 1) * experts / p. Rows behind the last one stay here.
        group: of the processes; None: all.

    Raises:
        ValueError: on all processes, if one has other experts, rows of another width, dtype or need
            of gradients than another, or offsets that are none. The text names both.
        RuntimeError: another process has ended, or not come here in the time of the group.
    """

    @untraced
    def __init__(
        self, rows: Tensor, offsets: Tensor, group: dist.ProcessGroup | None = None
    ) -> None:
        sent, received, counts = _counts(rows, offsets, group)
        self._offsets = counts.sum(0).cumsum(0).int()
        order = _sorted_by_expert(counts, sum(received))
        away, to_here = _Side(sent, rows.shape[0]), _Side(received, sum(received), order)
        self._there = _Way(away, to_here, group, "rows of tokens")
        self._back = _Way(to_here, away, group, "results of experts")
        self._turns = ["arrived", "send_back", "returned"]
        self._moving = _departed(rows, self._there)

    @untraced
    def arrived(self) -> tuple[Tensor, Tensor]:
        """Return the rows of the experts of this process.

        Returns:
            (rows, n), sorted by expert, those of an expert by sender and as the sender had them;
            and where those of each expert end: (experts / processes,), int32.

        Raises:
            RuntimeError: see the class.
        """
        self._turn("arrived")
        return _arrived(self._moving, self._there), self._offsets

    @untraced
    def send_back(self, rows: Tensor) -> None:
        """Send what experts have made of the rows, (rows, any number), to where they came from.

        Raises:
            ValueError: there are more or fewer rows than have arrived.
        """
        if rows.shape[0] != self._back.source.rows:
            raise ValueError(
                f"{_OP}: experts have made {rows.shape[0]} rows of {self._back.source.rows},"
                " expected as many"
            )
        self._turn("send_back")
        self._moving = _departed(rows, self._back)

    @untraced
    def returned(self) -> Tensor:
        """Return what the experts made of the rows that were sent, in their places; else zeros.

        Raises:
            RuntimeError: see the class.
        """
        self._turn("returned")
        return _arrived(self._moving, self._back)

    def _turn(self, step: str) -> None:
        if self._turns[:1] != [step]:
            want = f"{self._turns[0]}()" if self._turns else "another exchange"
            raise RuntimeError(f"{_OP}: {step}() of an exchange is called, expected {want}")
        del self._turns[0]


class _Side(NamedTuple):
    """Rows in one process: how many go to or come from each process, and how they lie.

    Attributes:
        counts: of rows, for each process.
        rows: that there are; those behind the counted ones are zeros.
        order: where the rows that lie by process are in `rows`; None: they are in their order.
    """

    counts: list[int]
    rows: int
    order: Tensor | None = None

    def by_process(self, rows: Tensor) -> Tensor:
        """Return the rows that are sent, in the order of processes."""
        return (rows if self.order is None else rows[self.order])[: sum(self.counts)].contiguous()

    def in_place(self, whole: Tensor) -> Tensor:
        """Return rows as they lie here, of a tensor with those of processes one after another."""
        if self.order is None:
            return whole
        return torch.empty_like(whole).index_copy_(0, self.order, whole)


class _Way:
    """From a source to a target; gradients go from the target to the source."""

    def __init__(
        self, source: _Side, target: _Side, group: dist.ProcessGroup | None, what: str
    ) -> None:
        self.source, self.target = source, target
        self._group, self._what = group, what
        self._under_way: tuple[Any, Tensor, Tensor] | None = None

    def begin(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """Send rows.

        Args:
            rows: as they lie at the side that they leave.
            back: from the target to the source.

        Returns:
            Nothing: a tensor for autograd without elements, as what comes is nobody's to read yet.
        """
        begin, end = (self.target, self.source) if back else (self.source, self.target)
        sent, come = begin.by_process(rows), sum(end.counts)
        into = sent.new_empty(end.rows, *sent.shape[1:])
        into[come:] = 0
        with _in_words(self._named(back), self._group):
            work = dist.all_to_all_single(
                into[:come], sent, end.counts, begin.counts, group=self._group, async_op=True
            )
        self._under_way = work, into, sent  # which have to stay where they are
        return into.new_empty(0)

    def end(self, *, back: bool = False) -> Tensor:
        """Wait for what was sent, and return what has come, as rows lie at the side it comes to."""
        assert self._under_way is not None
        work, into, _ = self._under_way
        self._under_way = None
        with _in_words(self._named(back), self._group):
            work.wait()
        return (self.source if back else self.target).in_place(into)

    def _named(self, back: bool) -> str:
        return f"gradients of {self._what}" if back else self._what


class _Depart(torch.autograd.Function):
    """Begins a way, and ends that of its gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return way.begin(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, nothing: Tensor) -> tuple[Tensor, None]:
        return ctx.way.end(back=True), None


class _Arrive(torch.autograd.Function):
    """Ends a way, and begins that of its gradient."""

    @staticmethod
    def forward(ctx: Any, nothing: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return way.end()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.way.begin(grad, back=True), None


def _departed(rows: Tensor, way: _Way) -> Tensor:
    nothing: Tensor = _Depart.apply(rows, way)  # type: ignore[no-untyped-call]
    return nothing


def _arrived(nothing: Tensor, way: _Way) -> Tensor:
    rows: Tensor = _Arrive.apply(nothing, way)  # type: ignore[no-untyped-call]
    return rows


class _Said(NamedTuple):
    """What processes tell each other beside counts."""

    experts: int
    width: int
    dtype: int
    needs_gradient: int
    rows: int
    fewest: int
    last: int

    def check(self, rank: int, other: "_Said", other_rank: int) -> None:
        """Raise if this is no rows of experts, or not like those of another process."""
        if self.fewest < 0 or self.last > self.rows:
            raise ValueError(
                f"{_OP}: offsets of process {rank} end with {self.last} and have a least count of"
                f" {self.fewest} for {self.rows} rows, expected counts from 0, and no more rows"
                " than there are"
            )
        if self[:4] != other[:4]:
            raise ValueError(
                f"{_OP}: process {rank} has {self}, process {other_rank} has {other}, expected the"
                " same on all"
            )

    def __str__(self) -> str:
        dtype = _DTYPES[self.dtype] if self.dtype >= 0 else "another dtype"
        without = "" if self.needs_gradient else ", without a gradient"
        return f"rows of {self.width} of {dtype} for {self.experts} experts{without}"


def _counts(
    rows: Tensor, offsets: Tensor, group: dist.ProcessGroup | None
) -> tuple[list[int], list[int], Tensor]:
    """Exchange counts.

    Returns:
        How many rows go to each process, and come from each; and how many come for each expert
        here, (processes, experts), on the device.
    """
    processes, experts = dist.get_world_size(group), offsets.shape[0]
    if not 0 < experts <= _MOST_EXPERTS or experts % processes:
        raise ValueError(
            f"{_OP}: there are {experts} experts for {processes} processes, expected as many for"
            f" each, and up to {_MOST_EXPERTS}"
        )
    local = experts // processes
    counts = offsets.long().diff(prepend=offsets.new_zeros(1, dtype=torch.int64))
    dtype = _DTYPES.index(rows.dtype) if rows.dtype in _DTYPES else -1
    needs_gradient = int(torch.is_grad_enabled() and rows.requires_grad)
    known = torch.tensor(
        [experts, rows.shape[1], dtype, needs_gradient, rows.shape[0]], device="cpu"
    )
    said = len(known) + 2
    here = counts.new_zeros(processes, said + _MOST_EXPERTS // processes)
    here[:, : len(known)] = known.to(here.device, non_blocking=True)
    here[:, said - 2] = counts.min()
    here[:, said - 1] = offsets[-1]
    here[:, said : said + local] = counts.view(processes, local)
    there = torch.empty_like(here)
    with _in_words("counts of tokens", group):
        dist.all_to_all_single(there, here, group=group)
        sent, received = torch.stack([here, there]).tolist()  # the one time that the host waits
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    all_said = [_Said(*of_one[:said]) for of_one in received]
    for rank, one in zip(ranks, all_said, strict=True):
        one.check(rank, all_said[0], ranks[0])
    go, come = ([sum(row[said : said + local]) for row in of] for of in (sent, received))
    return go, come, there[:, said : said + local]


def _sorted_by_expert(counts: Tensor, rows: int) -> Tensor:
    """Return where rows that lie by sender and expert are when they lie by expert and sender.

    Args:
        counts: (senders, experts) of rows.
        rows: the sum of them.
    """
    ends = counts.t().flatten().cumsum(0).view(counts.t().shape).t()  # of each pair, by expert
    begins_here = counts.flatten().cumsum(0) - counts.flatten()
    moves = (ends - counts).flatten() - begins_here
    places = torch.arange(rows, device=counts.device)
    return places + moves.repeat_interleave(counts.flatten(), output_size=rows)


@contextmanager
def _in_words(what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Say what was exchanged when an exchange fails."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{_OP}: the exchange of {what} between {dist.get_world_size(group)} processes failed,"
            " expected all of them there; one may have ended, or be elsewhere: its error says why"
            f" ({error})"
        ) from error
