"""What the benchmarks of functional ops share: operands in turn, calls in a graph, gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.harness import Contender
from benchmarks.rivals import rivals_of
from benchmarks.workloads import Shapes, Workload

CACHE = 256 << 20  # bytes of copies of the operands that calls go through in turn

Shape = tuple[int, ...]
Ways = Callable[[], Mapping[str, Callable[..., object]]]  # to do the same, ours first


@dataclass(frozen=True)
class Form:
    """One form of an op.

    Args:
        name: of the form; empty for the usual one.
        operands: makes random ones, given the shape of the result, a dtype and a device.
        forward: how often the best of passes goes over a tensor of that shape, in all.
        backward: the same for the gradients of all operands.
        op: the one that other libraries have, too; see rivals.py.
    """

    name: str
    operands: Callable[[Shape, torch.dtype, str], list[Tensor]]
    forward: float
    backward: float
    op: str = ""


def workloads(
    ways: Ways, forms: Sequence[Form], shape: Shape, dtype: torch.dtype, calls: int = 1
) -> list[Workload]:
    """Return the work of all forms, forward and backward.

    Args:
        ways: to do it.
        forms: of the op.
        shape: of the result.
        dtype: of operands and result.
        calls: how many are timed together, on CUDA.
    """
    what = f"{str(dtype).partition('.')[2]}, {' x '.join(f'{n:,}' for n in shape)}"
    what += f", {calls} times" * (calls > 1)
    made = []
    for direction, make in (("forward", _forward), ("backward", _backward)):
        for form in forms:
            passes = getattr(form, direction)
            contenders = partial(make, ways, form, dtype=dtype, calls=calls)
            name = f"{direction}{form.name and ' '}{form.name}, {what}"
            made.append(Workload(name, [shape], int(passes * dtype.itemsize * calls), contenders))
    return made


def _forward(
    ways: Ways, form: Form, shapes: Shapes, device: str, dtype: torch.dtype, calls: int
) -> list[Contender]:
    (shape,) = shapes
    operands = [form.operands(shape, dtype, device) for _ in range(copies_of(shape, dtype, device))]
    made = [forward_contender(name, way, operands, device, calls) for name, way in ways().items()]
    made += _rivals(form.op, device, lambda n, w: forward_contender(n, w, operands, device, calls))
    return [*made, copy_contender(form.forward, shape, dtype, device, calls)]


def _backward(
    ways: Ways, form: Form, shapes: Shapes, device: str, dtype: torch.dtype, calls: int
) -> list[Contender]:
    (shape,) = shapes
    leaves = [operand.requires_grad_() for operand in form.operands(shape, dtype, device)]
    made = [backward_contender(name, way, leaves, device, calls) for name, way in ways().items()]
    made += _rivals(form.op, device, lambda n, w: backward_contender(n, w, leaves, device, calls))
    return [*made, copy_contender(form.backward, shape, dtype, device, calls)]


def _rivals(
    op: str, device: str, contender: Callable[[str, Callable[..., object]], Contender]
) -> Iterator[Contender]:
    """Yield those of other libraries that are installed, and can do it."""
    for name, make in rivals_of(op).items() if device == "cuda" else ():
        try:
            yield contender(name, make())
        except Exception as error:
            tqdm.write(f"{name}: left out, {type(error).__name__}: {str(error)[:100]}")


def in_turn(calls: list[Callable[[], object]]) -> Callable[[], object]:
    """Return a function that makes the next of these calls each time."""
    state = {"next": 0}

    def call() -> object:
        state["next"] = (state["next"] + 1) % len(calls)
        return calls[state["next"]]()

    return call


def copies_of(shape: Shape, dtype: torch.dtype, device: str) -> int:
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


def copy_contender(
    passes: float, shape: Shape, dtype: torch.dtype, device: str, calls: int
) -> Contender:
    """Return one that copies as many bytes as so many passes over such a tensor move."""
    source = torch.ones(int(torch.Size(shape).numel() * passes / 2), dtype=dtype, device=device)
    operands = [(source,)] if device == "cpu" else [(source,), (source.clone(),)]
    copy = forward_contender("copy of as many bytes", torch.clone, operands, device, calls)
    return replace(copy, is_ceiling=True)
