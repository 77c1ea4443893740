"""Init as DeepSpeed's users call it: a model is built of which each process keeps its own rows."""

import sys
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from deepspeed_ext.compat.zero import under_way
from deepspeed_ext.compat.zero.parameters import describe, number
from deepspeed_ext.config.config import Config, examine
from deepspeed_ext.dtensors import is_dtensor
from deepspeed_ext.engine.processes import make_group
from deepspeed_ext.torch_internals.modules import parameters_of
from deepspeed_ext.zero.all_processes import DIMENSIONS, device_of_group, mesh_of_all
from deepspeed_ext.zero.rows import RowsParameter, keep

_OP = "compat.zero.Init"


class Init:
    """Build a model of which each process keeps the rows that fully_shard will give it.

        with compat.zero.Init(config_dict_or_path=config):
            model = GPT(size)
        engine, *_ = compat.initialize(model=model, config=config)

    A module's parameters are whole until it is made and the next one registers a parameter, so that
    they may be drawn as ever; after that a write to them is an error outside of GatheredParameters.
    `apply` gathers those of one module after another. Each process keeps rows of what the first one
    has drawn, so the numbers are those of a plain model there. All processes build the same.
    initialize exchanges nothing for such parameters. Buffers, parameters without dimensions and
    those on meta stay as they are. The process group is made if there is none.

    Args:
        module: one that is there, whose parameters are kept in rows at once.
        data_parallel_group: of the processes that hold rows; None: all.
        mem_efficient_linear: so anyway.
        remote_device: where rows rest until initialize: "cpu", or where processes compute, "none";
            None: in host memory if the config has offload_param there.
        pin_memory: acts nowhere: rows come to their place in initialize, which pins what rests.
        config_dict_or_path: what initialize is given; all else is not read of it here: weights keep
            the dtype that they are made in, and initialize makes master weights of them.
        config: the same.
        enabled: False does nothing.
        dtype: floating-point parameters are cast to it; None: they are not.
        mpu: its get_data_parallel_group() is the group.
        zero_param_parallel_group: refused, as are zero_quantized_weights, param_swapper,
            zero_quantized_nontrainable_weights and sequence_data_parallel_group.

    Raises:
        ValueError: an argument is one that is not here; the text names it and what to use.

    See: `initialize`, `zero.Init`, which fills a model after it was sharded.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        self._is_enabled = enabled
        if not enabled:
            return
        _refuse(
            zero_param_parallel_group=zero_param_parallel_group,
            zero_quantized_weights=zero_quantized_weights,
            zero_quantized_nontrainable_weights=zero_quantized_nontrainable_weights,
            sequence_data_parallel_group=sequence_data_parallel_group,
            param_swapper=param_swapper,
        )
        if not dist.is_initialized():
            make_group()
        device = device_of_group()
        if remote_device not in (None, "none", "cpu", device):
            raise ValueError(
                f'{_OP}: remote_device is {remote_device!r}, expected None, "cpu" or "none", which'
                f" is {device}"
            )
        given = config_dict_or_path if config is None else config
        is_on_host = remote_device == "cpu" or (remote_device is None and _offloads_params(given))
        self._rests_on = "cpu" if is_on_host else device
        group = data_parallel_group or (mpu and mpu.get_data_parallel_group())
        self._mesh = _mesh(group, device)
        self._dtype = dtype
        self._open: list[nn.Module] = []  # modules with whole parameters
        for inner in module.modules() if module is not None else ():
            self._keep(inner)

    def __enter__(self) -> "Init":
        if self._is_enabled and not under_way.begin(self):
            raise RuntimeError(
                f"{_OP}: this Init is under way already, expected one that is not; make another one"
            )
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not self._is_enabled:
            return
        around: list[Any] | None = under_way.end(self)
        if around is None:
            raise RuntimeError(f"{_OP}: this Init is not under way, expected one that is")
        modules, self._open = self._open, []
        if kind is None:  # else other processes may not be here
            for module in modules:
                if around and _is_being_made(module):
                    around[-1]._open.append(module)
                else:
                    self._keep(module)

    def registered(self, module: nn.Module) -> None:
        """Keep rows of modules that are made, as another one begins to be."""
        for made in [m for m in self._open if m is not module and not _is_being_made(m)]:
            self._open.remove(made)
            self._keep(made)
        if not any(known is module for known in self._open):
            self._open.append(module)

    def _keep(self, module: nn.Module) -> None:
        for param in parameters_of(module).values():
            if param is None or isinstance(param, RowsParameter) or is_dtensor(param):
                continue
            number(param)
            if not (is_lazy(param) or param.is_meta or param.dim() == 0):
                dtype = self._dtype if param.is_floating_point() else None
                keep(param, self._mesh, dtype, self._rests_on)
                describe(param)


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value:
            raise ValueError(
                f"{_OP}: {name} is {value!r}, expected none, as rows are dealt to all processes of"
                " one group, as they are"
            )


def _offloads_params(config: Any) -> bool:
    """Tell what a config says, as far as it can be read; else initialize says what is wrong."""
    with suppress(ValueError):
        found = config if isinstance(config, Config) else examine(config).config
        return found is not None and found.offloads_params
    return False


def _mesh(group: Any, device: str) -> DeviceMesh:
    """Return the mesh that initialize will have, so that rows are where it wants them."""
    if group is None or group == dist.group.WORLD:
        return mesh_of_all()
    return DeviceMesh.from_group(group, device, mesh_dim_names=DIMENSIONS)


def _is_being_made(module: nn.Module) -> bool:
    """Tell whether the constructor of a module is under way in this thread."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        is_constructor = code.co_name == "__init__" and code.co_argcount > 0
        if is_constructor and frame.f_locals.get(code.co_varnames[0]) is module:
            return True
    return False
