"""Tensors of several blocks in checkpoints, and what each stage keeps on a GPU."""

import gc

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import Case
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros
from zero_cases import adam, home

from deepspeed_ext import zero
from deepspeed_ext.optim import FusedAdam

ROWS, COLUMNS = 1031, 2053  # 8.5 MB in float32: two blocks of 4 MiB and a bit


def blocks(row, folder):
    """What one process wrote as one chunk, others want in rows that begin and end inside blocks."""
    path, device = folder / f"blocks-{home()}", home()
    generator = torch.Generator().manual_seed(0)
    kept = {
        "float32": torch.randn(ROWS, COLUMNS, generator=generator),
        "bfloat16": torch.randn(ROWS, COLUMNS, generator=generator).bfloat16(),
        "flat": torch.randn(3_000_001, generator=generator),
        "number": torch.tensor(7.0),
    }
    if dist.get_rank() == 0:
        dcp.save(
            {name: t.to(device) for name, t in kept.items()},
            storage_writer=zero.Writer(path),
            no_dist=True,
        )
    dist.barrier()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for placement in (Shard(0), Shard(1), Replicate()):
        for dtype in (None, torch.float32, torch.bfloat16):
            into = {
                name: zeros(t.shape, dtype=dtype or t.dtype, device_mesh=mesh, placements=[place])
                for name, t in kept.items()
                for place in [placement if t.dim() > getattr(placement, "dim", 0) else Replicate()]
            }
            dcp.load(into, storage_reader=zero.Reader(path))
            for name, tensor in into.items():
                want = distribute_tensor(kept[name].to(device), mesh, tensor.placements)
                part = want.to_local().to(tensor.dtype)
                assert torch.equal(tensor.to_local(), part), (name, placement, dtype)


def resumes(row, folder):
    """Steps after a load are those after the save: weights and state of several blocks."""
    path = folder / f"resumes-{home()}"

    def training(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.Linear(ROWS, 5)).to(home())
        zero.shard(model, 3)
        return model, adam(model.parameters(), lr=0.01)

    def train(model, optimizer, number):
        torch.manual_seed(number)
        model(torch.randn(2, COLUMNS).to(home())).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = training(0)
    train(model, optimizer, 1)
    saved = zero.save(path, "a", model, optimizer, wait=False)
    train(model, optimizer, 2)
    saved.result()
    for steps in (0, 1):  # the state is made by the load, or is there
        other, its = training(5)
        for number in range(steps):
            train(other, its, 8 + number)
        own = [t.data_ptr() for t in local_state(its)]
        zero.load(path, "a", other, its)
        assert not own or own == [t.data_ptr() for t in local_state(its)]
        train(other, its, 2)
        mine, loaded = ([*m.parameters(), *state(o)] for m, o in ((model, optimizer), (other, its)))
        pairs = zip(mine, loaded, strict=True)
        for ours, theirs in pairs:
            assert torch.equal(
                getattr(ours, "_local_tensor", ours), getattr(theirs, "_local_tensor", theirs)
            )


def state(optimizer):
    return [tensor for entry in optimizer.state.values() for tensor in entry.values()]


def local_state(optimizer):
    return [getattr(tensor, "_local_tensor", tensor) for tensor in state(optimizer)]


class Layers(nn.Module):
    """Weights beside which activations are nothing."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1024, 1024, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(16))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def memory(row, folder):
    """Of the table of zero.shard, in bytes: w and w' 4, c 2, g 4, s 8."""
    block, n = 2**20, dist.get_world_size()
    total, x = 17 * block, torch.randn(2, 1024, device="cuda")
    Layers().cuda().bfloat16()(x.bfloat16()).backward()  # torch's workspaces stay
    for stage in range(4):
        gc.collect()  # of the models before
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        model = Layers().cuda()
        zero.shard(model, stage, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        optimizer = FusedAdam(model.parameters())
        share = 1 if stage == 0 else n
        between, grads = 12 * total // share, 4 * total // share
        gathered = 2 * (total if stage < 3 else block)
        for _ in range(2):
            loss = model(x)
            forward = torch.cuda.memory_allocated() - base
            torch.cuda.reset_peak_memory_stats()
            loss.backward()
            most = torch.cuda.max_memory_allocated() - base
            backward = torch.cuda.memory_allocated() - base
            optimizer.step()
            optimizer.zero_grad()
        del loss
        kept = torch.cuda.memory_allocated() - base
        near(kept, between, stage, "kept")
        near(forward, between + gathered, stage, "forward")
        near(backward, between + grads, stage, "backward")
        limit = between + (max(gathered, grads) if stage < 3 else gathered + 4 * block + grads)
        assert most <= 1.05 * (limit + 10 * block), (stage, most, limit)
        del model, optimizer


def near(got, want, *what):
    assert abs(got - want) <= 0.05 * want, (*what, got, want)


@pytest.mark.parametrize("function", ("blocks", "resumes"))
def test_processes(function, groups):
    groups.run(Case(3 if function == "blocks" else 2, function, ""), least=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("world", (1, 2))
def test_memory(world, groups):
    groups.run(Case(world, "memory", ""), "cuda")
