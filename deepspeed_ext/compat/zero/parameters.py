"""What DeepSpeed's users read of parameters in stage 3: ds_id, ds_shape, ds_status and so on.

Here the process has state: numbers of parameters, and the models that are known by `know`.
"""

import itertools
import weakref
from collections.abc import Iterable
from enum import Enum

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from deepspeed_ext.dtensors import is_dtensor, local
from deepspeed_ext.torch_internals.fully_shard import (
    groups_of,
    shards_of,
    when_first_gathered,
    whole_of,
)
from deepspeed_ext.zero.rows import rows_of
from deepspeed_ext.zero.sharding import sharding_of

_NUMBER = "_deepspeed_ext_number"  # attribute of a parameter
_numbers = itertools.count()
_models: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


class ZeroParamStatus(Enum):
    """Whether a parameter is whole in this process."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3  # never here


def know(model: nn.Module) -> None:
    """Let GatheredParameters find the modules of its parameters; in stage 3 describe the shards.

    Args:
        model: that initialize has sharded; of one that it has left whole there is nothing to know.
    """
    if isinstance(model, FSDPModule):
        _models.add(model)
        if sharding_of("compat.zero", model).stage == 3:
            for param in model.parameters():
                describe(param)
            when_first_gathered(model, _describe_whole)


def models_of(params: Iterable[Tensor]) -> list[nn.Module]:
    """Return the models, of those that are known, that have any of these parameters."""
    wanted = set(map(id, params))
    known = list(_models)  # in no order, which nothing depends on
    return [model for model in known if any(id(shard) in wanted for shard in shards_of(model))]


def check_not_lent(params: Iterable[Tensor]) -> None:
    """Refuse to write to what a forward or backward has gathered for itself, and drops after it.

    Raises:
        RuntimeError: one of these plain parameters is such a one.
    """
    plain = set(map(id, params))
    for model in list(_models) if plain else ():
        lent = (whole_of(param) for group in groups_of(model) for param in group.fsdp_params)
        if any(id(param) in plain for param in lent):
            raise RuntimeError(
                "compat.zero.GatheredParameters: modifier_rank is given in a forward or a backward"
                " of the model, expected outside of both"
            )


def describe(param: Tensor, is_whole: bool = False) -> None:
    """Say on a parameter, of Init or sharded, what DeepSpeed says there; on others nothing."""
    rows = param if is_dtensor(param) else rows_of(param)
    if rows is not None:
        number(param)
        names = ZeroParamStatus
        vars(param).update(
            ds_id=number_of(param),
            ds_shape=rows.shape,
            ds_numel=rows.numel(),
            ds_tensor=local(rows),
            ds_status=names.AVAILABLE if is_whole else names.NOT_AVAILABLE,
            ds_active_sub_modules=set(),
            ds_persist=False,  # all are gathered and let go with their block
        )


def _describe_whole(shard: Tensor, whole: Tensor) -> None:
    """Say the same on what stands in the place of a shard in a forward."""
    said = {name: value for name, value in vars(shard).items() if name.startswith("ds_")}
    vars(whole).update(said, ds_status=ZeroParamStatus.AVAILABLE)


def number(param: Tensor) -> None:
    """Give a parameter its place among those that processes exchange, also if it is plain."""
    vars(param).setdefault(_NUMBER, next(_numbers))


def number_of(param: Tensor) -> int:
    """Return that place, the same on all processes; -1: it has none."""
    return int(vars(param).get(_NUMBER, -1))
