"""initialize: from a model and a config to an engine."""

import logging
import math
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from deepspeed_ext import zero
from deepspeed_ext.config import Config, read as read_config
from deepspeed_ext.dtensors import local
from deepspeed_ext.engine.data import loader_of
from deepspeed_ext.engine.describing import described
from deepspeed_ext.engine.engine import Engine
from deepspeed_ext.engine.leaf_modules import set_z3_leaf_module
from deepspeed_ext.engine.monitors import Reports, monitors_of
from deepspeed_ext.engine.planning import Plan
from deepspeed_ext.engine.processes import config_of, join_group, leave_group
from deepspeed_ext.engine.streaming import Streaming
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.zero.agreement import all_or_none, check_agreement
from deepspeed_ext.zero.all_processes import mesh_of_all
from deepspeed_ext.zero.alone import keep_whole

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
    master weights, and are used in 16 bits; they begin rounded to these, as DeepSpeed's do. In one
    process with offload_param it streams, by `zero.stream`: weights are in 16 bits then, and master
    weights are state of the optimizer.

    Args:
        args: of a script; its `deepspeed_config` is the config if that is None.
        model: plain, or built under compat.zero.Init, or under zero.Init, which fills it after
            this: init.fill(engine.module). Not sharded yet.
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
        OSError: a folder on NVMe is none to write in, and nothing was changed; or it has too little
            room: a model that was to stream may be in 16 bits then, and nothing else is changed.
    """
    is_in_group, reports = join_group(), None
    streaming: Streaming | None = None
    try:
        is_default = mesh is None
        mesh = mesh_of_all() if mesh is None else mesh
        with all_or_none(_OP, mesh):
            read = read_config(config_of(args, config))
            plan = Plan(model, optimizer, model_parameters, lr_scheduler, read, mesh)
            loader = None
            if training_data is not None:
                drop_last = read.dataloader_drop_last
                loader = loader_of(
                    training_data, plan.sizes.micro, mesh, collate_fn, drop_last=drop_last
                )
        check_agreement(_OP, [*plan.lines()], mesh)
        if dist.get_rank() == 0:
            if is_default and mesh.device_type == "cpu" and torch.cuda.is_available():
                _log.warning(
                    "%s: the process group is of %s, so the model trains on the CPU; for the GPU"
                    " call torch.distributed.init_process_group without a backend, or not at all",
                    _OP,
                    dist.get_backend(),
                )
            for sentence in read.warnings:
                _log.warning(sentence)
        reports = _reports(read, mesh)
        model = plan.model
        for leaf in plan.leaves:
            set_z3_leaf_module(leaf, True)
        if plan.streams:
            streaming = Streaming(model, read, mesh)
        else:
            _shard(model, read, mesh)
        made = plan.optimizer()
        if streaming is not None and isinstance(made, OffloadOptimizer):
            streaming.stepped_by(made)
        scheduler = plan.scheduler(made)
        engine = Engine(model, made, scheduler, read, plan.sizes, mesh, is_in_group, reports)
        engine.end_streaming = None if streaming is None else streaming.end
        engine.random_ltd_scheduler = plan.dropping.scheduler
        plan.dropping.begin()
        if read.dump_state and dist.get_rank() == 0:
            _log.info("%s: %s", _OP, described(engine))
        if read.compile.compiles:
            engine.compile(read.compile.backend, plan.compile_kwargs)
    except BaseException:
        if streaming is not None:
            streaming.end()
        if reports is not None:
            reports.close()
        if is_in_group:
            leave_group()
        raise
    engine.training_dataloader = loader
    return engine, made, engine.training_dataloader, scheduler


def _reports(config: Config, mesh: DeviceMesh) -> Reports | None:
    """Return what shows steps, in the first process."""
    measures = config.wall_clock_breakdown or config.memory_breakdown
    every = 1 if measures and math.isinf(config.steps_per_print) else config.steps_per_print
    if not any((config.tensorboard.enabled, config.wandb.enabled, config.csv_monitor.enabled)):
        return None if dist.get_rank() else Reports({}, every)
    with all_or_none(_OP, mesh):
        return None if dist.get_rank() else Reports(monitors_of(config), every)


def _shard(model: nn.Module, config: Config, mesh: DeviceMesh) -> None:
    used, has_masters = config.used_dtype, config.has_masters
    if used is not None:
        kept = torch.float32 if has_masters else used
        for param in model.parameters():
            if param.is_floating_point() and param.dtype != kept:
                param.data = param.data.to(kept)
    stage, reduce_dtype = config.zero_optimization.stage, config.communication_data_type
    reduce_unused = not config.zero_optimization.ignore_unused_parameters
    if config.is_plain and keep_whole(model, stage, mesh):
        return
    zero.shard(
        model,
        stage,
        mesh=mesh,
        param_dtype=used,
        reduce_dtype=reduce_dtype or (torch.float32 if has_masters else None),
        reduce_unused=reduce_unused,
        offload="cpu" if config.offloads_params else None,
    )
    if used is not None and has_masters:
        _round(model, used)
    if config.gradient_allreduce_op == "sum":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums


@torch.no_grad()
def _round(model: nn.Module, dtype: torch.dtype) -> None:
    """Let master weights begin as DeepSpeed's, which are copies of weights in 16 bits.

    Frozen ones are used in 16 bits too, and nothing is added to them: they keep all their bits.
    """
    for param in model.parameters():
        if param.requires_grad and param.is_floating_point():
            shard = local(param.detach())
            shard.copy_(shard.to(dtype))
