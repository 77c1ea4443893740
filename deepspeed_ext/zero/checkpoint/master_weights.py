"""Master weights that a checkpoint's weights are read to, while all other state stays as it is."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_ext.dtensors import local
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.offload.state_intake import StateIntake
from deepspeed_ext.ops.optimizers.state_formats import join_float32
from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.optim.formats import MASTER, REMAINDER
from deepspeed_ext.zero.checkpoint.storage import Part


class MasterWeights:
    """Those of parameters of 16 bits, which have not all bits of what was saved.

    Where a parameter has them, an optimizer's step keeps those bits of its master weight.

    Args:
        optimizer: that has them; it gets state for parameters that have none yet.
        params: of the model, by name.
        dtypes: of what the checkpoint has, by its name there.
        model: what names of weights begin with there.
        state: what names of state begin with there.

    Attributes:
        tensors: to be read, by name in the checkpoint.
        again: likewise, of what is read to the parameters too.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype],
        model: str,
        state: str,
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.again: dict[str, Tensor] = {}
        sources: dict[Tensor, list[str]] = {}
        for name, param in params.items():
            weight, kind = model + name, dtypes.get(model + name)
            master, lower = (f"{state}{name}.{key}" for key in (MASTER, REMAINDER))
            if kind == torch.float32:
                sources[param] = [weight]
            elif kind is not None and master in dtypes:
                sources[param] = [master]
            elif lower in dtypes and kind == param.dtype == torch.bfloat16:
                sources[param] = [weight, lower]
        self._own, self._intake = _masters_of(optimizer, sources)
        self._names = {param: sources[param] for param in self._own}  # of what is read for each
        for param, own in self._own.items():
            last = sources[param][-1]
            if len(sources[param]) > 1:
                self.tensors[last] = torch.empty_like(own[MASTER], dtype=dtypes[last])
            else:
                read = self.again if last.startswith(model) else self.tensors
                read[last] = own[MASTER]

    def parts(self, *, again: bool) -> Iterator[Part]:
        """Yield what is to be there together, of one of the two, and is taken then."""
        read = self.again if again else self.tensors
        ordered = self._names if self._intake is None else self._intake.ordered(self._names)
        for param in ordered:
            names = self._names[param]
            if names[-1] in read:
                buffers = [local(read[names[1]])] if len(names) > 1 else []
                yield Part(names, buffers, partial(self._take, param))

    def _take(self, param: Tensor) -> None:
        own, names = self._own[param], self._names[param]
        with torch.no_grad():
            if len(names) > 1:
                lower = local(self.tensors[names[1]]).to(torch.int16)
                part = local(param).detach().to(lower.device)
                local(own[MASTER]).copy_(join_float32(part, lower))
        if self._intake is not None:
            self._intake.take(param, own)

    def finish(self) -> None:
        """Bring to the disk what is to rest there."""
        if self._intake is not None:
            self._intake.finish()


@contextmanager
def keeping_float32(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Let a load_state_dict inside give master weights the bits that parameters have no room for.

    Args:
        model: whose modules load.
        optimizer: that has master weights, perhaps.
    """
    given: dict[Tensor, Tensor] = {}

    def note(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        for name, param in module.named_parameters(recurse=False):
            value = state.get(prefix + name)
            given.pop(param, None)  # of a tied one what comes last counts
            if isinstance(value, Tensor) and value.shape == param.shape:
                given[param] = value

    removes = [module.register_load_state_dict_pre_hook(note).remove for module in model.modules()]
    try:
        yield
    finally:
        for remove in removes:
            remove()
        wide = [param for param, value in given.items() if value.dtype.itemsize > 2]
        found, intake = _masters_of(optimizer, wide)
        for param in found if intake is None else intake.ordered(found):
            with torch.no_grad():
                local(found[param][MASTER]).copy_(local(given[param]))
            if intake is not None:
                intake.take(param, found[param])
        if intake is not None:
            intake.finish()


def _masters_of(
    optimizer: torch.optim.Optimizer | None, params: Iterable[Tensor]
) -> tuple[dict[Tensor, dict[str, Any]], StateIntake | None]:
    """Return the state of those that have master weights, made if there is none yet.

    Returns:
        It, and what takes it, if that is not done when it is written.
    """
    if not isinstance(optimizer, OffloadOptimizer | FlatStateOptimizer):
        return {}, None
    stepped = {param for group in optimizer.param_groups for param in group["params"]}
    low = [p for p in params if p in stepped and p.requires_grad and p.dtype.itemsize == 2]
    if not low:
        return {}, None
    with torch.no_grad():
        optimizer.give_state(low)
    state = optimizer.state
    found = {param: state[param] for param in low if MASTER in state[param]}
    return found, optimizer.state_intake() if isinstance(optimizer, OffloadOptimizer) else None
