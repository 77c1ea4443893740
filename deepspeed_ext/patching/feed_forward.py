"""Feed-forward blocks with a gate, and activations alone where torch takes several passes."""

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_ext.moe.transformers_models import known_activations
from deepspeed_ext.ops import bias_activation, bias_activation_ref, gated_activation
from deepspeed_ext.patching.recognition import (
    Unlike,
    check_forward,
    check_same,
    class_of,
    is_of_transformers,
    samples,
    stub_of,
)
from deepspeed_ext.patching.replaced import Replaced, are_ours
from deepspeed_ext.torch_internals.modules import forward_hooks_of, result_hooks_of

_TWO = ("gate_proj", "up_proj", "down_proj")
_ONE = ("gate_up_proj", "down_proj")
_ACTIVATIONS = ("act_fn", "activation_fn")  # what classes call theirs
_PASSES = (  # classes of transformers.activations that go over memory several times
    *("AccurateGELUActivation", "FastGELUActivation", "NewGELUActivation", "QuickGELUActivation"),
)


class _Gated(Replaced):
    """Args:
    module: that it is for.
    name: of the module in it that is the activation of the gate.
    activation: what our ops call that.
    """

    by = ("gated_activation",)

    def __init__(self, module: nn.Module, name: str, activation: str) -> None:
        super().__init__(module)
        self.name, self.kind = name, class_of(getattr(module, name))
        self.activation = activation

    def is_ours(self, x: Tensor) -> bool:
        """Tell whether our op does it: for these, if the activation is what it was, unwatched."""
        found = getattr(self.module, self.name)
        hooks = (*forward_hooks_of(found), *result_hooks_of(found))
        return are_ours(x) and type(found) is self.kind and not hooks


class _GatedByTwo(_Gated):
    def run(self, x: Tensor) -> Any:
        module: Any = self.module
        if not self.is_ours(x):
            return self.own(x)
        gate, up = module.gate_proj(x), module.up_proj(x)
        return module.down_proj(gated_activation(gate, up, activation=self.activation))


class _GatedByOne(_Gated):
    def run(self, x: Tensor) -> Any:
        module: Any = self.module
        if not self.is_ours(x):
            return self.own(x)
        both = module.gate_up_proj(x)
        return module.down_proj(gated_activation(both, activation=self.activation))


class _Activation(Replaced):
    by = ("bias_activation",)

    def __init__(self, module: nn.Module, activation: str) -> None:
        super().__init__(module)
        self.activation = activation

    def run(self, x: Tensor) -> Any:
        return bias_activation(x, activation=self.activation) if are_ours(x) else self.own(x)


def feed_forward_of(module: nn.Module) -> Replaced | None:
    """Return what replaces a feed-forward block with a gate; None: it is none.

    Raises:
        Unlike: it is one, and not one that our ops compute.
    """
    children = dict(module.named_children())
    projections = next((names for names in (_TWO, _ONE) if {*names} <= {*children}), None)
    if projections is None:
        return None
    check_forward(module)
    (name,) = {*children} - {*projections} or {""}
    activation = known_activations().get(type(children[name])) if name in _ACTIVATIONS else None
    if activation is None or any(True for _ in module.parameters(recurse=False)):
        raise Unlike("it is no gate by an activation that our ops know, between linear layers")
    check_forward(children[name])
    _check_block(module, projections, name, activation)
    return (_GatedByTwo if projections is _TWO else _GatedByOne)(module, name, activation)


def _check_block(
    module: nn.Module, projections: tuple[str, ...], name: str, activation: str
) -> None:
    """Refuse a block that does something else with small layers in the place of its own."""
    gate, up, down, x = samples((4, 6), (4, 6), (6, 4), (3, 6))
    first = {"gate_proj": gate, "up_proj": up, "gate_up_proj": torch.cat([gate, up])}
    weights = {part: first.get(part, down) for part in projections}
    parts: dict[str, nn.Module] = {}
    for part, weight in weights.items():
        parts[part] = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        parts[part].weight = nn.Parameter(weight)
    stub = stub_of(module, **parts, **{name: getattr(module, name)})
    forward: Any = class_of(module).forward
    gated = bias_activation_ref(x @ gate.t(), activation=activation) * (x @ up.t()).double()
    check_same("its forward", lambda: forward(stub, x), gated @ down.t().double())


def activation_of(module: nn.Module) -> Replaced | None:
    """Return what replaces an activation that takes several passes; None: it is none.

    Raises:
        Unlike: it is one, and its forward was replaced.
    """
    kind = class_of(module)
    if kind.__name__ not in _PASSES or not is_of_transformers(module):
        return None
    check_forward(module)
    activation = known_activations().get(kind)
    if activation is None:
        raise Unlike("our ops do not know it")
    (x,) = samples((5, 7))
    want = bias_activation_ref(x, activation=activation)
    check_same("its forward", lambda: module(x), want)
    return _Activation(module, activation)
