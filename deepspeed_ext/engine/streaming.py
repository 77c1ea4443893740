"""Parameters at rest in one process: the engine's model streams by zero.stream, where it can."""

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from deepspeed_ext.config import Config
from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.torch_internals.dispatch import tree_map
from deepspeed_ext.zero.alone import Alone
from deepspeed_ext.zero.blocks import blocks_of
from deepspeed_ext.zero.rows import RowsParameter, make_whole
from deepspeed_ext.zero.streaming import is_streamed, stream
from deepspeed_ext.zero.streaming.rest import streamed_parameters

_OP = "initialize"
_DEVICE = "zero_optimization.offload_param.device"
_log = logging.getLogger("deepspeed_ext")


class _Hindrance(NamedTuple):
    """Why a model is not streamed.

    Args:
        got: what is so, in words that follow what was asked for.
        wanted: what would do.
    """

    got: str
    wanted: str


def streams(
    model: nn.Module,
    config: Config,
    mesh: DeviceMesh,
    optimizer: object,
    is_offloaded: bool,
) -> bool:
    """Tell whether a model is to be streamed; changes nothing.

    Where it cannot be, parameters in host memory are shards of `zero.shard`, as those of several
    processes are, and the log says why.

    Args:
        model: not sharded yet.
        config: that was read.
        mesh: of all processes.
        optimizer: of the user, or what makes one; None: the config's, or none.
        is_offloaded: OffloadOptimizer steps it.

    Raises:
        ValueError: parameters are to rest on NVMe, and cannot.
    """
    is_kept = mesh.size() == 1 and config.zero_optimization.stage < 3 and config.is_plain
    if is_streamed(model) and not is_kept:
        raise ValueError(
            f"{_OP}: model is streamed already, expected one that is not; offload_param in stage 3"
            " streams it, and one process in float32 and stage 0 takes a streamed one"
        )
    if not config.offloads_params:
        return False
    device = config.zero_optimization.offload_param.device
    if device == "nvme" and config.zero_optimization.offload_param.nvme_path is None:
        raise ValueError(
            f"{_OP}: zero_optimization.offload_param.nvme_path is None, expected a folder on the"
            " disk to use"
        )
    if mesh.size() > 1:
        found: _Hindrance | None = _Hindrance(f"on {mesh.size()} processes", "one process")
    else:
        found = _hindrance(model, config, mesh, optimizer, is_offloaded)
    if found is None:
        return True
    if device == "nvme":
        raise ValueError(
            f'{_OP}: {_DEVICE} is "nvme" {found.got}, expected {found.wanted}; or "cpu"'
        )
    if mesh.size() == 1:
        _log.info("%s: parameters rest as shards %s; %s streams", _OP, found.got, found.wanted)
    return False


def _hindrance(
    model: nn.Module, config: Config, mesh: DeviceMesh, optimizer: object, is_offloaded: bool
) -> _Hindrance | None:
    if not config.zero_optimization.ignore_unused_parameters:
        return _Hindrance("with ignore_unused_parameters false", "true")
    sent = config.communication_data_type
    if sent is not None and (sent != torch.float32 or config.low_precision):
        return _Hindrance(f"with communication_data_type {sent}", "none")
    if is_offloaded and config.bf16.enabled and not config.bf16.check_grad_overflow:
        return _Hindrance("with bf16.check_grad_overflow false", "true")
    has_optimizer = optimizer is not None or config.optimizer is not None
    if config.has_masters and has_optimizer and not is_offloaded:
        wanted = "one that OffloadOptimizer steps, which has master weights"
        return _Hindrance("with bf16 or fp16 and this optimizer", wanted)
    spec = optimizer.spec if isinstance(optimizer, FlatStateOptimizer) else None
    if spec is not None and not is_offloaded and not {"cpu", mesh.device_type} <= {*spec.devices}:
        name, both = type(optimizer).__name__, "one that steps on the CPU and there, or"
        return _Hindrance(f"with a {name}", f"{both} offload_optimizer beside it")
    if any(param.is_meta for param in model.parameters()):
        return _Hindrance("with parameters on meta", "a model that has values")
    blocks = blocks_of(model, None)
    if not blocks:
        return _Hindrance("in a model without blocks", "a list of modules of one class in it")
    try:
        streamed_parameters(model, blocks)
    except ValueError as error:
        return _Hindrance(f"in this model ({error})", "one that zero.stream takes")
    return None


def stream_model(model: nn.Module, config: Config, mesh: DeviceMesh) -> None:
    """Stream a model in the place of a sharded one; in 16 bits if it is used so.

    Raises:
        OSError: as zero.stream.
    """
    used = config.used_dtype
    for param in model.parameters():
        if isinstance(param, RowsParameter):
            make_whole(param)
        if used is not None and param.is_floating_point() and param.dtype != used:
            param.data = param.data.to(used)
    block = config.zero_optimization.offload_param
    path = block.nvme_path if block.device == "nvme" else None
    found = blocks_of(model, None)
    stream(model, block.device, to=torch.device(mesh.device_type), nvme_path=path)
    Alone(model, 3, mesh, ()).attach()
    if used is not None:
        for module in (model, *found.values()):
            module.register_forward_pre_hook(_Cast(used), with_kwargs=True)


class _Cast:
    """Casts floating-point inputs of a module, as fully_shard does."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(self._cast, (args, kwargs))

    def _cast(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self._dtype)
        return value
