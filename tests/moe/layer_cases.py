"""What tests of layers of experts share: experts, and the layer as a plain loop in float64."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, INNER, EXPERTS = 8, 12, 8


class Mlp(nn.Module):
    """Recognised as nothing, so that its own forward runs."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x))), self.down.bias


def sequence():
    return nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))


def varied(module, seed=0):
    """Draw all parameters, so that experts differ, and return the module."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 2)
    return module


def inputs(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, WIDTH, generator=generator).requires_grad_()


class Loop:
    """A MoE in float64, token by token.

    Args:
        layer: a MoE of these experts, with use_rts=False or room for all.
    """

    def __init__(self, layer):
        self.layer = copy.deepcopy(layer).double()
        self.k, self.count = layer.k, layer.num_experts
        factor = layer.capacity_factor if layer.training else layer.eval_capacity_factor
        self.capacity = lambda tokens: (
            max(math.ceil(tokens / self.count * factor * self.k), layer.min_capacity)
            if layer.drop_tokens
            else tokens
        )

    def expert(self, number, x):
        up, down = (layer for layer in self.layer.experts.children() if hasattr(layer, "weight"))
        inner = F.gelu(F.linear(x, up.weight[number], up.bias[number]))
        return F.linear(inner, down.weight[number], down.bias[number])

    def __call__(self, hidden, used=None):
        x = hidden.reshape(-1, WIDTH)
        probability = F.linear(x, self.layer.gate.weight).softmax(-1)
        order = probability.argsort(dim=-1, descending=True, stable=True)[:, : self.k].tolist()
        room, counts, firsts = [self.capacity(len(x))] * self.count, [0] * self.count, []
        kept = {token: [] for token in range(len(x))}
        for rank in range(self.k):
            for token, choices in enumerate(order):
                expert = choices[rank]
                if used is not None and not used[token]:
                    continue
                counts[expert] += 1
                firsts += [expert] * (rank == 0)
                if room[expert]:
                    room[expert] -= 1
                    kept[token].append(expert)
        out = []
        for token, experts in kept.items():
            weights = [probability[token, expert] for expert in experts]
            total = sum(weights) if self.k > 1 else 1
            terms = zip(weights, experts, strict=True)
            own = [weight / total * self.expert(expert, x[token]) for weight, expert in terms]
            out.append(sum(own) if own else 0 * x[token])
        found = torch.stack(out).view(hidden.shape) if out else hidden * 0
        if self.layer.use_residual:
            share = self.layer.coefficient(hidden).softmax(-1)
            beside = self.layer.mlp(hidden)
            beside = beside[0] if isinstance(beside, tuple) else beside
            found = found * share[..., :1] + beside * share[..., 1:]
        share_of_firsts = torch.bincount(
            torch.tensor(firsts, dtype=torch.long), minlength=self.count
        )
        l_aux = self.count * (probability.mean(0) * share_of_firsts / max(len(x), 1)).sum()
        return found, l_aux, torch.tensor(counts)


def assert_near(got, want):
    torch.testing.assert_close(got.double(), want.double(), rtol=2e-4, atol=2e-5)


def assert_gradients_near(layer, loop, pairs):
    """Compare gradients of all parameters, and of pairs of tensors."""
    theirs = dict(loop.layer.named_parameters())
    for name, param in layer.named_parameters():
        want = theirs[name].grad
        assert_near(param.grad, torch.zeros_like(param) if want is None else want)
    for got, want in pairs:
        assert_near(got.grad, want.grad)
