"""What goes wrong in a step, and that the next one is that of plain PyTorch."""

import contextlib
import itertools
import logging
from functools import partial
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from process_groups import with_long
from processes import Case
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial
from torch.utils.checkpoint import checkpoint
from zero_cases import Net, assert_close, home, loss_of, whole

from deepspeed_ext import zero

MICRO_STEPS = 3


class Plain:
    """The same training of one whole model, which sees the batches of all processes."""

    def __init__(self, kind=Net):
        self.model = kind()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

    def add(self, number):
        for rank in range(dist.get_world_size()):
            (loss_of(self.model, number, rank) / dist.get_world_size() / MICRO_STEPS).backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def fail(*_):
    raise MemoryError


class Mishap:
    """An error at a place of a model, in all processes."""

    def __init__(self, model, where):
        up = model.blocks[1].up
        self.block, self.handle = None, None
        if where == "recomputation":
            self.block = model.blocks[1]
            calls = []

            def forward(x, inner=self.block.forward):
                calls.append(x)
                return inner(x) if len(calls) == 1 else fail()

            self.block.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
        elif where == "forward":
            self.handle = up.register_forward_hook(fail)
        else:
            self.handle = up.register_full_backward_hook(fail)

    def remove(self):
        if self.handle is not None:
            self.handle.remove()
        else:
            del self.block.forward


def assert_trains(model, optimizer, plain, what):
    """Two whole steps more, and all weights are equal."""
    for number in (10, 20):
        for i in zero.accumulate(model, MICRO_STEPS):
            (loss_of(model, number + i) / MICRO_STEPS).backward()
            plain.add(number + i)
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
    for (name, ours), theirs in zip(
        model.named_parameters(), plain.model.parameters(), strict=True
    ):
        assert_close(whole(ours), theirs.detach(), f"{name}, {what}")


def made(stage, kind=Net, mesh=None):
    logging.getLogger("deepspeed_ext").setLevel(logging.ERROR)
    model = zero.shard(kind(), stage, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.5), Plain(kind)


def errors(row, folder):
    """Caught where it was, in the loop or without one, in the first step and in a later one."""
    stages, places, loops, mesh = (
        range(4),
        ("forward", "backward", "recomputation"),
        (False, True),
        None,
    )
    if row == "replicas":  # what they have not added up yet outlives an error in a forward
        stages, places, loops = (2, 3), ("forward",), (True,)
        mesh = init_device_mesh(home(), (2, 2), mesh_dim_names=("replicas", "shards"))
    for stage in stages:
        for where in places:
            for in_loop in loops:
                model, optimizer, plain = made(stage, mesh=mesh)
                for at in (0, 1):  # of the micro-steps
                    for i in zero.accumulate(model, MICRO_STEPS) if in_loop else range(2):
                        mishap = Mishap(model, where) if i == at else None
                        try:
                            (loss_of(model, i) / MICRO_STEPS).backward()
                            plain.add(i)
                        except MemoryError:
                            if where != "forward":  # a half gradient is none
                                plain.optimizer.zero_grad()
                        if mishap is not None:
                            mishap.remove()
                    if not in_loop:
                        (loss_of(model, 2) / MICRO_STEPS).backward()
                        plain.add(2)
                    optimizer.step()
                    optimizer.zero_grad()
                    plain.step()
                assert_trains(model, optimizer, plain, f"{stage} {where} {in_loop}")


def shards_after_errors(row, folder):
    """As soon as an error is caught, parameters are shards: to clip, to drop, to be written."""
    for stage, where in itertools.product(range(4), ("forward", "backward", "block")):
        model, optimizer, plain = made(stage)
        for _ in range(2):
            (loss_of(model, 0) / MICRO_STEPS).backward()
            plain.add(0)
            mishap = Mishap(model, "backward" if where == "backward" else "forward")
            with pytest.raises(MemoryError):
                if where == "block":
                    model.blocks[1](torch.ones(1, 6))
                else:
                    loss_of(model, 1).backward()
            mishap.remove()
            assert all(isinstance(param, DTensor) for param in model.parameters())
            if where == "backward":  # a half gradient is none
                model.zero_grad()
                plain.optimizer.zero_grad()
            else:
                norms = [
                    nn.utils.clip_grad_norm_(each.parameters(), 0.05)
                    for each in (model, plain.model)
                ]
                assert_close(whole(norms[0]), norms[1], f"norm, {stage} {where}")
                optimizer.step()
                model.zero_grad()
                plain.step()
            with torch.no_grad():
                for param in (*model.parameters(), *plain.model.parameters()):
                    param.mul_(0.9)
            assert_trains(model, optimizer, plain, f"shards after errors, {stage} {where}")


