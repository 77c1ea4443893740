"""The classes that a config names: of an optimizer and of its schedule."""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from deepspeed_ext import optim
from deepspeed_ext.config.tree import Scheduler
from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.optim.formats import FormatOptions
from deepspeed_ext.optim.schedules import SCHEDULES

if TYPE_CHECKING:
    from deepspeed_ext.offload import Estimate

Group = dict[str, Any]
Make = Callable[..., torch.optim.Optimizer]

# By the name in a config, in small letters: the class for parameters on CUDA, the one for those on
# the CPU, and, where offload takes it, the one that steps in host memory.
_BY_NAME: dict[str, tuple[Make, Make, type[FlatStateOptimizer] | None]] = {
    "adam": (optim.FusedAdam, optim.DeepSpeedCPUAdam, optim.DeepSpeedCPUAdam),
    "adamw": (optim.FusedAdam, optim.DeepSpeedCPUAdam, optim.DeepSpeedCPUAdam),
    "adagrad": (optim.FusedAdagrad, optim.DeepSpeedCPUAdagrad, optim.DeepSpeedCPUAdagrad),
    "lion": (optim.FusedLion, optim.DeepSpeedCPULion, optim.DeepSpeedCPULion),
    "lamb": (optim.FusedLamb, optim.FusedLamb, None),
    "sgd": (optim.FusedSGD, optim.FusedSGD, optim.FusedSGD),
}
_SO_ANYWAY = ("cuda_aware", "comm_backend_name")
IN_HOST = {row[2] for row in _BY_NAME.values()} - {None}


