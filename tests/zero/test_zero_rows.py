"""compat.zero: models of which each process keeps its rows, and whole parameters for a while."""

import copy
import ctypes
import io
import threading
import types

import pytest
import torch
import torch.distributed as dist
from processes import Case
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from zero_cases import Net, home, loss_of, whole

import deepspeed_ext
from deepspeed_ext import zero
from deepspeed_ext.compat import zero as compat
from deepspeed_ext.compat.parameters import safe_set_full_fp32_param
from deepspeed_ext.compat.zero import ZeroParamStatus
from deepspeed_ext.dtensors import local
from deepspeed_ext.zero.memory import give_back


class Drawn(nn.Module):
    """Draws in all ways: in parts, after them, and by apply."""

    def __init__(self, seed: int, layers: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.gain = nn.Parameter(torch.rand(3))
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
        self.attention = nn.MultiheadAttention(16, 2)
        self.head = nn.Linear(16, 4)
        nn.init.normal_(self.head.weight, std=0.3)
        self.head.bias.data.fill_(0.5)
        self.register_buffer("places", torch.arange(4.0))
        self.scale = nn.Parameter(torch.tensor(2.0))  # no rows
        self.gain.data.add_(1)
        self.apply(self._draw)

    def _draw(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and home() == "cpu":
            nn.init.trunc_normal_(module.weight)
        elif isinstance(module, nn.Linear):  # where a plain model draws other numbers
            module.weight.data.mul_(3)
        if module is self:
            self.gain.data.mul_(2)


def config(stage, **more):
    given = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    return given | more


def assert_same(model, plain):
    with compat.GatheredParameters(model.parameters()):
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert type(ours) is nn.Parameter and torch.equal(ours.cpu(), theirs.cpu()), name


def builds(row, folder):
    """What the first process draws, as a plain model does; never whole."""
    rank = dist.get_rank()
    registered, most = [], 0

    def count(module, name, param):
        nonlocal most
        registered.append(param)
        most = max(most, sum(p.nbytes for p in registered))

    with compat.Init(config_dict_or_path={"train_batch_size": "auto"}):
        hook = register_module_parameter_registration_hook(count)
        model = Drawn(seed=rank)
        hook.remove()
    plain = Drawn(seed=0)
    assert_same(model, plain)
    assert torch.equal(model.places.cpu(), plain.places.cpu()) and type(model.scale) is nn.Parameter
    assert most < 0.4 * sum(p.nbytes for p in plain.parameters())
    assert sum(p.nbytes for p in model.parameters()) == model.scale.nbytes
    with compat.Init():
        net = Net(seed=rank)
    shards = dict(zero.shard(Net(), 3).named_parameters())
    for name, param in net.named_parameters():
        shard = shards[name]
        assert torch.equal(param.ds_tensor, local(shard)), name
        assert (param.ds_shape, param.ds_numel) == (shard.shape, shard.numel())
        assert param.ds_status is ZeroParamStatus.NOT_AVAILABLE and param.shape == (0,)
        assert param.requires_grad == shard.requires_grad
    assert net.head.weight is net.embedding.weight
    assert len({p.ds_id for p in net.parameters()}) == len(shards)
    taken = copy.deepcopy(net)
    assert taken.head.weight is taken.embedding.weight is not net.head.weight
    with compat.GatheredParameters(net, modifier_rank=1), torch.no_grad():
        net.head.weight.fill_(rank)
    assert_same(taken, Net(seed=0))


def ends(row, folder):
    """Nested, with errors, without effect, and what is made beside and after it."""
    rank = dist.get_rank()
    with compat.Init():
        outer = nn.ModuleList([nn.Linear(4, 4)])
        with compat.Init(dtype=torch.bfloat16):
            outer.append(nn.Linear(4, 4))
        with pytest.raises(KeyError), compat.Init():
            nn.Linear(4, 4)
            raise KeyError
        with compat.Init(enabled=False, param_swapper=1):
            outer.append(nn.Linear(4, 4))
        elsewhere = []
        thread = threading.Thread(
            target=lambda: elsewhere.extend([nn.Linear(2, 2), nn.Linear(2, 2)])
        )
        thread.start()
        thread.join()
    assert [layer.weight.ds_shape for layer in outer] == [(4, 4)] * 3
    assert [layer.weight.ds_tensor.dtype for layer in outer][:2] == [torch.float32, torch.bfloat16]
    after = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    after.apply(lambda module: None)
    assert nn.Module.apply.__module__ == "torch.nn.modules.module"
    assert all(p.numel() for layer in (*elsewhere, *after) for p in layer.parameters())
    with pytest.raises(KeyError), compat.Init():
        broken = nn.Linear(4, 4)
        raise KeyError
    assert type(broken.weight) is nn.Parameter and broken.weight.numel() == 16
    torch.manual_seed(rank)
    there = nn.Linear(4, 4)
    wanted = there.weight.detach().to(home())
    dist.broadcast(wanted, 0)
    compat.Init(module=there, data_parallel_group=dist.group.WORLD)
    with compat.GatheredParameters(there.weight):
        assert torch.equal(there.weight, wanted)
    there.half()
    with compat.GatheredParameters(there.weight, modifier_rank=0):
        assert torch.equal(there.weight, wanted.half()) and there.weight.dtype == torch.float16


def trains(row, folder):
    """The same numbers as of a plain model, bit for bit; rows go into shards as they are."""
    stage, kind = row.split("-")
    more = {"bf16": {"enabled": True}} if kind == "bf16" else {}
    given = config(int(stage), **more)
    with compat.Init():
        model = Net(seed=dist.get_rank())
    if kind == "mixed":  # with parameters that came after it, and moved ones
        model.unused = nn.Linear(3, 2)
        model.embedding.weight = nn.Parameter(torch.ones(11, 6))
        model.head.weight = model.embedding.weight
    if kind == "client":
        del given["optimizer"]
    plain = Net(seed=0)
    if kind == "mixed":
        plain.unused = nn.Linear(3, 2)
        plain.embedding.weight = plain.head.weight = nn.Parameter(torch.ones(11, 6))
    held = model.blocks[0].up.weight.ds_tensor.data_ptr()
    engines = []
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1) if kind == "client" else None
        engines.append(deepspeed_ext.initialize(model=each, optimizer=optimizer, config=given)[0])
    if stage == "3" and kind == "":
        assert local(model.blocks[0].down.weight).data_ptr()
        moved = model.blocks[0].up.weight
        assert dist.get_rank() or local(moved).data_ptr() == held
    for number in range(3):
        for engine in engines:
            engine.backward(loss_of(engine, number))
            engine.step()
    pairs = zip(*(engine.parameters() for engine in engines), strict=True)
    for ours, theirs in pairs:
        if kind != "mixed" or ours.shape[0] != 2:
            assert torch.equal(whole(ours), whole(theirs))


def filled(row, folder):
    """Of zero.Init, which fills a model after initialize, also for an optimizer that offloads."""
    offload = {"offload_optimizer": {"device": "cpu"}}
    given = config(3, zero_optimization={"stage": 3, **offload}, bf16={"enabled": True})

    def layers():
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))

    with zero.Init(seed=0) as init:
        model = layers()
    torch.manual_seed(0)
    with torch.device(home()):
        plain = layers()
    drawn = [param.detach().clone() for param in plain.parameters()]
    engines = [deepspeed_ext.initialize(model=each, config=given)[0] for each in (model, plain)]
    init.fill(model)
    for param, value in zip(engines[1].parameters(), drawn, strict=True):  # which began rounded
        safe_set_full_fp32_param(param, value)
    for number in range(2):
        for engine in engines:
            engine.backward(engine(torch.full((4, 6), 1.0 + number)).square().mean())
            engine.step()
    for ours, theirs in zip(*(engine.parameters() for engine in engines), strict=True):
        assert torch.equal(whole(ours), whole(theirs))


