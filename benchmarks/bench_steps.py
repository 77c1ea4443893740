"""Optimizer steps, ours and torch's: `python -m benchmarks.bench_steps --device cpu`."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Contender
from benchmarks.workloads import BF16, BIG, F32, MANY, SMALL, Shapes, Workload, leaves, llama, main
from deepspeed_ext.optim import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdagrad,
    FusedAdam,
    FusedLion,
    FusedRMSprop,
    FusedSGD,
)

NUMBERS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
LOSS_SCALE = 1024.0
TORCH = "torch AdamW(fused=True)"


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


def lion(shapes: Shapes, device: str) -> list[Contender]:
    kind = FusedLion if device == "cuda" else DeepSpeedCPULion
    return [step_of(kind(leaves(shapes, F32, device), **NUMBERS)), lion_of_torch(shapes, device)]


def lion_of_torch(shapes: Shapes, device: str) -> Contender:
    """Torch has no Lion: as few passes as its operations on lists can make of one."""
    params = leaves(shapes, F32, device)
    grads = [param.grad for param in params]
    means = [torch.zeros_like(param) for param in params]
    updates = [torch.empty_like(param) for param in params]
    (beta1, beta2), lr, decay = (0.9, 0.999), NUMBERS["lr"], NUMBERS["weight_decay"]

    @torch.no_grad()
    def run() -> None:
        torch._foreach_copy_(updates, means)
        torch._foreach_lerp_(updates, grads, 1 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(params, 1 - lr * decay)
        torch._foreach_add_(params, updates, alpha=-lr)
        torch._foreach_lerp_(means, grads, 1 - beta2)

    return Contender("torch foreach operations", run)


def adagrad(shapes: Shapes, device: str) -> list[Contender]:
    kind = FusedAdagrad if device == "cuda" else DeepSpeedCPUAdagrad
    routes = ["foreach"] if device == "cuda" else ["fused", "foreach"]
    made = [step_of(kind(leaves(shapes, F32, device), lr=1e-3))]
    for route in routes:
        theirs = torch.optim.Adagrad(leaves(shapes, F32, device), lr=1e-3, **{route: True})
        made.append(step_of(theirs, f"torch Adagrad({route}=True)"))
    return made


def sgd(shapes: Shapes, device: str) -> list[Contender]:
    numbers: dict[str, Any] = NUMBERS | {"momentum": 0.9}
    made = [step_of(FusedSGD(leaves(shapes, F32, device), **numbers))]
    for route in ("fused", "foreach"):
        theirs = torch.optim.SGD(leaves(shapes, F32, device), **numbers, **{route: True})
        made.append(step_of(theirs, f"torch SGD({route}=True)"))
    return made


def rmsprop(shapes: Shapes, device: str) -> list[Contender]:
    """Torch has no fused form; compiled, it makes a kernel of each parameter's step."""
    numbers: dict[str, Any] = NUMBERS | {"momentum": 0.9}
    made = [step_of(FusedRMSprop(leaves(shapes, F32, device), **numbers))]
    for route in (True, False):
        theirs = torch.optim.RMSprop(leaves(shapes, F32, device), **numbers, foreach=route)
        made.append(step_of(theirs, f"torch RMSprop(foreach={route})"))
    theirs = torch.optim.RMSprop(leaves(shapes, F32, device), **numbers, foreach=True)
    return [*made, Contender("torch RMSprop, compiled", torch.compile(theirs.step))]


WORKLOADS = {
    "cpu": [
        Workload("fp32, 64 x 1,048,576", BIG, 28, fp32),
        Workload("fp32, 16,384 x 4,096", MANY, 28, fp32),
        Workload("fp32, 16,384 x 256", SMALL, 28, fp32),
        Workload("mixed: bf16 gradients, fp32 originals, bf16 weights", BIG, 28, mixed),
        Workload("all bf16, 64 x 1,048,576", BIG, 14, all_bf16),
        Workload("Lion, fp32, 64 x 1,048,576", BIG, 20, lion),
        Workload("Adagrad, fp32, 64 x 1,048,576", BIG, 20, adagrad),
        Workload("SGD with momentum, fp32, 64 x 1,048,576", BIG, 20, sgd),
        Workload("RMSprop with momentum, fp32, 64 x 1,048,576", BIG, 28, rmsprop),
    ],
    "cuda": [
        Workload("fp32, Llama shapes", llama(8, embedding=True), 28, fp32),
        Workload("fp32, 10,000 x 1,024", [(1024,)] * 10_000, 28, fp32),
        Workload("fp32, 10,000 x 1,024, CUDA graph", [(1024,)] * 10_000, 28, graphs),
        Workload("mixed, Llama shapes", llama(4, embedding=False), 28, mixed),
        Workload("all bf16, Llama shapes", llama(4, embedding=False), 14, all_bf16),
        Workload("Lion, fp32, Llama shapes", llama(4, embedding=False), 20, lion),
        Workload("Adagrad, fp32, Llama shapes", llama(4, embedding=False), 20, adagrad),
        Workload("SGD with momentum, fp32, Llama shapes", llama(4, embedding=False), 20, sgd),
        Workload(
            "RMSprop with momentum, fp32, Llama shapes", llama(4, embedding=False), 28, rmsprop
        ),
    ],
}


if __name__ == "__main__":
    main(__doc__, WORKLOADS)
