"""rms_norm of deepspeed_ext and of torch: `python -m benchmarks.bench_rms_norm --device cpu`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Contender
from benchmarks.works import BF16, F32, Shapes, Work, main
from deepspeed_ext.ops import rms_norm

EPS = 1e-6
CACHE = 256 << 20  # bytes of copies of the operands that calls go through in turn


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def torch_residual(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, EPS), total


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


def forward(
    dtype: torch.dtype, residual: bool, calls: int
) -> Callable[[Shapes, str], list[Contender]]:
    def contenders(shapes: Shapes, device: str) -> list[Contender]:
        shape = shapes[0]
        weight = torch.randn(shape[-1], device=device).to(dtype)
        xs = [
            torch.randn(shape, device=device).to(dtype)
            for _ in range(copies_of(shape, dtype, device))
        ]
        added = [x.flip(0) for x in xs] if residual else []
        compiled = torch.compile(torch_residual if residual else torch_norm, dynamic=False)
        ways: dict[str, Callable[..., object]] = {
            "rms_norm": lambda x, *r: rms_norm(x, weight, **({"residual": r[0]} if r else {})),
            "torch, compiled": lambda x, *r: compiled(x, *r, weight),
            "torch": lambda x, *r: (torch_residual if r else torch_norm)(x, *r, weight),
            "copy": lambda x, *r: [x.clone(), *(each.clone() for each in r)],
        }
        operands = list(zip(xs, added, strict=True)) if residual else [(x,) for x in xs]

        def contender(name: str, way: Callable[..., object]) -> Contender:
            run = in_turn([lambda o=each: way(*o) for each in operands])

            def without_grad() -> object:
                with torch.no_grad():
                    return run()

            return Contender(name, captured(device, lambda: without_grad, calls))

        return [contender(name, way) for name, way in ways.items()]

    return contenders


def backward(
    dtype: torch.dtype, residual: bool, calls: int
) -> Callable[[Shapes, str], list[Contender]]:
    """Gradients of x and of weight, and of the sum if there is a residual."""

    def contenders(shapes: Shapes, device: str) -> list[Contender]:
        torch._functorch.config.donated_buffer = False  # it would forbid a second backward
        x = torch.randn(shapes[0], device=device).to(dtype).requires_grad_()
        added = x.detach().flip(0).requires_grad_() if residual else None
        weight = torch.randn(shapes[0][-1], device=device).to(dtype).requires_grad_()
        leaves = [leaf for leaf in (x, added, weight) if leaf is not None]
        grad = torch.randn_like(x)

        def contender(name: str, function: Callable[..., object]) -> Contender:
            def make() -> Callable[[], object]:
                results = function(*leaves)
                results = results if isinstance(results, tuple) else (results,)
                grads = [grad] * len(results)
                return lambda: torch.autograd.grad(results, leaves, grads, retain_graph=True)

            return Contender(name, captured(device, make, calls))

        def copy() -> object:
            return [
                *(source.clone() for source in sources[:1]),
                sources[-1].view(-1)[:extra].clone(),
            ]

        def ours(x: Tensor, *others: Tensor) -> object:
            *added, weight = others
            return rms_norm(x, weight, **({"residual": added[0]} if added else {}))

        rival = torch_residual if residual else torch_norm
        sources = [torch.randn_like(x.detach()) for _ in range(2 if residual else 1)]
        extra = x.numel() if residual else x.numel() // 2  # half a copy: 3 passes, or 4
        return [
            contender("rms_norm", ours),
            contender("torch, compiled", torch.compile(rival, dynamic=False)),
            contender("torch", rival),
            Contender("copy of as many bytes", captured(device, lambda: copy, calls)),
        ]

    return contenders


def works(rows: int, columns: int, dtype: torch.dtype, calls: int = 1) -> list[Work]:
    shape, size = [(rows, columns)], dtype.itemsize * calls
    name = f"{str(dtype).partition('.')[2]}, {rows:,} x {columns:,}" + f", {calls} times" * (
        calls > 1
    )
    return [
        Work(f"forward, {name}", shape, 2 * size, forward(dtype, False, calls)),
        Work(f"forward with residual, {name}", shape, 4 * size, forward(dtype, True, calls)),
        Work(f"backward, {name}", shape, 3 * size, backward(dtype, False, calls)),
        Work(f"backward with residual, {name}", shape, 4 * size, backward(dtype, True, calls)),
    ]


WORKS = {
    "cpu": [*works(4096, 4096, F32), *works(4096, 4096, BF16), *works(64, 4096, BF16)],
    "cuda": [
        *works(16384, 4096, BF16, calls=10),
        *works(16384, 4096, F32, calls=10),
        *works(65536, 1024, BF16, calls=10),
        *works(8192, 8192, BF16, calls=10),
        *works(4096, 16384, BF16, calls=10),
        *works(262144, 128, BF16, calls=10),
        *works(32, 4096, BF16, calls=50),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKS)
