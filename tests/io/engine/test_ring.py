"""The ring through which device tensors travel; device and files here do as they are told."""

import errno
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from aio_cases import bytes_of, payload
from hypothesis import given, settings, strategies as st
from torch import Tensor

from deepspeed_ext.io.engine.pinned import PinnedBuffer
from deepspeed_ext.io.engine.ring import Ring, RingJob

PAGE = 4096
PIECE = 4 * PAGE
RING_PIECES = 3


class OpenFile(NamedTuple):
    """A file of the world."""

    name: str


class Event:
    """A copy or a request that completes when it is told to, and has its effect only then."""

    def __init__(self, of: object, effect: Callable[[], object]) -> None:
        self.of = of  # a file, or the memory of a tensor
        self.effect = effect
        self.error: BaseException | None = None
        self.is_done = False

    def complete(self, error: BaseException | None = None) -> None:
        self.error = error
        if error is None:
            self.effect()
        self.is_done = True

    def query(self) -> bool:
        self.check()
        return self.is_done

    def done(self) -> bool:
        return self.is_done

    def wait(self, seconds: float, /) -> bool:
        return self.is_done

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class World:
    """Files and a device around a ring; what is under way waits in `pending`."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.pending: list[Event] = []
        self.requests: list[tuple[str, int, int, int, bool]] = []
        self.memory = PinnedBuffer(RING_PIECES * PIECE).tensor()
        self.ring = Ring(self.memory, PIECE, self.submit, self)

    def submit(
        self,
        file: OpenFile,
        address: int,
        nbytes: int,
        offset: int,
        /,
        *,
        write: bool,
        truncate: bool,
    ) -> Event:
        self.requests.append((file.name, address, nbytes, offset, truncate))
        start = address - self.memory.data_ptr()
        here = self.memory[start : start + nbytes].numpy()
        assert here.nbytes == nbytes
        content = self.files.setdefault(file.name, bytearray())

        def move() -> None:
            if write:
                content.extend(bytes(max(0, offset + nbytes - len(content))))
                content[offset : offset + nbytes] = here.tobytes()
                here[:] = 0xEE  # whoever reads it again gets this
                if truncate:
                    del content[offset + nbytes :]
            else:
                here[:] = list(content[offset : offset + nbytes])

        return self.begin(file.name, move)

    def mark(self, tensor: Tensor) -> Event:
        raise NotImplementedError

    def copy(self, destination: Tensor, source: Tensor) -> Event:
        ours = self.memory.untyped_storage().data_ptr()
        sides = [side.untyped_storage().data_ptr() for side in (destination, source)]
        assert sides.count(ours) == 1
        sides.remove(ours)
        return self.begin(sides[0], lambda: destination.copy_(source))

    def begin(self, of: object, effect: Callable[[], object]) -> Event:
        self.pending.append(Event(of, effect))
        return self.pending[-1]

    def job(
        self,
        write: bool,
        tensor: Tensor,
        name: str,
        offset: int = 0,
        truncate: bool = False,
        ready: Event | None = None,
    ) -> RingJob:
        """Start a transfer; the tensor is ready, or is when this event is."""
        job = RingJob(
            tensor, OpenFile(name), offset, ready or done(), write=write, truncate=truncate
        )
        self.ring.add(job)
        return job

    def complete(self, index: int = 0, error: BaseException | None = None) -> Event:
        event = self.pending.pop(index)
        event.complete(error)
        return event

    def run(self, choice: random.Random | None = None) -> None:
        """Complete all, one after the other, in the order they came or in any."""
        while self.ring.busy:
            self.ring.step()
            if self.pending:
                self.complete(choice.randrange(len(self.pending)) if choice else 0)

    def assert_is_empty(self) -> None:
        assert not self.pending
        assert not self.ring.busy
        assert self.ring._space.used == 0


def done() -> Event:
    event = Event(None, lambda: None)
    event.complete()
    return event


sizes = st.builds(
    lambda pieces, more: max(0, pieces * PIECE + more),
    st.integers(0, 2 * RING_PIECES),
    st.sampled_from([-PAGE, -1, 0, 1, PAGE, 511]),
)
offsets = st.sampled_from([0, 1, 100, PAGE - 1, PAGE, PIECE - 1, PIECE, 3 * PIECE + 5])


@settings(max_examples=100, deadline=None)
@given(
    jobs=st.lists(st.tuples(st.booleans(), sizes, offsets, st.booleans()), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_every_byte_arrives_in_whatever_order_things_complete(
    jobs: list[tuple[bool, int, int, bool]], seed: int
) -> None:
    world = World()
    expected = []
    for index, (write, nbytes, offset, truncate) in enumerate(jobs):
        name, tensor = f"file {index}", payload(nbytes, seed=index)
        file = bytearray(bytes_of(payload(offset + nbytes + 77, seed=100 + index)))
        world.files[name] = file
        values = bytes_of(tensor) if write else bytes(file[offset : offset + nbytes])
        after = file.copy()
        if write:
            after[offset : offset + nbytes] = values
            if truncate:
                del after[offset + nbytes :]
        expected.append((world.job(write, tensor, name, offset, truncate), tensor, values, after))
    world.run(random.Random(seed))
    for index, (job, tensor, values, after) in enumerate(expected):
        assert job.done()
        job.check()
        assert bytes_of(tensor) == values
        assert world.files[f"file {index}"] == after
    world.assert_is_empty()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (7, 900)], ids=str)
def test_dtypes_and_views(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    world = World()
    rows = torch.randn(3, *shape).to(dtype)
    world.job(True, rows[1].requires_grad_(dtype.is_floating_point), "file")
    world.run()
    assert world.files["file"] == bytes_of(rows[1])
    with torch.inference_mode():
        got = torch.zeros(3, *shape, dtype=dtype)
    job = world.job(False, got[2], "file")
    world.run()
    job.check()
    assert bytes_of(got) == bytes_of(torch.stack([torch.zeros_like(rows[1])] * 2 + [rows[1]]))


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("offset", [0, 1, PAGE + 7, PIECE - 1, PIECE])
def test_pieces_can_travel_directly(write: bool, offset: int) -> None:
    world = World()
    world.files["file"] = bytearray(offset + 3 * PIECE + 9)
    world.job(write, payload(3 * PIECE + 9), "file", offset)
    world.run()
    at = offset
    for _, address, nbytes, start, _ in sorted(world.requests, key=lambda request: request[3]):
        assert address % PAGE == start % PAGE
        assert start == at and (start == offset or start % PIECE == 0)
        at += nbytes
    assert at == offset + 3 * PIECE + 9


def test_only_the_last_piece_truncates() -> None:
    world = World()
    world.job(True, payload(3 * PIECE), "file", 5, truncate=True)
    world.run()
    ends = [start + nbytes for _, _, nbytes, start, truncate in world.requests if truncate]
    assert ends == [5 + 3 * PIECE]


def test_copies_and_requests_overlap() -> None:
    world = World()
    tensor = payload(8 * PIECE)
    memory = tensor.untyped_storage().data_ptr()
    world.job(True, tensor, "file")
    world.ring.step()
    assert [event.of for event in world.pending] == [memory] * 3  # copies fill the ring
    world.complete()
    world.ring.step()
    assert [event.of for event in world.pending] == [memory, memory, "file"]
    world.complete(2)  # on the disk: its place is for the next copy
    world.ring.step()
    assert [event.of for event in world.pending] == [memory] * 3
    world.run()
    world.assert_is_empty()


def test_small_transfers_share_the_ring() -> None:
    world = World()
    count = RING_PIECES * PIECE // PAGE
    jobs = [world.job(True, payload(100, seed=i), f"{i}") for i in range(count + 1)]
    world.ring.step()
    assert len(world.pending) == count
    world.run()
    for i, job in enumerate(jobs):
        job.check()
        assert world.files[f"{i}"] == bytes_of(payload(100, seed=i))


@pytest.mark.parametrize("write", [False, True])
def test_a_tensor_that_is_not_ready_is_not_touched_and_holds_up_nobody(write: bool) -> None:
    world = World()
    world.files["late"] = bytearray(bytes_of(payload(5 * PIECE)))
    ready = Event(None, lambda: None)
    tensor = torch.zeros(5 * PIECE, dtype=torch.uint8)
    late = world.job(write, tensor, "late", ready=ready)
    other = world.job(True, payload(4 * PIECE), "other")
    while not other.done():
        world.ring.step()
        if world.pending:
            world.complete()
    assert not late.done()
    assert {name for name, *_ in world.requests} == {"other"}
    tensor.fill_(7)
    ready.complete()
    world.run()
    expected = bytes([7]) * (5 * PIECE) if write else bytes_of(payload(5 * PIECE))
    assert world.files["late"] == bytes_of(tensor) == expected


def test_transfers_keep_their_order_when_there_is_no_room() -> None:
    world = World()
    for i in range(20):
        world.job(True, payload(2 * PIECE if i % 2 else 5), f"{i}")
    world.run()
    names = [name for name, *_ in world.requests]
    assert list(dict.fromkeys(names)) == [f"{i}" for i in range(20)]


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("stage", ["copy", "file"])
@pytest.mark.parametrize("failing", [0, 3, 6])
def test_a_failure_in_the_middle(write: bool, stage: str, failing: int) -> None:
    world = World()
    tensor = payload(7 * PIECE)
    mine = {"copy": tensor.untyped_storage().data_ptr(), "file": "bad"}
    world.files["bad"] = bytearray(7 * PIECE)
    bad = world.job(write, tensor, "bad")
    good = world.job(True, payload(2 * PIECE), "good")
    seen = 0
    while world.ring.busy:
        world.ring.step()
        if world.pending:
            fails = world.pending[0].of == mine[stage] and seen == failing
            seen += world.pending[0].of == mine[stage]
            world.complete(error=OSError(errno.EIO, f"number {failing}") if fails else None)
        if bad.done():
            assert not any(event.of in mine.values() for event in world.pending)
    assert seen >= failing
    with pytest.raises(OSError, match=f"number {failing}"):
        bad.check()
    good.check()
    assert world.files["good"] == bytes_of(payload(2 * PIECE))
    world.assert_is_empty()


def test_the_error_nearest_to_the_front_is_told() -> None:
    world = World()
    bad = world.job(False, payload(3 * PIECE), "bad")
    world.ring.step()
    for index in (2, 0, 0):
        world.complete(index, OSError(errno.EIO, f"number {index}"))
        world.ring.step()
    world.run()
    with pytest.raises(OSError, match="number 0"):
        bad.check()


@pytest.mark.parametrize("method", ["submit", "copy"])
@pytest.mark.parametrize("write", [False, True])
def test_what_cannot_even_begin(monkeypatch: pytest.MonkeyPatch, method: str, write: bool) -> None:
    world = World()
    world.files["bad"] = bytearray(5 * PIECE)

    def refuse(*arguments: object, **how: bool) -> Event:
        raise RuntimeError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(world, method, refuse)
        if method == "submit":
            patch.setattr(world.ring, "_submit", refuse)
        bad = world.job(write, payload(5 * PIECE), "bad")
        world.run()
    with pytest.raises(RuntimeError, match="refused"):
        bad.check()
    good = world.job(True, payload(5), "good")
    world.run()
    good.check()
    assert world.files["good"] == bytes_of(payload(5))
    world.assert_is_empty()


def test_a_device_that_is_lost() -> None:
    world = World()
    ready = Event(None, lambda: None)
    ready.complete(RuntimeError("device lost"))
    bad = world.job(True, payload(5), "bad", ready=ready)
    world.run()
    with pytest.raises(RuntimeError, match="device lost"):
        bad.check()
    world.assert_is_empty()


def test_a_job_lets_go_of_its_tensor() -> None:
    world = World()
    tensor = payload(2 * PIECE)
    job = world.job(True, tensor, "file")
    assert job.memory is not None and job.memory.tensor is tensor
    world.run()
    assert job.memory is job.bytes is None


def test_a_job_of_the_ring_is_taken_back_before_it_begins() -> None:
    class Never:
        def query(self) -> bool:
            return False

    class Mailbox:
        def __init__(self) -> None:
            self.numbers: list[int] = []

        def put(self, number: int) -> None:
            self.numbers.append(number)

    job, mailbox = RingJob(payload(5), "file", 0, Never(), write=True), Mailbox()
    job.tell(mailbox, 7)
    assert not job.begun() and not mailbox.numbers
    assert job.cancel() and job.done() and job.memory is None and mailbox.numbers == [7]
    assert not job.begin() and not job.cancel()
    job.tell(mailbox, 8)
    assert mailbox.numbers == [7, 8]
    late = RingJob(payload(5), "file", 0, Never(), write=True)
    assert late.begin() and late.begun() and not late.cancel() and not late.done()
