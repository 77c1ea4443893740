"""Quick runs of routing, permute and unpermute against their references, for ds_report."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext import ops
from deepspeed_ext.ops._compare import compare


def moe(device: str) -> None:
    """Run each score there and back, with drops, and the gradients of all.

    Raises:
        RuntimeError: a result is not what the reference says.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 12, generator=generator)
    x = torch.rand(40, 52, generator=generator) + 0.5
    ways: tuple[dict[str, Any], ...] = (
        dict(score="softmax", normalize=True),
        dict(score="sigmoid", groups=4, topk_groups=2, scale=2.5),
        dict(score="softmax_topk", keep="random", seed=7),
    )
    for options in ways:
        leaves = [t.to(device).requires_grad_() for t in (logits, x)]
        doubles = [t.double().requires_grad_() for t in (logits, x)]
        got = _there_and_back(leaves, "", options)
        want = _there_and_back(doubles, "_ref", options)
        for i, (value, expected) in enumerate(zip(got, want, strict=True)):
            what = f"moe: {i} of results and gradients of {options['score']} on {device}"
            compare(what, value, expected, 1e-5, of_largest=1e-4)


def _there_and_back(leaves: Sequence[Tensor], kind: str, options: dict[str, Any]) -> list[Tensor]:
    logits, x = leaves
    with torch.enable_grad():
        routing = getattr(ops, f"moe_route{kind}")(logits, 3, capacity=9, **options)
        rows = getattr(ops, f"moe_permute{kind}")(x, routing)
        out = getattr(ops, f"moe_unpermute{kind}")(rows.square(), routing)
        loss = ops.moe_load_balancing_loss(routing) + ops.moe_z_loss(routing)
        grads = torch.autograd.grad(out.square().mean() + loss, leaves)
    integers = (routing.experts, routing.slots, routing.offsets, routing.counts)
    return [*(tensor.double() for tensor in integers), out.detach(), loss.detach(), *grads]