class Named:
    """The optimizer that a config names.

    Args:
        op: for the text of an error.
        name: "Adam", ... or a class of torch.optim.
        options: its `params` in the config.
        device: "cpu" or "cuda", where parameters are.
        offloads: whether it steps in host memory.
        state_dtype: of the state of classes of ours; None: as they have it.

    Raises:
        ValueError: there is no such class, or offload does not take it, or it has no such option.
    """

    def __init__(
        self,
        op: str,
        name: str,
        options: Mapping[str, Any],
        device: str,
        offloads: bool,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        options = {key: value for key, value in options.items() if key not in _SO_ANYWAY}
        if options.pop("torch_adam", False) and not offloads:  # else ours, of the same formula
            is_decoupled = _is_decoupled(name, options)
            name = "AdamW" if is_decoupled else "Adam"
            options = {k: v for k, v in options.items() if k != "adam_w_mode"}
            known = None
        else:
            known = _BY_NAME.get(name.lower())
        on_cuda, on_cpu, in_host = known or _of_torch(op, name)
        if known is not None and state_dtype is not None:
            options = {"state_dtype": state_dtype} | options
        if on_cuda is optim.FusedAdam:
            is_fused = device == "cuda" and not offloads
            mode = {"adam_w_mode" if is_fused else "adamw_mode": _is_decoupled(name, options)}
            options = {k: v for k, v in options.items() if k != "adam_w_mode"} | mode
        if "max_grad_norm" in options:
            raise ValueError(
                f"{op}: optimizer.params.max_grad_norm is {options['max_grad_norm']}, expected"
                " none; clip by gradient_clipping"
            )
        for key, value in options.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(
                    f"{op}: optimizer.params.{key} is {value}, expected a finite number"
                )
        for key in ("betas", "eps"):
            if isinstance(options.get(key), list):
                options[key] = tuple(options[key])
        if offloads and in_host is None:
            takes = ", ".join(key for key, row in _BY_NAME.items() if row[2] is not None)
            raise ValueError(
                f"{op}: optimizer.type is {name!r} with offload_optimizer, expected one that steps"
                f" in host memory: {takes}"
            )
        self._op, self._options = op, options
        self._make = on_cuda if device == "cuda" else on_cpu
        self._in_host = in_host if offloads else None
        self._device = "cpu" if offloads else device

    def tried(self, groups: list[Group]) -> torch.optim.Optimizer:
        """Return one of small parameters in the places of others, so that errors come early.

        Raises:
            ValueError: an option has no such value, or there is none of this name.
        """
        own = _options_of_offload() if self._in_host is not None else ()
        options = {name: value for name, value in self._options.items() if name not in own}
        small = [
            {**group, "params": [nn.Parameter(torch.zeros(1, device=self._device))]}
            for group in groups
        ]
        return self._called(self._in_host or self._make, small, options)

    def check_names(self) -> None:
        """Refuse options that the class has not, without making one: that imports for seconds.

        Raises:
            ValueError: there is one.
        """
        taken = inspect.signature(self._in_host or self._make).parameters
        known = {*taken, *inspect.get_annotations(FormatOptions)}
        if self._in_host is not None:
            known |= _options_of_offload()
        other = [name for name in self._options if name not in known]
        if other:
            raise ValueError(
                f"{self._op}: optimizer.params has {other[0]!r}, expected one of"
                f" {', '.join(sorted(known - {'self', 'params', 'kwargs', 'formats'}))}"
            )

    def made(self, groups: list[Group], offload: Mapping[str, Any] | None) -> torch.optim.Optimizer:
        """Return the optimizer.

        Args:
            groups: of shards.
            offload: options of OffloadOptimizer; None: the state is where the parameters are.
        """
        if self._in_host is None or offload is None:
            return self._called(self._make, groups, self._options)
        from deepspeed_ext.offload import OffloadOptimizer

        make = partial(OffloadOptimizer, optimizer_class=self._in_host, **offload)
        return self._called(make, groups, self._options)

    def estimated(
        self, params: list[nn.Parameter], gpu_fraction: float, **offload: Any
    ) -> "Estimate":
        """Return what an optimizer that steps in host memory takes.

        Args:
            params: of one process, also on meta.
            gpu_fraction: of OffloadOptimizer.
            offload: other options of it, which those of the config come before.
        """
        from deepspeed_ext.offload import estimate

        own = _options_of_offload() - {*inspect.signature(estimate).parameters}
        options = {name: value for name, value in self._options.items() if name not in own}
        assert self._in_host is not None
        options = {"gpu_fraction": gpu_fraction, **offload, **options}
        return estimate(params, self._in_host, **options)

    def _called(self, make: Make, groups: list[Group], options: Group) -> torch.optim.Optimizer:
        try:
            return make(groups, **options)
        except TypeError as error:
            raise ValueError(f"{self._op}: optimizer.params is {options}: {error}") from error


def _options_of_offload() -> set[str]:
    from deepspeed_ext.offload import OffloadOptimizer  # a config that names it may only be read

    return {*inspect.signature(OffloadOptimizer).parameters}


def _of_torch(op: str, name: str) -> tuple[Make, Make, None]:
    cls = getattr(torch.optim, name, None)
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
        names = ", ".join(sorted(_BY_NAME))
        raise ValueError(
            f"{op}: optimizer.type is {name!r}, expected one of {names}, or a class of torch.optim"
        )
    return cls, cls, None


def _is_decoupled(name: str, options: Mapping[str, Any]) -> bool:
    """Tell the kind of weight decay: DeepSpeed's "Adam" is AdamW but with adam_w_mode false."""
    return bool(options.get("adam_w_mode", True)) or name.lower() == "adamw"


def steps_in_host(name: str) -> bool:
    """Tell whether OffloadOptimizer takes the optimizer of this name in a config."""
    return _BY_NAME.get(name.lower(), (None,))[-1] is not None


def schedule_class(op: str, block: Scheduler) -> Any:
    """Return the class of a schedule, whose options are names of its arguments.

    Raises:
        ValueError: as `schedule_of`.
    """
    name = block.type
    cls: Any = SCHEDULES.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    if not isinstance(cls, type) or not issubclass(cls, LRScheduler):
        raise ValueError(
            f"{op}: scheduler.type is {name!r}, expected one of {', '.join(SCHEDULES)}, or a class"
            " of torch.optim.lr_scheduler"
        )
    try:
        inspect.signature(cls).bind(None, **block.params)
    except TypeError as error:
        raise ValueError(f"{op}: scheduler.params: {error}") from error
    return cls


def schedule_of(op: str, block: Scheduler, optimizer: Any) -> Any:
    """Return the schedule that a config names.

    Args:
        op: for the text of an error.
        block: of the config: "WarmupLR", ... or a class of torch.optim.lr_scheduler.
        optimizer: whose rates it sets.

    Raises:
        ValueError: there is no such class, or it has no such option.
    """
    cls = schedule_class(op, block)
    try:
        return cls(optimizer, **block.params)
    except TypeError as error:
        raise ValueError(f"{op}: scheduler.params: {error}") from error
