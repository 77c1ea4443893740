"""CUDA tensors to files and back: every byte, in the order of streams, on every device."""

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import warm_python
from aio_cases import bytes_of, payload

from deepspeed_ext import io

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

MIB = 1 << 20
PIECE = 16 * MIB
A_WHILE = 500_000_000  # cycles that a stream is kept at work: about a quarter of a second


@pytest.fixture
def cuda_engine(tmp_path: Path) -> Iterator[io.AsyncIO]:
    with io.AsyncIO() as engine:
        engine.write(torch.zeros(1, device="cuda"), tmp_path / "first")  # makes the ring
        engine.wait()
        yield engine


def on_device(nbytes: int, seed: int = 0, device: str = "cuda") -> torch.Tensor:
    """Return random bytes, without making many on the host."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device, generator=generator)


@pytest.mark.parametrize("offset", [0, 1, 4096, PIECE + 100])
@pytest.mark.parametrize(
    "nbytes", [0, 1, 4095, MIB + 1, PIECE - 1, PIECE, PIECE + 1, 200 * MIB + 12345]
)
def test_round_trips(cuda_engine: io.AsyncIO, tmp_path: Path, nbytes: int, offset: int) -> None:
    path, tensor = tmp_path / "file", on_device(nbytes)
    assert cuda_engine.write(tensor, path, offset).result() is tensor
    assert path.stat().st_size == (offset + nbytes if nbytes else 0)
    if nbytes:
        there = torch.from_file(str(path), size=offset + nbytes, dtype=torch.uint8)
        assert torch.equal(there[offset:], tensor.cpu())
    got = torch.zeros_like(tensor)
    assert cuda_engine.read(got, path, offset).result() is got
    assert torch.equal(got, tensor)
    assert cuda_engine.stats()["copied_bytes"] == 0


DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (70, 31)], ids=str)
def test_dtypes_and_shapes(
    cuda_engine: io.AsyncIO, tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.randn(shape, device="cuda") * 5).to(dtype)
    cuda_engine.write(tensor, tmp_path / "file").result()
    assert (tmp_path / "file").read_bytes() == bytes_of(tensor.cpu())
    got = torch.zeros(2, *shape, device="cuda").to(dtype)
    cuda_engine.read(got[1], tmp_path / "file").result()
    assert bytes_of(got[1].cpu()) == bytes_of(tensor.cpu())
    assert not got[0].cpu().reshape(-1).view(torch.uint8).any()


def test_strided_parameters_and_inference_tensors(cuda_engine: io.AsyncIO, tmp_path: Path) -> None:
    tensor = torch.randn(300, 70, device="cuda").t()
    cuda_engine.write(tensor, tmp_path / "file").result()
    assert (tmp_path / "file").read_bytes() == bytes_of(tensor.cpu())
    got = torch.zeros(300, 70, device="cuda").t()
    parameter = torch.nn.Parameter(torch.zeros(70, 300, device="cuda"))
    with torch.inference_mode():
        frozen = torch.zeros(70, 300, device="cuda")
    for each in (got, parameter, frozen):
        cuda_engine.read(each, tmp_path / "file").result()
        assert torch.equal(each, tensor)


def test_a_write_sees_what_was_queued_before(cuda_engine: io.AsyncIO, tmp_path: Path) -> None:
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        tensor = torch.zeros(40 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(A_WHILE)
            tensor.fill_(7)
            future = cuda_engine.write(tensor, tmp_path / "file", truncate=True)
            assert not stream.query() and not future.done()
        future.result()
        assert (tmp_path / "file").read_bytes() == bytes([7]) * (40 * MIB)


def test_a_read_does_not_overwrite_what_is_still_needed(
    cuda_engine: io.AsyncIO, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(bytes_of(payload(20 * MIB)))
    tensor = on_device(20 * MIB, seed=5)
    copy, expected = torch.empty_like(tensor), tensor.clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(A_WHILE)
    copy.copy_(tensor)
    future = cuda_engine.read(tensor, tmp_path / "file")
    assert not torch.cuda.current_stream().query()
    future.result()
    assert torch.equal(copy, expected)
    assert torch.equal(tensor.cpu(), payload(20 * MIB))


def test_what_was_read_is_there_for_every_stream(cuda_engine: io.AsyncIO, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes_of(payload(20 * MIB)))
    for _ in range(5):
        tensor = torch.zeros(20 * MIB, dtype=torch.uint8, device="cuda")
        cuda_engine.read(tensor, tmp_path / "file").result()
        with torch.cuda.stream(torch.cuda.Stream()):
            seen = tensor.clone()
            torch.cuda.current_stream().synchronize()
        assert torch.equal(seen.cpu(), payload(20 * MIB))


def test_a_stream_at_work_holds_up_nobody(cuda_engine: io.AsyncIO, tmp_path: Path) -> None:
    busy, tensor = torch.cuda.Stream(), on_device(300 * MIB)
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(4 * A_WHILE)
        late = cuda_engine.write(tensor, tmp_path / "late")
    cuda_engine.write(tensor[:MIB], tmp_path / "early").result()
    assert not busy.query() and not late.done()
    late.result()
    assert (tmp_path / "late").stat().st_size == 300 * MIB


def test_64_tensors_in_flight(cuda_engine: io.AsyncIO, tmp_path: Path) -> None:
    tensors = [on_device(i * 123_457 + i % 3, seed=i) for i in range(64)]
    for i, tensor in enumerate(tensors):
        cuda_engine.write(tensor, tmp_path / f"{i}")
    assert cuda_engine.wait() == 64
    got = [torch.zeros_like(tensor) for tensor in tensors]
    for i, tensor in enumerate(got):
        cuda_engine.read(tensor, tmp_path / f"{i}")
    assert cuda_engine.wait() == 64
    assert all(map(torch.equal, got, tensors))


def test_host_and_device_tensors_together(cuda_engine: io.AsyncIO, tmp_path: Path) -> None:
    tensors = [payload(5 * MIB + i, seed=i).to("cuda" if i % 2 else "cpu") for i in range(10)]
    for i, tensor in enumerate(tensors):
        cuda_engine.write(tensor, tmp_path / "file", offset=i * 6 * MIB)
    cuda_engine.wait()
    got = [torch.zeros_like(tensor) for tensor in tensors]
    for i, tensor in enumerate(got):
        cuda_engine.read(tensor, tmp_path / "file", offset=i * 6 * MIB)
    cuda_engine.wait()
    assert all(map(torch.equal, got, tensors))


def test_a_tensor_that_is_dropped_is_still_written(cuda_engine: io.AsyncIO, tmp_path: Path) -> None:
    torch.cuda._sleep(A_WHILE)
    futures = [
        cuda_engine.write(torch.full((30 * MIB,), i, dtype=torch.uint8, device="cuda"), path)
        for i, path in enumerate([tmp_path / "0", tmp_path / "1"])
    ]
    taken = [torch.full((30 * MIB,), 99, dtype=torch.uint8, device="cuda") for _ in range(2)]
    for i, future in enumerate(futures):
        future.result()
        assert (tmp_path / f"{i}").read_bytes() == bytes([i]) * (30 * MIB)
    del taken


def test_nothing_is_allocated_on_the_device(cuda_engine: io.AsyncIO, tmp_path: Path) -> None:
    tensor = on_device(100 * MIB)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cuda_engine.write(tensor, tmp_path / "file").result()
    cuda_engine.read(tensor, tmp_path / "file").result()
    assert torch.cuda.max_memory_allocated() == before


def test_the_ring_is_pinned_and_goes(tmp_path: Path) -> None:
    engine = io.AsyncIO()
    engine.write(on_device(MIB), tmp_path / "file").result()
    ring = engine._cuda[0]._ring
    assert ring is not None and ring._memory.is_pinned() and ring._memory.numel() == 128 * MIB
    if engine.backend == "io_uring":
        stats = engine.stats()
        assert int(stats["fixed_bytes"]) >= 0.8 * int(stats["direct_bytes"])
    del ring
    engine.close()
    assert engine._cuda[0]._ring is None
    gc.collect()


@pytest.mark.parametrize("nbytes", [1000, 100 * MIB])
def test_the_end_of_a_file(cuda_engine: io.AsyncIO, tmp_path: Path, nbytes: int) -> None:
    path, tensor = tmp_path / "file", on_device(nbytes)
    cuda_engine.write(tensor, path).result()
    os.truncate(path, nbytes - 10)
    bad = cuda_engine.read(torch.zeros_like(tensor), path)
    good = torch.zeros_like(tensor[:-10])
    cuda_engine.read(good, path).result()
    assert torch.equal(good, tensor[:-10])
    with pytest.raises(OSError, match=f"the file ends at {nbytes - 10}") as caught:
        bad.result()
    assert caught.value.errno == errno.ENODATA


def test_a_missing_file(cuda_engine: io.AsyncIO, tmp_path: Path) -> None:
    for nbytes in (10, 50 * MIB):
        with pytest.raises(FileNotFoundError, match="No such file"):
            cuda_engine.read(on_device(nbytes), tmp_path / "missing").result()


def in_child(code: str, *arguments: object) -> str:
    """Run code in a fresh process that can import this file; return what it prints."""
    program = "import sys\nfrom test_cuda_transfers import *\n" + code
    done = warm_python.run("-c", program, *arguments, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_file_that_may_grow_no_further(tmp_path: Path) -> None:
    code = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (40 * MIB, 40 * MIB))
with io.AsyncIO() as engine:
    bad = engine.write(on_device(100 * MIB), sys.argv[1])
    good = engine.write(on_device(30 * MIB), sys.argv[1] + "2")
    good.result()
    error = bad.exception()
    assert isinstance(error, OSError) and error.errno == errno.EFBIG, error
    print(error)
"""
    assert f"of {tmp_path}/file failed: File too large" in in_child(code, tmp_path / "file")
    assert (tmp_path / "file2").stat().st_size == 30 * MIB


