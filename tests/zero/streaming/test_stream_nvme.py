"""Weights that rest in a scratch file: what is there, what is read, and what goes wrong."""

import contextlib
import copy
import errno
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stream_cases import Block, Model, assert_equal_models, loss_of, on_disk, pair, some_ids
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed_ext import offload, zero
from deepspeed_ext.io import AsyncIO, Future
from deepspeed_ext.io.extents import PAGE, whole_pages
from deepspeed_ext.zero.streaming import scratch

FORK = Path(__file__).parent / "fork_of_a_stream.py"
CHANGES = {
    "twice": lambda model: setattr(model, "calls", [0, 1, 1, 0, 3]),
    "not all": lambda model: setattr(model, "calls", [3, 1]),
    "transposed": lambda model: setattr(
        model.layers[0].up,
        "weight",
        nn.Parameter(model.layers[1].up.weight.detach().t().clone().t()),
    ),
    "reentrant": lambda model: setattr(
        model, "wrap", lambda block, x: checkpoint(block, x, use_reentrant=True)
    ),
}


pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(name="disk")
def each_disk(tmp_path):
    return on_disk(tmp_path)


def files_of(folder):
    """Return what this process has open, or mapped, of a folder's file system without a name."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [text for text in (*links, *maps) if str(folder) in text]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [{"shared": True}, {"dtype": torch.bfloat16, "unused": True}])
def test_of_a_backward(device, disk, change, kind):
    streamed, kept, handle = pair(device, CHANGES[change], disk, **kind)
    for model in (streamed, kept):
        for seed in range(2):
            loss_of(model, some_ids(device, seed)).backward()
    assert_equal_models(streamed, kept, gradients=True)
    assert handle.stats()["ahead"] > 0 or change == "not all"


@pytest.mark.parametrize("prefetch", [0, 2])
def test_as_much_is_staged_as_is_on_the_device(device, disk, prefetch):
    class Wide(Block):
        def __init__(self, width):
            super().__init__()
            self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    kept = Model()
    kept.layers = nn.ModuleList(Wide(width) for width in (700, 400, 1000, 90, 800))
    kept.calls = [*range(5)]
    streamed = copy.deepcopy(kept)
    handle = zero.stream(streamed, to=device, prefetch=prefetch, **disk)
    pool, most = handle._staging._pool, []
    take = pool.take
    pool.take = lambda nbytes: (most.append(pool.stats()["buffers"] + 1), take(nbytes))[1]
    for model in (streamed, kept.to(device)):
        for seed in range(2):
            loss_of(model, some_ids(device, seed)).backward()
    assert_equal_models(streamed, kept, gradients=True)
    largest = max(handle._piece(block).nbytes for block in streamed.layers)
    assert max(most) == 1 + prefetch
    assert pool.stats()["peak"] <= (1 + prefetch) * whole_pages(largest)
    assert pool.stats()["buffers"] == 0


def test_one_read_a_block_and_none_of_what_rests_elsewhere(disk):
    streamed, kept, handle = pair("cpu", rest=disk)
    with torch.no_grad():
        streamed(some_ids("cpu", 0))
        assert handle._scratch._engine.stats()["submitted"] == 4 * 2  # late reads are two
        stats = handle.stats()
        assert stats["disk_bytes"] == stats["resting_bytes"] > 0
        for model in (streamed, kept):
            middle = model.layers[1].up
            middle.weight.data = middle.weight.data * 2
        got, want = streamed(some_ids("cpu", 1)), kept(some_ids("cpu", 1))
    assert torch.equal(got, want)
    assert handle.stats()["disk_bytes"] == stats["disk_bytes"] - streamed.layers[1].up.weight.nbytes
    assert handle._scratch._engine.stats()["direct_bytes"] == 0


def test_the_file_has_its_blocks_and_no_name(tmp_path, disk):
    streamed, _, handle = pair("cpu", rest=disk)
    status = os.fstat(handle._scratch._file.fileno())
    assert status.st_blocks * 512 >= status.st_size >= handle.stats()["disk_bytes"] > 0
    assert os.listdir(tmp_path) == [] and status.st_nlink == 0
    for block in streamed.layers:
        first = next(p for p in block.parameters() if handle._scratch.has(p))
        assert first.data_ptr() % PAGE == 0


def test_the_file_goes_with_the_last_weight(tmp_path, disk):
    streamed, kept, handle = pair("cpu", rest=disk)
    loss_of(streamed, some_ids("cpu", 0)).backward()
    assert files_of(tmp_path)
    handle.close()
    weight = streamed.layers[0].up.weight.detach()
    del handle, streamed
    gc.collect()
    assert torch.equal(weight, kept.layers[0].up.weight)
    assert files_of(tmp_path)
    del weight
    gc.collect()
    assert not files_of(tmp_path)


def test_parts_that_nobody_has_are_used_again(disk):
    streamed, _, handle = pair("cpu", rest=disk)
    extents = handle._scratch._extents
    sizes = []
    for _ in range(3):
        streamed.to(torch.float64)
        streamed.to(torch.float32)
        sizes.append(extents.end)
    assert sizes[0] == sizes[1] == sizes[2]
    stats = handle.stats()
    assert stats["disk_bytes"] == stats["resting_bytes"]


def test_a_forked_child_writes_to_memory_of_its_own(disk):
    streamed, kept, _ = pair("cpu", rest=disk)
    array = streamed.layers[0].up.weight.detach().numpy()
    child = os.fork()
    if child == 0:  # nothing of torch, which other tests have given threads
        array[:] = 7
        child_of_child = os.fork()
        is_there = bool((array == 7).all())
        if child_of_child:
            array[:] = 8
            is_there &= os.waitpid(child_of_child, 0)[1] == 0
        os._exit(0 if is_there else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert_equal_models(streamed, kept)


@pytest.mark.long
def test_a_forked_child_has_weights_of_its_own(tmp_path):
    run = subprocess.run(
        [sys.executable, FORK, tmp_path], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.stdout == "went on\n" and run.returncode == 0, run.stderr


class Broken:
    """In place of a read: it raises when somebody waits for it."""

    def __init__(self, error):
        self._error = error

    def result(self):
        raise self._error

    def exception(self):
        return self._error


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "a bad sector"), KeyboardInterrupt()])
def test_a_read_that_fails_or_is_interrupted(device, disk, monkeypatch, where, error):
    streamed, kept, handle = pair(device, rest=disk)
    loss = loss_of(streamed, some_ids(device, 0)) if where == "backward" else None
    with monkeypatch.context() as patch:
        patch.setattr(scratch.ScratchMemory, "read", lambda *_: Broken(error))
        for _ in range(2):
            with pytest.raises(type(error)):
                loss_of(streamed, some_ids(device, 0)) if loss is None else loss.backward()
            if loss is not None:
                break  # the graph is gone
    error.__traceback__ = None  # which has all that was under way
    streamed.zero_grad()
    for model in (streamed, kept):
        loss_of(model, some_ids(device, 1)).backward()
    assert_equal_models(streamed, kept, gradients=True)
    del loss
    gc.collect()
    assert handle._staging._pool.stats()["buffers"] == 0


def test_what_could_not_be_read_does_not_seem_to_be_there(disk, monkeypatch):
    model = Model()
    handle = zero.stream(model, to="cpu", **disk)
    piece = handle._piece(model.layers[1])
    with monkeypatch.context() as patch:
        patch.setattr(scratch.ScratchMemory, "read", lambda *_: Broken(OSError("a bad sector")))
        for _ in range(2):
            with pytest.raises(OSError, match="a bad sector"):
                handle.fetched(piece)
    assert torch.equal(handle.fetched(piece).weight(0), piece.params[0])
    handle.close()


def test_pinned_memory_is_kept_until_a_copy_is_over(disk, monkeypatch):
    monkeypatch.undo()  # late copies would keep it
    model = Model()
    handle = zero.stream(model, to="cpu", **disk)
    pool = handle._staging._pool
    got = handle._begun(handle._piece(model.layers[1]))
    got.wait()
    assert pool.stats()["buffers"] == 1
    got.finish()
    assert pool.stats()["buffers"] == 0


def test_a_file_that_was_cut_off_is_an_error_of_the_call(disk, monkeypatch):
    monkeypatch.undo()  # reads are not late
    model = Model()
    handle = zero.stream(model, to="cpu", **disk)
    handle._scratch._file.truncate(0)
    with pytest.raises(OSError, match=r"aio: read of .* the file ends at 0"):
        model(some_ids("cpu", 0))
    handle._scratch._file.truncate(handle._scratch._extents.end)  # of zeros by now
    assert torch.isfinite(model(some_ids("cpu", 0))).all()


def test_errors_of_nvme_path(tmp_path):
    model = Model()
    before = [param.data_ptr() for param in model.parameters()]
    file = tmp_path / "file"
    file.touch()

    def fails(error, text, *args, **kwargs):
        with pytest.raises(error, match=text):
            zero.stream(model, *args, to="cpu", **kwargs)

    fails(ValueError, r"^zero.stream: nvme_path is None, expected a folder with dev", "nvme")
    fails(ValueError, r"^zero.stream: nvme_path is '', expected a folder", "nvme", nvme_path="")
    fails(TypeError, r"^zero.stream: nvme_path is int, expected a fol", "nvme", nvme_path=5)
    fails(
        ValueError, r"^zero.stream: nvme_path is .*, expected a path wi", "nvme", nvme_path="a\0b"
    )
    fails(ValueError, r"^zero.stream: nvme_path is given, expected device='nvme' w", nvme_path="x")
    text = r"zero.stream: nvme_path is .*, expected a folder to write in: "
    fails(FileNotFoundError, text, "nvme", nvme_path=tmp_path / "none")
    fails(NotADirectoryError, text, "nvme", nvme_path=os.fsencode(file))
    assert [param.data_ptr() for param in model.parameters()] == before


def test_a_disk_without_room(tmp_path, monkeypatch, disk):
    model = Model()
    before = [param.data_ptr() for param in model.parameters()]
    allocate = scratch._allocate

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(scratch, "_allocate", full)
    with pytest.raises(OSError, match=r"zero.stream: nvme_path is .* with too little room: No sp"):
        zero.stream(model, to="cpu", **disk)
    assert [param.data_ptr() for param in model.parameters()] == before
    gc.collect()
    assert not files_of(tmp_path)
    monkeypatch.setattr(scratch, "_allocate", allocate)
    streamed, kept, handle = pair("cpu", rest=disk)
    with offload.OffloadOptimizer(
        streamed.parameters(), model=streamed, lr=1e-2, free_grads=True
    ) as optimizer:
        loss_of(streamed, some_ids("cpu", 0)).backward()
        optimizer.step()
        weight = streamed.layers[1].up.weight
        weight.data = weight.data.bfloat16()
        monkeypatch.setattr(scratch, "_allocate", full)
        for _ in range(2):
            with pytest.raises(OSError, match=r"zero.stream: nvme_path is .* with too little room"):
                optimizer.step()
        monkeypatch.setattr(scratch, "_allocate", allocate)
        optimizer.step()
        assert handle._scratch.has(weight) and weight.dtype == torch.bfloat16
    with pytest.raises(OSError, match=r"File too large|too little room"):
        _with_a_limit(lambda: zero.stream(kept, to="cpu", **disk))


def _with_a_limit(call):
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE, limits[1]))
    try:
        call()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_system_that_cannot_reserve(tmp_path):
    class Plain:
        """A file of such a file system."""

        def __init__(self, file):
            self.fileno, self.size, self.sync = file.fileno, file.size, file.sync

        def allocate(self, begin, nbytes):
            pass

    memory = scratch.ScratchMemory(str(tmp_path), 0)
    scratch._allocate(Plain(memory._file), 0, 5 * PAGE)
    status = os.fstat(memory._file.fileno())
    assert status.st_size == 5 * PAGE and status.st_blocks * 512 >= 5 * PAGE
    memory.close()


def test_the_engine_is_closed_with_the_stream(disk):
    streamed, kept, handle = pair("cpu", rest=disk)
    engine = handle._scratch._engine
    handle.close()
    with pytest.raises(RuntimeError, match="engine is closed"):
        engine.read(torch.empty(1), "/dev/zero")
    assert torch.equal(streamed(some_ids("cpu", 0)), kept(some_ids("cpu", 0)))


def test_reads_and_writes_of_files_by_weights_that_are_one(tmp_path, disk):
    streamed, kept, _ = pair("cpu", rest=disk)
    with AsyncIO() as engine:
        weight, file = streamed.layers[0].up.weight, tmp_path / "weights"
        assert isinstance(engine.write(weight, file), Future)
        engine.wait()
        weight.data.zero_()
        engine.read(weight.data, file).result()
    assert_equal_models(streamed, kept)
