"""Sharded training against DDP: every parameter after each step."""

import re

import pytest
import torch
import torch.distributed as dist
from processes import Case
from sharded_cases import ROWS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from zero_cases import FORMATS, Net, adam, assert_close, home, loss_of, whole

from deepspeed_ext import zero
from deepspeed_ext.offload import OffloadOptimizer

# A large eps keeps the rounding of small gradients, which differs with the order of sums, small.
OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3}
MAX_NORM = 0.05  # which bites in each step
STEPS = {"short": 3, "long": 20}


class Twin:
    """The same training in DDP, with the same class of optimizer, unsharded."""

    def __init__(self, make=adam, options=OPTIONS, dtype=torch.float32):
        self.model = Net().to(home(), dtype)
        self.wrapped = DistributedDataParallel(self.model, find_unused_parameters=True)
        self.optimizer = make(self.model.parameters(), **options)

    def step(self, number, times, clips):
        for i in range(times):
            self.wrapped.require_backward_grad_sync = i == times - 1
            (loss_of(self.wrapped, number * times + i) / times).backward()
        if clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


def optimizer_of(model, kind):
    if kind == "offload":
        return OffloadOptimizer(model.parameters(), model=model, **OPTIONS)
    return adam(model.parameters(), **OPTIONS)


def step(model, optimizer, kind, number, times, clips):
    for i in zero.accumulate(model, times):
        (loss_of(model, number * times + i) / times).backward()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    if clips and kind == "torch's":
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).full_tensor()
        assert norm > MAX_NORM
        optimizer.step()
    elif clips:
        assert optimizer.clip_and_step(MAX_NORM) > MAX_NORM
    else:
        optimizer.step()
    model.zero_grad()


def parity(row, folder):
    stage, kind, length = row.split("-")
    world = dist.get_world_size()
    for times in (1, 3) if world < 4 or length == "long" else (3,):
        for clips in (False, True):
            twin, model = Twin(), Net().to(home())
            zero.shard(model, int(stage))
            optimizer = optimizer_of(model, kind)
            # Sums of two numbers do not depend on their order; norms are added up otherwise.
            exact = home() == "cpu" and (
                world == 1 or (world == 2 and (times == 1 or int(stage) < 2))
            )
            for number in range(STEPS[length]):
                step(model, optimizer, kind, number, times, clips)
                twin.step(number, times, clips)
                if kind == "offload":
                    optimizer.synchronize()
                pairs = zip(model.named_parameters(), twin.model.parameters(), strict=True)
                for (name, ours), theirs in pairs:
                    what = f"{name} after step {number}, {times} micro-steps, clips {clips}"
                    assert_close(whole(ours), theirs.detach(), what, exact and not clips)
            assert optimizer.state[model.get_parameter("blocks.0.up.weight")]
            assert not model.unused.weight.grad


def optimizers(row, folder):
    """Every class, and the formats of state that no sharding changes, in the end of some steps."""
    kinds = [
        (name, kind.make, kind.options, torch.float32, kind.elementwise)
        for name, kind in ROWS.items()
        if kind.device == home() and "sharded" in kind.ways
    ]
    kinds += [
        (name, adam, OPTIONS | options, dtype, True)
        for name, (dtype, options) in FORMATS.items()
        if name != "codes"  # have scales for the blocks of a process
    ]
    for number, (name, make, options, dtype, exact) in enumerate(kinds):
        twin, model = Twin(make, options, dtype), Net().to(dtype)
        zero.shard(model, 1 + number % 3)
        sharded = make(model.parameters(), **options)
        for i in range(3):
            step(model, sharded, "plain", i, 1, False)
            twin.step(i, 1, False)
        for (key, ours), theirs in zip(
            model.named_parameters(), twin.model.parameters(), strict=True
        ):
            is_exact = exact and home() == "cpu"
            # A gradient in bfloat16 may be off by its last bit; weights have moved by up to 0.06.
            low = {"rtol": 0, "atol": 0.02} if dtype == torch.bfloat16 else {}
            assert_close(whole(ours), theirs.detach(), f"{key}, {name}", is_exact, **low)


