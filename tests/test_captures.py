"""Work of this package while a CUDA graph is captured: what is no part of it leaves it as it is."""

import ctypes
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_ext import captures, offload, zero
from deepspeed_ext.captures import beside_captures
from deepspeed_ext.io import PinnedBuffer, PinnedPool
from deepspeed_ext.offload.activations.host import CopyLane, HostBytes
from deepspeed_ext.threads import AwaitedThread

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=[pytest.param("cuda", marks=NEEDS_GPU)])
def cuda(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def leaving() -> object:
    lane = CopyLane(torch.device("cuda"))
    return lane, HostBytes(lane, torch.ones(64 << 20, dtype=torch.uint8, device="cuda"))


def coming_back() -> object:
    lane, kept = leaving()  # type: ignore[misc]
    return lane, kept, kept.fetch()


def pinned() -> object:
    pool = PinnedPool()
    return pool, pool.take(1 << 24)


def saved_tensors() -> object:
    x = torch.ones(16 << 20, device="cuda", requires_grad=True)
    with offload.saved_tensors():
        return x.exp().exp()


def streamed_model() -> object:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512)) for _ in range(4)])
    streamed = zero.stream(model, to="cuda", blocks=["0", "1", "2", "3"])
    return model, streamed, model(torch.ones(8, 512, device="cuda"))


def optimizer() -> object:
    layer = nn.Linear(4096, 4096, device="cuda")
    made = offload.OffloadOptimizer(layer.parameters(), lr=1e-3, model=layer)
    layer(torch.ones(8, 4096, device="cuda")).sum().backward()
    made.step()  # goes on in its thread
    return layer, made


KINDS: list[Callable[[], object]] = [
    *(leaving, coming_back, pinned, saved_tensors, streamed_model, optimizer)
]


def collect() -> None:
    gc.collect()


def collect_in_another_thread() -> None:
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()


def collect_on_another_stream() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        gc.collect()


WAYS: list[Callable[[], None]] = [collect, collect_in_another_thread, collect_on_another_stream]


@pytest.mark.usefixtures("garbage_stays")
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("on_same_stream", [False, True], ids=["apart", "same stream"])
def test_garbage(
    make: Callable[[], object], way: Callable[[], None], on_same_stream: bool, cuda: str
) -> None:
    """It is collected in the middle of a capture, also of the stream that it was used on."""
    x, graph, stream = torch.zeros(1024, device=cuda), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream if on_same_stream else torch.cuda.current_stream()):
        garbage = [make()]
        garbage.append(garbage)
        del garbage
    with torch.cuda.graph(graph, stream=stream):
        x += 1
        way()
        x += 1
    graph.replay()
    torch.cuda.synchronize()
    assert x.eq(2).all()


def test_memory_that_is_pinned_meanwhile(cuda: str) -> None:
    x, graph = torch.zeros(1024, device=cuda), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        buffer = PinnedBuffer(1 << 24)
        x += 1
    graph.replay()
    torch.cuda.synchronize()
    assert buffer.tensor().is_pinned() and x.eq(2).all()


def test_threads(cuda: str) -> None:
    x, graph, asked = torch.zeros(1024, device=cuda), torch.cuda.CUDAGraph(), threading.Event()
    event, errors = torch.cuda.Event(), []
    event.record()

    def ask() -> None:
        try:
            event.query()
            event.synchronize()
        except BaseException as error:
            errors.append(error)
        asked.set()

    with torch.cuda.graph(graph):
        x += 1
        AwaitedThread(ask, "asks").start()
        assert asked.wait(60)
        x += 1
    graph.replay()
    torch.cuda.synchronize()
    assert not errors and x.eq(2).all()


class Driver:
    """Has the mode of a thread, as libcuda does."""

    def __init__(self, refuses: bool = False) -> None:
        self.mode, self.refuses = 0, refuses

    def __call__(self, mode: Any) -> int:
        if self.refuses:
            return 3  # CUDA_ERROR_NOT_INITIALIZED
        mode._obj.value, self.mode = self.mode, mode._obj.value
        return 0


@pytest.mark.parametrize("refuses", [False, True])
def test_the_mode_is_what_it_was(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(refuses)
    monkeypatch.setattr(captures, "_exchange", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    relaxed = 0 if refuses else 2
    with beside_captures():
        assert driver.mode == relaxed
        with pytest.raises(ZeroDivisionError), beside_captures():
            assert driver.mode == relaxed
            raise ZeroDivisionError
        assert driver.mode == relaxed
    assert driver.mode == 0


def test_a_thread_that_is_older_than_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of an optimizer, whose model goes to a GPU after it was made."""
    threads: list[str] = []

    def exchange(_: Any) -> int:
        threads.append(threading.current_thread().name)
        return 0

    monkeypatch.setattr(captures, "_exchange", lambda: exchange)
    weight = nn.Parameter(torch.ones(64))
    made = offload.OffloadOptimizer([weight], lr=1e-3)
    for _ in range(2):
        weight.sum().backward()
        made.step()
        made.synchronize()
        if not threads:
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.undo()
    made.close()
    assert "deepspeed_ext-offload" in threads


def test_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded then."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(captures, "_exchange", lambda: pytest.fail("is asked for"))
    with beside_captures():
        pass


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert captures._exchange.__wrapped__() is None