def refusals(row, folder):
    with compat.Init():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    weight, ones = model[0].weight, torch.ones(2, 4, device=home())
    text = "is given a parameter of which this process holds its rows only"
    for wrong in (
        lambda: nn.init.zeros_(weight),
        lambda: weight.data.normal_(),
        lambda: weight.detach().copy_(torch.ones(1)),
        lambda: model(ones),
        lambda: weight.sum(),
        lambda: weight.T,
        lambda: weight.data_ptr(),
        lambda: torch.optim.SGD([weight], 1.0).param_groups[0]["params"][0].add_(1),
    ):
        with pytest.raises(RuntimeError, match=text):
            wrong()
    with pytest.raises(RuntimeError, match="pickled"):
        torch.save(model.state_dict(), io.BytesIO())
    with compat.GatheredParameters(model):
        loss = model(ones).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    for name in ("zero_quantized_weights", "param_swapper", "sequence_data_parallel_group"):
        with pytest.raises(ValueError, match=f"^compat.zero.Init: {name} is True, expected none"):
            compat.Init(**{name: True})
    with pytest.raises(ValueError, match="remote_device is 'nvme'"):
        compat.Init(remote_device="nvme")
    with pytest.raises(ValueError, match="has no dimensions"), compat.Init():
        zero.shard(Drawn(0), 3)
    held, other = model[0].weight, nn.Sequential(model[0])
    zero.shard(copy.deepcopy(model), 3)  # which is another model
    zero.shard(model, 3)
    text = "has given its rows to a model that was sharded since"
    with pytest.raises(ValueError, match=f"GatheredParameters: a parameter {text}"):
        compat.GatheredParameters([held])
    other[0].weight = held
    with pytest.raises(ValueError, match=f"zero.shard: weight of a FSDPLinear {text}"):
        zero.shard(other, 3)
    with compat.Init():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if dist.get_rank() == 0:  # processes that differ
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="expected the same model"):
        zero.shard(model, 3)


CASES = [
    Case(2, "builds", ""),
    Case(2, "ends", ""),
    *(Case(2, "trains", row) for row in ("3-", "0-", "2-bf16", "3-mixed", "3-client")),
    Case(2, "filled", ""),
    Case(2, "refusals", ""),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function}-{c.row}-{c.world}")
def test_processes(case, groups):
    groups.run(case)


def test_much_that_was_freed_is_given_back(monkeypatch):
    trimmed = []
    library = types.SimpleNamespace(malloc_trim=trimmed.append)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    give_back(1000)
    assert not trimmed
    give_back(1 << 20)
    assert trimmed == [0]
    del library.malloc_trim  # of glibc only
    give_back(1 << 20)
