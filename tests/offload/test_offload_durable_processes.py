"""Commits by several processes: all resume from the same one, whatever some of them have beside."""

import shutil

import pytest
import torch
import torch.distributed as dist
from process_groups import with_long
from processes import Case
from sharded_cases import Net, Row, full, mesh_of
from torch.distributed.fsdp import fully_shard

from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.offload.tiers.commits import Commits
from deepspeed_ext.optim import DeepSpeedCPUAdam

COMPACT = {"state_dtype": torch.uint8, "master": "remainder"}


def net_of(device, dtype=torch.float32):
    torch.manual_seed(3)
    net = Net().to(device, dtype)
    for layer in (net.first, net.second, net):
        fully_shard(layer, mesh=mesh_of(Row(DeepSpeedCPUAdam, device)))
    return net


def opened(net, folder, **options):
    return OffloadOptimizer(
        net.parameters(),
        model=net,
        device="nvme",
        nvme_path=folder,
        durable=True,
        memory_budget="32MiB",
        lr=0.01,
        **{"nvme_fraction": 1.0, "resume": True} | options,
    )


def train(net, optimizer, first, last):
    param = net.first.weight
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(8, 6, generator=generator).to(param.device, param.dtype)
        net(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(net, optimizer):
    """What is of this process, as copies."""
    optimizer.synchronize()
    found = []
    for param in net.parameters():
        tensors = [param.detach(), *optimizer.state[param].values()]
        found += [getattr(value, "_local_tensor", value).clone().cpu() for value in tensors]
    return found


def made(folder):
    """Return an empty folder that all processes share."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    dist.barrier()
    return folder


def resumes(device, folder):
    """Shards go on where they were, state, weights and codes bit for bit."""
    for dtype, options in (
        (torch.float32, {}),
        (torch.bfloat16, COMPACT),
        (torch.bfloat16, {"master": "float32", "nvme_fraction": 0.5}),
    ):
        home = made(folder / f"resumes {dist.get_world_size()}")
        net = net_of(device, dtype)
        with opened(net, home, **options) as optimizer:
            train(net, optimizer, 1, 3)
            optimizer.commit(step=3, rank=dist.get_rank())
            train(net, optimizer, 4, 6)
            expected, whole = values(net, optimizer), [full(p).cpu() for p in net.parameters()]
        net = net_of(device, dtype)
        with opened(net, home, **options) as optimizer:
            assert optimizer.committed == {"step": 3, "rank": dist.get_rank()}
            train(net, optimizer, 4, 6)
            assert all(map(torch.equal, values(net, optimizer), expected))
            now = [full(p).cpu() for p in net.parameters()]
            assert all(map(torch.equal, now, whole))


def one_is_behind(device, folder):
    """A process that was killed between commits makes all go on from the one before."""
    home = made(folder / "behind")
    mine = home / f"process-{dist.get_rank()}"
    net = net_of(device)
    with opened(net, home) as optimizer:
        train(net, optimizer, 1, 2)
        optimizer.commit(step=2)
        expected = values(net, optimizer)
    copy = home / f"copy of {dist.get_rank()}"
    shutil.copytree(mine, copy)
    forget = Commits._forget_older
    with opened(net, home) as optimizer:
        train(net, optimizer, 3, 3)
        Commits._forget_older = lambda self: None  # as it is until all have said that they have it
        optimizer.commit(step=3)
        Commits._forget_older = forget
    if dist.get_rank() == 1:  # did not get so far
        shutil.rmtree(mine)
        shutil.copytree(copy, mine)
    dist.barrier()
    for _ in range(2):
        net = net_of(device)
        with opened(net, home) as optimizer:
            assert optimizer.committed == {"step": 2}
            assert all(map(torch.equal, values(net, optimizer), expected))
    with opened(net, home) as optimizer:
        train(net, optimizer, 3, 3)
        optimizer.commit(step="later")
    if dist.get_rank() == 1:  # is replaced by an older one
        shutil.rmtree(mine)
        shutil.copytree(copy, mine)
    dist.barrier()
    with pytest.raises(OSError, match="nvme_path of process 1 has no commit 2, expected it as all"):
        opened(net_of(device), home)
    if dist.get_rank() == 1:
        shutil.rmtree(mine)
    dist.barrier()
    with pytest.raises(OSError, match="nvme_path of process 1 has no commit 2"):
        opened(net_of(device), home)


def one_cannot(device, folder):
    """What one process cannot commit, none does, and all can go on."""
    home = made(folder / "cannot")
    net = net_of(device)
    with opened(net, home) as optimizer:
        train(net, optimizer, 1, 1)
        optimizer.commit(step=1)
        extra = {"step": object()} if dist.get_rank() == 1 else {"step": 2}
        train(net, optimizer, 2, 2)
        kind, text = (
            (TypeError, "step is or has a object")
            if dist.get_rank() == 1
            else (
                RuntimeError,
                "commit is refused by process 1: .*step is or has .*, expected by",
            )
        )
        with pytest.raises(kind, match=text):
            optimizer.commit(**extra)
        assert optimizer.committed == {"step": 1}
        train(net, optimizer, 3, 3)
        optimizer.commit(step=3)
        expected = values(net, optimizer)
    net = net_of(device)
    with opened(net, home) as optimizer:
        assert optimizer.committed == {"step": 3}
        assert all(map(torch.equal, values(net, optimizer), expected))


FUNCTIONS = {resumes: (1, 2, 4), one_is_behind: (2,), one_cannot: (2,)}
CASES = [
    Case(world, function.__name__, device)
    for function, worlds in FUNCTIONS.items()
    for device in ("cpu", "cuda")
    for world in worlds
]


@pytest.mark.parametrize("case", with_long(CASES, "resumes-cpu-4"))
def test_processes(case, groups):
    if case.row == "cuda" and torch.cuda.device_count() < case.world:
        pytest.skip(f"needs {case.world} CUDA GPUs")
    groups[case.row].run(case, case.row)


def test_commits_of_several_processes_are_not_for_one(groups, tmp_path):
    groups["cpu"].run(Case(2, "resumes", "cpu"), "cpu")
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="has commits of 2 processes, expected 1 as there are"):
        opened(Net(), groups["cpu"].folder("cpu") / "resumes 2")
