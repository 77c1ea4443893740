"""The budget of host memory that an optimizer keeps to."""

from collections.abc import Iterable

from torch import Tensor

from deepspeed_ext.dtensors import least_over_meshes, local, rests_on_host
from deepspeed_ext.offload.streamed import is_in_memory
from deepspeed_ext.op_builder.toolchain import free_memory
from deepspeed_ext.processors import local_processes


def bytes_at_rest(params: Iterable[Tensor]) -> int:
    """Return the bytes of those parameters that have host memory already."""
    there = (param for param in params if rests_on_host(param) or is_in_memory(param))
    return sum(local(param).nbytes for param in there if not param.is_meta)


def budget_for(device: str, memory_budget: int | None, params: Iterable[Tensor]) -> int | None:
    """Return the budget; state on disk has one in any case: a part of what there is.

    Args:
        device: where state rests.
        memory_budget: as it was given.
        params: of the optimizer. What rests in memory counts, and is no part of what is free.
    """
    if device == "nvme" and memory_budget is None:
        return 3 * (free_memory() // local_processes()) // 4 + bytes_at_rest(params)
    return memory_budget


def common_budget(device: str, memory_budget: int | None, params: Iterable[Tensor]) -> int | None:
    """Return the budget by which all processes choose the same parameters for the disk.

    They exchange parts of what is in buckets, in one order.
    """
    known = list(params)
    budget = budget_for(device, memory_budget, known)
    if device == "cpu" or budget is None:
        return budget
    return least_over_meshes(budget, known)
