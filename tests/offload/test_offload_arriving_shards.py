"""Shards on their way: whoever touches one, in several processes, gets the new value."""

import copy

import processes
import pytest
import torch
import torch.distributed as dist
from offload_cases import Gate
from processes import Case
from sharded_cases import Net, Row, mesh_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim import DeepSpeedCPUAdam
from deepspeed_ext.zero import GatheredParameters

X = torch.linspace(-1, 1, 12).view(2, 6)


def emptied(net):
    """One writes nothing, and what all had before the step must not come back by that."""
    with GatheredParameters(net.first, modifier_rank=0):
        pass
    return list(net.first.parameters())


def gathered(net):
    with GatheredParameters(net.first.weight) as weight:
        return weight.clone()


def unsharded(net):
    net.first.unshard()
    try:
        return net.first.weight.detach().clone()
    finally:
        net.first.reshard()


def loaded(net):
    net.load_state_dict({name: value * 0 + 2 for name, value in copied(net).items()})
    return list(net.parameters())


def copied(net):
    """From before the step, as far as values go: none of them is read."""
    return {name: torch.ones_like(value) for name, value in net.state_dict().items()}


def collected(net):
    parts = [torch.empty_like(net.first.bias._local_tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, net.first.bias._local_tensor)
    return parts


def part_replaced(net):
    """By one that nothing on its way is written to."""
    weight = net.first.weight
    weight._local_tensor = torch.full_like(weight.grad.to_local(), 2.0)
    assert type(weight) is DTensor, "the new value may come after this part"
    return weight


TOUCHES = {
    "forward": lambda net: net(X),
    "a block": lambda net: net.first(X),
    "unshard": unsharded,
    "state_dict": lambda net: dict(net.state_dict()),
    "state_dict of a block": lambda net: dict(net.second.state_dict()),
    "state_dict of DCP": lambda net: get_model_state_dict(net),
    "to_local": lambda net: net.first.weight.to_local(),
    "to_local without a graph": torch.no_grad()(lambda net: net.first.weight.to_local()),
    "its part": lambda net: net.first.weight._local_tensor,
    "full_tensor": lambda net: net.second.weight.full_tensor(),
    "detach": lambda net: net.second.weight.detach(),
    "operator": lambda net: net.second.weight * 2,
    "foreach": lambda net: torch._foreach_mul(list(net.second.parameters()), 2.0),
    "deepcopy": lambda net: copy.deepcopy(net.second.weight),
    "load_state_dict": loaded,
    "collective": collected,
    "gathered": gathered,
    "gathered for nothing": emptied,
    "part replaced": part_replaced,  # last: fully_shard does not know of it
}


def touched(device, folder, **options):
    """Compare what each touch gets with what it gets after a plain step."""
    row = Row(DeepSpeedCPUAdam, device)
    nets = []
    for _ in range(2):
        net = Net()
        for layer in (net.first, net.second, net):
            fully_shard(layer, mesh=mesh_of(row), reshard_after_forward=True, **options)
        nets.append(net)
    net, twin = nets
    plain = DeepSpeedCPUAdam(twin.parameters(), lr=0.05)
    ours = OffloadOptimizer(net.parameters(), lr=0.05, model=nn.Module())
    for step, (name, touch) in enumerate(TOUCHES.items()):
        for each in nets:
            each(X * (1 + dist.get_rank() + step)).float().square().sum().backward()
        with pytest.MonkeyPatch.context() as patch:
            gate = Gate(patch, "_send")
            ours.step()
            gate.await_thread()
            plain.step()
            gate.open_soon()
            got, wanted = map(touch, nets)
            got, wanted = (parts(value) for value in (got, wanted))
            assert list(map(type, got)) == list(map(type, wanted)), name
            for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
                assert torch.equal(mine, theirs), (name, i)
            gate.open()
            ours.synchronize()
        for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            assert type(mine) is DTensor and not {"_deepspeed_ext_wait"} & vars(mine).keys()
            assert torch.equal(mine._local_tensor, theirs._local_tensor), name
        for optimizer in (ours, plain):
            optimizer.zero_grad()
    ours.close()


def parts(value):
    """What this process holds, of each."""
    values = list(value.values()) if isinstance(value, dict) else value
    values = [values] if isinstance(values, Tensor) else list(values)
    return [v._local_tensor if isinstance(v, DTensor) else v for v in values]


def touched_in_mixed_precision(device, folder):
    """Where fully_shard gathers by another way."""
    touched(device, folder, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


FUNCTIONS = {touched: (1, 2), touched_in_mixed_precision: (2,)}
CASES = [
    Case(world, function.__name__, "cpu")
    for function, worlds in FUNCTIONS.items()
    for world in worlds
]


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    made = processes.Groups(__name__, tmp_path_factory.mktemp("cpu"))
    yield made
    made.end()


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function}-{c.world}")
def test_processes(case, groups):
    groups.run(case)
