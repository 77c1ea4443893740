"""zero.GatheredParameters: whole parameters inside, what one process writes is everywhere after."""

import contextlib
import itertools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from process_groups import with_long
from processes import Case
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from zero_cases import Net, assert_close, home, loss_of, whole

from deepspeed_ext import zero
from deepspeed_ext.compat import zero as compat
from deepspeed_ext.zero import gather


def gathers(row, folder):
    world = dist.get_world_size()
    mesh = None
    if row == "hybrid":
        mesh = init_device_mesh(home(), (2, 2), mesh_dim_names=("replica", "shard"))
    for stage in (0, 3):
        model, plain = zero.shard(Net(), stage, mesh=mesh), Net()
        shards = dict(model.named_parameters())
        with zero.GatheredParameters(model.parameters()) as tensors:
            for tensor, param in zip(tensors, plain.parameters(), strict=True):
                assert type(tensor) is torch.Tensor and torch.equal(tensor, param.data)
        for rank in range(world):
            with zero.GatheredParameters(model, modifier_rank=rank), torch.no_grad():
                assert model.head.weight is model.embedding.weight
                assert type(model.head.weight) is nn.Parameter
                assert not model.blocks[1].down.weight.requires_grad
                for param in model.parameters():
                    param.fill_(dist.get_rank())
                model.blocks[0].up.reset_parameters()
            assert all(model.get_parameter(name) is p for name, p in shards.items())
            assert whole(model.head.weight).eq(rank).all()
            with zero.GatheredParameters(model.blocks[0].up.weight) as weight:
                everywhere = [torch.empty_like(weight) for _ in range(world)]
                dist.all_gather(everywhere, weight)
                assert all(torch.equal(weight, each) for each in everywhere)
        loss_of(model, 0).backward()
        assert isinstance(model.head.weight.grad, DTensor)


def nested(row, folder):
    """One value, seen and written by all of them; a write without a rank is still refused."""
    rank = dist.get_rank()
    model = zero.shard(Net(), 3)
    weight = model.head.weight
    for outer, of_all in itertools.product((None, 0, 1), (False, True)):
        with zero.GatheredParameters(model if of_all else weight, outer):
            for inner in (0, 1):
                again = model.head.weight if inner else weight
                with zero.GatheredParameters(again, inner) as value, torch.no_grad():
                    if inner == rank:
                        value[inner] = 3.0 + inner
                with zero.GatheredParameters(model.head) as [value]:
                    assert value[inner].eq(3.0 + inner).all()
                    assert type(model.head.weight) is nn.Parameter
        assert model.head.weight is weight and whole(weight)[:2].sum(1).tolist() == [18, 24]
        with zero.GatheredParameters(weight, 1) as value:
            value.zero_()
    for outer in (0, 1):  # what it has written before others is theirs too, also if they raise
        with zero.GatheredParameters(weight, outer) as value, torch.no_grad():
            value[0] = 1.0 + rank
            with contextlib.suppress(KeyError), zero.GatheredParameters(model, 1 - outer):
                assert model.head.weight[0].eq(1.0 + outer).all()
                model.head.weight[1] = 5.0 + rank
                raise KeyError
            value[2] = 7.0 + rank
        expected = [1.0 + outer, 6.0 - outer, 7.0 + outer]
        assert whole(weight)[:3].eq(torch.tensor(expected)[:, None]).all()
    first, second = zero.GatheredParameters(weight), zero.GatheredParameters(weight)
    with first, pytest.raises(RuntimeError, match="it ends before one inside of it"), second:
        first.__exit__(None, None, None)
    assert weight.requires_grad
    with zero.GatheredParameters(model.head):
        model.head.requires_grad_(False)
    assert model.head.weight is weight and not weight.requires_grad
    weight.requires_grad_(True)
    text = "^zero.GatheredParameters: params.0. was written to"
    with pytest.raises(RuntimeError, match=text), zero.GatheredParameters(weight):
        with zero.GatheredParameters(weight, 0) as value:
            value.add_(1)
        with zero.GatheredParameters(weight) as value:
            value.add_(1)
    with pytest.raises(RuntimeError, match=text), zero.GatheredParameters(weight) as value:
        value.add_(1)
        with zero.GatheredParameters(weight, 0):
            pass


