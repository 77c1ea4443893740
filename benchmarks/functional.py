"""What the benchmarks of functional ops share: operands in turn, calls in a graph, gradients."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.harness import Contender

CACHE = 256 << 20  # bytes of copies of the operands that calls go through in turn


def in_turn(calls: list[Callable[[], object]]) -> Callable[[], object]:
    """Return a function that makes the next of these calls each time."""
    state = {"next": 0}

    def call() -> object:
        state["next"] = (state["next"] + 1) % len(calls)
        return calls[state["next"]]()

    return call


def copies_of(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> int:
    bytes_of_one = torch.Size(shape).numel() * dtype.itemsize
    return max(1, -(-CACHE // bytes_of_one)) if device == "cuda" else 1


def captured(
    device: str, make: Callable[[], Callable[[], object]], calls: int
) -> Callable[[], object]:
    """Return `calls` calls of what `make` makes, on CUDA as one graph, made on the stream of it."""
    if device == "cpu":
        return make()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):  # autograd goes back on the stream that it came on
        run = make()
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                run()
    torch.cuda.synchronize()

    def replay(_kept: object = run) -> None:
        graph.replay()

    return replay


def forward_contender(
    name: str,
    way: Callable[..., object],
    operands: Sequence[Sequence[Tensor]],
    device: str,
    calls: int,
) -> Contender:
    """Return one that calls `way` without gradients, with these operands in turn."""
    run = in_turn([lambda o=each: way(*o) for each in operands])

    def without_grad() -> object:
        with torch.no_grad():
            return run()

    return Contender(name, captured(device, lambda: without_grad, calls))


def backward_contender(
    name: str, way: Callable[..., object], leaves: Sequence[Tensor], device: str, calls: int
) -> Contender:
    """Return one that works out the gradients of all leaves."""

    def make() -> Callable[[], object]:
        torch._functorch.config.donated_buffer = False  # it would forbid a second backward
        results = way(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        grads = [torch.ones_like(result).normal_() for result in results]
        return lambda: torch.autograd.grad(results, leaves, grads, retain_graph=True)

    return Contender(name, captured(device, make, calls))


def copy_contender(passes: float, like: Tensor, device: str, calls: int) -> Contender:
    """Return one that copies as many bytes as so many passes over such a tensor move."""
    source = torch.ones(int(like.numel() * passes / 2), dtype=like.dtype, device=device)
    operands = [(source,)] if device == "cpu" else [(source,), (source.clone(),)]
    return forward_contender("copy of as many bytes", torch.clone, operands, device, calls)
