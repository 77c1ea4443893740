"""Any size, offset, address, block, depth and number of threads: every byte is where it belongs."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from aio_cases import bytes_of, payload
from hypothesis import HealthCheck, given, settings, strategies as st

from deepspeed_ext import io

BLOCKS = (1, 199, 512, 4096, 5000, 8192, 65536)
EDGES = (0, 1, 511, 512, 513, 4095, 4096, 4097, 8192, 12288)
GUARD = 171  # what stands before and after the memory that is read into
COMMON = settings(
    deadline=None,
    max_examples=30,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def near(values: tuple[int, ...], most: int) -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from(values), st.integers(0, most))


@st.composite
def sizes(draw: st.DrawFn, block: int) -> int:
    """From nothing to three blocks, and a little more or less."""
    return max(0, draw(st.integers(0, 3)) * block + draw(st.integers(-3, 3)))


@st.composite
def engines(draw: st.DrawFn) -> dict[str, int]:
    block = draw(st.sampled_from(BLOCKS))
    depth, threads = draw(st.integers(1, 64)), draw(st.integers(1, 3))
    return {"block_size": block, "queue_depth": depth, "threads": threads}


def block_for_data(options: dict[str, int]) -> int:
    """Return a size of which three make a test, whatever the blocks of the engine are."""
    return max(options["block_size"], 4096)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="deepspeed-ext-") as name:
        yield Path(name)


def misaligned(content: torch.Tensor, shift: int) -> torch.Tensor:
    """Return the same bytes at an address that is `shift` after a page."""
    room = torch.full((content.numel() + 2 * 4096 + shift + 4096,), GUARD, dtype=torch.uint8)
    first = -room.data_ptr() % 4096 + 4096 + shift
    view = room[first : first + content.numel()]
    view.copy_(content)
    return view


def assert_untouched_around(view: torch.Tensor) -> None:
    room, first = view._base, view.storage_offset()
    assert room is not None
    assert (room[:first] == GUARD).all() and (room[first + view.numel() :] == GUARD).all()


def written_into(old: bytes, data: bytes, offset: int, truncate: bool = False) -> bytes:
    """Return a file's content after a write, as a model without any I/O has it."""
    model = bytearray(old)
    if data:
        model.extend(bytes(max(0, offset - len(model))))
        model[offset : offset + len(data)] = data
    return bytes(model[: offset + len(data)] if truncate else model)


@COMMON
@given(options=engines(), data=st.data())
def test_one_request_changes_its_bytes_and_no_others(
    backend: str, folder: Path, options: dict[str, int], data: st.DataObject
) -> None:
    block = block_for_data(options)
    old = bytes_of(payload(data.draw(sizes(block), "length of the file"), seed=7))
    new = payload(data.draw(sizes(block), "length of the tensor"), seed=8)
    offset = data.draw(near(EDGES, 2 * block), "offset")
    shift = data.draw(near((0, 1, 3, 64, 511, 512), 4095), "address")
    truncate = data.draw(st.booleans(), "truncate")
    by_path = data.draw(st.booleans(), "by path")
    path = folder / "file"
    path.unlink(missing_ok=True)
    path.write_bytes(old)
    target = path if by_path else io.File(str(path), "update")
    with io.AsyncIO(backend=backend, **options) as engine:
        source = misaligned(new, shift)
        assert engine.write(source, target, offset, truncate=truncate).result() is source
        assert torch.equal(source, new)
        expected = written_into(old, bytes_of(new), offset, truncate)
        assert path.read_bytes() == expected

        got = misaligned(torch.zeros_like(new), shift)
        engine.read(got, target, offset).result()
        assert torch.equal(got, new)
        assert_untouched_around(got)
        whole = torch.zeros(len(expected), dtype=torch.uint8)
        engine.read(whole, target).result()
        assert bytes_of(whole) == expected


