"""Functional ops: two threads, two streams, and CUDA graphs have nothing to do with each other."""

import pytest
import torch
import warm_python
from at_once import in_threads
from functional_cases import CASES, Call, call_of
from samples import BF16, F32
from torch import Tensor

LENGTHS = [64, 4096, 20_000]  # of rows that half a warp, a block, and shared memory hold
each_case = pytest.mark.parametrize("name", CASES)


def two_calls(name: str, n: int, device: str) -> list[Call]:
    """Return one, and another with other values and another number of rows."""
    rows = 40 if n < 5000 else 8
    return [
        call_of(CASES[name], rows + i, n, BF16, device, others=F32, scale=1 + i) for i in range(2)
    ]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for value, expected in zip(got, want, strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize("n", LENGTHS)
@each_case
def test_two_threads(name: str, n: int, device: str) -> None:
    """On CUDA each with a stream of its own."""
    calls = two_calls(name, n, device)
    wanted = [call.run() for call in calls]

    found = in_threads(device, 6, *(call.run for call in calls))
    for of_thread, want in zip(found, wanted, strict=True):
        for got in of_thread:
            assert_same(got, want)


@each_case
def test_two_threads_with_rows_of_two_lengths(name: str, device: str) -> None:
    """On CUDA the kernels are the same, and the shared memory that they take is not."""
    lengths, times = ((16_392, 131_072), 60) if device == "cuda" else ((40, 64), 2)
    calls = [call_of(CASES[name], 4, n, BF16, device, others=BF16) for n in lengths]
    wanted = [call.run() for call in calls]
    found = in_threads(device, times, *(call.run for call in calls))
    for of_thread, want in zip(found, wanted, strict=True):
        for got in of_thread:
            assert_same(got, want)


FIRST_USE = """
from functional_cases import CASES, call_of
from at_once import at_once
import torch
for case in CASES.values():
    found = [None, None]
    def task(i, case=case):
        found[i] = call_of(case, 9, 40, torch.float32, "cpu").run()
    at_once(lambda: task(0), lambda: task(1))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
"""


def test_first_use_in_two_threads() -> None:
    """Both load the library, or one waits for the other."""
    done = warm_python.run("-c", FIRST_USE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("n", LENGTHS)
@each_case
def test_two_streams(name: str, n: int, cuda: str) -> None:
    """The work is queued on the current stream, behind what makes its arguments."""
    call, other = two_calls(name, n, cuda)
    want, want_of_other = call.run(), other.run()
    late = call.each(torch.empty_like)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        for target, source in zip(tensors_of(late), tensors_of(call), strict=True):
            target.copy_(source)
        got = late.run()
    got_of_other = other.run()
    torch.cuda.synchronize()
    assert_same(got, want)
    assert_same(got_of_other, want_of_other)


@pytest.mark.parametrize("n", LENGTHS)
@each_case
def test_cuda_graph(name: str, n: int, cuda: str) -> None:
    """Forward and backward, replayed with other values."""
    call = two_calls(name, n, cuda)[0]
    room = call.each(torch.clone)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            room.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = room.run()
    torch.cuda.synchronize()
    for values in (call.each(lambda t: t * 2 if t.is_floating_point() else t), call):
        for target, source in zip(tensors_of(room), tensors_of(values), strict=True):
            target.copy_(source)
        graph.replay()
        assert_same(got, values.run())


@pytest.mark.parametrize("n", LENGTHS)
@each_case
def test_nothing_waits_for_cuda(name: str, n: int, cuda: str) -> None:
    call = two_calls(name, n, cuda)[0]
    call.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tensors_of(call: Call) -> list[Tensor]:
    return [*call.tensors(), *call.grads]
