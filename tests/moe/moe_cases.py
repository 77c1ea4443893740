"""What tests of experts over processes share: a model with a stand-in layer, and its training."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from deepspeed_ext.moe import Experts
from deepspeed_ext.moe.exchange import Exchange
from deepspeed_ext.ops import moe_assign

WIDTH, EXPERTS, VOCABULARY = 8, 4, 11


class Layer(nn.Module):
    def __init__(self, expert, ep_size):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.mesh = None
        if ep_size > 1:
            shape = (dist.get_world_size() // ep_size, ep_size)
            self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "expert"))["expert"]
        self.experts = Experts(expert, EXPERTS, self.mesh)

    def forward(self, x):
        tokens = x.flatten(0, -2)
        probability = self.gate(tokens).softmax(-1)
        weights, experts = probability.topk(2)
        routing = moe_assign(experts, weights, EXPERTS)
        flat = routing.slots.flatten()
        token = torch.empty_like(flat).index_copy_(0, flat, torch.arange(len(flat)) // 2)
        rows = tokens[token]
        if self.mesh is None:
            rows = self.experts(rows, routing.offsets)
        else:
            exchange = Exchange(rows, routing.offsets, self.mesh.get_group())
            exchange.send_back(self.experts(*exchange.arrived()))
            rows = exchange.returned()
        out = (rows[routing.slots] * weights[..., None]).sum(-2)
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, ep_size):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        self.moe = Layer(expert, ep_size)

    def forward(self, x):
        return x + self.moe(self.norm(x))


class Net(nn.Module):
    def __init__(self, ep_size=1, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(ep_size) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(number, rank):
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(VOCABULARY, (2, 4, 5), generator=generator)


def loss_of(model, number, rank):
    tokens, targets = batch(number, rank)
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
