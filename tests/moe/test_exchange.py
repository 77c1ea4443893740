"""Rows that go to the processes of their experts and back, and what may go wrong on the way."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from moe_cases import home
from process_groups import with_long
from processes import Case

from deepspeed_ext.moe.exchange import Exchange

EXPERTS, WIDTH = 8, 3
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COUNTS = {  # of rows, for a process and the number of an expert
    "mixed": lambda rank, expert: (3 * rank + 5 * expert) % 4,
    "from one": lambda rank, expert: 2 * (rank == 1),
    "to one": lambda rank, expert: (rank + 1) * (expert == 5),
    "none": lambda rank, expert: 0,
}


def rows_of(counts, extra=0, dtype=torch.float32):
    """Random rows, some of them behind the last offset, and where those of experts end."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = torch.randn(sum(counts) + extra, WIDTH, generator=generator).to(home(), dtype)
    return rows.requires_grad_(), ends_of(counts)


def ends_of(counts):
    return torch.tensor(counts, device=home()).cumsum(0).int()


def factors_of(counts, first=0):
    """What the expert of each row multiplies it by."""
    experts = torch.arange(first, first + len(counts)) + 1
    return experts.repeat_interleave(torch.tensor(counts))[:, None].to(home())


def there_and_back(row, folder):
    rank, world = dist.get_rank(), dist.get_world_size()
    local = EXPERTS // world
    for dtype in DTYPES:
        for extra in (0, 2):
            counts = [COUNTS[row](rank, expert) for expert in range(EXPERTS)]
            rows, offsets = rows_of(counts, extra, dtype)
            exchange = Exchange(rows, offsets)
            beside = rows.sum()  # while they are under way
            got, ends = exchange.arrived()
            mine = range(rank * local, (rank + 1) * local)
            come = [sum(COUNTS[row](sender, e) for sender in range(world)) for e in mine]
            assert torch.equal(ends, ends_of(come))
            assert ends.dtype is torch.int32
            exchange.send_back(got * factors_of(come, mine[0]).to(dtype))
            back = exchange.returned()
            factors = torch.cat([factors_of(counts), torch.zeros(extra, 1, device=home())]).to(
                dtype
            )
            assert torch.equal(back, rows * factors)
            (back.sum() + 0 * beside).backward()  # an expanded gradient
            assert torch.equal(rows.grad, factors.expand_as(rows))


def order(row, folder):
    """Rows of an expert lie by sender, and as the sender had them."""
    rank = dist.get_rank()
    counts = [1 + (rank + expert) % 2 for expert in range(EXPERTS)]
    numbers = 1000 * rank + torch.arange(float(sum(counts)), device=home())[:, None]
    offsets = ends_of(counts)
    with torch.no_grad():
        exchange = Exchange(numbers, offsets)
    got, ends = exchange.arrived()
    for begin, end in zip([0, *ends.tolist()], ends.tolist(), strict=False):
        assert got[begin:end].flatten().tolist() == sorted(got[begin:end].flatten().tolist())
        assert len({int(number) // 1000 for number in got[begin:end]}) == dist.get_world_size()


def anew(row, folder):
    """In a checkpointed block rows go again; where nothing has a gradient, nothing goes back."""
    rows, offsets = rows_of([1] * EXPERTS)
    weight = torch.ones(1, device=home(), requires_grad=True)

    def layer(rows):
        exchange = Exchange(rows, offsets)
        exchange.send_back(exchange.arrived()[0] * weight)
        return exchange.returned().square()

    torch.utils.checkpoint.checkpoint(layer, rows, use_reentrant=False).sum().backward()
    torch.testing.assert_close(rows.grad, 2 * rows.detach())
    with torch.autograd.detect_anomaly(check_nan=True):
        layer(rows.detach()).sum().backward()
    first = Exchange(rows, offsets)
    first.send_back(first.arrived()[0] * rows.sum())
    (grad,) = torch.autograd.grad(first.returned().sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def one_differs(row, folder):
    """All processes say what is not alike, and can go on."""
    world = dist.get_world_size()
    other = world - 1
    is_other = dist.get_rank() == other
    counts = [1] * EXPERTS

    def differing():
        rows, offsets = rows_of(counts)
        wide = torch.zeros(8, 5, device=home(), requires_grad=True)
        yield wide, offsets, f"process {other} has rows of 5 of"
        yield rows.detach().double().requires_grad_(), offsets, "has rows of 3 of torch.float64"
        yield rows.detach(), offsets, "for 8 experts, without a gradient, process 0"
        yield rows, offsets[:4], "for 4 experts, process 0 has rows of 3 of torch.float32 for 8"
        yield rows, offsets + 1, f"offsets of process {other} end with 9 .* for 8 rows"
        yield (
            rows,
            offsets.flip(0),
            f"offsets of process {other} end with 1 and have a least count of -1",
        )

    for theirs, others, text in differing():
        rows, offsets = (theirs, others) if is_other else rows_of(counts)
        with pytest.raises(ValueError, match=f"moe: .*{text}"):
            Exchange(rows, offsets)
    for count in (0, 1, 1028):
        with pytest.raises(ValueError, match=f"there are {count} experts for {world} processes"):
            Exchange(rows, torch.zeros(count, dtype=torch.int32, device=home()))
    there_and_back("mixed", folder)


def out_of_turn(row, folder):
    exchange = Exchange(*rows_of([1] * EXPERTS))
    with pytest.raises(RuntimeError, match=r"returned\(\) .* is called, expected arrived\(\)"):
        exchange.returned()
    rows, _ = exchange.arrived()
    with pytest.raises(ValueError, match="made 7 rows of 8, expected as many"):
        exchange.send_back(rows[1:])
    exchange.send_back(rows)
    with pytest.raises(RuntimeError, match=r"expected returned\(\)"):
        exchange.send_back(rows)
    exchange.returned()
    with pytest.raises(RuntimeError, match="expected another exchange"):
        exchange.returned()


def one_raises(row, folder):
    """The others hear of it when the time of their group is over."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    exchange = Exchange(*rows_of([1] * EXPERTS), group)
    rows, _ = exchange.arrived()
    if dist.get_rank() != 1:  # whose expert has raised
        begin = time.monotonic()
        exchange.send_back(rows)
        with pytest.raises(RuntimeError, match="the exchange of results of experts between 4"):
            exchange.returned()
        assert time.monotonic() - begin < 20
    dist.barrier()  # of another group, that knows nothing of it


def killed(row, folder):
    """One process of two ends; the other one is to say in what."""
    exchange = Exchange(*rows_of([1] * EXPERTS))
    rows, _ = exchange.arrived()
    if row == "results" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    exchange.send_back(rows)
    loss = exchange.returned().sum()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()


CASES = [
    *(Case(4, "there_and_back", row) for row in COUNTS),
    *(Case(4, f.__name__, "all") for f in (order, anew, one_differs, out_of_turn, one_raises)),
]


@pytest.mark.parametrize("case", with_long(CASES))
def test_exchange(groups, case):
    if case.function == "one_raises":
        groups.need_gloo()
    groups.run(case, least=2)


@pytest.mark.parametrize("what", ["results", "gradients of results"])
def test_the_other_one_says_in_what_a_process_was_killed(groups, what):
    groups.need_gloo()
    text = f"process 0: .*moe: the exchange of {what} of experts between 2 processes failed"
    with pytest.raises(AssertionError, match=f"(?s){text}.*process 1: ended with -9"):
        groups.run(Case(2, "killed", what))