def test_what_is_under_way_when_python_ends_arrives(tmp_path: Path) -> None:
    code = """
engine = io.AsyncIO()
torch.cuda._sleep(A_WHILE)
engine.write(on_device(100 * MIB), sys.argv[1])
"""
    assert in_child(code, tmp_path / "file") == ""
    assert (tmp_path / "file").read_bytes() == bytes_of(on_device(100 * MIB).cpu())


def test_a_capture_is_refused_and_survives(cuda_engine: io.AsyncIO, tmp_path: Path) -> None:
    tensor, graph = torch.zeros(10, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
        with pytest.raises(RuntimeError, match="capturing a CUDA graph"):
            cuda_engine.write(tensor, tmp_path / "file")
    graph.replay()
    cuda_engine.write(tensor, tmp_path / "file").result()
    assert (tmp_path / "file").read_bytes() == bytes_of(torch.ones(10))


@needs_two
def test_two_devices(cuda_engine: io.AsyncIO, tmp_path: Path) -> None:
    tensors = [on_device(50 * MIB + i, i, f"cuda:{i % 2}") for i in range(6)]
    for i, tensor in enumerate(tensors):
        cuda_engine.write(tensor, tmp_path / f"{i}")
    cuda_engine.wait()
    got = [torch.zeros_like(tensors[i], device=f"cuda:{(i + 1) % 2}") for i in range(6)]
    for i, tensor in enumerate(got):
        cuda_engine.read(tensor, tmp_path / f"{i}")
    cuda_engine.wait()
    for tensor, expected in zip(got, tensors, strict=True):
        assert torch.equal(tensor.cpu(), expected.cpu())


@needs_two
def test_streams_of_the_other_device_count(cuda_engine: io.AsyncIO, tmp_path: Path) -> None:
    tensor = torch.zeros(20 * MIB, dtype=torch.uint8, device="cuda:1")
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):
        torch.cuda._sleep(A_WHILE)
        tensor.fill_(3)
    cuda_engine.write(tensor, tmp_path / "file").result()  # from device 0
    assert (tmp_path / "file").read_bytes() == bytes([3]) * (20 * MIB)


@needs_two
def test_no_context_is_opened_on_another_device(tmp_path: Path) -> None:
    code = """
tensor = on_device(40 * MIB, device="cuda:1")
before = torch._C._cuda_hasPrimaryContext(0)
with io.AsyncIO() as engine:
    engine.write(tensor, sys.argv[1]).result()
    engine.read(tensor, sys.argv[1]).result()
gc.collect()
assert torch._C._cuda_hasPrimaryContext(0) == before
print(before)
"""
    if in_child(code, tmp_path / "file") == "True\n":
        pytest.skip("torch itself opens device 0")
