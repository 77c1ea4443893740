"""What commits and resumes: a net with parameters and buffers of many kinds, and its optimizer."""

import pytest
import torch
from offload_cases import KINDS
from optim_cases import F32
from torch import nn
from torch.nn import Parameter

from deepspeed_ext.offload import OffloadOptimizer

BUDGET = 16 << 20


class Net(nn.Module):
    """Layers with buffers, a tied weight, one that is frozen, one that has no gradient."""

    def __init__(self, device="cpu", dtype=F32, width=400):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(300, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 300)
        self.frozen = nn.Linear(300, 300).requires_grad_(False)
        self.tied = nn.Linear(300, width, bias=False)
        self.tied.weight = self.first.weight
        self.unused = Parameter(torch.randn(70_000))
        self.permuted = Parameter(torch.randn(30, 300).t())
        self.to(device, dtype)

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.first(x)) + self.tied(x))
        return self.frozen(self.last(hidden)) @ self.permuted


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def opened(net, folder, kind="adam", resume=True, fraction=1.0, **options):
    """Return a durable optimizer of two groups."""
    chosen = {"memory_budget": BUDGET, "nvme_fraction": fraction} | KINDS[kind].options | options
    params = list(net.parameters())
    return OffloadOptimizer(
        [{"params": params[:2]}, {"params": params[2:], "lr": 3e-3}],
        KINDS[kind].offloaded,
        model=net,
        device="nvme",
        nvme_path=folder,
        durable=True,
        resume=resume,
        **chosen,
    )


def train(net, optimizer, first, last):
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        param = net.first.weight
        x = torch.randn(8, 300, generator=generator).to(param.device, param.dtype)
        net(x).float().pow(2).mean().backward()
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9
        optimizer.step()
        optimizer.zero_grad()


def values(net, optimizer):
    """Return copies of weights, buffers and state, which are in no order of time any more."""
    optimizer.synchronize()
    found = [value.detach().clone() for value in net.state_dict().values()]
    for group in optimizer.param_groups:
        for param in group["params"]:
            entry = optimizer.state.get(param, {})
            state = [entry[key] for key in sorted(entry)]
            found += [value.clone() for value in state if isinstance(value, torch.Tensor)]
    return found
