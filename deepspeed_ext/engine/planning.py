"""What initialize is asked for, checked before anything is sharded, and on all processes alike."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from deepspeed_ext.config import BatchSizes, Config
from deepspeed_ext.config.classes import Named, schedule_of, steps_in_host
from deepspeed_ext.config.kinds import thawed
from deepspeed_ext.config.tree import OffloadOptimizer
from deepspeed_ext.engine.compiling import checked_kwargs
from deepspeed_ext.engine.leaf_modules import leaf_modules_of
from deepspeed_ext.engine.monitors import check_packages
from deepspeed_ext.engine.optimizers import Renamed, check_given, placed
from deepspeed_ext.engine.stepping import scaler_of
from deepspeed_ext.engine.streaming import check_folder, streams
from deepspeed_ext.engine.token_dropping import TokenDropping
from deepspeed_ext.zero.kinds_of_parameters import is_sharded
from deepspeed_ext.zero.shared_experts import experts_of
from deepspeed_ext.zero.streaming import is_streamed

_OP = "initialize"
_log = logging.getLogger("deepspeed_ext")
_OWN = ("tensorboard", "wandb", "csv_monitor")  # blocks that the first process alone goes by

Optimizer = torch.optim.Optimizer


class Plan:
    """The optimizer and the schedule that will be, of a model that is not sharded yet.

    Args:
        model: of any kind.
        optimizer, params, scheduler: as initialize was given them.
        config: that was read.
        mesh: to shard on.

    Raises:
        ValueError: something is not as it must be.
        ImportError: a package is missing that the config asks for.
        OSError: a folder on NVMe is none to write in.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: Optimizer | Callable[[Any], Optimizer] | None,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | None,
        scheduler: Any,
        config: Config,
        mesh: DeviceMesh,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"{_OP}: model is a {type(model).__name__}, expected a torch.nn.Module"
            )
        _check_plain(model)
        _check_experts(model, config)
        _check_dtypes(model, config)
        self.model = model
        self._given, self._scheduler, self._config = optimizer, scheduler, config
        self.sizes: BatchSizes = config.batch_sizes(mesh.size())
        check_packages(config)
        self.dropping = TokenDropping(model, config, self.sizes)
        self.leaves = leaf_modules_of(model, config)
        self.compile_kwargs = dict(thawed(config.compile.kwargs))
        if config.compile.compiles:
            checked_kwargs(f"{_OP}: compile", config.compile.backend, self.compile_kwargs)
        self._renamed = Renamed(model)
        is_stepped = optimizer is not None or config.optimizer is not None
        self._groups = self._renamed.checked_groups(params, is_stepped)
        self._offload: Mapping[str, Any] | None = None
        self._rests = config.offloads_params
        block = config.zero_optimization.offload_optimizer
        if block.device != "none":
            self._offload = {"model": model, "gpu_fraction": 1 - block.ratio, **_place(block)}
            if is_stepped and block.device == "nvme":
                check_folder("offload_optimizer", block.nvme_path)
        named = config.optimizer if optimizer is None else None
        if named is not None and self._rests and steps_in_host(named.type):
            self._offload = self._offload or {"model": model}
        is_offloaded = self._offload is not None and not _is_made_by(optimizer)
        self.streams = streams(model, config, mesh, optimizer, is_offloaded)
        if self.streams and self._offload is not None:
            self._offload = {**self._offload, "gpu_fraction": 0.0, "free_grads": True}
            if config.has_masters:
                self._offload |= {"master": "float32"}
        self._named: Named | None = None
        if named is not None:
            device = "cpu" if self._rests else mesh.device_type
            offloads = self._offload is not None
            self._named = Named(
                *(_OP, named.type, named.params, device, offloads, config.state_dtype)
            )
        self._try()

    def _try(self) -> None:
        """Make optimizer, step and schedule of small parameters, so that errors come early."""
        _check_schedule(self._scheduler, self._given)
        if self._named is not None and not any(group["params"] for group in self._groups):
            raise ValueError(
                f"{_OP}: model has no parameter that needs a gradient, expected some for the"
                " optimizer of the config"
            )
        if isinstance(self._given, Optimizer):
            check_given(self._given, self._renamed, self._offload is not None, self._rests)
            tried = self._given
        elif self._named is not None:
            tried = self._named.tried(self._groups)
        else:
            if self._given is None and self._scheduler is None and self._config.scheduler:
                _log.warning("%s: scheduler acts nowhere: there is no optimizer", _OP)
            return
        scaler_of(self._config)
        if self._scheduler is None and self._config.scheduler is not None:
            small = nn.Parameter(torch.zeros(1))
            groups = [{**group, "params": [small.clone().detach()]} for group in tried.param_groups]
            schedule_of(_OP, self._config.scheduler, torch.optim.SGD(groups, lr=1e-3))

    def lines(self) -> Iterator[str]:
        """Yield what must be the same on all processes, a line for each thing."""
        for key, value in self._config.as_dict().items():
            if key not in _OWN:
                yield from _flat(key, value)
        given = self._given
        yield f"optimizer {type(given).__name__ if isinstance(given, Optimizer) else bool(given)}"
        yield f"scheduler {type(self._scheduler).__name__}"
        groups = given.param_groups if isinstance(given, Optimizer) else self._groups
        for i, group in enumerate(groups):
            names = [self._renamed.name_of(param, "optimizer") for param in group["params"]]
            yield f"parameters of group {i}: {', '.join(names)}"
            options = {key: value for key, value in group.items() if key != "params"}
            yield from _flat(f"group {i}", options)
        if hasattr(self._scheduler, "state_dict"):
            yield from _flat("scheduler", self._scheduler.state_dict())

    def optimizer(self) -> Optimizer | None:
        """Return what steps the shards, when the model is sharded."""
        if isinstance(self._given, Optimizer):
            return placed(self._given, self._renamed, self._offload)
        for group in self._groups:
            group["params"] = self._renamed.now(group["params"])
        if self._named is not None:
            return self._named.made(self._groups, self._offload)
        if self._given is None:
            return None
        made = self._given(self._groups)
        if not isinstance(made, Optimizer):
            raise ValueError(
                f"{_OP}: optimizer returns a {type(made).__name__}, expected a"
                " torch.optim.Optimizer"
            )
        return made

    def scheduler(self, optimizer: Optimizer | None) -> Any:
        """Return the schedule of the optimizer, or None."""
        given = self._scheduler
        if given is not None and not hasattr(given, "step") and callable(given):
            return given(optimizer)
        if given is not None or self._config.scheduler is None or optimizer is None:
            return given
        return schedule_of(_OP, self._config.scheduler, optimizer)


