"""Shards: gradients that leave at once and are dropped, and copies that come late."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from offload_cases import await_speculation
from processes import Case
from sharded_cases import Net, distribute, mesh_of
from test_offload_distributed import Both, loss_of, plain_class, row_of, same_local, sharded
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn import Parameter

from deepspeed_ext import zero
from deepspeed_ext.offload import OffloadOptimizer, copies
from deepspeed_ext.offload.sent_gradients import sent

OPTIONS = {"lr": 0.01, "weight_decay": 0.1}


class Two:
    """A net whose gradients leave, and one trained alike by the plain class."""

    def __init__(self, device, shard, **options):
        self.device = device
        self.nets = [shard(), shard()]
        self.ours = OffloadOptimizer(self.nets[0].parameters(), free_grads=True, **OPTIONS)
        self.plain = plain_class(device)(self.nets[1].parameters(), **OPTIONS)

    def backward(self, number):
        for net in self.nets:
            loss_of(net, number, self.device).backward()

    def step(self):
        await_speculation(self.ours)
        self.ours.step()
        self.plain.step()
        self.plain.zero_grad()
        for p, q in zip(*(net.parameters() for net in self.nets), strict=True):
            assert p.grad is None and same_local(p, q)


def fsdp_frees(device, folder):
    """Micro-steps of which each is reduced, after some that were dropped."""
    two = Two(device, lambda: sharded(device))
    for step in range(8):
        for number in range(1 + step % 3):
            two.backward(10 * step + number)
            assert all(sent(p.grad) is not None for p in two.nets[0].parameters())
            if step in (2, 5) and number == 0:
                await_speculation(two.ours)
                for net in two.nets:
                    net.zero_grad(set_to_none=step == 2)
        two.step()
    two.backward(0)
    with pytest.raises(RuntimeError, match="max_grad_norm"):
        nn.utils.clip_grad_norm_(two.nets[0].parameters(), 1.0)


def left_early(device, folder):
    """What a loop over micro-steps drops does not come back."""
    for stage in (1, 2, 3):

        def shard(stage=stage):
            return zero.shard(Net().to(device), stage, mesh=mesh_of(row_of(device)))

        two = Two(device, shard)
        for step in range(8):
            for net in two.nets if step % 4 == 3 else ():
                for number in zero.accumulate(net, 3):
                    loss_of(net, 50 + number, device).backward()
                    if number == 1:
                        break
            for net in two.nets:
                for number in zero.accumulate(net, 2):
                    loss_of(net, 10 * step + number, device).backward()
            two.step()


def copies_that_are_late(device, folder):
    """Hooks are told of a gradient in host memory that only the stream of the device has yet.

    As FSDP2 with CPUOffloadPolicy does in torch 2.11.
    """
    mesh = mesh_of(row_of(device))
    for settings in ({}, {"free_grads": True}):
        generator = torch.Generator().manual_seed(1)
        values = [torch.randn(size, generator=generator) for size in ((11, 7), (3, 50))]
        params = [Parameter(distribute(v, mesh, [Shard(0)])) for v in values]
        both = Both(nn.ParameterList(params), device, **settings)
        for _ in range(6):
            grads = [torch.randn(p.shape, generator=generator) for p in params]
            grads = [distribute(g, mesh, [Shard(0)]) for g in grads]
            for param, grad in zip(params, grads, strict=True):
                param.grad = copy.deepcopy(grad)
                part = param.grad._local_tensor
                value, _ = part.clone(), part.fill_(7.0)

                def arrive(where, part=part, value=value):
                    assert where.type == "cuda"
                    part.data.copy_(value)

                with (
                    mock.patch.object(type(mesh), "device_type", "cuda"),
                    mock.patch.object(copies, "sleep_until", arrive),
                ):
                    for hook in param._post_accumulate_grad_hooks.values():
                        hook(param)
                part.data.copy_(value)  # for FSDP2 waits when backward ends
            both.step(grads=grads)
        stats = both.ours.stats()
        assert stats["committed"] >= 3 and stats["discarded"] == 0, stats


def fsdp_offloads(device, folder):
    """CPUOffloadPolicy, with a device that is behind."""
    width = 2048 if device == "cuda" else 8

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if device == "cuda":
                torch.cuda._sleep(50_000_000)
            return grad

    for settings in ({}, {"free_grads": True}):
        nets = []
        for _ in range(2):
            torch.manual_seed(0)
            net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6)))
            policy = CPUOffloadPolicy(pin_memory=device == "cuda")
            for layer in (*net, net):
                fully_shard(layer, mesh=mesh_of(row_of(device)), offload_policy=policy)
            nets.append(net)
        ours = OffloadOptimizer(nets[0].parameters(), **settings, **OPTIONS)
        plain = plain_class("cpu")(nets[1].parameters(), **OPTIONS)
        for step in range(5):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            x = torch.randn(4, width, generator=generator).to(device)
            for net, optimizer in zip(nets, (ours, plain), strict=True):
                Late.apply(net(x)).square().sum().backward()
                if optimizer is ours:
                    await_speculation(ours)
                optimizer.step()
                optimizer.zero_grad()
            for p, q in zip(*(net.parameters() for net in nets), strict=True):
                assert same_local(p, q), (settings, step)
        stats = ours.stats()
        if device == "cuda":  # they are stepped where they rest
            assert stats["bytes_out"] == stats["bytes_back"] == stats["ahead"] == 0
        else:
            assert stats["committed"] >= 3 and not stats["discarded"]


FUNCTIONS = {
    fsdp_frees: (1, 2),
    left_early: (1, 2),
    copies_that_are_late: (1,),
    fsdp_offloads: (2, 1),
}
CASES = [
    Case(world, function.__name__, device)
    for function, worlds in FUNCTIONS.items()
    for device in ("cpu", "cuda")
    for world in worlds
    if (function, device) != (copies_that_are_late, "cuda")
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function}-{c.row}-{c.world}")
def test_processes(case, groups):
    device = case.row
    if device == "cuda" and torch.cuda.device_count() < case.world:
        pytest.skip(f"needs {case.world} CUDA GPUs")
    groups[device].run(case, device)
