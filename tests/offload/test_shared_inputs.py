"""checkpoint over a mesh: each process keeps a part of each input, and gradients are the same."""

import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from late_lanes import be_late
from optim_cases import assert_same_bits
from processes import Case
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed_ext import offload
from deepspeed_ext.offload.activations.forms import ALIGNMENT
from deepspeed_ext.offload.activations.sharding import layout_of

WIDTH, ROWS, BLOCKS = 5, 7, 4  # 35 elements: no part of 2 or 3 processes is as long as the others


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x, source, mask, scale=1.0):
        y = nn.functional.gelu(self.up(x + source * mask))
        return x + scale * self.down(nn.functional.dropout(y, 0.2))


def mesh_here():
    kind = torch.empty(0).device.type
    return init_device_mesh(kind, (dist.get_world_size(),))


def saved_in(row, folder):
    path = {"nvme_path": folder} if row == "nvme" else {}
    device = "nvme" if row == "nvme" else "cpu"
    return offload.saved_tensors(device, min_bytes=0, budget=0 if row == "stays" else None, **path)


def step(blocks, source, call):
    """Gradients of a step whose blocks have one input in common, beside a mask."""
    torch.manual_seed(1)
    mask = torch.rand(ROWS, WIDTH)
    x, source = source.sin(), source.cos()
    for block in blocks:
        x = call(block, x, source, mask)
    blocks.zero_grad()
    x.square().mean().backward()
    return [p.grad.clone() for p in blocks.parameters()]


