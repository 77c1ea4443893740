"""deepspeed.initialize, and what scripts call around it: arguments and configs."""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from pydantic import model_validator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from deepspeed_ext.compat.distributed import init_distributed
from deepspeed_ext.compat.engine import note_engine
from deepspeed_ext.compat.zero import know
from deepspeed_ext.compat.zero.parameter_offload import ParameterOffload
from deepspeed_ext.config import read, tree
from deepspeed_ext.config.config import open_sentence
from deepspeed_ext.config.precision import Bf16, Fp16
from deepspeed_ext.config.walk import walk
from deepspeed_ext.engine import Engine, initialize as _initialize

DeepSpeedConfigError = ValueError  # what reading a config raises
# Blocks of it, to be read alone: DeepSpeedFP16Config(enabled=True).
DeepSpeedBF16Config, DeepSpeedFP16Config = Bf16, Fp16
DeepSpeedZeroLeafModuleConfig = tree.LeafModule
DeepSpeedZeroOffloadOptimizerConfig = tree.OffloadOptimizer
DeepSpeedZeroOffloadParamConfig = tree.OffloadParam
_LEAVES = DeepSpeedZeroLeafModuleConfig()
DEFAULT_LEAF_MODULE_CLASSES = _LEAVES.classes
DEFAULT_LEAF_MODULE_NAMES = _LEAVES.names
DEFAULT_LEAF_MODULE_NAME_SUFFIXES = _LEAVES.name_suffixes


class DeepSpeedZeroConfig(tree.ZeroOptimization):
    """The block zero_optimization, also by the older names of its keys.

    Raises:
        ValueError: a key is none, is refused, or has a value that does not fit.
    """

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: dict[str, Any]) -> Any:
        found = walk({"zero_optimization": dict(given)})
        problems = [*found.problems, *open_sentence(found.left_open)]
        if problems:
            raise ValueError("\n".join(problems))
        return found.values["zero_optimization"]


def initialize(
    args: argparse.Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Tensor] | Iterable[dict[str, Any]] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    mpu: None = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    config_params: Any = None,
    mesh: DeviceMesh | None = None,
) -> tuple[Engine, torch.optim.Optimizer | None, Any, Any]:
    """Make an engine, as `deepspeed_ext.initialize`, under DeepSpeed's names of arguments.

    Args:
        args: as there, and all that is not named here.
        mpu: None.
        dist_init_required: False: there has to be a process group.
        config_params: the config, by its older name.
        mesh: of the processes that share the model; None: all.

    Raises:
        ValueError: as there; or mpu is given, or the config twice.
        RuntimeError: there is no process group and dist_init_required is False.
    """
    if mpu is not None:
        raise ValueError(
            f"initialize: mpu is a {type(mpu).__name__}, expected None; shard over one dimension of"
            " torch's device mesh by mesh="
        )
    if config is not None and config_params is not None:
        raise ValueError("initialize: config_params is given beside config, expected one of them")
    if dist_init_required is False and not dist.is_initialized():
        init_distributed(dist_init_required=False)  # raises
    made = _initialize(
        args,
        model,
        optimizer,
        model_parameters,
        training_data,
        lr_scheduler,
        mesh,
        collate_fn,
        config_params if config is None else config,
    )
    engine, optimizer = made[:2]
    note_engine(engine)
    know(engine.module)
    if optimizer is not None and engine.zero_optimization_stage() == 3:
        vars(optimizer)["parameter_offload"] = ParameterOffload(engine.module)
    return made


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config, and their oldest names, to a script's arguments."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="for the script: use an engine")
    group.add_argument("--deepspeed_config", help="path of a JSON file")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", help=argparse.SUPPRESS)
    return parser


class DeepSpeedConfig:
    """A config that was read, with the three batch sizes; its other keys are attributes.

    `sparse_attention` is None, or a dict of `mode` and the arguments of that SparsityConfig.

    Args:
        config: a dict, the path of a JSON file, or base64.
        mpu: taken for code that passes it.

    Raises:
        ValueError: as `deepspeed_ext.config.read`, or the batch sizes do not fit together.
    """

    def __init__(self, config: Any, mpu: Any = None) -> None:
        self._config = read(config)
        sizes = self._config.batch_sizes(dist.get_world_size() if dist.is_initialized() else 1)
        self.train_batch_size = sizes.train
        self.train_micro_batch_size_per_gpu = sizes.micro
        self.gradient_accumulation_steps = sizes.steps
        self.zero_config = self._config.zero_optimization
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_config.stage > 0
        pattern = self._config.sparse_attention
        self.sparse_attention = None if pattern is None else pattern.as_dict()

    def __getattr__(self, name: str) -> Any:
        if name == "_config":
            raise AttributeError(name)
        return getattr(self._config, name)
