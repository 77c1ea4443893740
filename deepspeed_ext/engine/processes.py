"""The process group that an engine trains in: torchrun's, or one of this process alone."""

import os
from argparse import Namespace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_ext.torch_internals.processes import default_store

_distributed: Any = dist  # with what the type checker does not know
_WANTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ENGINES = "deepspeed_ext/engines"  # in the store of a group that an engine made: who is in it


def join_group() -> bool:
    """Make the process group if there is none: of torchrun's processes, else of this one.

    Returns:
        whether engines made it, and call `leave_group`.

    Raises:
        RuntimeError: some of torchrun's variables are there and others are not.
    """
    if not dist.is_initialized():
        make_group()
    elif not default_store().check([_key()]):
        return False
    default_store().add(_key(), 1)
    return True


def leave_group() -> None:
    """End the group that engines made, if no other one is in it."""
    if not dist.is_initialized():
        return
    try:
        others = default_store().add(_key(), -1) if default_store().check([_key()]) else 1
    except RuntimeError:  # the process that keeps the store has ended
        others = 0
    if others == 0:
        dist.destroy_process_group()


def _key() -> str:
    return f"{_ENGINES}/{dist.get_rank()}"


def make_group(backend: str | None = None, timeout: timedelta | None = None) -> None:
    """Make the process group.

    Args:
        backend: of torch.distributed; None: nccl with a GPU, else gloo.
        timeout: of collectives; None: torch's.

    Raises:
        RuntimeError: as join_group.
    """
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = backend or ("nccl" if has_gpu else "gloo")
    there = [name for name in _WANTED if name in os.environ]
    if not there:
        store = _distributed.HashStore()
        dist.init_process_group(backend, None, timeout, store=store, rank=0, world_size=1)
        return
    if len(there) < len(_WANTED):
        missing = [name for name in _WANTED if name not in there]
        raise RuntimeError(
            f"initialize: {', '.join(there)} are set and {', '.join(missing)} are not, expected all"
            " of them, as torchrun sets them, or none"
        )
    dist.init_process_group(backend, None, timeout)


def config_of(args: Namespace | None, config: Any) -> Any:
    """Return the config, which a script may have among its arguments.

    Raises:
        ValueError: it is in neither place, or in both.
    """
    in_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if config is not None and in_args is not None:
        raise ValueError(
            f"initialize: config is given and args.deepspeed_config is {in_args!r}, expected one of"
            " them"
        )
    found = in_args if config is None else config
    if found is None:
        raise ValueError("initialize: config is None, expected a dict or the path of a JSON file")
    return found
