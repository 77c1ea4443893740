"""Parameters at rest in one process: the engine's model streams by zero.stream, where it can."""

import errno
import logging
import os
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from deepspeed_ext.config import Config
from deepspeed_ext.io.file_map import scratch_file
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.torch_internals.dispatch import tree_map
from deepspeed_ext.zero.alone import Alone
from deepspeed_ext.zero.blocks import blocks_of
from deepspeed_ext.zero.rows import RowsParameter, make_whole
from deepspeed_ext.zero.streaming import Stream, is_streamed, stream
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
        OSError: their folder is none to write in.
    """
    is_kept = mesh.size() == 1 and config.zero_optimization.stage < 3 and config.is_plain
    if is_streamed(model) and not is_kept:
        raise ValueError(
            f"{_OP}: model is streamed already, expected one that is not, as after close() of what"
            " zero.stream has returned; offload_param in stage 3 streams it, and one process in"
            " float32 and stage 0 takes a streamed one"
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
        if device == "nvme":
            check_folder("offload_param", config.zero_optimization.offload_param.nvme_path)
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


def check_folder(block: str, path: str | os.PathLike[str]) -> None:
    """Refuse a folder of zero_optimization in which no file can be made."""
    try:
        scratch_file(os.path.abspath(os.fspath(path)))
    except OSError as error:
        raise OSError(
            error.errno,
            f"{_OP}: zero_optimization.{block}.nvme_path is {path}, expected a folder to write in:"
            f" {os.strerror(error.errno or errno.EIO)}",
        ) from error


class Streaming:
    """A model that streams in the place of a sharded one; in 16 bits if it is used so.

    Args:
        model: of which `streams` is true.
        config: that was read.
        mesh: of this process alone.

    Raises:
        OSError: as zero.stream; nothing is left of it then.
    """

    def __init__(self, model: nn.Module, config: Config, mesh: DeviceMesh) -> None:
        self._model = model
        self._stream: Stream | None = None
        self._ends = ExitStack()
        try:
            self._begin(config, mesh)
        except BaseException:
            self.end()
            raise

    def _begin(self, config: Config, mesh: DeviceMesh) -> None:
        model, used = self._model, config.used_dtype
        for param in model.parameters():
            if isinstance(param, RowsParameter):
                make_whole(param)
            if used is not None and param.is_floating_point() and param.dtype != used:
                param.data = param.data.to(used)
        block = config.zero_optimization.offload_param
        path = block.nvme_path if block.device == "nvme" else None
        found = blocks_of(model, None)
        to = torch.device(mesh.device_type)
        self._stream = stream(model, block.device, to=to, nvme_path=path)
        stand_in = Alone(model, 3, mesh, ())
        self._ends.callback(stand_in.detach)
        stand_in.attach()
        if used is not None:
            for module in (model, *found.values()):
                hook = module.register_forward_pre_hook(_Cast(used), with_kwargs=True)
                self._ends.callback(hook.remove)

    def stepped_by(self, optimizer: OffloadOptimizer) -> None:
        """Let an optimizer go, too, at the end, which takes gradients of the model."""
        self._ends.callback(optimizer.close)

    def end(self) -> None:
        """Let the model be an ordinary one, whose parameters stay where they are.

        Raises:
            RuntimeError: it computes in another thread; it is to be ended again.
        """
        try:
            self._ends.close()
        finally:
            if self._stream is not None:
                self._stream.close()


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
