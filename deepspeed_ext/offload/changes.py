"""Take up what users change in groups, and in what parameters look like."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from deepspeed_ext.dtensors import local
from deepspeed_ext.offload.host_optimizer import HostOptimizer, options_of
from deepspeed_ext.offload.host_tensors import host_memory, put, remake, untouched_copy
from deepspeed_ext.offload.param_table import ParamTable, Row
from deepspeed_ext.offload.streamed import home_of, move
from deepspeed_ext.optim.spec import Group


def follow_groups(
    groups: Sequence[Group], host_optimizer: HostOptimizer, table: ParamTable[Any]
) -> None:
    """Take options and parameters that have come into groups, and let go of others."""
    for group, host_group in zip(groups, host_optimizer.param_groups, strict=True):
        copies = table.copies_of(group["params"])
        if list(map(id, copies)) != list(map(id, host_group["params"])):
            host_group["params"] = copies
            table.move_state(group["params"], host_optimizer.state)
        host_group.update(options_of(group))
    table.forget(groups, host_optimizer.state)


def follow_params(host_optimizer: HostOptimizer, table: ParamTable[Any]) -> None:
    """Give new host copies to parameters that have got another device, dtype or layout."""
    changed = [row for row in rows_of(host_optimizer, table) if row.has_new_look()]
    try:
        for row in changed:
            _follow(row, table)
    except BaseException:
        for row in changed:
            row.look = None  # so that they are looked at again
        raise
    finally:
        if changed:
            host_optimizer.forget_buckets()


def _follow(row: Row[Any], table: ParamTable[Any]) -> None:
    home = home_of(row.param)
    if row.is_on_disk:
        put(row.copy, local(untouched_copy(row.param)).detach())
    elif home is None:
        remake(row.copy, row.param, partial(host_memory, share=table.share))
    else:
        remake(row.copy, row.param, home.memory)
        move(row.param, row.copy.data)


def rows_of(host_optimizer: HostOptimizer, table: ParamTable[Any]) -> list[Row[Any]]:
    """Return the rows of parameters that are in groups."""
    return list(map(table.of_copy, host_optimizer.params()))