class Forgiving(Net):
    """Goes on without a block that fails."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            with contextlib.suppress(MemoryError):
                x = block(x)
        return self.head(x)


def caught_inside(row, folder):
    """A block that has failed in a forward without a backward is gathered anew after the step."""
    for stage, has_grad in itertools.product(range(4), (False, True)):
        model, optimizer, plain = made(stage, Forgiving)
        for at in range(2):
            loss_of(model, at).div(MICRO_STEPS).backward()
            plain.add(at)
            mishap = Mishap(model, "forward")
            with torch.set_grad_enabled(has_grad):
                loss_of(model, 7)
            mishap.remove()
            optimizer.step()
            optimizer.zero_grad()
            plain.step()
            with torch.no_grad():
                ours, theirs = loss_of(model, 7), loss_of(plain.model, 7)
            assert_close(ours, theirs, f"loss, {stage} {has_grad} {at}")
        assert_trains(model, optimizer, plain, f"caught inside, {stage} {has_grad}")


def left_loops(row, folder):
    """Before a forward; kept by a traceback; in the last pass of one that is done."""
    for stage in range(4):
        model, optimizer, plain = made(stage)
        for _ in zero.accumulate(model, 2):
            break
        steps = zero.accumulate(model, 3)
        loss_of(model, next(steps)).backward()
        with TestCase().assertLogs("deepspeed_ext", "WARNING") as logs:
            steps.close()  # which raises nothing
        text = "zero.accumulate: left in micro-step 1 of 3; its gradients are dropped"
        assert [record.getMessage() for record in logs.records] == [text]
        assert all(param.grad is None for param in model.parameters())
        kept = []

        def fails(model, kept):
            steps = zero.accumulate(model, 3)
            for i in steps:
                loss_of(model, i).backward()
                if i == 1:
                    fail()

        try:
            fails(model, kept)
        except MemoryError as error:
            kept.append(error)
        optimizer.step()  # of no gradients
        assert_trains(model, optimizer, plain, f"kept by a traceback, {stage}")
        other = zero.shard(Net(), stage)
        for i, j, k in zip(
            range(3), zero.accumulate(model, 3), zero.accumulate(other, 3), strict=False
        ):
            assert i == j == k
            (loss_of(model, 30 + i) / MICRO_STEPS).backward()
            loss_of(other, i).backward()
            plain.add(30 + i)
        assert other.embedding.weight.grad is not None
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        assert_trains(model, optimizer, plain, f"zip, {stage}")


def no_last_backward(row, folder):
    for stage in range(4):
        model, optimizer, plain = made(stage)
        with pytest.raises(
            RuntimeError, match=r"^zero.accumulate: the backward of micro-step 3 of 3 is missing"
        ):
            for i in zero.accumulate(model, 3):
                loss = loss_of(model, i)
                if i != 2:
                    loss.backward()
        assert all(param.grad is None for param in model.parameters())
        for _ in zero.accumulate(model, 2):
            with torch.no_grad():
                loss_of(model, 0)
        assert_trains(model, optimizer, plain, f"{stage}")


def steps_in_loops(row, folder):
    """Refused before the last backward, fine after it; another model's are none of its."""
    for stage in range(4):
        model, optimizer, plain = made(stage)
        other = nn.Linear(2, 2)
        for i in zero.accumulate(model, MICRO_STEPS):
            (loss_of(model, i) / MICRO_STEPS).backward()
            plain.add(i)
            torch.optim.SGD(other.parameters()).step()
            if i < 2:
                text = rf"^zero.accumulate: SGD is stepped in micro-step {i + 1} of 3, expected"
                with pytest.raises(RuntimeError, match=text):
                    optimizer.step()
            else:
                optimizer.step()
                optimizer.zero_grad()
        plain.step()
        assert_trains(model, optimizer, plain, f"{stage}")
        model.set_requires_gradient_sync(False)
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match=r"^zero: SGD finds no gradient, as those of the"):
            optimizer.step()


