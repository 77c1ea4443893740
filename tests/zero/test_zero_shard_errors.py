"""What zero.shard and zero.accumulate refuse, by name; and what goes on after a mishap."""

import gc
import logging
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from processes import Case
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from zero_cases import Block, Net, assert_close, home, loss_of, whole

from deepspeed_ext import zero
from deepspeed_ext.zero.blocks import blocks_of


def refused(kind, text, function, *args, **kwargs):
    with pytest.raises(kind) as caught:
        function(*args, **kwargs)
    assert str(caught.value) == text


def arguments(row, folder):
    refused(ValueError, "zero.shard: stage is 4, expected 0, 1, 2 or 3", zero.shard, Net(), 4)
    refused(ValueError, "zero.shard: stage is True, expected 0, 1, 2 or 3", zero.shard, Net(), True)
    text = "zero.shard: model is a int, expected a torch.nn.Module"
    refused(TypeError, text, zero.shard, 1, 1)
    text = "zero.shard: model has no parameters, expected some"
    refused(ValueError, text, zero.shard, nn.ReLU(), 1)
    text = (
        "zero.shard: blocks has 'block.*', expected a name or class of modules of the model, such"
        " as embedding"
    )
    refused(ValueError, text, zero.shard, Net(), 1, blocks=["block.*"])
    text = (
        "zero.shard: blocks has 'blocks', a list that is never called, expected its members, such"
        " as 'blocks.*'"
    )
    refused(ValueError, text, zero.shard, Net(), 1, blocks=["blocks"])
    text = "zero.shard: blocks is the string 'blocks.*', expected several in a list"
    refused(TypeError, text, zero.shard, Net(), 1, blocks="blocks.*")
    text = "zero.shard: blocks has 3, expected names or classes of modules in it"
    refused(TypeError, text, zero.shard, Net(), 1, blocks=[3])
    mesh = init_device_mesh(home(), (1, dist.get_world_size()))
    text = (
        f"zero.shard: mesh has shape {[1, dist.get_world_size()]} and names None, expected one"
        " dimension, or two with names"
    )
    refused(ValueError, text, zero.shard, Net(), 1, mesh=mesh)
    text = (
        "zero.accumulate: model is a Net that is not sharded, expected one that zero.shard was"
        " called on"
    )
    refused(ValueError, text, zero.accumulate, Net(), 1)
    model = zero.shard(Net(), 1)
    text = "zero.accumulate: steps is 0, expected a whole number above 0"
    refused(ValueError, text, zero.accumulate, model, 0)
    text = (
        "zero.shard: model has 'blocks.0', which is sharded already, expected a model that is not"
    )
    refused(ValueError, text, zero.shard, nn.ModuleDict({"blocks": nn.ModuleList(model.blocks)}), 1)
    text = (
        "zero.accumulate: model is between the micro-steps of another accumulate, expected one at"
        " a time; if that loop was left, close() its iterator"
    )
    for _ in zero.accumulate(model, 1):
        refused(RuntimeError, text, list, zero.accumulate(model, 1))
        loss_of(model, 0).backward()


def parameters(row, folder):
    net = Net()
    net.blocks[2].up.weight = net.blocks[0].up.weight
    text = (
        "zero.shard: parameter 'blocks.0.up.weight' is also ['blocks.2.up.weight'], in the blocks"
        " ['blocks.0', 'blocks.2'], expected tied parameters in one block or in none; name blocks"
        " that hold all of them"
    )
    refused(ValueError, text, zero.shard, net, 1)
    net = Net()
    net.blocks[1].norm.bfloat16()
    text = (
        "zero.shard: block 'blocks.1' has trainable parameters of torch.bfloat16, torch.float32,"
        " expected one dtype"
    )
    refused(ValueError, text, zero.shard, net, 2)
    net = nn.LazyLinear(3)
    text = "zero.shard: parameter 'weight' has no shape yet, expected one; run the model once"
    refused(ValueError, text, zero.shard, net, 2)
    net = nn.Linear(2, 2)
    net.scale = nn.Parameter(torch.ones(()))
    text = (
        "zero.shard: parameter 'scale' has no dimensions, expected rows to shard; give it the"
        " shape [1]"
    )
    refused(ValueError, text, zero.shard, net, 2)
    for hook in ("register_hook", "register_post_accumulate_grad_hook"):
        net = nn.Linear(2, 2)
        getattr(net.bias, hook)(lambda given: None)
        text = (
            "zero.shard: parameter 'bias' has a hook on its gradient, expected none, as its shard"
            " would not call it; register_post_accumulate_grad_hook on the sharded parameter,"
            " after this"
        )
        refused(ValueError, text, zero.shard, net, 2)


