"""initialize: from a model and a config to an engine."""

import logging
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import LRScheduler

from deepspeed_ext import zero
from deepspeed_ext.config import Config, read as read_config
from deepspeed_ext.engine.data import loader_of
from deepspeed_ext.engine.engine import Engine
from deepspeed_ext.engine.optimizers import Renamed, by_name, check_given, placed
from deepspeed_ext.engine.processes import config_of, device_of_group, ensure_group
from deepspeed_ext.optim.schedules import SCHEDULES

_OP = "initialize"
_log = logging.getLogger("deepspeed_ext")

Returned = tuple[Engine, torch.optim.Optimizer | None, Any, Any]


def initialize(
    args: Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Tensor] | Iterable[dict[str, Any]] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    mesh: DeviceMesh | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
) -> Returned:
    """Make an engine of a model, as the config of a DeepSpeed user says.

        engine, optimizer, loader, scheduler = deepspeed_ext.initialize(
            model=model, training_data=dataset, config="ds_config.json"
        )
        for batch in loader:
            engine.backward(engine(batch))
            engine.step()

    All processes of torchrun call it; without torchrun there is one. The model is sharded by
    `zero.shard` in the config's stage. With bf16 or fp16 its weights become float32 shards, the
    master weights, and are used in 16 bits.

    Args:
        args: of a script; its `deepspeed_config` is the config if that is None.
        model: plain, or built under zero.Init; not sharded yet.
        optimizer: of parameters of the model, which has not stepped; its group dicts stay the same
            objects, and their `params` become shards. With offload_optimizer, OffloadOptimizer
            stands in for torch's Adam and AdamW. Or what makes one of parameters. None: that of the
            config, or none, to evaluate only.
        model_parameters: that the config's optimizer, or what makes one, steps: tensors, or
            groups; None: all that require a gradient.
        training_data: a map-style dataset, of which the loader gives each process its own part.
        lr_scheduler: of that optimizer, or what makes one of an optimizer; None: the config's, or
            none. It is stepped by each step of the engine that is not skipped.
        mesh: of zero.shard; None: all processes.
        collate_fn: of the loader.
        config: a dict, the path of a JSON file, or one in base64.

    Returns:
        The engine; its optimizer, scheduler and loader, or None.

    Raises:
        ValueError: an argument or a key of the config is not as it must be; the text names it.
        RuntimeError: torchrun's variables are incomplete.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"{_OP}: model is a {type(model).__name__}, expected a torch.nn.Module")
    read = read_config(config_of(args, config))
    owns_group = ensure_group()
    try:
        mesh = mesh or init_device_mesh(
            device_of_group(), (dist.get_world_size(),), mesh_dim_names=("shard",)
        )
        for sentence in read.warnings if dist.get_rank() == 0 else ():
            _log.warning(sentence)
        sizes = read.batch_sizes(mesh.size())
        made = _sharded(model, optimizer, model_parameters, read, mesh)
        scheduler = _scheduler(lr_scheduler, made, read)
        engine = Engine(model, made, scheduler, read, sizes, mesh, owns_group)
    except BaseException:
        if owns_group:
            dist.destroy_process_group()
        raise
    if training_data is not None:
        engine.training_dataloader = loader_of(training_data, sizes.micro, mesh, collate_fn)
    return engine, made, engine.training_dataloader, scheduler


def _sharded(
    model: nn.Module, optimizer: Any, params: Any, config: Config, mesh: DeviceMesh
) -> torch.optim.Optimizer | None:
    """Shard a model, and return what steps the shards."""
    renamed = Renamed(model)
    groups = renamed.checked_groups(params)
    if isinstance(optimizer, torch.optim.Optimizer):
        check_given(optimizer, renamed)
    _shard(model, config, mesh)
    for group in groups:
        group["params"] = renamed.now(group["params"])
    return _optimizer(optimizer, groups, renamed, config, model, mesh)


def _shard(model: nn.Module, config: Config, mesh: DeviceMesh) -> None:
    used = torch.bfloat16 if config.bf16.enabled else torch.float16
    is_mixed = config.bf16.enabled or config.fp16.enabled
    if is_mixed:
        for param in model.parameters():
            if param.is_floating_point() and param.dtype != torch.float32:
                param.data = param.data.float()  # master weights
    zero.shard(
        model,
        config.zero_optimization.stage,
        mesh=mesh,
        param_dtype=used if is_mixed else None,
        reduce_dtype=config.communication_data_type or (torch.float32 if is_mixed else None),
        reduce_unused=not config.zero_optimization.ignore_unused_parameters,
    )


def _optimizer(
    given: Any,
    groups: list[dict[str, Any]],
    renamed: Renamed,
    config: Config,
    model: nn.Module,
    mesh: DeviceMesh,
) -> torch.optim.Optimizer | None:
    offload: Mapping[str, Any] | None = None
    block = config.zero_optimization.offload_optimizer
    if block.device == "cpu":
        offload = {"model": model, "gpu_fraction": 1 - block.ratio}
    if isinstance(given, torch.optim.Optimizer):
        return placed(given, renamed, offload)
    if callable(given):
        made = given(groups)
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(
                f"{_OP}: optimizer returns a {type(made).__name__}, expected a"
                " torch.optim.Optimizer"
            )
        return made
    if config.optimizer is None:
        return None
    return by_name(
        config.optimizer.type, config.optimizer.params, groups, mesh.device_type, offload
    )


def _scheduler(given: Any, optimizer: torch.optim.Optimizer | None, config: Config) -> Any:
    if given is not None and not hasattr(given, "step") and callable(given):
        return given(optimizer)
    if given is not None or config.scheduler is None:
        return given
    if optimizer is None:
        _log.warning("%s: scheduler acts nowhere: there is no optimizer", _OP)
        return None
    name = config.scheduler.type
    cls: Any = SCHEDULES.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    if not isinstance(cls, type) or not issubclass(cls, LRScheduler):
        raise ValueError(
            f"{_OP}: scheduler.type is {name!r}, expected one of {', '.join(SCHEDULES)}, or a class"
            " of torch.optim.lr_scheduler"
        )
    try:
        return cls(optimizer, **config.scheduler.params)
    except TypeError as error:
        raise ValueError(f"{_OP}: scheduler.params: {error}") from error
