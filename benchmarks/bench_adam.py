"""Optimizer steps of deepspeed_ext and of torch: `python -m benchmarks.bench_adam --device cpu`."""

import argparse
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.harness import ROUNDS, Contender, Result, environment, measure, save, show
from benchmarks.stream import Stream
from deepspeed_ext.optim import DeepSpeedCPUAdam, FusedAdam

Shapes = Sequence[tuple[int, ...]]
F32, BF16 = torch.float32, torch.bfloat16
NUMBERS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
LOSS_SCALE = 1024.0
TORCH = "torch AdamW(fused=True)"


@dataclass(frozen=True)
class Work:
    """Steps over tensors of these shapes; `contenders` makes the ways to do it, ours first."""

    name: str
    shapes: Shapes
    bytes_each: int  # per element, that the best of passes reads and writes
    contenders: Callable[[Shapes, str], list[Contender]]


def leaves(shapes: Shapes, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Parameters with gradients, random and for nobody else."""
    made = [torch.randn(shape, dtype=dtype, device=device).requires_grad_() for shape in shapes]
    for leaf in made:
        leaf.grad = torch.randn_like(leaf)
    return made


def ours(params: list[Tensor], **options: Any) -> torch.optim.Optimizer:
    kind = FusedAdam if params[0].is_cuda else DeepSpeedCPUAdam
    return kind(params, **NUMBERS, **options)


def theirs(params: list[Tensor], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **NUMBERS, fused=True, **options)


def divide_gradients(optimizer: torch.optim.Optimizer, device: str) -> None:
    """Hand over the loss scale as GradScaler does."""
    scalars = {"grad_scale": LOSS_SCALE, "found_inf": 0.0}
    for name, value in scalars.items():
        setattr(optimizer, name, torch.tensor(value, device=device))


def step_of(optimizer: torch.optim.Optimizer, name: str = "") -> Contender:
    return Contender(name or f"{type(optimizer).__name__}.step()", optimizer.step)


def graph_of(optimizer: torch.optim.Optimizer, name: str) -> Contender:
    """The step as a replayed CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()  # makes the state
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()

    def replay(_kept: object = optimizer) -> None:  # a graph does not keep what it works on
        graph.replay()

    return Contender(f"{name}, as a CUDA graph", replay)


def fp32(shapes: Shapes, device: str) -> list[Contender]:
    return [
        step_of(ours(leaves(shapes, F32, device))),
        step_of(theirs(leaves(shapes, F32, device)), TORCH),
    ]


def all_bf16(shapes: Shapes, device: str) -> list[Contender]:
    return [
        step_of(ours(leaves(shapes, BF16, device), fp32_optimizer_states=False)),
        step_of(theirs(leaves(shapes, BF16, device)), TORCH),
    ]


def graphs(shapes: Shapes, device: str) -> list[Contender]:
    return [
        graph_of(ours(leaves(shapes, F32, device)), "FusedAdam"),
        step_of(theirs(leaves(shapes, F32, device)), TORCH),
        graph_of(theirs(leaves(shapes, F32, device), capturable=True), "torch AdamW"),
    ]


def mixed(shapes: Shapes, device: str) -> list[Contender]:
    """From bf16 gradients, scaled, to bf16 weights, through fp32 originals and moments."""
    optimizer = ours(leaves(shapes, BF16, device), master_weights=True)
    divide_gradients(optimizer, device)
    return [
        step_of(optimizer),
        mixed_of_torch(shapes, device, "torch, unscaled by the step", in_kernel=True),
        mixed_of_torch(shapes, device, "torch, unscaled by foreach_mul", in_kernel=False),
    ]


def mixed_of_torch(shapes: Shapes, device: str, name: str, in_kernel: bool) -> Contender:
    """Torch's passes at their best: into buffers that are there, a list at a time."""
    weights = [torch.randn(shape, dtype=BF16, device=device) for shape in shapes]
    grads = [torch.randn_like(weight) for weight in weights]
    originals = [weight.detach().float().requires_grad_() for weight in weights]
    wide_grads = [torch.empty_like(original) for original in originals]
    for original, grad in zip(originals, wide_grads, strict=True):
        original.grad = grad
    optimizer = theirs(originals)
    if in_kernel:
        divide_gradients(optimizer, device)

    @torch.no_grad()
    def run() -> None:
        torch._foreach_copy_(wide_grads, grads)
        if not in_kernel:
            torch._foreach_mul_(wide_grads, 1 / LOSS_SCALE)
        optimizer.step()
        torch._foreach_copy_(weights, originals)

    return Contender(name, run)


def llama(layers: int, embedding: bool) -> Shapes:
    """The shapes of an 8 B Llama with fewer layers."""
    width, kv, hidden, vocabulary = 4096, 1024, 14336, 128256
    attention = [(width, width), (kv, width), (kv, width), (width, width)]
    feed_forward = [(hidden, width), (hidden, width), (width, hidden)]
    layer = [*attention, *feed_forward, (width,), (width,)]
    return [(vocabulary, width)] * embedding + layer * layers


BIG, MANY, SMALL = [(1 << 20,)] * 64, [(4096,)] * 16384, [(256,)] * 16384
WORKS = {
    "cpu": [
        Work("fp32, 64 x 1,048,576", BIG, 28, fp32),
        Work("fp32, 16,384 x 4,096", MANY, 28, fp32),
        Work("fp32, 16,384 x 256", SMALL, 28, fp32),
        Work("mixed: bf16 gradients, fp32 originals, bf16 weights", BIG, 28, mixed),
        Work("all bf16, 64 x 1,048,576", BIG, 14, all_bf16),
    ],
    "cuda": [
        Work("fp32, Llama shapes", llama(8, embedding=True), 28, fp32),
        Work("fp32, 10,000 x 1,024", [(1024,)] * 10_000, 28, fp32),
        Work("fp32, 10,000 x 1,024, CUDA graph", [(1024,)] * 10_000, 28, graphs),
        Work("mixed, Llama shapes", llama(4, embedding=False), 28, mixed),
        Work("all bf16, Llama shapes", llama(4, embedding=False), 14, all_bf16),
    ],
}


def bench(work: Work, stream: Stream, threads: int, rounds: int, progress: "tqdm[None]") -> Result:
    """Measure one piece of work."""
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    elements = sum(torch.Size(shape).numel() for shape in work.shapes)
    bytes_moved = elements * work.bytes_each
    contenders = work.contenders(work.shapes, stream.device)
    contenders.append(stream.contender(bytes_moved, threads))
    timings = measure(contenders, stream.device, rounds, progress)
    return Result(work.name, threads, elements, bytes_moved, timings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=sorted(WORKS), default="cpu")
    parser.add_argument("--threads", default="1,2", help="thread counts on the CPU, such as 1,2")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="works whose name has this text in it")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    threads = [0] if options.device == "cuda" else [int(n) for n in options.threads.split(",")]
    works = [work for work in WORKS[options.device] if options.only in work.name]
    described = environment(options.device)
    print("\n".join(f"{name:14} {text}" for name, text in described.items()), flush=True)
    stream, results = Stream(options.device), []
    with tqdm(total=len(works) * len(threads) * options.rounds, desc="rounds") as progress:
        for work in works:
            for count in threads:
                results.append(bench(work, stream, count, options.rounds, progress))
                show(results[-1])
                gc.collect()  # the tensors of this work, before those of the next
                torch.cuda.empty_cache()
    if options.json:
        save(options.json, described, results)


if __name__ == "__main__":
    main()
