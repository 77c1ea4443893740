"""Experts that are run all at once: which modules these are, and what they compute.

Only what is known to be nothing else: a subclass may compute anything, and hooks see a module.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepspeed_ext.dtypes import DTYPES
from deepspeed_ext.ops import grouped_linear
from deepspeed_ext.torch_internals.modules import (
    HOOKS,
    global_forward_hooks,
    is_compiled_in_place,
    modules_of,
)

DECLARED = "expert_form"  # what a class says of its forward

Weights = tuple[Tensor, Tensor | None]
Function = Callable[[Tensor], Tensor]

_ELEMENTWISE = (
    *(nn.CELU, nn.Dropout, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh),
    *(nn.Identity, nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU),
    *(nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanh, nn.Tanhshrink),
)


class Form(NamedTuple):
    """What an expert computes.

    Args:
        steps: names of linear layers, and functions of each element, one after the other.
        gate: None, or the name of a linear layer and a function: what the first step gives is
            multiplied by the function of what the layer gives.
    """

    steps: Sequence[str | Function]
    gate: tuple[str, Function] | None = None

    @property
    def linears(self) -> list[str]:
        """The names of all linear layers."""
        names = [step for step in self.steps if isinstance(step, str)]
        return names if self.gate is None else [*names, self.gate[0]]


def form_of(expert: nn.Module) -> Form | None:
    """Return what an expert computes, or None: only its own forward tells."""
    inside = list(expert.modules())
    if any(getattr(module, hooks) for module in inside for hooks in HOOKS):
        return None
    if any("forward" in vars(module) or is_compiled_in_place(module) for module in inside):
        return None
    named = dict(expert.named_parameters())
    if len(named) != sum(1 for _ in expert.named_parameters(remove_duplicate=False)):
        return None  # tied: only one of the names of a tensor is known
    if type(expert) is nn.Sequential:
        return _form_of_sequence(expert)
    declared = vars(type(expert)).get(DECLARED)  # not what a class before it said
    return None if declared is None else _form_of_declared(expert, declared)


def _form_of_sequence(expert: nn.Sequential) -> Form | None:
    steps: list[str | Function] = []
    for name, module in modules_of(expert).items():  # a module may be there twice
        if type(module) is nn.Linear:
            steps.append(name)
        elif isinstance(module, nn.Module) and type(module) in _ELEMENTWISE:
            steps.append(module)
        else:
            return None
    # A layer comes first: it has no gradient for rows behind those of experts, whatever is there.
    return Form(steps) if steps and isinstance(steps[0], str) else None


def _form_of_declared(expert: nn.Module, declared: Sequence[str | Function]) -> Form | None:
    """Return the form that a class has declared, if its parts are what it needs.

    Raises:
        TypeError: no expert could have this form.
    """
    parts = [getattr(expert, part, None) if isinstance(part, str) else part for part in declared]
    if len(parts) not in (3, 4) or not all(map(callable, parts)):
        raise TypeError(
            f"Experts: {type(expert).__name__}.{DECLARED} is {declared!r}, expected the names of a"
            " linear layer, of an activation or the function itself, of a linear layer, and of one"
            " more if the first is a gate"
        )
    linears = [part for part in (declared[0], *declared[2:]) if isinstance(part, str)]
    if any(type(getattr(expert, name)) is not nn.Linear for name in linears):
        return None
    activation = parts[1]
    assert activation is not None
    form = Form((linears[0], activation, linears[1]))
    if len(parts) == 4:
        form = Form(linears[1:], (linears[0], activation))
    named = {param for name in linears for param in expert.get_submodule(name).parameters()}
    return form if named == set(expert.parameters()) and not any(expert.buffers()) else None


def can_run(weights: Sequence[Weights], rows: Tensor) -> bool:
    """Tell whether the op takes these: no float64, and no hook that sees all modules."""
    tensors = [rows, *(weight for weight, _ in weights)]
    return all(tensor.dtype in DTYPES for tensor in tensors) and not any(global_forward_hooks())


def run(form: Form, weights: Sequence[Weights], rows: Tensor, offsets: Tensor) -> Tensor:
    """Return what all experts make of their rows.

    Args:
        form: what each computes.
        weights: stacked weight and bias of each of `form.linears`.
        rows: (rows, n), sorted by expert.
        offsets: (experts,), where the rows of each expert end.
    """
    of = dict(zip(form.linears, weights, strict=True))
    gated = None
    if form.gate is not None:
        gated = form.gate[1](_linear(rows, of[form.gate[0]], offsets))
    for step in form.steps:
        rows = _linear(rows, of[step], offsets) if isinstance(step, str) else step(rows)
        if gated is not None:
            rows, gated = rows * gated, None
    if isinstance(form.steps[-1], str):
        return rows  # with zeros behind the last offset
    place = torch.arange(len(rows), device=rows.device, dtype=offsets.dtype)
    return rows.masked_fill((place >= offsets[-1])[:, None], 0)


def _linear(rows: Tensor, weights: Weights, offsets: Tensor) -> Tensor:
    """Multiply, in the dtype in which torch's linear would under autocast."""
    weight, bias = weights
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, weight = rows.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return grouped_linear(rows, weight, offsets, bias)
