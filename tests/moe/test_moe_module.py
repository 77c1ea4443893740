"""MoeModule against plain torch in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from layer_cases import EXPERTS, WIDTH, Mlp, assert_near, inputs, varied
from torch import nn

from deepspeed_ext.moe import Experts, MoeModule

TOKENS = 30


def plain(layer, x, room):
    """Return the result and the loss, by masks of tokens and experts."""
    wide = {name: p.detach().double() for name, p in layer.named_parameters()}
    probability = F.linear(x, wide["gate.weight"]).softmax(-1)
    best = probability.argsort(dim=-1, descending=True, stable=True)[:, : layer.top_k]
    masks = F.one_hot(best, EXPERTS).double()  # (tokens, k, experts)
    places = masks.transpose(0, 1).flatten(0, 1).cumsum(0).view(layer.top_k, -1, EXPERTS) - 1
    kept = masks * (places.transpose(0, 1) < room)
    inner = torch.einsum("th,eih->tei", x, wide["experts.up.weight"]) + wide["experts.up.bias"]
    out = torch.einsum("tei,ehi->teh", F.gelu(inner), wide["experts.down.weight"])
    out = out + wide["experts.down.bias"]
    found = torch.einsum("teh,te->th", out, kept.sum(1) * probability)
    l_aux = EXPERTS * (probability.mean(0) * masks.mean((0, 1))).sum()
    return found, l_aux


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("training", [True, False])
def test_results_are_those_of_masks(k, training):
    layer = varied(MoeModule(WIDTH, EXPERTS, k, 0.5, 1.1, 1, expert_cls=Mlp)).train(training)
    x = inputs(TOKENS)
    room = math.floor(k * (0.5 if training else 1.1) * TOKENS / EXPERTS)
    found, l_aux = layer(x)
    for got, want in zip((found, l_aux), plain(layer, x.double(), room + room % 2), strict=True):
        assert_near(got, want)
    (found.sum() + l_aux).backward()
    assert all(p.grad is not None for p in layer.parameters())
    layer.drop_tks = False
    assert_near(layer(x)[0], plain(layer, x.double(), TOKENS)[0])
    layer.drop_tks, layer.min_capacity = True, 100
    assert_near(layer(x)[0], plain(layer, x.double(), TOKENS)[0])


def test_residual_and_noise():
    beside = nn.Linear(WIDTH, WIDTH)
    layer = varied(MoeModule(WIDTH, EXPERTS, use_residual=True, residual_instance=beside,
                             expert_instance=Experts(Mlp(), EXPERTS)))  # fmt: skip
    x = inputs(2, 5)
    share = layer.residual_combine(x).softmax(-1)
    apart = varied(MoeModule(WIDTH, EXPERTS, expert_cls=Mlp))
    apart.load_state_dict({k: v for k, v in layer.state_dict().items() if "resid" not in k})
    want = apart(x)[0] * share[..., :1] + beside(x) * share[..., 1:]
    torch.testing.assert_close(layer(x)[0], want)
    for policy in ("Jitter", "Gaussian"):
        layer.noisy_policy = policy
        assert not torch.equal(layer.train()(x)[1], layer(x)[1])
        assert torch.equal(layer.eval()(x)[1], layer(x)[1])


def test_experts_are_drawn_one_by_one():
    torch.manual_seed(2)
    layer = MoeModule(WIDTH, EXPERTS, expert_cls=nn.Linear, in_features=WIDTH, out_features=WIDTH)
    torch.manual_seed(2)
    want = [nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)]
    assert torch.equal(layer.experts.weight, torch.stack([linear.weight for linear in want]))


@pytest.mark.parametrize(("options", "text"), [
    (dict(expert_cls=None), "expert_cls is None, expected a class of experts"),
    (dict(top_k=9), "top_k is 9, expected at most 8"),
    (dict(noisy_policy="RSample"), "noisy_policy is 'RSample', expected None, 'Jitter' or 'Gau"),
    (dict(top_k=True), "top_k is True, expected a whole number"),
    (dict(capacity_factor_train=1e30), "capacity_factor_train is 1e[+]30, expected a number from"),
    (dict(drop_tks="no"), "drop_tks is 'no', expected True or False"),
    (dict(expert_cls=3), "expert_cls is a int, expected a class of experts"),
    (dict(expert_cls=Mlp()), "expert_cls is a Mlp, expected a class of experts"),
    (dict(expert_cls=None, width=3), "width is given, expected expert_cls, whose argument it is"),
    (dict(residual_instance=Mlp()), "residual_instance is given, expected None without use_resi"),
    (dict(residual_instance=3, use_residual=True), "residual_instance is 3, expected a Module"),
    (dict(expert_instance=Mlp()), "expert_instance is .*, expected a Experts"),
    (dict(expert_instance=Experts(Mlp(), 2)), "expert_instance has 2 experts, expected 8"),
])  # fmt: skip
def test_arguments_that_are_refused(options, text):
    with pytest.raises((TypeError, ValueError), match=f"^MoeModule: {text}"):
        MoeModule(WIDTH, EXPERTS, **{"expert_cls": Mlp, **options})
