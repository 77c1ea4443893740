"""Who trains the model of the sharding benchmark: ours, plain torch, DeepSpeed."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

import deepspeed_ext
from benchmarks.offload_model import Block, Decoder, Size, make_data
from deepspeed_ext import zero
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim import DeepSpeedCPUAdam, FusedAdam

OURS, ENGINE = "deepspeed_ext.zero", "deepspeed_ext.initialize"
TORCH = "plain FSDP2, torch's AdamW (fused)"
DEEPSPEED = "DeepSpeed, torch's AdamW (fused)"
DEEPSPEED_OFFLOAD = "DeepSpeed ZeRO-Offload"
MAX_NORM = 1.0
MASTERS: dict[str, Any] = {"master": "float32"}
OPTIONS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}


@dataclass(frozen=True)
class ZeroWorkload:
    """A way to train.

    Args:
        stage: 1 to 3.
        micro_steps: backwards in a step.
        clips: to a global norm.
        offloads: the state of the optimizer, ours; all shards, torch's.
        shards: dtype of the weights that processes keep, float32 or bfloat16. Those of float32
            are used in bfloat16.
        compact: our state is in 8 bits, and in 16 more for each bfloat16 weight; torch's in the
            dtype of shards, as ours is otherwise, with float32 master weights.
    """

    stage: int
    micro_steps: int = 1
    clips: bool = False
    offloads: bool = False
    shards: torch.dtype = torch.float32
    compact: bool = False

    @property
    def name(self) -> str:
        """As the results have it."""
        ending = ", clips" * self.clips
        if self.offloads:
            ending += f", state in host memory, {str(self.shards).removeprefix('torch.')} shards"
            ending += ", compact state" * self.compact
        ending += f", {self.micro_steps} micro-steps" * (self.micro_steps > 1)
        return f"a step of stage {self.stage}{ending}"

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """In which weights are used and gradients added up, for zero.shard."""
        if self.shards != torch.float32:
            return {}
        return {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@dataclass(frozen=True)
class Made:
    """A model, its optimizer, and what takes a step.

    Args:
        backward: is given the loss.
        micro_steps: goes through them; there is one backward in each.
        step: steps once gradients are there, and drops them.
    """

    model: nn.Module
    optimizer: Any
    device: str
    step: Callable[[], object]
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward
    micro_steps: Callable[[], Iterable[object]] = partial(range, 1)


def ours(work: ZeroWorkload, size: Size, device: str) -> Made:
    """Return our training."""
    with zero.Init(seed=0) as init:
        model = Decoder(size).to(work.shards)
    zero.shard(model, work.stage, mesh=mesh_on(device), blocks=[Block], **work.dtypes)
    init.fill(model)
    optimizer: Any
    if work.offloads:
        form = {"state_dtype": torch.uint8, "master": "remainder"} if work.compact else MASTERS
        # What a machine says that it has may be less than it gives when that is wanted.
        budget = 36 * sum(p.numel() for p in model.parameters()) // dist.get_world_size()
        optimizer = OffloadOptimizer(
            model.parameters(), model=model, memory_budget=budget + (1 << 30), **form, **OPTIONS
        )
    else:
        kind = FusedAdam if device == "cuda" else DeepSpeedCPUAdam
        optimizer = kind(model.parameters(), **OPTIONS)
    step = partial(optimizer.clip_and_step, MAX_NORM) if work.clips else optimizer.step

    def finish() -> None:
        step()
        optimizer.zero_grad()

    passes = partial(zero.accumulate, model, work.micro_steps)
    return Made(model, optimizer, device, finish, micro_steps=passes)


def torchs(work: ZeroWorkload, size: Size, device: str) -> Made:
    """Return the same in plain torch."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(size).to(work.shards)
    if work.offloads:
        model.cpu()
    policy = MixedPrecisionPolicy(**work.dtypes)
    pins = CPUOffloadPolicy(pin_memory=device == "cuda")
    offload = pins if work.offloads else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": mesh_on(device),
        "mp_policy": policy,
        "offload_policy": offload,
    }
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=work.stage == 3, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)

    def finish() -> None:
        if work.clips:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    def passes() -> Iterator[int]:
        root: Any = model
        for i in range(work.micro_steps):
            is_last = i == work.micro_steps - 1
            root.set_requires_gradient_sync(is_last or work.stage > 1)
            root.set_reshard_after_backward(is_last or work.stage == 3)
            yield i

    return Made(model, optimizer, device, finish, micro_steps=passes)