def tied_to_a_block(row, folder):
    """A weight of a block that the model uses too is gathered with the model."""
    for stage in range(4):
        torch.manual_seed(0)
        model = nn.Module()
        model.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        model.last = nn.Linear(4, 4)
        model.last.weight = model.blocks[0].weight
        model.forward = lambda x, m=model: m.last(m.blocks[1](m.blocks[0](x)))
        x = torch.randn(3, 4)
        model.forward(x).square().mean().backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        zero.shard(model, stage, blocks=["blocks.*"])
        model(x).square().mean().backward()
        assert model.last.weight is model.blocks[0].weight
        for name, param in model.named_parameters():
            assert_close(whole(param.grad), expected[name], f"{name}, stage {stage}")


class Borrower(nn.Module):
    """Uses a weight of one of its blocks by itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.scale + nn.functional.linear(x, self.blocks[1].weight)


def external_parameters(row, folder):
    """Right where the weight is gathered, and refused with the fix where it is not."""
    x, plain = torch.ones(2, 4), Borrower()
    plain(x).square().mean().backward()
    for stage, blocks in ((0, None), (1, None), (2, None), (3, ["blocks.0", "blocks.2"])):
        model = zero.shard(Borrower(), stage, blocks=blocks)
        model(x).square().mean().backward()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_close(whole(ours.grad), theirs.grad, f"{name}, stage {stage}")
    model = zero.shard(Borrower(), 3)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as caught:
        model(x)
    assert str(caught.value).endswith(
        "\nzero: parameter 'blocks.1.weight' is used outside of its block 'blocks.1', which alone"
        " gathers it, expected the block itself to use it; leave the block out, as by"
        " blocks=['blocks.0', 'blocks.2'], and it is gathered with the model"
    )


def disagreements(row, folder):
    rank = dist.get_rank()
    other = 1 - rank
    net = Net(blocks=3 + rank)
    names = [f"blocks {[f'blocks.{i}' for i in range(3 + r)]}" for r in (0, 1)]
    text = (
        f"zero.shard: process {rank} has {names[rank]}, process {other} has {names[other]},"
        " expected the same model and options on all processes"
    )
    refused(ValueError, text, zero.shard, net, 3)
    text = (
        f"zero.shard: process {rank} has stage {1 + rank}, process {other} has stage {1 + other},"
        " expected the same model and options on all processes"
    )
    refused(ValueError, text, zero.shard, Net(), 1 + rank)
    net = Net()
    net.blocks[2].gain.requires_grad_(rank == 0)
    ends = ("", ", frozen")
    text = (
        f"zero.shard: process {rank} has parameter 'blocks.2.gain' of [1] torch.float32"
        f"{ends[rank]},"
        f" process {other} has parameter 'blocks.2.gain' of [1] torch.float32{ends[other]},"
        " expected the same model and options on all processes"
    )
    refused(ValueError, text, zero.shard, net, 3)
    loss_of(zero.shard(Net(), 3), 0).backward()  # nothing is left of it


def one_of_four_differs(row, folder):
    """All of a mesh are told, also those that agree with all that they compare with."""
    mesh = init_device_mesh(home(), (2, 2), mesh_dim_names=("replica", "shard"))
    with pytest.raises(ValueError, match="expected the same model and options on all processes"):
        zero.shard(Net(), 1 + (dist.get_rank() == 3), mesh=mesh)


def changed_models(row, folder):
    for stage in (1, 3):
        model = zero.shard(Net(), stage)
        model.adapter = nn.Linear(2, 2)
        text = (
            "zero: parameter 'adapter.weight' is a plain tensor, expected a shard: it came after"
            " zero.shard; change the model before"
        )
        refused(RuntimeError, text, loss_of, model, 0)
        del model.adapter
        loss_of(model, 0).backward()
        model.blocks[0].up = nn.Linear(6, 9)
        text = (
            "zero: parameter 'blocks.0.up.weight' is gone or another one, expected the parameters"
            " that were sharded; change the model before zero.shard"
        )
        refused(RuntimeError, text, loss_of, model, 0)


def left_early(row, folder):
    """Nothing of a step that was not finished counts in the next one."""
    for stage in range(4):
        for mishap in ("break", "before backward", "in forward", "in backward"):
            model, twin = zero.shard(Net(), stage), zero.shard(Net(), stage)
            spoil(model, mishap)
            assert all(p.grad is None for p in model.parameters()), (stage, mishap)
            for each in (model, twin):
                for i in zero.accumulate(each, 2):
                    loss_of(each, i).backward()
            pairs = zip(model.named_parameters(), twin.parameters(), strict=True)
            for (name, ours), theirs in pairs:
                assert (ours.grad is None) == (theirs.grad is None)
                if ours.grad is not None:
                    assert torch.equal(whole(ours.grad), whole(theirs.grad)), (name, stage, mishap)


def spoil(model, mishap):
    logging.getLogger("deepspeed_ext").setLevel(logging.ERROR)
    handle = None
    try:
        for i in zero.accumulate(model, 3):
            if i == 1:
                if mishap == "break":
                    break
                if mishap == "before backward":
                    loss_of(model, 7)
                    raise MemoryError
                if mishap == "in forward":
                    handle = model.blocks[1].up.register_forward_hook(fail)
                if mishap == "in backward":
                    handle = model.blocks[1].up.register_full_backward_hook(fail)
            loss_of(model, i).backward()
    except MemoryError:
        pass
    if handle is not None:
        handle.remove()


def fail(*_):
    raise MemoryError


def errors_without_micro_steps(row, folder):
    """A loop that knows nothing of accumulate goes on after an error, too."""
    logging.getLogger("deepspeed_ext").setLevel(logging.ERROR)
    for stage in range(4):
        model, twin = zero.shard(Net(), stage), zero.shard(Net(), stage)
        for where in ("forward", "backward"):
            up = model.blocks[1].up
            handle = up.register_forward_hook(fail)
            if where == "backward":
                handle.remove()
                handle = up.register_full_backward_hook(fail)
            with pytest.raises(MemoryError):
                loss_of(model, 0).backward()
            handle.remove()
            for each in (model, twin):
                loss_of(each, 1).backward()
            for (name, ours), theirs in zip(
                model.named_parameters(), twin.parameters(), strict=True
            ):
                if theirs.grad is not None:
                    assert torch.equal(whole(ours.grad), whole(theirs.grad)), (name, stage, where)
            for each in (model, twin):
                each.zero_grad()


def looks_in_between(row, folder):
    """What a forward left gathered is not what the next one reads: it may have been stepped."""
    for stage in range(4):
        model = zero.shard(Net(), stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss_of(model, 0).backward()
        before = loss_of(model, 1).item()  # no backward: weights of stages 0 to 2 stay gathered
        optimizer.step()
        after = loss_of(model, 1).item()
        with torch.no_grad():
            assert loss_of(model, 1).item() == after != before, stage
        assert all(isinstance(p, DTensor) for p in model.parameters())
        model.zero_grad()
        assert all(p.grad is None for p in model.parameters())


def checkpointed_activations(row, folder):
    """A forward that backward runs anew, of a block and of all, finds its weights."""
    for stage in range(4):
        for whole_model in (False, True):
            model, plain = zero.shard(Net(), stage), zero.shard(Net(), stage)
            run = partial(checkpoint, model, use_reentrant=False)
            if not whole_model:
                run = model
                for block in model.blocks:
                    forward = partial(checkpoint, block.forward, use_reentrant=False)
                    block.forward = forward
            for each, call in ((model, run), (plain, plain)):
                for i in zero.accumulate(each, 2):
                    loss_of(call, i).backward()
            for (name, ours), theirs in zip(
                model.named_parameters(), plain.parameters(), strict=True
            ):
                if theirs.grad is not None:
                    assert torch.equal(whole(ours.grad), whole(theirs.grad)), (name, stage)


def dropped_models(row, folder):
    """A hundred models are gone when nobody has them."""
    models = []
    for i in range(100):
        model = zero.shard(Net(blocks=2), i % 4)
        if i % 10 == 0:
            loss_of(model, i).backward()
        models.append(weakref.ref(model))
        del model
    gc.collect()
    assert not any(model() for model in models)


def models_that_go_in_a_step(row, folder):
    """While torch goes through the hooks of all optimizers: the step is taken nonetheless."""
    models = [zero.shard(Net(blocks=2), 2) for _ in range(3)]
    kept = models[1]
    optimizer = torch.optim.SGD(kept.parameters(), lr=0.5)
    loss_of(kept, 0).backward()
    before = whole(kept.blocks[0].up.weight).clone()
    gone = [weakref.ref(model) for model in models if model is not kept]

    def collect(*_):
        models.clear()
        gc.collect()

    hooks = [
        register_optimizer_step_pre_hook(collect),
        register_optimizer_step_pre_hook(lambda *_: None),  # torch goes on to this one
    ]
    optimizer.step()
    for hook in hooks:
        hook.remove()
    assert not any(model() for model in gone)
    assert not torch.equal(whole(kept.blocks[0].up.weight), before)
    optimizer.zero_grad()
    for micro_step in zero.accumulate(kept, 2):
        loss_of(kept, micro_step).backward()
        if micro_step == 0:
            with pytest.raises(RuntimeError, match="SGD is stepped in"):
                optimizer.step()


CASES = [
    Case(2, "arguments", ""),
    Case(2, "parameters", ""),
    Case(2, "tied_to_a_block", ""),
    Case(2, "external_parameters", ""),
    Case(2, "disagreements", ""),
    Case(4, "one_of_four_differs", ""),
    Case(2, "changed_models", ""),
    Case(2, "left_early", ""),
    Case(2, "errors_without_micro_steps", ""),
    Case(2, "looks_in_between", ""),
    Case(2, "checkpointed_activations", ""),
    Case(2, "dropped_models", ""),
    Case(2, "models_that_go_in_a_step", ""),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function}-{c.row}-{c.world}")
def test_processes(case, groups):
    groups.run(case)


def test_there_must_be_a_process_group():
    text = (
        "zero.shard: there is no process group, expected one; start by torchrun and call"
        " torch.distributed.init_process_group first, also for one process"
    )
    refused(ValueError, text, zero.shard, Net(), 1)


def test_blocks_are_found():
    assert list(blocks_of(Net(), None)) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(blocks_of(Net(), [Block])) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(blocks_of(Net(), ["blocks.1", "head"])) == ["blocks.1", "head"]
    experts = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(2))
    names = ["experts.0.0", "experts.0.1", "experts.1.0", "experts.1.1"]
    assert list(blocks_of(nn.ModuleDict({"experts": experts}), None)) == names
    assert list(blocks_of(nn.Linear(2, 2), None)) == []
    mixed = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2), nn.ReLU(), nn.Linear(2, 2))
    assert list(blocks_of(mixed, None)) == ["0", "4"]
