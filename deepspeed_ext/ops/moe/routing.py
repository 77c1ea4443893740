"""What is known of the choices of tokens, and the losses that keep experts in balance."""

from typing import NamedTuple

from torch import Tensor

from deepspeed_ext.ops._kinds import check_kinds

LIBRARIES = {"cpu": "cpu_moe", "cuda": "fused_moe"}


class Routing(NamedTuple):
    """Which experts each token goes to, and where its copies lie when they are sorted by expert.

    A token has k choices, the best one first. Its copies are rows of a permuted tensor, which lie
    expert by expert, without gaps; behind those of the last expert there may be rows that are no
    choice's.

    Args:
        experts: (..., k), int64, the chosen experts.
        weights: (..., k), what the results of the experts are multiplied by.
        slots: (..., k), int64, the row of the permuted tensor that has the token for this expert;
            -1 for a choice that is dropped.
        offsets: (experts,), int32, where the rows of each expert end, as
            torch.nn.functional.grouped_mm takes them.
        counts: (experts,), int64, how many choices each expert is, dropped ones included.
        first_counts: (experts,), int64, the same of first choices.
        rows: how many rows a permuted tensor has, known without asking the device.
        probability_sums: (experts,), float32, the probabilities of each expert, added up over
            tokens; None if the choices came without.
        z_sum: (), float32, log(sum of e^logit)^2, added up over tokens; None likewise.
    """

    experts: Tensor
    weights: Tensor
    slots: Tensor
    offsets: Tensor
    counts: Tensor
    first_counts: Tensor
    rows: int
    probability_sums: Tensor | None = None
    z_sum: Tensor | None = None


def moe_load_balancing_loss(routing: Routing, *, first_choices: bool = False) -> Tensor:
    """Return the loss that is least when all experts get as many tokens.

    It is experts x sum(mean probability x share of choices): 1 if either is the same for all
    experts. Multiplied by k, with all choices, it is the loss of Mixtral in transformers; with
    first choices, that of Switch and GShard, and of DeepSpeed. The gradient is that of the
    probabilities.

    Args:
        routing: of moe_route.
        first_choices: whether shares are those of first choices alone.

    Returns:
        float32, (); 0 for no tokens.

    Raises:
        ValueError: the routing has no probabilities.

    See: Fedus, Zoph & Shazeer, "Switch Transformers", 2022, equation 4.
    """
    if type(routing) is not Routing:
        check_kinds("moe_load_balancing_loss", routing=(routing, Routing))
    probabilities = _known("moe_load_balancing_loss", "probability_sums", routing.probability_sums)
    counts = routing.first_counts if first_choices else routing.counts
    tokens = max(routing.experts.shape[:-1].numel(), 1)
    choices = tokens if first_choices else max(routing.experts.numel(), 1)
    products: Tensor = probabilities / tokens * (counts / choices)
    return products.sum() * len(counts)


def moe_z_loss(routing: Routing) -> Tensor:
    """Return the mean over tokens of log(sum of e^logit)^2, which keeps logits small.

    Args:
        routing: of moe_route.

    Returns:
        float32, (); 0 for no tokens.

    Raises:
        ValueError: the routing has no sum of them.

    See: Zoph et al., "ST-MoE", 2022, equation 5.
    """
    if type(routing) is not Routing:
        check_kinds("moe_z_loss", routing=(routing, Routing))
    total = _known("moe_z_loss", "z_sum", routing.z_sum)
    return total / max(routing.experts.shape[:-1].numel(), 1)


def _known(op: str, name: str, value: Tensor | None) -> Tensor:
    if value is None:
        raise ValueError(f"{op}: routing.{name} is None, expected that of moe_route")
    return value
