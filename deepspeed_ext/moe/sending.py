"""What layers of experts have in common: a router, and tokens on their way to experts and back."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed_ext.moe.experts import Experts
from deepspeed_ext.ops import moe_permute, moe_unpermute
from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops.moe.routing import Routing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_JITTER = 0.01


class Gate(nn.Linear):
    """A router: a linear layer without bias that computes in float32, also under autocast."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits, (..., experts), float32."""
        with torch.autocast(input.device.type, enabled=False):
            return functional.linear(input.float(), self.weight.float())


def tokens_of(layer: str, hidden_states: Tensor, gate: nn.Linear) -> Tensor:
    """Return (tokens, n) of (..., n).

    Raises:
        ValueError: n is not what the router takes.
    """
    check_kinds(layer, hidden_states=(hidden_states, Tensor))
    shape, width = hidden_states.shape, gate.in_features
    if len(shape) == 0 or shape[-1] != width:
        raise ValueError(f"{layer}: hidden_states has shape {list(shape)}, expected (..., {width})")
    return hidden_states.reshape(-1, width)


def send(
    hidden_states: Tensor,
    routing: Routing,
    weights: Tensor,
    experts: Experts,
    beside: nn.Module | None,
    mesh: "DeviceMesh | None",
) -> tuple[Tensor, Tensor | None]:
    """Send tokens through experts, and all of them through a module beside these.

    Args:
        hidden_states: (..., n).
        routing: of their tokens, (tokens, k).
        weights: (tokens, k), what results are multiplied by.
        experts: all of them, or with a mesh those of this process.
        beside: is run while rows are under way to other processes.
        mesh: over which experts are shared out.

    Returns:
        The sums of the results, and what the module beside returned, or None; both (..., n).
    """
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    if torch.is_autocast_enabled(tokens.device.type):
        tokens = tokens.to(torch.get_autocast_dtype(tokens.device.type))
    rows = moe_permute(tokens, routing)
    if mesh is None or experts.has_all():
        rows = experts(rows, routing.offsets)
        added = None if beside is None else _first(beside(hidden_states))
    else:
        from deepspeed_ext.moe.exchange import Exchange

        exchange = Exchange(rows, routing.offsets, mesh.get_group())
        added = None if beside is None else _first(beside(hidden_states))
        exchange.send_back(experts(*exchange.arrived()))
        rows = exchange.returned()
    return moe_unpermute(rows, routing, weights).view(hidden_states.shape), added


def _first(result: Any) -> Tensor:
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found


def mixed(found: Tensor, added: Tensor, coefficients: Tensor) -> Tensor:
    """Return the sum of two results, each times its share, the softmax of (..., 2)."""
    share = functional.softmax(coefficients, dim=-1)
    return found * share[..., :1] + added * share[..., 1:]


def jittered(values: Tensor) -> Tensor:
    """Return values times random numbers near 1, in float32."""
    factors = torch.empty_like(values, dtype=torch.float32)
    return values * factors.uniform_(1 - _JITTER, 1 + _JITTER)
