"""What the references of all optimizer steps share: everything about a step but the formula."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

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
from deepspeed_ext.ops.optimizers.step_op import P, R, StepOp

Formula = Callable[..., tuple[Tensor, ...]]


def reference_of(
    function: Callable[P, R], op: StepOp
) -> Callable[[Callable[["StepReference"], R]], Callable[P, R]]:
    """Give a reference the arguments of the function that it defines; used as a decorator.

    Args:
        function: that calls the op.
        op: what is known of it.
    """
    signature = inspect.signature(function)

    def make(definition: Callable[["StepReference"], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def reference(*args: P.args, **kwargs: P.kwargs) -> R:
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            for name, targets in (call.arguments.get("out") or {}).items():
                for target, source in zip(targets, call.arguments[name], strict=True):
                    target.copy_(source)
                call.arguments[name] = targets
            return definition(StepReference(op, call.arguments))

        for name in ("__name__", "__qualname__", "__doc__"):
            setattr(reference, name, getattr(definition, name))
        return reference

    return make


class StepReference:
    """Takes a step in float64 and plain torch.

    State in 8-bit codes is rounded to the nearest here, noise or not.

    Args:
        op: which one.
        values: its arguments by name.

    Attributes:
        options: the same, with lr and grad_scale as plain numbers.
    """

    def __init__(self, op: StepOp, values: Mapping[str, Any]) -> None:
        states = [state for state in op.states if values[state.argument]]
        self.states: list[Sequence[Tensor]] = [values[state.argument] for state in states]
        self.signed = [state.signed for state in states]
        self.advances = "steps" in op.written
        grad_scale = values.get("grad_scale")
        numbers = dict(
            lr=float(values.get("lr", 0)),
            grad_scale=1.0 if grad_scale is None else float(grad_scale),
        )
        self.options = SimpleNamespace(**{**values, **numbers})
        self.params: Sequence[Tensor] = values["params"]
        self.grads: Sequence[Tensor] = values.get("grads", ())
        self.scales: Sequence[Tensor] = values.get("scales", ())
        self.master_params: Sequence[Tensor] = values["master_params"]
        self.steps: Sequence[Tensor] = values.get("steps", ())
        self.offsets: Tensor | None = values["offsets"]
        self.slots: Tensor | None = values["slots"]
        self.maximize: bool = values.get("maximize", False)
        self.found_inf: Tensor | None = values.get("found_inf")

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
        for i in range(len(self.params)):
            step = self._step(i)
            if self.advances:
                step += 1
            grads = [self.grad(i)] if self.grads else []
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

    def grad(self, i: int) -> Tensor:
        """Return gradient i, divided by grad_scale, in float64."""
        grad: Tensor = self.grads[i].double() / self.options.grad_scale
        return -grad if self.maximize else grad

    def _step(self, i: int) -> Tensor:
        return self.steps[i] if self.slots is None else self.steps[0][self.slots[i]]

    def _piece(self, state: Sequence[Tensor], i: int) -> Tensor:
        if self.offsets is None:
            return state[i]
        buffer, param = state[0], self.params[i]
        start = buffer.storage_offset() + int(self.offsets[i])
        return buffer.as_strided(param.shape, param.stride(), start)

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