def graded_forwards(row, folder):
    """A metric with gradients, anywhere: clipping, zero_grad and all that writes meet shards."""

    def metric(model, number):
        loss_of(model, number)
        model.blocks[0](torch.ones(1, 6))  # a block by itself

    for stage, times, where in itertools.product(range(4), (None, 2), ("in", "after", "next")):
        model, optimizer, plain = made(stage)
        for at in range(3):
            loop = range(1) if times is None else zero.accumulate(model, times)
            for i in loop:
                loss = loss_of(model, 3 * at + i) / MICRO_STEPS
                if where == "next" and times is None:
                    model.zero_grad()  # between a forward and its backward
                loss.backward()
                plain.add(3 * at + i)
                if where == "in" and i + 1 == (times or 1):
                    metric(model, 0)
                    assert all(isinstance(param, DTensor) for param in model.parameters())
            if where == "after":
                metric(model, 0)
            norms = [
                nn.utils.clip_grad_norm_(each.parameters(), 0.05) for each in (model, plain.model)
            ]
            assert_close(whole(norms[0]), norms[1], f"norm, {stage} {times} {where}")
            optimizer.step()
            plain.step()
            if where == "next" and times is None:
                continue
            metric(model, 0)
            model.zero_grad()
            with torch.no_grad():  # as weights are clamped
                for param in (*model.parameters(), *plain.model.parameters()):
                    param.data.mul_(0.9)
            block, theirs = model.blocks[0], plain.model.blocks[0]
            x = torch.ones(1, 6)
            assert_close(block(x).detach(), theirs(x).detach(), f"block, {stage} {times} {where}")
            with zero.GatheredParameters(model.head.weight, modifier_rank=0) as weight:
                weight.mul_(0.5)
            plain.model.head.weight.data.mul_(0.5)
        model.zero_grad()
        assert_trains(model, optimizer, plain, f"{stage} {times} {where}")


def recomputed(row, folder):
    """Blocks and what is in none, some in a loss of its own; the first forward has no gradients."""
    for stage in range(4):
        model, optimizer, plain = made(stage)
        with torch.inference_mode():
            loss_of(model, 0)
        for each in (model, plain.model):
            for inner in (each.blocks[0], each.head):
                forward = partial(checkpoint, inner.forward, use_reentrant=False)
                inner.forward = forward
            each.side = []
            each.blocks[2].register_forward_hook(
                lambda block, args, x, each=each: each.side.append(x.square().mean())
            )
        assert_trains(model, optimizer, plain, f"{stage}")
        model.side.clear()
        loss_of(model, 0)
        model.side.pop().backward()  # not from what the model returns
        plain.model.side.clear()
        for rank in range(dist.get_world_size()):
            loss_of(plain.model, 0, rank)
        sum(plain.model.side).div(dist.get_world_size()).backward()
        for ours, theirs in zip(model.parameters(), plain.model.parameters(), strict=True):
            if theirs.grad is not None:
                assert_close(whole(ours.grad), theirs.grad, f"side, {stage}")


class Recursive(nn.Module):
    """Calls itself, with gradients or without."""

    def __init__(self, has_grad):
        super().__init__()
        torch.manual_seed(0)
        self.has_grad = has_grad
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last = nn.Linear(4, 4)

    def forward(self, x, is_inner=False):
        for block in self.blocks:
            x = torch.tanh(block(x))
        if not is_inner:
            with torch.set_grad_enabled(self.has_grad):
                inner = self(x, True)
            x = x + inner
        return self.last(x)


def models_that_call_themselves(row, folder):
    for stage, has_grad in itertools.product(range(4), (False, True)):
        model, plain = zero.shard(Recursive(has_grad), stage), Recursive(has_grad)
        for i in range(2):
            x = torch.full((2, 4), float(i + 1))
            model(x).square().mean().backward()
            plain(x).square().mean().backward()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_close(whole(ours.grad), theirs.grad, f"{name}, stage {stage}")


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x, which):
        return self.experts[which](x)


