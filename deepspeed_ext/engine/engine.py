"""The engine: counts micro-steps, scales, clips, steps, saves; all work is done by other parts."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from deepspeed_ext import offload, zero
from deepspeed_ext.config import BatchSizes, Config
from deepspeed_ext.engine.checkpoints import Checkpoints
from deepspeed_ext.engine.compiling import checked_kwargs
from deepspeed_ext.engine.loss_scale import LossScale, show_scale
from deepspeed_ext.engine.metrics import Metrics, Phases
from deepspeed_ext.engine.monitors import Reports
from deepspeed_ext.engine.processes import leave_group
from deepspeed_ext.engine.stepping import Stepping, scaler_of
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.random_ltd import RandomLTDScheduler
from deepspeed_ext.torch_internals.modules import is_compiled_in_place
from deepspeed_ext.zero.sharding import sharding_of

_log = logging.getLogger("deepspeed_ext")


@dataclass(slots=True)
class _Progress:
    """How far the step is that is under way.

    Args:
        phases: what measures it.
        ended: its micro-steps that are over.
        seen: backwards of these.
        scaled: its backwards that the engine has done itself.
        has_failed: an error has ended the last one of these.
        was_applied: whether the last call of step has stepped the optimizer.
    """

    phases: Phases | None = None
    ended: int = 0
    seen: int = 0
    scaled: int = 0
    has_failed: bool = False
    was_applied: bool | Tensor = False


class Engine(Checkpoints):
    """A sharded model with its optimizer and schedule, under the names of DeepSpeed's engine.

    `initialize` makes it. What it has not is looked for in the model. It is a context manager,
    whose end is `destroy`.

    Attributes:
        module: the model.
        optimizer: that steps its shards, or None.
        lr_scheduler: of the optimizer, or None.
        training_dataloader: of initialize's training_data, or None.
        random_ltd_scheduler: says how many tokens layers keep, of a config with random_ltd, or
            None.
        config: the config as a dict.
        device: where weights are.
        global_steps: steps that were taken or skipped.
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
        is_in_group: bool,
        reports: Reports | None = None,
    ) -> None:
        super().__init__()
        self.module = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader: Any = None
        self.random_ltd_scheduler: RandomLTDScheduler | None = None
        self.config = config.as_dict()
        on_cuda = mesh.device_type == "cuda"
        self.device = torch.device(mesh.device_type, torch.cuda.current_device() if on_cuda else 0)
        self.global_steps = self.global_samples = self.micro_steps = 0
        self._skipped: int | Tensor = 0
        self._config, self._sizes, self._mesh = config, sizes, mesh
        self._is_in_group = is_in_group
        self._is_destroyed = False
        self.end_streaming: Callable[[], None] | None = None  # that initialize has begun
        self._is_last: bool | None = None  # of micro-steps, said by hand
        self._is_syncing = True  # not inside of no_sync
        self._now = _Progress()
        self._was_told = False  # of plain backwards
        self._metrics = Metrics(mesh.size())
        self._reports = reports
        self._accumulation = zero.Accumulation(model)
        is_saved = config.activation_checkpointing.cpu_checkpointing
        self._saved = offload.saved_tensors("cpu") if is_saved else None
        self._stepping = None
        if optimizer is not None:
            skips = config.bf16.check_grad_overflow if config.bf16.enabled else None
            clipping, scaler = config.gradient_clipping, scaler_of(config)
            self._stepping = Stepping(optimizer, clipping, scaler, skips)
            show_scale(optimizer, LossScale(scaler, self))
            if not config.gradient_clipping and not config.is_set("gradient_clipping"):
                _log.info(
                    "initialize: gradients are not clipped; DeepSpeed since 0.19 clips them to 1"
                    " where gradient_clipping is not set"
                )

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a count at once: nn.Module looks for long at what it might be."""
        if type(value) in (int, _Progress):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copy, deepcopy and pickle, which all ask here.

        The counts of an engine are fed by hooks on its own model: a copy would see no backward.
        """
        raise TypeError(
            "engine: it was to be copied or pickled, expected no copy of an engine; copy"
            " engine.state_dict(), or the model before initialize; to save, engine.save_checkpoint"
        )

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return is_compiled_in_place(self.module)

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: object = None,
    ) -> None:
        """Compile the model by torch.compile, in place; gathers and reductions stay outside.

        Args:
            backend: of torch.compile.
            compile_kwargs: its other arguments.
            schedule: None; that of DeepCompile is not here.

        Raises:
            ValueError: an argument is none of torch.compile, or asks for what is not here.
        """
        if schedule is not None:
            raise ValueError(
                "engine.compile: schedule is given, expected None; it is DeepCompile's"
            )
        kwargs = checked_kwargs("engine.compile", backend, compile_kwargs or {})
        if self.is_compiled:
            _log.warning("engine.compile: the model is compiled already; nothing changes")
            return
        self.module.compile(**kwargs)

    # A step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; with gradients on, a micro-step begins."""
        if not torch.is_grad_enabled() or self._stepping is None:
            with self._saving():
                return self.module(*args, **kwargs)
        if self._now.has_failed or self._accumulation.is_broken:
            self._drop_step()
        if not self._accumulation.is_open:
            self._metrics.begin()
            self._now.phases = self._phases_of(self.global_steps + 1)
        self._accumulation.begin(self.is_gradient_accumulation_boundary())
        if self.module.training:
            if self.random_ltd_scheduler is not None:
                self.random_ltd_scheduler.update_seq(self.global_steps)
            self._metrics.add_batch(args, kwargs)
        with self._measured("forward"), self._saving():
            output = self.module(*args, **kwargs)
        self._accumulation.watch(output)
        return output

    def _saving(self) -> AbstractContextManager[object]:
        """Return a context in which inputs of checkpoints leave, where the config says so."""
        return nullcontext() if self._saved is None else self._saved.of_checkpoints()

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
        _check_loss("backward", loss)
        # Said anew: set_gradient_accumulation_boundary may have come after the forward.
        self._accumulation.begin(self.is_gradient_accumulation_boundary())
        if scale_wrt_gas and self._sizes.steps > 1:
            loss = loss / self._sizes.steps
        scaled = self._scaled(stepping, loss)
        self._now.has_failed = True  # until it is over
        with self._measured("backward"):
            scaled.backward(retain_graph=retain_graph)
        self._now.has_failed = False
        self._now.scaled += 1
        self._metrics.add_loss(loss)
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss whose own `backward()` does what `backward` of this engine does.

            engine.scale(engine(batch)).backward()

        It is divided by the number of micro-steps, and scaled with fp16.

        Raises:
            RuntimeError, ValueError: as `backward`.
        """
        stepping = self._with_optimizer("scale")
        _check_loss("scale", loss)
        scaled = self._scaled(stepping, loss / self._sizes.steps)
        scaled.register_hook(self._note_scaled)
        return scaled

    def _scaled(self, stepping: Stepping, loss: Tensor) -> Tensor:
        scaled = loss if stepping.scaler is None else stepping.scaler.scale(loss)
        self._accumulation.watch(scaled)  # also where its forward was not the engine's
        return scaled

    def _note_scaled(self, _: Tensor) -> None:
        """Count a backward, as it begins, whose loss was scaled."""
        self._now.scaled += 1

    @property
    def skipped_steps(self) -> int:
        """How many steps there were for which a gradient was inf or NaN; waits for the device."""
        return int(self._skipped)

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self._skipped = count

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-step; after the last one clip, step and drop gradients, step the schedule.

        With fp16 a step that is skipped does not step the schedule. What a schedule raises comes
        after all else is done: the next step may follow.

        Args:
            lr_kwargs: arguments of the schedule's step, such as metrics for ReduceLROnPlateau.

        Raises:
            RuntimeError: there is no optimizer, or no backward since the last call; or, with fp16,
                a backward was not scaled: gradients are dropped then.
        """
        stepping = self._with_optimizer("step")
        backwards = self._accumulation.backwards
        if backwards <= self._now.seen:
            raise RuntimeError(
                "engine.step: there was no backward since the last step, expected"
                " engine.backward(loss) before"
            )
        is_last = self.is_gradient_accumulation_boundary()
        ended = 1 if self.managed_gradient_accumulation() else backwards
        self.micro_steps += ended
        self._now.ended += ended
        self._now.was_applied = False
        if not is_last:
            self._now.seen = backwards
            return
        scaled, micro_steps = self._now.scaled, self._now.ended
        self._now = _Progress(self._now.phases)
        self._accumulation.end()
        if stepping.scaler is not None and scaled < backwards:
            self.zero_grad()
            raise RuntimeError(
                f"engine.step: {backwards - scaled} of {backwards} backwards are of a loss that was"
                " not scaled, expected engine.backward(loss) with fp16; the gradients are dropped"
            )
        is_told = self._was_told or dist.get_rank() > 0
        if scaled < backwards and self._sizes.steps > 1 and not is_told:
            self._was_told = True
            _log.warning(
                "engine.step: %d of %d backwards are plain ones, which divide nothing, while"
                " DeepSpeed divides by the %d micro-steps; engine.backward(loss) divides",
                backwards - scaled,
                backwards,
                self._sizes.steps,
            )
        rate = self._first_rate()
        with self._measured("step"):
            self._now.was_applied = stepping.step()
        self.global_steps += 1
        is_managed = self.managed_gradient_accumulation()
        self.global_samples += (
            self._sizes.train
            if is_managed
            else self._sizes.train // self._sizes.steps * micro_steps
        )
        applied = self._now.was_applied
        was_skipped = applied.logical_not() if isinstance(applied, Tensor) else not applied
        self._skipped = self._skipped + was_skipped
        self._report(stepping, micro_steps, rate)
        # Without fp16 nobody waits to know whether the step was skipped.
        if self.lr_scheduler is not None and (stepping.scaler is None or applied):
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def _report(self, stepping: Stepping, micro_steps: int, rate: Any) -> None:
        """Collect what is known of the step that is over, and show it."""
        step = self._metrics.end(
            self.global_steps,
            self.global_samples,
            self._sizes.train // self._sizes.steps * micro_steps,
            self._now.phases,
            lr=rate,
            norm=stepping.norm,
            scale=stepping.scale,
            skipped=self._skipped,
        )
        if self._reports is not None:
            self._reports.add(step)

    def _first_rate(self) -> Any:
        rate = self.optimizer.param_groups[0]["lr"] if self.optimizer is not None else None
        return rate.clone() if isinstance(rate, Tensor) else rate

    def _measured(self, phase: str) -> AbstractContextManager[None]:
        return nullcontext() if self._now.phases is None else self._now.phases.measured(phase)

    def _phases_of(self, number: int) -> Phases | None:
        """Return what measures a step, if it is one that is logged and the config asks for it."""
        times, memory = self._config.wall_clock_breakdown, self._config.memory_breakdown
        if self._reports is None or not (times or memory) or not self._reports.logs(number):
            return None
        return Phases(self.device, times, memory)

    def _drop_step(self) -> None:
        """Begin a step anew: what an error has left of a backward is no part of any step."""
        self._accumulation.end(is_whole=False)
        self._now = _Progress()

    def metrics(self) -> dict[str, float]:
        """Return what is known of the last step; waits for the device.

        Returns:
            loss: of this process, over all micro-steps, as engine.backward added it up. lr: of the
            first group, that the step was taken with. norm: of the gradients before clipping.
            scale: of the loss, with fp16. skipped: how many steps were, so far.
            samples_per_second and tokens_per_second: of all processes, from the end of the step
            before; tokens are those of input_ids, or of a first argument of integers. Nothing
            before the first step, and what is not known is not there.
        """
        last = self._metrics.last
        return {} if last is None else last.numbers()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, those of earlier micro-steps too."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)
        self.module.zero_grad(set_to_none)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell whether the micro-step that is under way is the last one of a step."""
        if not self._is_syncing:
            return False
        if not self.managed_gradient_accumulation():
            return True
        if self._is_last is not None:
            return self._is_last
        return self._now.ended + 1 >= self._sizes.steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say by hand, from now on, which micro-step is the last one; before its backward.

        Raises:
            RuntimeError: managed_gradient_accumulation is false, so that each step says it.
        """
        if not self.managed_gradient_accumulation():
            raise RuntimeError(
                "engine.set_gradient_accumulation_boundary: managed_gradient_accumulation is false,"
                " expected no call, as engine.step ends each step"
            )
        self._is_last = is_boundary
        if self._accumulation.is_open:
            self._accumulation.begin(self.is_gradient_accumulation_boundary())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards inside be of micro-steps that are not the last one."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def was_step_applied(self) -> bool:
        """Tell whether the last call of `step` has stepped the optimizer."""
        return bool(self._now.was_applied)

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
        if self._is_destroyed:
            raise RuntimeError(
                f"engine.{what}: the engine was destroyed, expected a call before engine.destroy()"
            )
        if self._stepping is None:
            raise RuntimeError(
                f"engine.{what}: the engine has no optimizer, expected one in initialize, or in the"
                " config"
            )
        return self._stepping

    def empty_partition_cache(self) -> None:
        """Let go of weights that a forward has left gathered, and of memory that nothing is in.

        Between micro-steps weights stay gathered, as their next backward wants them, and inside of
        GatheredParameters, as you do.
        """
        if self.end_streaming is None:
            sharding = sharding_of("engine.empty_partition_cache", self.module)
            if not self._accumulation.is_open and not sharding.shown:
                sharding.reshard()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def destroy(self) -> None:
        """Wait for the optimizer, drop what micro-steps have left, and leave the group.

        The last engine in a process group that initialize made ends it. `backward` and `step` are
        errors from here on.

        Monitors get the last step, and are closed. A model that initialize streams is an ordinary
        one from here on, whose parameters stay where they rest; initialize may take it again.
        """
        self._accumulation.end(is_whole=False)
        self._is_destroyed = True
        with ExitStack() as rest:  # all of it, whatever fails
            if self._is_in_group:
                self._is_in_group = False
                rest.callback(leave_group)
            if self._reports is not None:
                rest.callback(self._reports.close)
            if self.end_streaming is not None:
                rest.callback(self.end_streaming)
            if isinstance(self.optimizer, OffloadOptimizer):
                self.optimizer.synchronize()


def _check_loss(op: str, loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(f"engine.{op}: loss is {what}, expected one number with a gradient")
