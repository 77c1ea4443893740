"""Who takes the optimizer's step of the offloading benchmark: ours, ours on the GPU, others."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from deepspeed_ext import zero
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim import DeepSpeedCPUAdam, FusedAdam

NUMBERS: dict[str, Any] = {"lr": 1e-5, "weight_decay": 0.01}
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"master": "float32"},
    "compact": {"state_dtype": torch.uint8, "master": "remainder"},
}
ALONE = "forward and backward alone"
TORCHAO = "torchao CPUOffloadOptimizer"
DEEPSPEED = "DeepSpeed ZeRO-Offload"
ZERO_3 = "DeepSpeed ZeRO-3, weights in host memory"
FREED = "gradients freed"
STREAMED = "weights streamed"
FROM_DISK = "weights streamed from NVMe"
ALL_ON_DISK = "weights streamed from NVMe, state there too"
NEVER, ALWAYS = "clipping never bites", "clipping always bites"
ACCUMULATED = "8 times forward and backward"
_NORMS = {NEVER: 1e9, ALWAYS: 1e-4}


@dataclass(frozen=True)
class Phase:
    """One way to use an optimizer.

    Attributes:
        max_norm: to clip to, None: no clipping.
        accumulate: how many times forward and backward make one step.
    """

    max_norm: float | None = None
    accumulate: int = 1


@dataclass(frozen=True)
class Session:
    """An optimizer and what is measured of it, by name.

    Attributes:
        make: makes it for a model, with wants_folder also given a folder on a disk; what it returns
            may have an `engine` to call for the model.
        phases: by the name in a row.
        why_not: says why it cannot be had on a device, or nothing.
        own_model: whether it changes the model so that nobody else can use it any more.
        dtype: of that model.
        wants_folder: whether something is to rest on a disk.
        wants_group: whether there is to be a process group.
    """

    make: Callable[..., Any]
    phases: dict[str, Phase]
    why_not: Callable[[str], str] = lambda device: ""
    own_model: bool = False
    dtype: torch.dtype = torch.bfloat16
    wants_folder: bool = False
    wants_group: bool = False


def ours(form: str, use: str = "") -> str:
    """Return the name of our offloaded optimizer in a row."""
    return f"OffloadOptimizer, {form} state{use and ', '}{use}"


def on_gpu(form: str, use: str = "") -> str:
    """Return the name of the optimizer that offloads nothing."""
    return f"FusedAdam, {form} state on the GPU{use and ', '}{use}"


def fsdp(form: str) -> str:
    """Return the name of torch's offloading in a row."""
    return f"FSDP2 CPUOffloadPolicy, {form}"


def _offloaded(form: str) -> Session:
    phases = {ours(form): Phase()}
    phases |= {ours(form, use): Phase(max_norm=norm) for use, norm in _NORMS.items()}
    phases[ours(form, ACCUMULATED)] = Phase(accumulate=8)
    return Session(
        lambda model: OffloadOptimizer(model.parameters(), model=model, **NUMBERS, **FORMATS[form]),
        phases,
    )


def _freeing(form: str) -> Session:
    return Session(
        lambda model: OffloadOptimizer(
            model.parameters(), model=model, free_grads=True, **NUMBERS, **FORMATS[form]
        ),
        {ours(form, FREED): Phase()},
    )


def _streamed(form: str) -> Session:
    def make(model: nn.Module) -> OffloadOptimizer:
        zero.stream(model, to=next(model.parameters()).device)
        return OffloadOptimizer(
            model.parameters(), model=model, free_grads=True, **NUMBERS, **FORMATS[form]
        )

    return Session(make, {ours(form, STREAMED): Phase()}, own_model=True)


def _on_disk(form: str, use: str) -> Session:
    def make(model: nn.Module, folder: str) -> OffloadOptimizer:
        where = {"device": "nvme", "nvme_path": folder}
        zero.stream(model, to=next(model.parameters()).device, **where)
        options: dict[str, Any] = {**NUMBERS, **FORMATS[form]}
        if use == ALL_ON_DISK:
            options |= {**where, "nvme_fraction": 1.0}
        return OffloadOptimizer(model.parameters(), model=model, free_grads=True, **options)

    return Session(make, {ours(form, use): Phase()}, own_model=True, wants_folder=True)


def _on_device(form: str) -> Session:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        kind = FusedAdam if next(model.parameters()).is_cuda else DeepSpeedCPUAdam
        return kind(model.parameters(), **NUMBERS, **FORMATS[form])

    uses = {on_gpu(form): Phase(), on_gpu(form, ACCUMULATED): Phase(accumulate=8)}
    return Session(make, uses)


def _torchao() -> Session:
    def make(model: nn.Module) -> Any:
        from torchao.optim import CPUOffloadOptimizer

        return CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **NUMBERS)

    def why_not(device: str) -> str:
        if find_spec("torchao") is None:
            return "torchao is not installed"
        return "" if device == "cuda" else "torchao offloads from a GPU only"

    return Session(make, {TORCHAO: Phase()}, why_not, own_model=True)


class _Engine:
    """A DeepSpeed engine in the form of an optimizer."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def step(self) -> None:
        """Step, and drop the gradients."""
        self.engine.step()

    def zero_grad(self) -> None:
        """Do nothing: step() has."""


def _deepspeed(name: str, **options: Any) -> Session:
    """Return DeepSpeed's way, with these options of zero_optimization."""

    def make(model: nn.Module) -> _Engine:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,  # it only counts samples by that
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": NUMBERS},
            "zero_optimization": {
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "overlap_comm": True,
                "contiguous_gradients": True,
                **options,
            },
        }
        os.environ.setdefault("LOCAL_RANK", "0")
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        return _Engine(engine)

    def why_not(device: str) -> str:
        if find_spec("deepspeed") is None:
            return "deepspeed is not installed"
        return "" if device == "cuda" else "measured on a GPU only"

    return Session(make, {name: Phase()}, why_not, own_model=True, wants_group=True)


def _fsdp(form: str, dtype: torch.dtype) -> Session:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        kind = next(model.parameters()).device.type
        options: dict[str, Any] = {
            "mesh": init_device_mesh(kind, (1,)),
            "offload_policy": CPUOffloadPolicy(pin_memory=kind == "cuda"),
        }
        if dtype == torch.float32:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        return torch.optim.AdamW(model.parameters(), fused=True, **NUMBERS)

    return Session(make, {fsdp(form): Phase()}, own_model=True, dtype=dtype, wants_group=True)


SESSIONS = [
    *map(_on_device, FORMATS),
    *map(_offloaded, FORMATS),
    *map(_freeing, FORMATS),
    *map(_streamed, FORMATS),
    *(_on_disk(form, use) for form in FORMATS for use in (FROM_DISK, ALL_ON_DISK)),
    _torchao(),
    _fsdp("bf16", torch.bfloat16),
    _fsdp("fp32", torch.float32),
    _deepspeed(DEEPSPEED, stage=2),
    _deepspeed(ZERO_3, stage=3, offload_param={"device": "cpu", "pin_memory": True}),
]


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Make the process group that FSDP2 and DeepSpeed want, of this process."""
    store = torch.distributed.HashStore()
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def drop_garbage() -> None:
    """Give memory back that nobody refers to any more."""
    gc.collect()
    torch.cuda.empty_cache()
