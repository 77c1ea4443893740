"""The engine: counts micro-steps, scales, clips, steps, saves; all work is done by other parts."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from deepspeed_ext import zero
from deepspeed_ext.config import BatchSizes, Config
from deepspeed_ext.engine.data import loader_of
from deepspeed_ext.engine.resuming import counted
from deepspeed_ext.engine.stepping import Stepping
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.zero.counters import COUNTERS, told
from deepspeed_ext.zero.loading import checkpoint_of

_log = logging.getLogger("deepspeed_ext")


class Engine(nn.Module):
    """A sharded model with its optimizer and schedule, under the names of DeepSpeed's engine.

    `initialize` makes it. What it has not is looked for in the model. It is a context manager,
    whose end is `destroy`.

    Attributes:
        module: the model.
        optimizer: that steps its shards, or None.
        lr_scheduler: of the optimizer, or None.
        training_dataloader: of initialize's training_data, or None.
        config: the config as a dict.
        device: where weights are.
        global_steps: steps that were taken or skipped.
        skipped_steps: those for which a gradient was inf or NaN.
        global_samples: samples of all processes in these steps.
        micro_steps: calls of `step`.

    See: `initialize`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: Any,
        config: Config,
        sizes: BatchSizes,
        mesh: DeviceMesh,
        owns_group: bool,
    ) -> None:
        super().__init__()
        self.module = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader: Any = None
        self.config = config.as_dict()
        on_cuda = mesh.device_type == "cuda"
        self.device = torch.device(mesh.device_type, torch.cuda.current_device() if on_cuda else 0)
        self.global_steps = self.skipped_steps = self.global_samples = self.micro_steps = 0
        self._config, self._sizes, self._mesh = config, sizes, mesh
        self._owns_group = owns_group
        self._is_last: bool | None = None  # of micro-steps, said by hand
        self._is_syncing = True  # not inside of no_sync
        self._was_applied = False
        self._ended = 0  # micro-steps of the step that is under way
        self._scaled = 0  # backwards of it that this engine has done itself
        self._accumulation = zero.Accumulation(model)
        self._stepping = None
        if optimizer is not None:
            self._stepping = Stepping(optimizer, config.gradient_clipping, scaler_of(config))
            if not config.gradient_clipping and not config.is_set("gradient_clipping"):
                _log.info(
                    "initialize: gradients are not clipped; DeepSpeed since 0.19 clips them to 1"
                    " where gradient_clipping is not set"
                )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    # A step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; with gradients on, a micro-step begins."""
        if torch.is_grad_enabled() and self._stepping is not None:
            self._accumulation.begin(self.is_gradient_accumulation_boundary())
        return self.module(*args, **kwargs)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Do the backward of a micro-step; `loss.backward()` does too, but divides nothing.

        Args:
            loss: one number, of a forward of this engine.
            retain_graph: of torch's backward.
            scale_wrt_gas: divide it by the number of micro-steps.

        Returns:
            The loss, divided.

        Raises:
            RuntimeError: there is no optimizer.
            ValueError: loss is not one number that has a gradient.
        """
        stepping = self._with_optimizer("backward")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(
                f"engine.backward: loss is {what}, expected one number with a gradient"
            )
        # Said anew: set_gradient_accumulation_boundary may have come after the forward.
        self._accumulation.begin(self.is_gradient_accumulation_boundary())
        if scale_wrt_gas:
            loss = loss / self._sizes.steps
        scaled = loss if stepping.scaler is None else stepping.scaler.scale(loss)
        scaled.backward(retain_graph=retain_graph)
        self._scaled += 1
        return loss

    def step(self) -> None:
        """End a micro-step; after the last one clip, step and drop gradients, step the schedule.

        Raises:
            RuntimeError: there is no optimizer, or no backward since the last call; or, with fp16,
                a backward was not scaled: gradients are dropped then.
        """
        stepping = self._with_optimizer("step")
        backwards = self._accumulation.backwards
        if backwards <= self._ended:
            raise RuntimeError(
                "engine.step: there was no backward since the last step, expected"
                " engine.backward(loss) before"
            )
        is_last = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._was_applied = False
        if not is_last:
            self._ended = backwards
            return
        scaled, self._ended, self._scaled = self._scaled, 0, 0
        self._accumulation.end()
        if stepping.scaler is not None and scaled < backwards:
            self.zero_grad()
            raise RuntimeError(
                f"engine.step: {backwards - scaled} of {backwards} backwards are of a loss that was"
                " not scaled, expected engine.backward(loss) with fp16; the gradients are dropped"
            )
        self._was_applied = stepping.step()
        self.global_steps += 1
        self.global_samples += self._sizes.train
        self.skipped_steps += not self._was_applied
        if self._was_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step()
        if self.global_steps % self._config.steps_per_print == 0 and dist.get_rank() == 0:
            self._report(stepping)

    def _report(self, stepping: Stepping) -> None:
        """Log what the last step was."""
        rates = ", ".join(f"{rate:.4g}" for rate in self.get_lr())
        text = f"step {self.global_steps}: lr {rates}, norm {self.get_global_grad_norm():.4g}"
        if stepping.scaler is not None:
            text += f", scale {stepping.scaler.get_scale():g}, skipped {self.skipped_steps}"
        _log.info(text)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, those of earlier micro-steps too."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)
        self.module.zero_grad(set_to_none)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell whether the micro-step that is under way is the last one of a step."""
        if not self._is_syncing:
            return False
        if self._is_last is not None:
            return self._is_last
        return self._ended + 1 >= self._sizes.steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say by hand, from now on, which micro-step is the last one; before its backward."""
        self._is_last = is_boundary
        if self._accumulation.is_open:
            self._accumulation.begin(self.is_gradient_accumulation_boundary())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards inside be of micro-steps that are not the last one."""
        self._is_syncing = False
        try:
            yield
        finally:
            self._is_syncing = True

    def was_step_applied(self) -> bool:
        """Tell whether the last call of `step` has stepped the optimizer."""
        return self._was_applied

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradients before clipping; waits for the device."""
        norm = None if self._stepping is None else self._stepping.norm
        return None if norm is None else float(norm)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        if self.optimizer is None:
            return []
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _with_optimizer(self, what: str) -> Stepping:
        if self._stepping is None:
            raise RuntimeError(
                f"engine.{what}: the engine has no optimizer, expected one in initialize, or in the"
                " config"
            )
        return self._stepping

    # What it was made with

    def train_batch_size(self) -> int:
        """Return the samples of all processes in a step."""
        return self._sizes.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a process in a micro-step."""
        return self._sizes.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-steps of a step."""
        return self._sizes.steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change how many micro-steps a step has, between two steps.

        Raises:
            ValueError: it is no multiple of what a micro-step has in all processes.
            RuntimeError: a step has begun.
        """
        if self._accumulation.backwards:
            raise RuntimeError(
                "engine.set_train_batch_size: called between micro-steps, expected after a step"
            )
        sizes = self._sizes
        in_micro_step = sizes.train // sizes.steps
        if train_batch_size < 1 or train_batch_size % in_micro_step:
            raise ValueError(
                f"engine.set_train_batch_size: train_batch_size is {train_batch_size}, expected a"
                f" multiple of {in_micro_step}, the samples of a micro-step in all processes"
            )
        steps = train_batch_size // in_micro_step
        self._sizes = sizes._replace(train=train_batch_size, steps=steps)

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
        return loader_of(dataset, size, self._mesh, collate_fn, num_local_io_workers)

    # Checkpoints

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
    ) -> None:
        """Save all by `zero.save`, whose text says what holds; all processes call it.

        Args:
            save_dir: that all processes see.
            tag: its name; None: global_step and the number.
            client_state: what comes back from load_checkpoint, plain values.

        Raises:
            RuntimeError: it is called between micro-steps.
        """
        self._end_unused()
        zero.save(
            save_dir,
            tag or f"global_step{self.global_steps}",
            self.module,
            self.optimizer,
            engine={name: getattr(self, name) for name in COUNTERS},
            client=dict(client_state or {}),
            **self._parts(),
        )

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
    ) -> tuple[str | None, dict[str, Any]]:
        """Go on from what `save_checkpoint` left, on any number of processes and in any stage.

        DeepSpeed's folders are read too, and those that `zero.import_deepspeed` has written.

        Args:
            load_dir: that save_checkpoint was given, ours or DeepSpeed's.
            tag: of the checkpoint; None: the latest.
            load_optimizer_states: else only weights; a loss scale begins, too.
            load_lr_scheduler_states: else the schedule begins.

        Returns:
            The folder of the checkpoint, and the client_state. None, if there is no checkpoint and
            no tag was given; a warning says so then.

        Raises:
            OSError, ValueError, RuntimeError: as `zero.load`.
        """
        try:
            path, _ = checkpoint_of("engine.load_checkpoint", load_dir, tag)
        except FileNotFoundError:
            if tag is not None:
                raise
            _log.warning(
                "engine.load_checkpoint: load_dir is %s without a checkpoint named as the latest;"
                " nothing is loaded",
                load_dir,
            )
            return None, {}
        self._end_unused()
        parts = self._parts()
        if not load_lr_scheduler_states:
            parts.pop("lr_scheduler", None)
        if not load_optimizer_states:
            parts.pop("loss_scaler", None)
        found = zero.load(
            load_dir,
            tag,
            self.module,
            self.optimizer if load_optimizer_states else None,
            **parts,
        )
        counters, client = told(found)
        for name, count in counted(counters, self._sizes).items():
            setattr(self, name, count)
        return str(path), client

    def _end_unused(self) -> None:
        """End micro-steps that had a forward only, such as evaluations with gradients on."""
        if self._accumulation.backwards == 0:
            self._accumulation.end()

    def _parts(self) -> dict[str, Any]:
        scaler = None if self._stepping is None else self._stepping.scaler
        parts = {"lr_scheduler": self.lr_scheduler, "loss_scaler": scaler}
        return {name: part for name, part in parts.items() if hasattr(part, "state_dict")}

    def destroy(self) -> None:
        """Wait for the optimizer, drop what micro-steps have left, and end the group made here."""
        self._accumulation.end(is_whole=False)
        if isinstance(self.optimizer, OffloadOptimizer):
            self.optimizer.synchronize()
        if self._owns_group and dist.is_initialized():
            self._owns_group = False
            dist.destroy_process_group()


def scaler_of(config: Config) -> zero.LossScaler | None:
    """Return what scales the loss, as the block fp16 says; None without it."""
    fp16 = config.fp16
    if not fp16.enabled:
        return None
    if fp16.loss_scale:
        return zero.LossScaler(
            fp16.loss_scale, growth_interval=None, min_scale=min(1.0, fp16.loss_scale)
        )
    return zero.LossScaler(
        2.0**fp16.initial_scale_power,
        growth_interval=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        min_scale=fp16.min_loss_scale,
    )
