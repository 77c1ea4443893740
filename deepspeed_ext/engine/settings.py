"""What an engine was made with, under the names of DeepSpeed's."""

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from deepspeed_ext import zero
from deepspeed_ext.config import BatchSizes, Config
from deepspeed_ext.engine.data import loader_of
from deepspeed_ext.zero.agreement import check_agreement


class Settings(nn.Module):
    """The part of an engine that tells what its config says."""

    _config: Config
    _sizes: BatchSizes
    _mesh: DeviceMesh
    _accumulation: zero.Accumulation

    def train_batch_size(self) -> int:
        """Return the samples of all processes in a step."""
        return self._sizes.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a process in a micro-step."""
        return self._sizes.micro

    def managed_gradient_accumulation(self) -> bool:
        """Tell whether steps are counted by micro-steps; else each engine.step ends one."""
        return self._config.managed_gradient_accumulation

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-steps of a step."""
        return self._sizes.steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change how many micro-steps a step has, between two steps; all processes call it.

        Raises:
            ValueError: it is no multiple of what a micro-step has in all processes, or others have
                another one.
            RuntimeError: a step has begun.
        """
        if self._accumulation.backwards:
            raise RuntimeError(
                "engine.set_train_batch_size: called between micro-steps, expected after a step"
            )
        sizes = self._sizes
        in_micro_step = sizes.train // sizes.steps
        name, given = "engine.set_train_batch_size", train_batch_size
        if not isinstance(given, int) or given < 1 or given % in_micro_step:
            raise ValueError(
                f"{name}: train_batch_size is {given!r}, expected a multiple of {in_micro_step},"
                " the samples of a micro-step in all processes"
            )
        check_agreement(name, [f"train_batch_size {given}"], self._mesh)
        steps = train_batch_size // in_micro_step
        self._sizes = sizes._replace(train=train_batch_size, steps=steps)

    def steps_per_print(self) -> float:
        """Return how many steps there are from one that is logged to the next; inf: none is."""
        return self._config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Tell whether the phases of steps that are logged are timed."""
        return self._config.wall_clock_breakdown

    def fp16_enabled(self) -> bool:
        """Tell whether weights are used in float16."""
        return self._config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Tell whether weights are used in bfloat16."""
        return self._config.bf16.enabled

    def zero_optimization_stage(self) -> int:
        """Return the stage, 0 to 3."""
        return self._config.zero_optimization.stage

    @property
    def global_rank(self) -> int:
        """The number of this process among all."""
        return dist.get_rank()

    @property
    def local_rank(self) -> int:
        """The number of this process on its host."""
        return int(os.environ.get("LOCAL_RANK", 0))

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return dist.get_world_size()

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int = 0,
    ) -> Any:
        """Return a loader that gives each process its own part of a dataset; see `loader_of`."""
        size = batch_size or self._sizes.micro
        drop_last = self._config.dataloader_drop_last
        return loader_of(dataset, size, self._mesh, collate_fn, num_local_io_workers, drop_last)