def same_bits(row, folder):
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
    leaf = torch.randn(ROWS, WIDTH).requires_grad_()
    plain = step(blocks, leaf, partial(torch_checkpoint, use_reentrant=False))
    world = dist.get_world_size()
    part = -(-leaf.numel() // world) * leaf.element_size()
    with pytest.MonkeyPatch.context() as patch:
        failures, _ = be_late(patch, leaf.device.type)
        saved, mesh = saved_in(row, folder), mesh_here()

        def call(block, *args):
            return offload.checkpoint(block, *args, device=saved, mesh=mesh)

        for number in range(3):
            leaf.grad = None
            assert_same_bits(step(blocks, leaf, call), plain)
            stats = saved.stats()
            kept = (BLOCKS + 1) * part + leaf.nbytes  # one input is of all; the mask stays whole
            assert stats["bytes"] == 0
            assert stats["stayed" if row == "stays" else "bytes_out"] == (number + 1) * kept
        assert failures == []


def forms(row, folder):
    """What the function gets again looks as it did at first, and is what it was."""
    saved, mesh = saved_in(row, folder), mesh_here()
    leaf = torch.linspace(-1, 1, 240).requires_grad_()
    flat = leaf * 1
    wave = torch.view_as_complex(flat.view(-1, 2))
    views = [
        flat[3:20],
        flat.view(8, 30)[:, ::2],
        flat.view(8, 30).t(),
        flat.view(2, 3, 4, 10).permute(0, 3, 1, 2),
        flat[5:6].expand(7, 3),
        flat[:6].view(6, 1).expand(6, 4),
        flat.as_strided((10, 8), (2, 1), 11),
        flat[7],
        flat[:0],
        flat.to(torch.bfloat16)[1:9],
        flat.double()[1:],
        flat.view(2, 120)[:, 3:7],
        wave[1:],
        wave.conj(),
        (flat.detach() > 0),
        (flat.detach() * 100).to(torch.int16)[::3],
        nn.Parameter(flat.detach()),
        leaf,
    ]
    seen = []

    def look(*views):
        seen.append([(v.dtype, v.shape, v.stride(), v.detach().clone()) for v in views])
        return sum(v.sum().abs() for v in views if v.requires_grad)

    look_again = offload.checkpoint(look, *views, device=saved, mesh=mesh, early_stop=False)
    look_again.backward()
    first, again = seen
    for one, other in zip(first, again, strict=True):
        assert one[:3] == other[:3] and torch.equal(one[3], other[3])


def lives(row, folder):
    """Graphs that are retained, dropped, or whose inputs are written; a block that fails."""
    saved, mesh = saved_in(row, folder), mesh_here()
    leaf = torch.linspace(-1, 1, 35).requires_grad_()
    x = leaf * 1
    y = offload.checkpoint(torch.sin, x, device=saved, mesh=mesh).sum()
    for _ in range(3):
        (found,) = torch.autograd.grad(y, leaf, retain_graph=True)
        assert torch.equal(found, leaf.cos())
    (first,) = torch.autograd.grad(y, leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    assert torch.equal(second, -leaf.sin())
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()

    def fail(x):
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        offload.checkpoint(fail, leaf * 1, device=saved, mesh=mesh)
    del y, first, second
    gc.collect()
    assert saved.stats()["bytes"] == 0


def sharded(row, folder):
    """Weights that fully_shard gathers and lets go of stay its own."""
    found = []
    leaf = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).requires_grad_()
    for kind in ("plain", "all leaves", "inputs", "inputs and what is around them"):
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        for block in blocks:
            fully_shard(block, mesh=mesh_here())
        saved = saved_in(row, folder)
        call = partial(offload.checkpoint, device=saved) if "inputs" in kind else Block.__call__
        with nullcontext() if kind in ("plain", "inputs") else saved:
            grads = step(blocks, leaf, call)
        found.append([grad.to_local() for grad in grads])
        stats = saved.stats()
        assert (stats["peak"] > 0) == (kind != "plain") and stats["bytes"] == 0
    for grads in found[1:]:
        assert_same_bits(grads, found[0])


def refused(row, folder):
    saved, leaf = saved_in(row, folder), torch.ones(3, requires_grad=True)
    for mesh, kind, text in (
        ("mesh", TypeError, "mesh is 'mesh', expected a DeviceMesh or None"),
        (
            init_device_mesh(leaf.device.type, (1, dist.get_world_size())),
            ValueError,
            "mesh has 2 dimensions, expected 1",
        ),
    ):
        with pytest.raises(kind, match=f"checkpoint: {text}"):
            offload.checkpoint(torch.sin, leaf, device=saved, mesh=mesh)
    first = DeviceMesh(leaf.device.type, [0])
    if dist.get_rank():
        with pytest.raises(ValueError, match="expected one with this process"):
            offload.checkpoint(torch.sin, leaf * 1, device=saved, mesh=first)
    else:
        offload.checkpoint(torch.sin, leaf * 1, device=saved, mesh=first).sum().backward()


CASES = [
    Case(3, "same_bits", "stays"),
    Case(3, "same_bits", "cpu"),
    Case(3, "same_bits", "nvme"),
    Case(3, "forms", "cpu"),
    Case(3, "lives", "cpu"),
    Case(3, "lives", "stays"),
    Case(3, "sharded", "cpu"),
    Case(3, "refused", "cpu"),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{case.function}-{case.row}" for case in CASES])
def test_processes_share_inputs_out(groups, case):
    groups["cpu"].run(case)


@pytest.mark.parametrize("case", CASES, ids=[f"{case.function}-{case.row}" for case in CASES])
def test_gpus_share_inputs_out(groups, case):
    groups["cuda"].run(case, "cuda", least=2)


@pytest.mark.parametrize("offset", [0, 1, 5])
@pytest.mark.parametrize(
    ("size", "stride"),
    [
        ((3, 4), (4, 1)),
        ((3, 4), (1, 3)),
        ((3, 4), (9, 2)),
        ((3, 4), (0, 1)),
        ((3, 1, 2), (1, 100, 3)),
        ((2, 3), (0, 0)),
        ((), ()),
        ((3, 4), (2, 1)),
        ((5, 1), (1, 0)),
    ],
)
def test_elements_in_a_row(offset, size, stride):
    tensor = torch.arange(100.0).as_strided(size, stride, offset)
    layout = layout_of(tensor)
    flat = layout.flat(tensor)
    memory = torch.cat([torch.full((layout.skew,), -1.0), flat, torch.full((3,), -1.0)])
    again = layout.of(memory, flat.numel())
    assert torch.equal(again, tensor) and again.stride() == tensor.stride()
    assert again.storage_offset() * 4 % ALIGNMENT == offset * 4 % ALIGNMENT