def hybrid(row, folder):
    """Replicas of shards, two by two."""
    mesh = init_device_mesh(home(), (2, 2), mesh_dim_names=("replica", "shard"))
    for stage in (0, 1, 2, 3):
        twin, model = Twin(), Net()
        zero.shard(model, stage, mesh=mesh)
        optimizer = optimizer_of(model, "plain")
        for number in range(3):
            step(model, optimizer, "plain", number, 2, False)
            twin.step(number, 2, False)
        for (name, ours), theirs in zip(
            model.named_parameters(), twin.model.parameters(), strict=True
        ):
            assert_close(whole(ours), theirs.detach(), f"{name}, stage {stage}")


def mixed_precision(row, folder):
    """Weights in bfloat16 where they are used, gradients added up in float32."""
    for stage in (0, 1, 2, 3):
        model, plain = Net(), Net()
        zero.shard(model, stage, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        optimizer = optimizer_of(model, "plain")
        other = adam(plain.parameters(), **OPTIONS)
        for number in range(4):
            step(model, optimizer, "plain", number, 2, False)
            emulated_step(plain, other, number, 2)
            for (name, ours), theirs in zip(
                model.named_parameters(), plain.parameters(), strict=True
            ):
                # Gradients are bfloat16 numbers, equal ones; their sums round in float32.
                assert_close(whole(ours), theirs.detach(), f"{name}, stage {stage}")


def emulated_step(plain, optimizer, number, times):
    """One process does what all do: copies in bfloat16, gradients of each summed in float32."""
    world, copy = dist.get_world_size(), Net().bfloat16()
    sums = {}
    for i in range(times):
        for rank in range(world):
            with torch.no_grad():
                for low, high in zip(copy.parameters(), plain.parameters(), strict=True):
                    low.copy_(high)
            copy.zero_grad()
            (loss_of(copy, number * times + i, rank) / times).backward()
            for name, param in copy.named_parameters():
                if param.grad is not None:
                    sums[name] = sums.get(name, 0) + param.grad.float() / world
    for name, param in plain.named_parameters():
        param.grad = sums.get(name)
    optimizer.step()


def unused_somewhere(row, folder):
    """A layer that the first process alone uses, where torch can reduce that."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        text = f"reduce_unused is True, expected False with torch {torch.__version__}"
        with pytest.raises(ValueError, match=re.escape(text)):
            zero.shard(Net(), 1, reduce_unused=True)
        return
    for stage in (1, 2, 3):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.5)
        model.forward = lambda x, m=model: m[0](x) + (m[0].bias if dist.get_rank() else 0)
        zero.shard(model, stage, blocks=[], reduce_unused=True)
        model(torch.ones(2, 4)).sum().backward()
        assert whole(model[1].weight.grad).eq(0).all()


KINDS = {1: ("plain",), 2: ("plain", "offload", "torch's"), 4: ("offload",)}
SHORT = {("plain", 1), ("plain", 2)}  # all stages
SHORT_STAGES = {1: (), 2: (2, 3), 4: (3,)}
CASES = [
    *(
        pytest.param(Case(world, "parity", f"{stage}-{kind}-{length}"), marks=marks)
        for length, marks in (("short", ()), ("long", pytest.mark.long))
        for world, kinds in KINDS.items()
        for kind in kinds
        for stage in range(4)
        if (length == "long" and stage in (1, 3))
        or (length == "short" and ((kind, world) in SHORT or stage in SHORT_STAGES[world]))
    ),
    Case(2, "optimizers", ""),
    Case(4, "hybrid", ""),
    Case(2, "mixed_precision", ""),
    Case(2, "unused_somewhere", ""),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function}-{c.row}-{c.world}")
def test_processes(case, groups):
    groups.run(case, least=1 if case.function == "parity" else None)
