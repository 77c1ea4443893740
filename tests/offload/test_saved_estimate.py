"""saved_tensors.estimate: what leaves, and the host memory that it takes, before any does."""

import pytest
import torch
from optim_cases import on_each_device
from saved_cases import Attention, Mixed, gradients, inputs, net_on
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed_ext import offload

NAMES = ("peak", "stayed", "largest")


def after(saved, function, *args):
    with saved:
        made = function(*args)
    stats = saved.stats()
    del made
    return {name: stats[name] for name in NAMES}


@on_each_device
@pytest.mark.parametrize("budget", [None, 20_000])
def test_what_leaves_is_what_was_estimated(device, budget):
    net, x = net_on(device), inputs(device)

    def checkpointed(x, use=torch_checkpoint):
        for block in net:
            x = use(block, x, use_reentrant=False)
        return x

    def new():
        return offload.saved_tensors(min_bytes=600, budget=budget)

    state = torch.get_rng_state()
    for function in (net, checkpointed, lambda x: net[1](net[0](x)).square().mean()):
        estimated = new().estimate(function, x)
        assert estimated == after(new(), function, x)
        assert estimated["peak"] + estimated["stayed"] > 0
        saved = new()
        gradients(net, x, saved)  # what was there before is not counted, nor changed
        before = saved.stats()
        assert saved.estimate(function, x) == estimated and saved.stats() == before
        with torch.autocast(device, torch.bfloat16):
            assert saved.estimate(function, x) == after(new(), function, x)
    torch.set_rng_state(state)
    saved = new()
    by_ours = saved.estimate(lambda x: checkpointed(x, lambda *a, **k: ours(saved, *a)), x)
    assert by_ours["peak"] <= 5 * x.nbytes and by_ours == new().estimate(checkpointed, x)
    assert all(type(p) is nn.Parameter and not p.is_meta for p in net.parameters())


def ours(saved, block, x):
    return offload.checkpoint(block, x, device=saved)


def test_models_without_memory():
    """Also of parameters and inputs that are nowhere yet."""
    saved = offload.saved_tensors(min_bytes=0)
    with torch.device("meta"):
        nowhere = nn.Sequential(Attention(), Mixed())
        x = torch.empty(2, 6, 24)
    real = nn.Sequential(Attention(), Mixed())
    assert saved.estimate(nowhere, x) == saved.estimate(real, torch.empty(2, 6, 24))


@on_each_device
def test_host_memory_is_within_5_percent(device):
    """Pages and all, also after some steps."""
    net = nn.Sequential(nn.Linear(300, 500), nn.GELU(), nn.Linear(500, 300), nn.Tanh()).to(device)
    x = inputs(device, 1200, 300)
    saved = offload.saved_tensors()
    estimated = saved.estimate(net, x)
    assert estimated["peak"] > 4 << 20
    for _ in range(3):
        gradients(net, x, saved)
        (lane,) = saved._packing._place._lanes.values()
        taken = lane._pool.stats()["pinned_bytes"]
        assert 1 <= taken / estimated["peak"] <= 1.05


def test_errors():
    saved, weight = offload.saved_tensors(min_bytes=0), nn.Parameter(torch.ones(9))
    with pytest.raises(RuntimeError, match="function calls backward, expected forward alone"):
        saved.estimate(lambda: (weight * 1).exp().sum().backward())
    assert weight.grad is None

    def fail():
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        saved.estimate(fail)
    with saved:  # and it goes on as before
        y = (weight * 1).exp()
    assert saved.stats()["bytes"] == weight.nbytes
    y.sum().backward()
    assert torch.equal(weight.grad, weight.exp())