@st.composite
def extents(draw: st.DrawFn, block: int) -> list[tuple[int, int]]:
    """Offsets and lengths of requests that do not overlap; many touch their neighbour."""
    offset, found = draw(near(EDGES, block)), []
    for _ in range(draw(st.integers(2, 12))):
        nbytes = draw(st.one_of(sizes(block), st.sampled_from((1, 100, 511, 4096))))
        found.append((offset, nbytes))
        offset += nbytes + draw(st.sampled_from((0, 0, 0, 1, 100, 512, 4096)))
    return found


@COMMON
@given(options=engines(), data=st.data())
def test_requests_side_by_side_leave_each_other_alone(
    backend: str, folder: Path, options: dict[str, int], data: st.DataObject
) -> None:
    """Neighbours are in flight together, as reads and writes, in pages that they share."""
    pieces = data.draw(extents(min(block_for_data(options), 16384)), "requests")
    reads = data.draw(st.sets(st.integers(0, len(pieces) - 1)), "which of them read")
    order = data.draw(st.permutations(range(len(pieces))), "order")
    shift = data.draw(near((0, 1, 512), 4095), "address")
    end = sum(pieces[-1])
    old = bytes_of(payload(max(0, end - data.draw(near((0, 1, 5000), end), "missing")), seed=3))
    path = folder / "shared"
    path.unlink(missing_ok=True)
    path.write_bytes(old)
    expected = old
    with io.AsyncIO(backend=backend, **options) as engine:
        target = data.draw(st.sampled_from((path, io.File(str(path), "update"))), "target")
        checks = []
        for i in order:
            offset, nbytes = pieces[i]
            if i in reads:
                if offset + nbytes <= len(old):
                    got = misaligned(torch.zeros(nbytes, dtype=torch.uint8), shift)
                    checks.append((engine.read(got, target, offset), offset, nbytes))
                continue
            tensor = misaligned(payload(nbytes, seed=i), shift)
            engine.write(tensor, target, offset)
            expected = written_into(expected, bytes_of(tensor), offset)
        for future, offset, nbytes in checks:
            view = future.result()
            assert bytes_of(view) == old[offset : offset + nbytes]
            assert_untouched_around(view)
        engine.wait()
        assert path.read_bytes() == expected
        whole = torch.zeros(len(expected), dtype=torch.uint8)
        assert bytes_of(engine.read(whole, target).result()) == expected
    file = io.File(str(path), "update")
    file.sync()  # the kernel reports here what the page cache could not keep in step
    file.close()


@settings(COMMON, max_examples=20)
@given(data=st.data())
def test_strided_tensors_are_read_and_written_in_place(
    backend: str, folder: Path, data: st.DataObject
) -> None:
    shape = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4), "shape")
    order = data.draw(st.permutations(range(len(shape))), "order")
    steps = data.draw(st.lists(st.integers(1, 3), min_size=len(shape), max_size=len(shape)))
    dtype = data.draw(st.sampled_from((torch.uint8, torch.bfloat16, torch.float64)), "dtype")
    room = [1 + (length - 1) * step for length, step in zip(shape, steps, strict=True)]
    index = tuple(slice(None, None, step) for step in steps)

    def view_of(base: torch.Tensor) -> torch.Tensor:
        return base[index].permute(order)

    count = torch.Size(room).numel()
    base = payload(count * dtype.itemsize).view(dtype).reshape(room)
    logical = view_of(base).contiguous()
    path = folder / "strided"
    path.unlink(missing_ok=True)
    with io.AsyncIO(block_size=512, backend=backend) as engine:
        engine.write(view_of(base), path).result()
        assert path.read_bytes() == bytes_of(logical)
        target = torch.full((count * dtype.itemsize,), GUARD, dtype=torch.uint8)
        landed = target.view(dtype).reshape(room)
        model = landed.clone()
        view_of(model).copy_(view_of(base))
        engine.read(view_of(landed), path).result()
        assert bytes_of(landed) == bytes_of(model)