def loads(row, folder):
    """On the process that has the values, as DeepSpeed's users load; it trains on."""
    for stage, assign in itertools.product((0, 2, 3), (False, True)):
        model, plain = zero.shard(Net(), stage), Net(seed=5)
        with zero.GatheredParameters(model, modifier_rank=0):
            if dist.get_rank() == 0:
                model.load_state_dict(plain.state_dict(), assign=assign)
        with zero.GatheredParameters(model.blocks[0], modifier_rank=1):
            if dist.get_rank() == 1:
                model.blocks[0].up.bias.data = torch.ones(9)
        nn.init.ones_(plain.blocks[0].up.bias)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(whole(ours), theirs)
        loss_of(model, 0).backward()
        for rank in range(2):
            (loss_of(plain, 0, rank) / 2).backward()
        assert_close(whole(model.head.weight.grad), plain.head.weight.grad, "gradient")


def bodies_that_raise(row, folder):
    model = zero.shard(Net(), 2)
    rank = dist.get_rank()
    with contextlib.suppress(KeyError):
        with zero.GatheredParameters(model.head.weight, modifier_rank=1) as weight:
            if rank == 1:
                weight.fill_(7)
                raise KeyError
        assert rank == 0
    assert whole(model.head.weight).eq(7).all()
    with pytest.raises(KeyError), zero.GatheredParameters(model.head.weight) as weight:
        raise KeyError


def begins_that_fail(row, folder):
    """For want of memory, at each of the parameters: all is as before, also of one around it."""
    model, other = (zero.shard(Net(), int(row)) for _ in range(2))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, other)]
    kinds = [type(param) for param in model.parameters()]
    for at in range(len(kinds)):
        with fails_after(at):
            zero.GatheredParameters(model, 0).__enter__()
        assert kinds == [type(param) for param in model.parameters()]
    with zero.GatheredParameters(model.head, 0):
        with fails_after(1):
            zero.GatheredParameters(model).__enter__()
        assert type(model.head.weight) is nn.Parameter and model.head.weight.numel()
        model.head(torch.ones(1, model.head.in_features))
    for each, optimizer in zip((model, other), optimizers, strict=True):
        loss_of(each, 0).backward()
        optimizer.step()
    with zero.GatheredParameters(model, 0), zero.GatheredParameters(other):
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    with compat.Init():
        layer = nn.Linear(4, 4)
    with fails_after(1):
        compat.GatheredParameters(layer.parameters()).__enter__()
    for param in layer.parameters():
        assert param.ds_status is compat.ZeroParamStatus.NOT_AVAILABLE and not param.data.numel()


@contextlib.contextmanager
def fails_after(count):
    """Have memory for so many whole parameters."""
    whole_ones = [gather._full] * count

    def full(*given):
        if not whole_ones:
            raise torch.OutOfMemoryError("no memory")
        return whole_ones.pop()(*given)

    with patch.object(gather, "_full", full), pytest.raises(torch.OutOfMemoryError):
        yield


def refusals(row, folder):
    model = zero.shard(Net(), 2)
    for params, name in ((model.head.weight, "params[0]"), (model, "blocks.1.down.weight")):
        text = (
            f"zero.GatheredParameters: {name} was written to, expected no change while"
            " modifier_rank is None; name the rank whose values count"
        )
        with pytest.raises(RuntimeError) as caught, zero.GatheredParameters(params) as inside:
            if isinstance(params, nn.Module):
                inside = model.blocks[1].down.weight
            inside.detach().add_(1)
        assert str(caught.value) == text
        with pytest.raises(RuntimeError) as caught, zero.GatheredParameters(params) as inside:
            if isinstance(params, nn.Module):
                inside = model.blocks[1].down.weight
            inside.data += 1  # which counts no version
        assert str(caught.value) == text
    text = (
        "zero.GatheredParameters: params[0] is a plain tensor, expected a shard; it is whole"
        " already, as without zero.shard"
    )
    with pytest.raises(ValueError) as caught:
        zero.GatheredParameters([torch.ones(3)])
    assert str(caught.value) == text
    text = "zero.GatheredParameters: params[0] is a int, expected a parameter"
    with pytest.raises(TypeError) as caught:
        zero.GatheredParameters([3])
    assert str(caught.value) == text
    text = (
        "zero.GatheredParameters: modifier_rank is 2, expected one of the processes that hold"
        " params[0], [0, 1]"
    )
    with pytest.raises(ValueError) as caught:
        zero.GatheredParameters(model.head.weight, modifier_rank=2)
    assert str(caught.value) == text


CASES = [
    Case(1, "gathers", ""),
    Case(2, "gathers", ""),
    Case(4, "gathers", "hybrid"),
    Case(2, "nested", ""),
    Case(2, "loads", ""),
    Case(2, "bodies_that_raise", ""),
    *(Case(2, "begins_that_fail", stage) for stage in "23"),
    Case(2, "refusals", ""),
]
LONG = ("gathers-hybrid-4",)


@pytest.mark.parametrize("case", with_long(CASES, *LONG))
def test_processes(case, groups):
    groups.run(case)
