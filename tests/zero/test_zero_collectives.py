"""What a step sends, counted, is what the table of zero.shard says."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from processes import Case
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from zero_cases import adam, home

from deepspeed_ext import zero

WIDTH, LAYERS = 8, 3
OF_BLOCK, OF_REST = WIDTH * WIDTH + WIDTH, 2 * WIDTH * WIDTH  # elements
BLOCKS, ALL = LAYERS * OF_BLOCK, LAYERS * OF_BLOCK + OF_REST


class Net(nn.Module):
    """Sizes that four processes share evenly: nothing is padded."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.last(torch.tanh(self.blocks(self.first(x))))


@contextmanager
def counted():
    """Collectives and their elements: of a gather what comes out, else what goes in."""
    calls, elements = Counter(), Counter()
    names = {  # in torch 2.11 and in 2.13, and the argument that is whole
        "all_gather_into_tensor": ("gather", 0, "output_tensor"),
        "all_gather_single": ("gather", 0, "output"),
        "reduce_scatter_tensor": ("reduce", 1, "input"),
        "reduce_scatter_single": ("reduce", 1, "input"),
        "all_reduce": ("all-reduce", 0, "tensor"),
    }
    real = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def counting(name):
        kind, position, keyword = names[name]

        def call(*args, **kwargs):
            by_name = [value for key, value in kwargs.items() if key.startswith(keyword)]
            calls[kind] += 1
            elements[kind] += (by_name[0] if by_name else args[position]).numel()
            return real[name](*args, **kwargs)

        return call

    for name in real:
        setattr(dist, name, counting(name))
    try:
        yield calls, elements
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def one_step(model, optimizer, times):
    for _ in zero.accumulate(model, times):
        model(torch.ones(2, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def expected(stage, times, is_hybrid):
    """The table: how often blocks and the rest are gathered and reduced in a step."""
    gathers = {0: (0, 0), 1: (1, 1), 2: (1, 1), 3: (2 * times, times)}[stage]
    reduces = {0: 0, 1: 1, 2: times, 3: times}[stage]
    asked = (times - 1) * (stage in (1, 2))  # whether a weight was written
    calls = {
        "gather": gathers[0] * LAYERS + gathers[1],
        "reduce": reduces * (LAYERS + 1),
        "all-reduce": (LAYERS + 1) * (stage == 0 or is_hybrid) + asked,
    }
    elements = {
        "gather": gathers[0] * BLOCKS + gathers[1] * OF_REST,
        "reduce": reduces * ALL,
        "all-reduce": (ALL if stage == 0 else ALL // 2 * is_hybrid) + asked,
    }
    return tuple({k: v for k, v in each.items() if v} for each in (calls, elements))


def table(row, folder):
    mesh = None
    if row == "hybrid":
        mesh = init_device_mesh(home(), (2, 2), mesh_dim_names=("replica", "shard"))
    for stage in range(4):
        model = zero.shard(Net(), stage, mesh=mesh)
        optimizer = adam(model.parameters())
        one_step(model, optimizer, 1)
        for times in (1, 3):
            with counted() as (calls, elements):
                one_step(model, optimizer, times)
            want = expected(stage, times, row == "hybrid")
            assert (calls, elements) == want, (stage, times, calls, elements, want)
        with counted() as (calls, elements), torch.no_grad():
            for _ in range(2):
                model(torch.ones(2, WIDTH))
                assert all(isinstance(p, DTensor) for p in model.parameters())
        gathers = 0 if stage == 0 else 2 * (LAYERS + 1)
        assert calls == ({"gather": gathers} if gathers else {})


def forwards_in_backward(row, folder):
    """What is computed anew in backward finds the weights that are gathered for it."""
    for stage in (1, 2):
        model = zero.shard(Net(), stage)
        for _ in range(2):
            with counted() as (calls, _):
                checkpoint(model, torch.ones(2, WIDTH), use_reentrant=False).sum().backward()
        assert calls == {"gather": LAYERS + 1, "reduce": LAYERS + 1}


def parts(row, folder):
    """Each process keeps its rows only: of weights, gradients and state."""
    world = dist.get_world_size()
    for stage in range(4):
        model = zero.shard(Net(), stage)
        optimizer = adam(model.parameters())
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        kept = Counter()
        for param in model.parameters():
            tensors = {"weight": param, "grad": param.grad, **optimizer.state[param]}
            tensors.pop("step")
            for what, tensor in tensors.items():
                kept[what] += tensor.to_local().nbytes
            kept["storage"] += param.to_local().untyped_storage().nbytes()
        share = ALL * 4 // (1 if stage == 0 else world)
        assert kept == dict.fromkeys(
            ("weight", "grad", "exp_avg", "exp_avg_sq", "storage"), share
        ), stage


CASES = [
    Case(2, "table", ""),
    Case(4, "table", "hybrid"),
    Case(4, "table", ""),
    Case(2, "parts", ""),
    Case(2, "forwards_in_backward", ""),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function}-{c.row}-{c.world}")
def test_processes(case, groups):
    groups.run(case)
