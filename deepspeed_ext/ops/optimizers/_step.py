"""What the wrappers and references of all optimizer steps share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_ext.ops.optimizers.state_formats import (
    BLOCK,
    decode_blocks,
    encode_blocks,
    in_memory_order,
    join_float32,
    split_float32,
)

ON_HOST = ("offsets", "slots", "noise")  # arguments that are always in host memory
Formula = Callable[..., tuple[Tensor, ...]]


def number_or_tensor(lr: float | Tensor) -> tuple[float, Tensor | None]:
    """Return a learning rate as the schemas take it."""
    return (0.0, lr) if isinstance(lr, Tensor) else (lr, None)


def count_writes(*written: Sequence[Tensor]) -> None:
    """Count the writes of a native op, which does not.

    Without the count, a backward that saved a parameter before the step would use the new values
    without an error.
    """
    for tensors in written:
        torch.autograd.graph.increment_version(tensors)


@dataclass
class StepReference:
    """Takes a step in float64 and plain torch: everything about it but the formula.

    Args:
        params, scales, master_params, steps, offsets, slots, grad_scale, found_inf, maximize: as in
            the op.
        states: the lists of state tensors, those that are empty left out.
        signed: for each of these whether values may be negative.
        grads: may be empty, for a formula that takes none.
        advances: whether this counts as a step.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: Sequence[Sequence[Tensor]]
    signed: Sequence[bool]
    scales: Sequence[Tensor]
    master_params: Sequence[Tensor]
    steps: Sequence[Tensor]
    offsets: Tensor | None
    slots: Tensor | None
    maximize: bool
    grad_scale: Tensor | None
    found_inf: Tensor | None
    advances: bool = True

    @torch.no_grad()
    def run(self, formula: Formula) -> None:
        """Update every parameter.

        Args:
            formula: takes the step number, the parameter, the gradient if there are any, then each
                state tensor, all in float64, and returns the new parameter and state tensors; what
                is not returned, or is the parameter it was given, is not written.
        """
        if self.skips():
            return
        scale = 1.0 if self.grad_scale is None else float(self.grad_scale)
        for i in range(len(self.params)):
            step = self._step(i)
            if self.advances:
                step += 1
            grads = [grad.double() / scale for grad in self.grads[i : i + 1]]
            grads = [-grad for grad in grads] if self.maximize else grads
            old = self.original(i)
            theta, *new = formula(float(step), old, *grads, *self.state(i))
            if theta is not old:
                self._store_param(i, theta)
            for j, values in enumerate(new):
                self._store(i, j, values)

    def skips(self) -> bool:
        """Return whether found_inf says that nothing is to be modified."""
        return self.found_inf is not None and self.found_inf.item() != 0

    def state(self, i: int) -> list[Tensor]:
        """Return the state tensors of parameter i in float64."""
        return [self._load(i, j) for j in range(len(self.states))]

    def original(self, i: int) -> Tensor:
        """Return parameter i, or the original that it is kept as, in float64."""
        param = self.params[i]
        if not self.master_params:
            return param.double()
        master = self._piece(self.master_params, i)
        return (join_float32(param, master) if master.dtype == torch.int16 else master).double()

    def _step(self, i: int) -> Tensor:
        return self.steps[i] if self.slots is None else self.steps[0][self.slots[i]]

    def _piece(self, state: Sequence[Tensor], i: int) -> Tensor:
        if self.offsets is None:
            return state[i]
        slab, param = state[0], self.params[i]
        start = slab.storage_offset() + int(self.offsets[i])
        return slab.as_strided(param.shape, param.stride(), start)

    def _scales(self, i: int, j: int) -> Tensor:
        if self.offsets is None:
            return self.scales[j * len(self.params) + i]
        return self.scales[j][int(self.offsets[i]) // BLOCK :]

    def _load(self, i: int, j: int) -> Tensor:
        piece = self._piece(self.states[j], i)
        if piece.dtype == torch.uint8:
            piece = decode_blocks(piece, self._scales(i, j), signed=self.signed[j])
        return piece.double()

    def _store(self, i: int, j: int, values: Tensor) -> None:
        piece = self._piece(self.states[j], i)
        if piece.dtype != torch.uint8:
            piece.copy_(values)
            return
        laid_out = torch.empty_like(piece, dtype=torch.float64).copy_(values)
        codes, scales = encode_blocks(laid_out, signed=self.signed[j])
        in_memory_order(piece).copy_(in_memory_order(codes))
        self._scales(i, j)[: len(scales)] = scales

    def _store_param(self, i: int, theta: Tensor) -> None:
        if not self.master_params:
            self.params[i].copy_(theta)
            return
        master = self._piece(self.master_params, i)
        if master.dtype == torch.int16:
            upper, lower = split_float32(theta.float())
            self.params[i].copy_(upper)
            master.copy_(lower)
        else:
            master.copy_(theta)
            self.params[i].copy_(master)