def deepspeeds(work: ZeroWorkload, size: Size, device: str) -> Made:
    """Return the same in DeepSpeed: bfloat16 weights, float32 master weights, sums in bfloat16."""
    import deepspeed

    optimizer: Callable[..., torch.optim.Optimizer]
    optimizer = partial(torch.optim.AdamW, fused=True, **OPTIONS)
    options: dict[str, object] = {"overlap_comm": True}
    if work.offloads:
        from deepspeed.ops.adam import DeepSpeedCPUAdam as TheirCPUAdam

        optimizer = partial(TheirCPUAdam, **OPTIONS)
        options["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return _initialized(deepspeed, work, size, device, optimizer, **options)


def engines(work: ZeroWorkload, size: Size, device: str) -> Made:
    """Return our training as `initialize` makes it from a config."""
    kind = FusedAdam if device == "cuda" else DeepSpeedCPUAdam
    return _initialized(deepspeed_ext, work, size, device, partial(kind, **OPTIONS))


def _initialized(
    library: Any,
    work: ZeroWorkload,
    size: Size,
    device: str,
    optimizer: Callable[..., torch.optim.Optimizer],
    **zero_options: object,
) -> Made:
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(size)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": size.batch,
        "bf16": {"enabled": True},
        "gradient_clipping": MAX_NORM * work.clips,
        "zero_optimization": {"stage": work.stage, **zero_options},
    }
    engine, *_ = library.initialize(
        model=model, optimizer=optimizer(model.parameters()), config=config
    )
    return Made(engine, engine.optimizer, device, engine.step, engine.backward)


Contender = Callable[[ZeroWorkload, Size, str], Made]
CONTENDERS: dict[str, Contender] = {OURS: ours, TORCH: torchs}


def mesh_on(device: str) -> DeviceMesh:
    """Return a mesh of all processes."""
    return init_device_mesh(device, (dist.get_world_size(),))


class Trained:
    """One of several models that take turns."""

    def __init__(self, made: Made, size: Size) -> None:
        self.model, self.optimizer, self._device = made.model, made.optimizer, made.device
        self._made = made
        self._data = make_data(size, made.device)
        self.seconds: list[float] = []  # of a step, each time
        self.peak = 0  # bytes that came on top in a step

    def steps(self, count: int) -> None:
        """Take some steps in a row, and note how long each took and what memory came on top."""
        self._wait()
        before = allocated(self._device)
        begin = time.perf_counter()
        for _ in range(count):
            for _ in self._made.micro_steps():
                self._made.backward(self.model(*self._data))
            self._made.step()
        self._wait()
        self.seconds.append((time.perf_counter() - begin) / count)
        self.peak = max(self.peak, peak(self._device) - before)

    def _wait(self) -> None:
        if isinstance(self.optimizer, OffloadOptimizer):
            self.optimizer.synchronize()  # its step goes on beside what comes after it
        synchronize(self._device)


def synchronize(device: str) -> None:
    """Wait for the device, and for all processes."""
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def allocated(device: str) -> int:
    """Return how many bytes tensors have on the device; the peak is counted from here on."""
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak(device: str) -> int:
    """Return the most that `allocated` would have returned since it was called."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def drop_garbage(device: str) -> None:
    """Give memory back that nobody refers to any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
