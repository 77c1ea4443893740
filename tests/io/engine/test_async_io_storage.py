"""Storages that are freed, resized or moved while a transfer uses them."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from aio_cases import BLOCK, bytes_of, payload
from held_memory import HeldMemory

from deepspeed_ext import io
from deepspeed_ext.io.engine.ring import Ring, RingJob

SIZE = 4 * BLOCK


def free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def grow(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(4 * tensor.untyped_storage().nbytes())


def grow_through_the_tensor(tensor: torch.Tensor) -> None:
    tensor.resize_(100 * max(tensor.numel(), 1))


def share(tensor: torch.Tensor) -> None:
    tensor.share_memory_()


CHANGES: dict[str, Callable[[torch.Tensor], None]] = {
    "free": free,
    "grow": grow,
    "grow through the tensor": grow_through_the_tensor,
    "share": share,
}
TEXT = (
    r"tensor of {what} .*\(shape \[\d+\], torch.float32\) has \d+ bytes of memory at 0x[0-9a-f]+,"
    r" expected 4000 at 0x[0-9a-f]+ to its end: its storage was freed, resized or moved"
)


@pytest.fixture
def stopped(engine: io.AsyncIO, tmp_path: Path) -> Iterator[HeldMemory]:
    """Keep the engine's only thread busy, so that what comes later does not begin."""
    with HeldMemory(SIZE) as held:
        future = engine.write(held.tensor(), tmp_path / "held")
        held.wait_until_touched()
        yield held
        held.release()
        future.result()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("what", ["read", "write"])
def test_a_transfer_whose_storage_changes_fails(
    engine: io.AsyncIO,
    stopped: HeldMemory,
    tmp_path: Path,
    what: str,
    change: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The engine gets memory that stays, as freed memory is for the test to keep its hands off.
    tensor, stays = torch.ones(1000), torch.zeros(1000)
    submit = engine._engine.submit

    class Harmless:
        def __getattr__(self, name: str) -> object:
            return getattr(native, name)

        def submit(self, target: object, address: int, *rest: int, **how: bool) -> object:
            assert address == tensor.data_ptr()
            return submit(target, stays.data_ptr(), *rest, **how)

    native = engine._engine
    monkeypatch.setattr(engine, "_engine", Harmless())
    (tmp_path / "file").write_bytes(bytes(4000))
    future = getattr(engine, what)(tensor, tmp_path / "file")
    CHANGES[change](tensor)
    stopped.release()
    with pytest.raises(OSError, match=TEXT.format(what=what)) as caught:
        future.result()
    assert caught.value.errno == errno.EFAULT
    with pytest.raises(OSError, match="moved meanwhile"):
        future.result()
    engine.wait()  # somebody was told


@pytest.mark.parametrize("change", ["free", "grow", "share"])
def test_a_strided_read_whose_storage_changes_fails(
    engine: io.AsyncIO, stopped: HeldMemory, tmp_path: Path, change: str
) -> None:
    """It is read elsewhere, so nothing is to be copied where memory was once."""
    (tmp_path / "file").write_bytes(bytes(4000))
    tensor = torch.ones(1000, 2)[:, 0]
    future = engine.read(tensor, tmp_path / "file")
    CHANGES[change](tensor)
    stopped.release()
    with pytest.raises(OSError, match="its storage was freed, resized or moved meanwhile"):
        future.result()


def test_a_failure_that_nobody_asks_for_is_raised(
    engine: io.AsyncIO, stopped: HeldMemory, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(bytes(4000))
    tensor = torch.ones(1000, 2)[:, 0]
    engine.read(tensor, tmp_path / "file")
    free(tensor)
    stopped.release()
    with pytest.raises(OSError, match="its storage was freed"):
        engine.wait()


def test_what_was_copied_may_change(
    engine: io.AsyncIO, stopped: HeldMemory, tmp_path: Path
) -> None:
    tensor = torch.arange(2000.0).reshape(1000, 2)
    want = bytes_of(tensor[:, 0])
    future = engine.write(tensor[:, 0], tmp_path / "file")
    empty = torch.ones(5)[:0]
    nothing = engine.write(empty, tmp_path / "empty")
    free(tensor)
    free(empty)
    stopped.release()
    future.result()
    nothing.result()
    assert (tmp_path / "file").read_bytes() == want


def test_after_its_end_a_storage_is_free(engine: io.AsyncIO, tmp_path: Path) -> None:
    tensor = torch.ones(1000)
    future = engine.write(tensor, tmp_path / "file")
    engine.wait()
    free(tensor)
    assert future.result() is tensor


def test_a_checked_read_of_a_store_does_not_copy_into_freed_memory(tmp_path: Path) -> None:
    with (
        HeldMemory(SIZE) as held,
        io.AsyncIO() as engine,
        io.TensorStore(tmp_path / "store", durable=True, engine=engine) as store,
    ):
        store.put("name", torch.ones(1000))
        store.commit()
        blocker = engine.write(held.tensor(), tmp_path / "held")
        held.wait_until_touched()
        out = torch.zeros(1000, 2)[:, 0]
        future = store.get_async("name", out)
        free(out)
        held.release()
        blocker.result()
        with pytest.raises(OSError, match=r"tensor of get of 'name' .* was freed"):
            future.result()


def test_a_validated_read_does_not_compare_freed_memory(tmp_path: Path) -> None:
    handle = io.aio_handle()
    with HeldMemory(SIZE) as held:
        handle.async_pwrite(held.tensor(), tmp_path / "held")
        held.wait_until_touched()
        (tmp_path / "file").write_bytes(bytes(4000))
        buffer = torch.zeros(1000, 2)[:, 0]
        handle.pread(buffer, tmp_path / "file", True, True)
        free(buffer)
        held.release()
    with pytest.raises(OSError, match="its storage was freed, resized or moved"):
        handle.wait()


class Device:
    """A device that is ordinary memory, for a ring; a request ends when it is submitted."""

    def __init__(self) -> None:
        self.is_ready = False
        self.copies = 0
        self.before_copy: Callable[[], None] = lambda: None

    def query(self) -> bool:
        return self.is_ready

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> "Device":
        self.copies += 1
        destination.copy_(source)
        return self

    def mark(self, tensor: torch.Tensor) -> "Device":
        return self

    def submit(self, *_: object, **how: bool) -> "Device":
        return self

    def wait(self, seconds: float) -> bool:
        return True

    def done(self) -> bool:
        return True

    def check(self) -> None: ...


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("change", ["free", "grow", "share"])
@pytest.mark.parametrize("when", ["before it begins", "between two pieces"])
def test_a_device_never_copies_to_or_from_a_storage_that_has_changed(
    write: bool, change: str, when: str
) -> None:
    device, piece = Device(), 1 << 12
    ring = Ring(torch.zeros(piece, dtype=torch.uint8), piece, device.submit, device)
    tensor = payload(3 * piece)
    job = RingJob(tensor, object(), 0, device, write=write)
    ring.add(job)
    if when == "between two pieces":
        device.is_ready = True
        while device.copies == 0:
            ring.step()
    copies = device.copies
    CHANGES[change](tensor)
    device.is_ready = True
    while not job.done():
        ring.step()
    assert device.copies == copies
    with pytest.raises(OSError, match="its storage was freed, resized or moved") as caught:
        job.check()
    assert caught.value.errno == errno.EFAULT
    assert not ring.busy
