"""What experts make of hidden states: each token goes to some of them, and maybe to one of all.

Nothing is read by the host, and a token's experts depend on no other token. Experts that no token
has chosen are not read.
"""

from torch import Tensor

from deepspeed_ext.inference.model.expert_sizes import ExpertSizes
from deepspeed_ext.inference.weights.experts import ExpertWeights, SharedExpert
from deepspeed_ext.ops import bias_activation, moe_route, moe_unpermute


def expert_sums(
    experts: ExpertWeights, sizes: ExpertSizes, h: Tensor, activation: str, gated: bool
) -> Tensor:
    """Return the sums of what the experts of each token make of it, with their weights.

    Args:
        experts: of a layer.
        sizes: say how they are chosen.
        h: (..., hidden), after the norm.
        activation: as ``bias_activation`` names it.
        gated: whether experts have gates.

    Returns:
        (..., hidden).
    """
    rows = h.reshape(-1, h.shape[-1])
    logits = experts.router(rows)
    routing = moe_route(logits, sizes.chosen, score=sizes.score, normalize=sizes.normalize)
    if sizes.limit is None:
        wide = experts.up(rows, routing, of_tokens=True, activation=activation, gated=gated)
    else:
        wide = _limited(experts.up(rows, routing, of_tokens=True), sizes.limit)
    sums = moe_unpermute(experts.down(wide, routing), routing)
    if experts.shared is not None:
        sums = _with_shared(experts.shared, rows, sums, activation, gated)
    return sums.view(h.shape)


def _limited(wide: Tensor, limit: float) -> Tensor:
    """Return (1 + up) * gate * sigmoid(1.702 gate), of both what the limit leaves."""
    gate, up = wide.chunk(2, -1)
    up = up.clamp(-limit, limit) + 1
    return bias_activation(gate.clamp(max=limit), activation="gelu_quick") * up


def _with_shared(
    shared: SharedExpert, rows: Tensor, sums: Tensor, activation: str, gated: bool
) -> Tensor:
    """Return the sums with what the shared expert makes of all tokens.

    Its gate is that of a mixture of one expert, whose weight is a sigmoid: so no op but ours runs,
    and steps on the CPU are recorded. Rows are multiplied before `down`, which adds the sums.
    """
    wide = shared.up(rows, activation=activation, gated=gated)
    if shared.gate is not None:
        one = moe_route(shared.gate(rows), 1, score="sigmoid")
        wide = moe_unpermute(wide, one)
    return shared.down(wide, residual=sums)