def _is_made_by(optimizer: object) -> bool:
    """Tell whether this makes the optimizer, which is not known before."""
    return optimizer is not None and not isinstance(optimizer, Optimizer)


def _check_plain(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if is_sharded(module) and is_streamed(module):
            raise ValueError(
                f"{_OP}: model has {name or 'itself'!r}, which an engine streams, expected a model"
                " that none does; engine.destroy() ends that"
            )
        if is_sharded(module):
            raise ValueError(
                f"{_OP}: model has {name or 'itself'!r}, which is sharded already, expected a"
                " model that no initialize or zero.shard was called on"
            )


def _check_experts(model: nn.Module, config: Config) -> None:
    """Refuse sums of gradients where those of experts are made means by the layer."""
    experts = experts_of(model)
    if config.gradient_allreduce_op == "sum" and experts:
        raise ValueError(
            f'{_OP}: gradient_allreduce_op is "sum" and {next(iter(experts))!r} has experts that'
            ' are shared out over processes, expected "mean"'
        )


def _check_dtypes(model: nn.Module, config: Config) -> None:
    """Refuse to add up in float32 what a model without master weights has in 16 bits."""
    if config.data_types.grad_accum_dtype is None or config.bf16.enabled or config.fp16.enabled:
        return
    for name, param in model.named_parameters():
        if param.requires_grad and param.dtype.itemsize < 4:
            raise ValueError(
                f"{_OP}: data_types.grad_accum_dtype is {config.data_types.grad_accum_dtype} and"
                f" parameter {name!r} is {param.dtype}, expected bf16 or fp16 enabled, or a model"
                " in float32"
            )


def _check_schedule(schedule: Any, optimizer: object) -> None:
    """Refuse one that writes rates which no step of this optimizer reads."""
    of = getattr(schedule, "optimizer", None)
    if not isinstance(of, Optimizer):
        return
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
    if {id(group) for group in groups} != {id(group) for group in of.param_groups}:
        raise ValueError(
            f"{_OP}: lr_scheduler is of a {type(of).__name__} that is not optimizer, expected one"
            " over its groups, or a function that makes one of an optimizer"
        )


def _flat(path: str, value: object) -> Iterator[str]:
    """Yield a line for each value that can be compared, in the order of their names."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _flat(f"{path}.{key}", value[key])
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            yield from _flat(f"{path}[{i}]", each)
    elif isinstance(value, Tensor):
        yield f"{path} {value.tolist() if value.numel() == 1 else list(value.shape)}"
    elif value is None or isinstance(value, bool | int | float | str):
        yield f"{path} {value!r}"


def _place(block: OffloadOptimizer) -> dict[str, Any]:
    """Return where the optimizer's state rests, as its class takes it."""
    if block.device == "cpu":
        return {}
    if block.nvme_path is None:
        raise ValueError(
            f"{_OP}: zero_optimization.offload_optimizer.nvme_path is None, expected a folder on"
            " the disk to use"
        )
    return {"device": "nvme", "nvme_path": block.nvme_path, "nvme_fraction": 1.0}
