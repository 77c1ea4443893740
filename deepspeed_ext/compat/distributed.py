"""What deepspeed.comm has: torch.distributed, and init_distributed; groups of one kind only."""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from deepspeed_ext.engine.processes import make_group

_OTHER_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make the process group of the whole process, unless there is one.

    Args:
        dist_backend: of torch.distributed; None: nccl with a GPU, else gloo.
        auto_mpi_discovery: refuse processes that MPI or Slurm has started without torchrun's
            variables, as each would train alone.
        distributed_port: taken for code that passes it; MASTER_PORT says it.
        verbose: likewise; the logger says what is logged.
        timeout: of collectives; None: torch's.
        init_method: of torch.distributed; None: torchrun's variables, or one process.
        dist_init_required: False: there has to be a group.
        config: taken for code that passes it.
        rank: of this process; -1: as RANK says.
        world_size: of all processes; -1: as WORLD_SIZE says.

    Raises:
        RuntimeError: torchrun's variables are incomplete, or another launcher's are there alone; or
            there is no group and none is to be made.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError(
            "init_distributed: dist_init_required is False and there is no process group, expected"
            " torch.distributed.init_process_group before"
        )
    others = [name for name in _OTHER_LAUNCHERS if int(os.environ.get(name) or 1) > 1]
    if auto_mpi_discovery and others and init_method is None and "RANK" not in os.environ:
        raise RuntimeError(
            f"init_distributed: {others[0]} is {os.environ[others[0]]} and RANK is not set,"
            " expected torchrun's variables; let MPI or Slurm start torchrun"
        )
    if init_method is None and rank < 0 and world_size < 0:
        make_group(dist_backend, timeout)
    else:
        dist.init_process_group(dist_backend, init_method, timeout, world_size, rank)


def get_local_rank() -> int:
    """Return the number of this process on its host."""
    return int(os.environ.get("LOCAL_RANK", 0))


def get_world_group() -> Any:
    """Return the group of all processes."""
    return dist.group.WORLD


inference_all_reduce = dist.all_reduce

# All processes are one data-parallel group: other parallelism is torch's meshes.
_get_data_parallel_group = get_world_group
_get_data_parallel_rank = dist.get_rank
_get_data_parallel_world_size = dist.get_world_size


def __getattr__(name: str) -> Any:
    return getattr(dist, name)
