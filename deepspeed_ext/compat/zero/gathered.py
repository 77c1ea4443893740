"""GatheredParameters as DeepSpeed's users call it, over zero.GatheredParameters."""

import logging
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_ext import zero
from deepspeed_ext.compat.zero.parameters import check_not_lent, describe, models_of, number_of
from deepspeed_ext.zero.all_processes import device_of_group
from deepspeed_ext.zero.gather import is_shown, shard_of, sharded
from deepspeed_ext.zero.rows import SINCE_SHARDED, RowsParameter

_log = logging.getLogger("deepspeed_ext")


class GatheredParameters:
    """Show parameters whole inside of modules, and spread what one process writes into them.

        with compat.zero.GatheredParameters(model.head.weight, modifier_rank=0):
            if dist.get_rank() == 0:
                nn.init.normal_(model.head.weight)

    All processes enter and leave it together. Inside, parameters are whole wherever they are held,
    and a model may be called that has all of its own whole; see `zero.GatheredParameters`. Where
    nobody writes, weights have the dtype that forwards use them in, bfloat16 with bf16.

    Args:
        params: a parameter, several, or a module: of Init, sharded by initialize, or plain. None,
            buffers and other tensors among them are left out. In any order, but for plain ones that
            were not made under Init.
        modifier_rank: the process whose values count in the end, those of plain parameters too; its
            number in the group that holds the parameters. None: what is written is dropped, with a
            warning; plain parameters keep it.
        fwd_module: a module; nothing is to be told of it, as a model's parameters outside of
            blocks are gathered for all of its blocks.
        enabled: False does nothing.

    Raises:
        TypeError, ValueError, RuntimeError: as `zero.GatheredParameters`.
    """

    def __init__(
        self,
        params: nn.Module | Tensor | Iterable[Tensor | None] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, nn.Module):
            params = params.parameters()
        several = [params] if isinstance(params, Tensor) or params is None else list(params)
        # In another one, modules show what is of a shard.
        given = [shard_of(p) for p in several if isinstance(p, nn.Parameter)] if enabled else []
        by_id = {id(param): param for param in given}  # processes give sets, in any order
        is_kept = {key: sharded(param) is not None for key, param in by_id.items()}
        ordered = sorted(by_id.values(), key=number_of)
        self._plain = [p for p in ordered if not is_kept[id(p)] and not p.is_meta]
        self._kept = [p for p in ordered if is_kept[id(p)]]
        if any(isinstance(param, RowsParameter) and not is_kept[id(param)] for param in given):
            raise ValueError(f"compat.zero.GatheredParameters: a parameter {SINCE_SHARDED}")
        self._rank = modifier_rank
        self._inner: _Gathered | None = None

    def __enter__(self) -> None:
        rank = self._rank
        if rank is not None:
            check_not_lent(self._plain)
            first = sharded(self._kept[0]) if self._kept else None
            if first is not None:
                ranks = first.device_mesh.mesh.flatten().tolist()
                if not 0 <= rank < len(ranks):
                    raise ValueError(
                        f"compat.zero.GatheredParameters: modifier_rank is {rank}, expected 0 to"
                        f" {len(ranks) - 1}, as so many processes hold the parameters"
                    )
                rank = ranks[rank]
        inner = _Gathered(self._kept, rank, inside=models_of(self._kept), as_used=True)
        for param in self._kept:
            describe(param, is_whole=True)  # which is shown of the whole ones, too
        try:
            inner.__enter__()
        except BaseException:
            self._describe()
            raise
        self._inner = inner

    def __exit__(self, *error: Any) -> None:
        assert self._inner is not None
        try:
            self._inner.__exit__(*error)
        finally:
            self._describe()
        if self._rank is not None and dist.is_initialized():
            for param in self._plain:
                _broadcast(param, self._rank)

    def _describe(self) -> None:
        for param in self._kept:
            describe(param, is_whole=is_shown(param))


class _Gathered(zero.GatheredParameters):
    def _drop_write(self, name: str) -> None:
        _warn_dropped()


@cache
def _warn_dropped() -> None:
    """Warn once in a process: libraries merge adapters in each step, and take them out again."""
    _log.warning(
        "compat.zero.GatheredParameters: a parameter was written to while modifier_rank is None;"
        " that is dropped, name the rank whose values count to keep it"
    )


@torch.no_grad()
def _broadcast(param: Tensor, rank: int) -> None:
    value = param.detach().to(device_of_group()).contiguous()
    dist.broadcast(value, rank)
    param.detach().copy_(value)