def experts(row, folder):
    """Each process uses another one; of blocks by name, one that none uses."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return  # test_zero_parity has what is said then
    world = dist.get_world_size()
    for stage in range(4):
        model, plain = zero.shard(Experts(), stage, reduce_unused=True), Experts()
        for turn in range(2):
            for rank in range(world):
                x = torch.full((1, 3), 1.0 + rank + turn)
                (plain(x, (rank + turn) % 4).sum() / world).backward()
                if rank == dist.get_rank():
                    model(x, (rank + turn) % 4).sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            want = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            assert_close(whole(ours.grad), want, f"stage {stage}")
        model = zero.shard(Experts(), stage, reduce_unused=True, blocks=["experts.*"])
        model(torch.ones(1, 3), 2).sum().backward()
        grads = [whole(expert.weight.grad).ne(0).any().item() for expert in model.experts]
        assert grads == [False, False, True, False]


def losses_of_whole_weights(row, folder):
    """Of a weight that forward uses too, as the docstring of shard says: gradients are averaged."""
    mesh = None
    if row == "replicas":
        mesh = init_device_mesh(home(), (2, 2), mesh_dim_names=("replicas", "shards"))

    def loss(model, number, rank):
        weight = model.embedding.weight
        if isinstance(weight, DTensor):
            ndim = weight.device_mesh.ndim
            weight = weight.full_tensor(grad_placements=[Partial("avg")] * ndim)
        return loss_of(model, number, rank) + weight[rank].pow(2).sum()

    for stage in (2, 3) if row == "replicas" else range(4):
        model, plain = zero.shard(Net(), stage, mesh=mesh), Net()
        for number in zero.accumulate(model, MICRO_STEPS):
            (loss(model, number, dist.get_rank()) / MICRO_STEPS).backward()
            for rank in range(dist.get_world_size()):
                (loss(plain, number, rank) / dist.get_world_size() / MICRO_STEPS).backward()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            if theirs.grad is None:  # of what the loss does not use
                assert ours.grad is None, name
            else:
                assert_close(whole(ours.grad), theirs.grad, f"stage {stage}, {name}")


def saved_pretrained(row, folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 11}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zero.shard(model, 3)
    text = "^save_pretrained: .* has shards, expected whole parameters; call it inside of zero.Gath"
    with pytest.raises(RuntimeError, match=text):
        model.save_pretrained(folder / "shards")
    with zero.GatheredParameters(model):
        model.save_pretrained(folder / "whole")
    if dist.get_rank() == 0:  # which alone saves
        loaded = LlamaForCausalLM.from_pretrained(folder / "whole").state_dict()
        assert all(torch.equal(value.cpu(), before[name].cpu()) for name, value in loaded.items())


def error_in_one(row, folder):
    """Others wait; the one goes on."""
    model, optimizer, _ = made(int(row))
    mishap = Mishap(model, "forward") if dist.get_rank() == 1 else None
    for number in range(4):
        try:
            loss_of(model, number).backward()
        except MemoryError:
            mishap.remove()
        optimizer.step()


CASES = [
    *(Case(world, "errors", "") for world in (1, 2)),
    Case(4, "errors", "replicas"),
    *(Case(world, "caught_inside", "") for world in (1, 2)),
    *(Case(world, "left_loops", "") for world in (1, 2)),
    Case(2, "no_last_backward", ""),
    *(Case(world, "shards_after_errors", "") for world in (1, 2)),
    Case(2, "steps_in_loops", ""),
    *(Case(world, "graded_forwards", "") for world in (1, 2)),
    Case(2, "recomputed", ""),
    *(Case(world, "models_that_call_themselves", "") for world in (1, 2)),
    *(Case(world, "experts", "") for world in (1, 2, 4)),
    Case(2, "losses_of_whole_weights", ""),
    Case(4, "losses_of_whole_weights", "replicas"),
    Case(2, "saved_pretrained", ""),
]
LONG = (
    "errors--2",
    "shards_after_errors--2",
    "graded_forwards--2",
)


@pytest.mark.parametrize("case", with_long(CASES, *LONG))
def test_processes(case, groups):
    groups.run(case)


@pytest.mark.parametrize("stage", ("1", "3"))
def test_an_error_in_one_process_ends_the_others(stage, groups):
    groups.need_gloo()
    with pytest.raises(AssertionError):
        groups.run(Case(2, "error_in_one", stage))
