"""The choice of experts for tokens, its weights, and the terms of the losses of a router."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops._library import check_numbers, define
from deepspeed_ext.ops.moe.assign import fake_rows, moe_assign_ref, rows_of, seed_of
from deepspeed_ext.ops.moe.routing import LIBRARIES, Routing

_SCORES = ("softmax", "sigmoid", "softmax_topk")  # by their numbers in the schemas
_OPTIONS = "int score, bool normalize, float scale"
_LEAST_SUM = 1e-20  # that weights are divided by

_backward_op = define(
    "moe_route_backward(Tensor logits, Tensor experts, Tensor? grad_weights,"
    f" Tensor? grad_probability_sums, Tensor? grad_z_sum, *, {_OPTIONS}) -> Tensor",
    LIBRARIES,
    fake=lambda logits, *others, **options: logits.new_empty(logits.shape),
)


def _fake(
    logits: Tensor, bias: Tensor | None, seed: Tensor | None, *, k: int, **options: Any
) -> tuple[Tensor, ...]:
    experts = logits.new_empty((*logits.shape[:-1], k), dtype=torch.int64)
    weights = torch.empty_like(experts, dtype=torch.float32)
    sums = weights.new_empty(logits.shape[-1:])
    return weights, experts, sums, weights.new_empty(()), *fake_rows(experts, logits.shape[-1])


def _save(
    ctx: Any,
    inputs: tuple[Tensor, Tensor | None, Tensor | None],
    keyword_only_inputs: Mapping[str, Any],
    output: tuple[Tensor, ...],
) -> None:
    ctx.mark_non_differentiable(output[1], *output[4:])
    ctx.save_for_backward(inputs[0], output[1])
    ctx.options = {name: keyword_only_inputs[name] for name in ("score", "normalize", "scale")}


def _backward(
    ctx: Any, grad_weights: Tensor | None, _: None, *grads: Tensor | None
) -> tuple[Tensor, None, None]:
    grad = _backward_op(*ctx.saved_tensors, grad_weights, *grads[:2], **ctx.options)
    return grad, None, None


_op = define(
    f"moe_route(Tensor logits, Tensor? bias, Tensor? seed, *, int k, {_OPTIONS}, int groups,"
    " int topk_groups, SymInt? capacity) -> (Tensor weights, Tensor experts,"
    " Tensor probability_sums, Tensor z_sum, Tensor slots, Tensor offsets, Tensor counts,"
    " Tensor first_counts)",
    LIBRARIES,
    fake=_fake,
    backward=_backward,
    setup_context=_save,
    without_gradient=("bias", "seed"),
)


def moe_route(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    normalize: bool = False,
    scale: float = 1.0,
    bias: Tensor | None = None,
    groups: int = 1,
    topk_groups: int = 1,
    capacity: int | None = None,
    keep: str = "order",
    seed: int | Tensor = 0,
) -> Routing:
    """Choose k experts for each token, and find a row for each choice.

    The choices are the k best experts, the best one first; of equal ones, the lower number. NaN is
    better than any number, as in torch.topk, so that it shows in the results. Arithmetic is in
    float32. The choice has no gradient; weights, probability_sums and z_sum have. Choices and
    weights of a token have the same bits in any batch; sums over tokens, the same in every run.
    ``moe_assign`` says which rows choices get, and which of them are dropped.

    Args:
        logits: (..., experts), float32, bfloat16 or float16, on the CPU or on CUDA, for up to 1024
            experts. Rows that lie in one piece each, at equal distances, are read as they lie;
            other layouts are copied first.
        k: choices of each token, 1 to all experts of topk_groups groups.
        score: "softmax": a weight is the probability of its expert among all. "sigmoid": it is the
            sigmoid of its logit. "softmax_topk": the probability among those chosen.
        normalize: divides the weights of a token by their sum + 1e-20.
        scale: multiplies the weights, after that.
        bias: (experts,), float32, bfloat16 or float16, added to scores (to logits, with
            "softmax_topk") for the choice, not for the weights. It has no gradient.
        groups: of how many groups, which are as large as each other, experts are.
        topk_groups: how many groups a token chooses from: those with the best expert, or with
            "sigmoid" with the largest sum of their two best.
        capacity: see moe_assign.
        keep: see moe_assign.
        seed: see moe_assign.

    Returns:
        The routing. Its probability_sums are of the softmax over all experts; with "sigmoid", of
        the sigmoids divided by their sum over all experts + 1e-20. A token with inf among its
        logits, or with only -inf, has no probabilities but NaN.

    See: Shazeer et al., "Outrageously Large Neural Networks", 2017, for "softmax_topk";
    DeepSeek-AI, "DeepSeek-V2", 2024, section 2.2, and "DeepSeek-V3", 2024, equations 12 to 16, for
    groups, "sigmoid" and bias. ``moe_route_ref`` is the same in float64.
    """
    if score not in _SCORES:
        raise ValueError(
            f"moe_route: score is {score!r}, expected 'softmax', 'sigmoid' or 'softmax_topk'"
        )
    if type(scale) is not float:
        check_numbers("moe_route", scale=scale)
    weights, experts, probability_sums, z_sum, slots, offsets, counts, first_counts = _op(
        logits,
        bias,
        seed_of("moe_route", keep, seed, logits),
        k=k,
        score=_SCORES.index(score),
        normalize=normalize,
        scale=scale,
        groups=groups,
        topk_groups=topk_groups,
        capacity=capacity,
    )
    return Routing(
        *(experts, weights, slots, offsets, counts, first_counts),
        rows=rows_of(slots, logits.shape[-1], capacity),
        probability_sums=probability_sums,
        z_sum=z_sum,
    )


def moe_route_ref(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    normalize: bool = False,
    scale: float = 1.0,
    bias: Tensor | None = None,
    groups: int = 1,
    topk_groups: int = 1,
    capacity: int | None = None,
    keep: str = "order",
    seed: int | Tensor = 0,
) -> Routing:
    """Do what moe_route does, in float64 and plain torch: its definition, for tests."""
    wide = logits.double()
    count = wide.shape[-1]
    probability = wide.softmax(-1)
    scores = {"softmax": probability, "sigmoid": wide.sigmoid(), "softmax_topk": wide}[score]
    ranked = wide.detach() if bias is None else scores.detach() + bias.double()
    if groups > 1:
        of_group = (
            ranked if score != "sigmoid" or bias is not None else scores.detach()
        ).unflatten(-1, (groups, count // groups))
        best = min(2 if score == "sigmoid" else 1, count // groups)
        best_groups = _first(_sorted(of_group)[..., :best].sum(-1), topk_groups)
        is_kept = torch.zeros_like(of_group[..., 0], dtype=torch.bool)
        is_kept = is_kept.scatter(-1, best_groups, True).repeat_interleave(count // groups, -1)
        inside = is_kept.nonzero()[:, -1]  # lower numbers first
        inside = inside.view(*wide.shape[:-1], count // groups * topk_groups)
        experts = inside.gather(-1, _first(ranked.gather(-1, inside), k))
    else:
        experts = _first(ranked, k)
    weights = scores.gather(-1, experts)
    if score == "softmax_topk":
        weights = weights.softmax(-1)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
    if score == "sigmoid":
        probability = scores / (scores.sum(-1, keepdim=True) + _LEAST_SUM)
    found = moe_assign_ref(experts, weights * scale, count, capacity=capacity, keep=keep, seed=seed)
    return found._replace(
        probability_sums=probability.flatten(end_dim=-2).sum(0) if wide.dim() > 1 else probability,
        z_sum=wide.logsumexp(-1).square().sum(),
    )


def _sorted(values: Tensor) -> Tensor:
    return values.sort(dim=-1, descending=True, stable=True).values


def _first(values: Tensor, k: int) -> Tensor:
    """Return where the k largest are, of equal ones the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
