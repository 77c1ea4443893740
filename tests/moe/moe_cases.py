"""What tests of experts over processes share: a small model, its training, on one process too."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from deepspeed_ext.moe import Experts
from deepspeed_ext.moe.exchange import Exchange
from deepspeed_ext.ops import moe_assign
from deepspeed_ext.optim import DeepSpeedCPUAdam, FusedAdam

WIDTH, EXPERTS, VOCABULARY = 8, 4, 11
NAMES = ("data", "expert")
OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3}
MAX_NORM = 0.05  # which bites in each step


def home():
    """Where the processes of this group compute."""
    return "cuda" if "nccl" in dist.get_backend_config() else "cpu"


def mesh_of(ep_size):
    shape = (dist.get_world_size() // ep_size, ep_size)
    return init_device_mesh(home(), shape, mesh_dim_names=NAMES)["expert"]


class Layer(nn.Module):
    """A plain one, as ops of this package have no float64."""

    def __init__(self, ep_size):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        expert = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        self.mesh = mesh_of(ep_size) if ep_size > 1 else None
        self.experts = Experts(expert, EXPERTS, self.mesh)

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weights, experts = self.gate(tokens).softmax(-1).topk(2)
        routing = moe_assign(experts, weights, EXPERTS)
        flat = routing.slots.flatten()
        rows = tokens[
            torch.empty_like(flat).index_copy_(
                0, flat, torch.arange(len(flat), device=x.device) // 2
            )
        ]
        if self.mesh is None:
            rows = self.experts(rows, routing.offsets)
        else:
            exchange = Exchange(rows, routing.offsets, self.mesh.get_group())
            exchange.send_back(self.experts(*exchange.arrived()))
            rows = exchange.returned()
        return (rows[routing.slots] * weights[..., None]).sum(-2).view_as(x)


class Block(nn.Module):
    def __init__(self, ep_size):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = Layer(ep_size)

    def forward(self, x):
        return x + self.moe(self.norm(x))


class Net(nn.Module):
    def __init__(self, ep_size=1, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(ep_size)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for block in self.blocks:  # copies of one would hide which is which
            experts, count = block.moe.experts, EXPERTS // ep_size
            first = block.moe.mesh.get_local_rank() * count if ep_size > 1 else 0
            for param in experts.parameters():
                part = param.to_local() if ep_size > 1 else param
                factor = 1 + torch.arange(first, first + count, device=part.device) / 8
                part.data.mul_(factor.view(-1, *[1] * (part.dim() - 1)))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model, number, rank=None):
    generator = torch.Generator().manual_seed(
        1000 * number + (dist.get_rank() if rank is None else rank)
    )
    tokens, targets = torch.randint(VOCABULARY, (2, 4, 5), generator=generator).to(home())
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def alone(make, steps, times, dtype, step, net=None):
    """Train in one process on what all processes have, and return the model and the last norm."""
    model = (net or Net)(1).to(home(), dtype)
    optimizer, norm = make(model), None
    for number in range(steps * times):
        for rank in range(dist.get_world_size()):
            (loss_of(model, number, rank) / dist.get_world_size() / times).backward()
        if number % times == times - 1:
            norm = step(optimizer, MAX_NORM)
            optimizer.zero_grad()
    return model, norm


def adam():
    return FusedAdam if home() == "cuda" else DeepSpeedCPUAdam


def adamw(model):
    return torch.optim.AdamW(model.parameters(), **OPTIONS)
