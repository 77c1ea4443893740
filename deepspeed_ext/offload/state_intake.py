"""Where the state of an offloaded optimizer goes that is loaded parameter by parameter."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.dtensors import local
from deepspeed_ext.offload.host_optimizer import HostOptimizer
from deepspeed_ext.offload.param_table import ParamTable
from deepspeed_ext.offload.tiers.disk_state import DiskState
from deepspeed_ext.optim.buckets import Bucket, is_same_memory
from deepspeed_ext.optim.state_values import StateValidation


class StateIntake:
    """Takes state of one parameter after another, so that it never is in memory as a whole.

    Args:
        host_optimizer: has buckets, in which all of these parameters have state already.
        table: of the parameters.
    """

    def __init__(self, host_optimizer: HostOptimizer, table: ParamTable[Any]) -> None:
        self._host_optimizer, self._table = host_optimizer, table
        self._places: dict[Tensor, tuple[int, Bucket, int]] = {
            copy: (group, bucket, i)
            for group, bucket in host_optimizer.buckets()
            for i, copy in enumerate(bucket.params)
        }

    def ordered(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Return parameters in the order in which their state lies."""
        wanted = set(params)
        return [param for param in map(self._table.param_of, self._places) if param in wanted]

    def take(self, param: Tensor, entry: Mapping[str, Any]) -> dict[str, Tensor]:
        """Copy state to where it rests; what was written there already, in host memory, is kept.

        Args:
            param: the parameter.
            entry: its state by key, in any format; its own tensors among them.

        Returns:
            The tensors in which it is.

        Raises:
            ValueError: it has numbers that would destroy.
        """
        copy = self._table.copy_of(param)
        group, bucket, i = self._places[copy]
        own = bucket.shown(i)
        with torch.no_grad():
            if all(is_same_memory(entry.get(key), local(value)) for key, value in own.items()):
                if isinstance(bucket, DiskState):
                    bucket.keep_written(i)
                return own
            if copy is not param and not isinstance(bucket, DiskState):
                local(copy).detach().copy_(local(param).detach())  # some formats need the weights
            spec = self._host_optimizer.spec
            given = spec.completed(self._host_optimizer.param_groups[group], entry)
            for key in own.keys() - given.keys():
                local(own[key]).zero_()
            validation = StateValidation(spec.signed)
            bucket.fill(i, given, validation.look_at_source)
            validation.check(self._host_optimizer)
        return own

    def finish(self) -> None:
        """Bring to the disk what is to rest there."""
        for bucket in dict.fromkeys(bucket for _, bucket, _ in self._places.values()):
            if isinstance(bucket, DiskState):
                bucket.flush_written()
