"""Functional ops: two threads, two streams, and CUDA graphs have nothing to do with each other."""

import threading
from collections.abc import Callable

import pytest
import torch
import warm_python
from functional_cases import CASES, Call, call_of
from samples import BF16, F32
from torch import Tensor

LENGTHS = [64, 4096, 20_000]  # of rows that half a warp, a block, and shared memory hold
each_case = pytest.mark.parametrize("name", CASES)


def at_once(*tasks: Callable[[], None]) -> None:
    """Run each in a thread of its own, all of which begin together; raise what one raises."""
    barrier, raised = threading.Barrier(len(tasks)), []

    def run(task: Callable[[], None]) -> None:
        try:
            barrier.wait(60)
            task()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


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

    def task(call: Call, want: list[Tensor]) -> Callable[[], None]:
        def run_often() -> None:
            stream = torch.cuda.Stream() if device == "cuda" else None
            with torch.cuda.stream(stream):
                found = [call.run() for _ in range(6)]
                if stream is not None:
                    stream.synchronize()
            for got in found:
                assert_same(got, want)

        return run_often

    if device == "cuda":
        torch.cuda.synchronize()
    at_once(*map(task, calls, wanted))


FIRST_USE = """
from functional_cases import CASES, call_of
from test_functional_streams import at_once
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
