"""Which host copy stands for which parameter."""

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from deepspeed_ext.dtensors import local
from deepspeed_ext.offload.host_tensors import stand_ins
from deepspeed_ext.ops.optimizers.state_formats import is_dense
from deepspeed_ext.optim.slabs import cut
from deepspeed_ext.optim.spec import Group
from deepspeed_ext.processors import Share

BUCKET = 2**25  # elements of parameters that travel and are stepped together: less than a block


class Links:
    """Parameters and their host copies. One that is stepped where it is stands for itself.

    Attributes:
        copies: by the identity of the parameter.
        owners: parameters, by the identity of the copy.
        resident: identities of parameters that are to be stepped where they are.
        share: where copies are stepped, which touches their memory first.
    """

    def __init__(self, share: Share | None = None) -> None:
        self.share = share or Share()
        self.copies: dict[int, Tensor] = {}
        self.owners: dict[int, Tensor] = {}
        self.resident: set[int] = set()

    def copies_of(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the host copies of parameters, made now for those that have none."""
        new = [param for param in params if self._lacks_copy(param)]
        for param, copy in zip(new, stand_ins(new, self.share), strict=True):
            self.add(param, copy)
        for param in params:
            if id(param) not in self.copies:
                self.add(param, param)
        return [self.copies[id(param)] for param in params]

    def _lacks_copy(self, param: Tensor) -> bool:
        """Return whether a parameter is to have a copy, and has memory to copy by now."""
        if self.copies.get(id(param), param) is not param or id(param) in self.resident:
            return False
        has_memory = not is_lazy(param) and local(param).device.type in ("cpu", "cuda")
        return has_memory and is_dense(local(param))

    def add(self, param: Tensor, copy: Tensor) -> None:
        """Take note of a pair."""
        self.owners.pop(id(self.copies.get(id(param))), None)
        self.copies[id(param)] = copy
        self.owners[id(copy)] = param

    def move_state(self, params: Sequence[Tensor], state: MutableMapping[Tensor, Any]) -> None:
        """Give copies the state that parameters got by themselves, as they had no copy then."""
        for param in params:
            copy = self.copies[id(param)]
            if copy is not param and param in state:
                state[copy] = state.pop(param)

    def forget(self, groups: Sequence[Group], state: Container[Tensor]) -> list[int]:
        """Let go of parameters that are in no group and have no state, and return their ids.

        Args:
            groups: of parameters.
            state: of copies.
        """
        wanted = [id(param) for group in groups for param in group["params"]]
        if len(wanted) == len(self.copies):
            return []
        gone = [key for key in self.copies.keys() - wanted if self.copies[key] not in state]
        for key in gone:
            del self.owners[id(self.copies.pop(key))]
            self.resident.discard(key)
        return gone

    def update_others(self, known: Iterable[Tensor]) -> None:
        """Give copies the weights of parameters that are in no bucket, as they have no state."""
        placed = set(map(id, known))
        for copy, owner in [(copy, self.owners[id(copy)]) for copy in self.copies.values()]:
            if copy is not owner and id(owner) not in placed:
                local(copy).detach().copy_(local(owner).detach())

    def cut(self, copies: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Put copies into buckets whose parameters are on one device; a huge one gets its own."""
        kinds: dict[tuple[torch.device, bool], list[Tensor]] = {}
        for copy in copies:
            owner = self.owners[id(copy)]
            kinds.setdefault((local(owner).device, owner is copy), []).append(copy)
        for (_, is_resident), members in kinds.items():
            yield from cut(members) if is_resident else cut(members, BUCKET)


def weakly(links: Links) -> Callable[[Sequence[Tensor]], Iterator[list[Tensor]]]:
    """Return the cut of these links for a class, which is garbage long after they could go."""
    reference = weakref.ref(links)

    def cut_by_links(copies: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        known = reference()
        assert known is not None  # an optimizer with parameters has them
        return known.cut(copies)

    return cut_by_links


def look_of(param: Tensor) -> object:
    """Return what a parameter and its host copy have in common, but for the device."""
    part = local(param)
    return (part.device.type == "meta", part.dtype, part.shape, part.stride())
