"""Several processes: FSDP2 and other DTensors, DDP; offloaded as the plain class does it there."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from offload_cases import FORMATS, KINDS, assert_same_state, await_speculation
from processes import Case
from sharded_cases import Net, Row, distribute, full, mesh_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.offload.sent_gradients import sent

STEPS = 8
WORLDS = (1, 2)
OPTIONS = KINDS["adam"].options


def row_of(device):
    return Row(KINDS["adam"].offloaded, device)


def plain_class(device):
    return KINDS["adam"].offloaded if device == "cpu" else KINDS["adam"].on_cuda


def batch(step, device):
    """The inputs and targets of this process."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return [torch.randn(8, n, generator=generator).to(device) for n in (6, 1)]


def loss_of(net, step, device):
    x, y = batch(step, device)
    return nn.functional.mse_loss(net(x).float(), y)


def same_local(one, other):
    """Whether two tensors are alike in this process, bit for bit."""
    parts = [t._local_tensor if isinstance(t, DTensor) else t for t in (one, other)]
    return torch.equal(parts[0].detach().cpu(), parts[1].detach().cpu())


def assert_alike(mine, theirs):
    """Parameters and state of two optimizers, in this process."""
    pairs = list(zip(*(o.param_groups[0]["params"] for o in (mine, theirs)), strict=True))
    for i, (p, q) in enumerate(pairs):
        assert same_local(p, q), f"parameter {i}"
        a, b = mine.state[p], theirs.state[q]
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert type(value) is type(b[key]) and value.dtype == b[key].dtype, (i, key)
            assert same_local(value, b[key]), (i, key)


class Both:
    """An offloaded optimizer of a sharded net, and the plain class on twins of its parameters."""

    def __init__(self, net, device, **settings):
        own = {
            k: settings.pop(k) for k in ("max_grad_norm", "model", "free_grads") if k in settings
        }
        self.params = list(net.parameters())
        self.twins = [Parameter(p.detach().clone()) for p in self.params]
        self.ours = OffloadOptimizer(self.params, **own, **OPTIONS | settings)
        self.plain = plain_class(device)(self.twins, **OPTIONS | settings)

    def give(self):
        for param, twin in zip(self.params, self.twins, strict=True):
            is_here = param.grad is not None and sent(param.grad) is None
            twin.grad = param.grad.detach().clone() if is_here else None

    def step(self, max_norm=None, grads=None):
        self.give()
        for twin, grad in zip(self.twins, grads or [], strict=grads is not None):
            twin.grad = grad
        await_speculation(self.ours)
        if max_norm is None:
            self.ours.step()
            self.plain.step()
        else:
            norms = [o.clip_and_step(max_norm) for o in (self.ours, self.plain)]
            assert torch.equal(norms[0].cpu(), norms[1].cpu())
        self.ours.zero_grad()
        self.plain.zero_grad()
        assert_alike(self.ours, self.plain)


def sharded(device, dtype=torch.float32, **options):
    net = Net().to(device, dtype)
    for layer in (net.first, net.second, net):
        fully_shard(layer, **{"mesh": mesh_of(row_of(device))} | options)
    return net


def fsdp(device, folder):
    """Buckets are early, and state and weights those of the plain class on the same shards."""
    trained_in_shards(device, ("float32", "master", "compact"))


def hsdp(device, folder):
    """Sharded among two, and the same in both halves."""
    mesh = mesh_of(row_of(device), 2, 2)
    for net in trained_in_shards(device, ("float32", "compact"), mesh=mesh):
        for param in net.parameters():
            part = param._local_tensor.detach()
            halves = [torch.empty_like(part) for _ in range(2)]
            dist.all_gather(halves, part, group=mesh.get_group(0))
            assert torch.equal(*halves)


def trained_in_shards(device, names, **options):
    """Compare after each step, and return the nets."""
    nets = []
    for name in names:
        for times in (1, 2):
            dtype = torch.float32 if name == "float32" else torch.bfloat16
            net = sharded(device, dtype, **options)
            nets.append(net)
            both = Both(net, device, **FORMATS[name])
            for step in range(STEPS):
                for micro in range(times):
                    x, y = batch(step * times + micro, device)
                    nn.functional.mse_loss(net(x.to(dtype)), y.to(dtype)).backward()
                both.step()
            stats = both.ours.stats()
            assert stats["committed"] >= STEPS - 2 and stats["discarded"] == 0, (name, stats)
    return nets


def fsdp_with_model(device, folder):
    """Forward waits for weights, as FSDP2 gathers them ahead of it; compiled or not."""
    for compiles in (False, True):
        net = sharded(device)
        watched = torch.compile(net, backend="eager") if compiles else net
        both = Both(net, device, model=watched)
        for step in range(STEPS):
            loss = loss_of(watched, step, device)
            assert all(map(same_local, both.params, both.twins)), step
            loss.backward()
            both.give()
            await_speculation(both.ours)
            both.ours.step()
            both.plain.step()
            both.ours.zero_grad()
        both.ours.synchronize()
        assert_alike(both.ours, both.plain)
        assert both.ours.stats()["committed"] >= STEPS - 2


def fsdp_mixed_precision(device, folder):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = sharded(device, mp_policy=policy)
    both = Both(net, device)
    for step in range(STEPS):
        loss_of(net, step, device).backward()
        both.step()
    assert both.ours.stats()["committed"] >= STEPS - 2


def fsdp_clips(device, folder):
    net = sharded(device)
    both = Both(net, device, max_grad_norm=1e6)
    for max_norm in (1e6, 1e6, 1e6, 1e6, 0.01, 0.01, 1e6, 1e6, 1e6):
        loss_of(net, 1, device).backward()
        both.step(max_norm)
    stats = both.ours.stats()
    assert stats["committed"] >= 3 and stats["discarded"] == 1
    # inf in one process keeps all from stepping
    before = [full(p).clone() for p in both.params]
    loss_of(net, 1, device).backward()
    await_speculation(both.ours)
    if dist.get_rank() == 0:
        net.first.weight.grad._local_tensor[0, 0] = float("inf")
    assert both.ours.clip_and_step(1e6).isinf()
    for param, value in zip(both.params, before, strict=True):
        assert torch.equal(full(param), value)


def fsdp_clipped_by_torch(device, folder):
    """Writes to DTensors count no version of the parts that are here."""
    net = sharded(device)
    both = Both(net, device)
    for step in range(4):
        loss_of(net, step, device).backward()
        await_speculation(both.ours)
        nn.utils.clip_grad_norm_(both.params, 0.01)
        both.step()


def fsdp_written_untold(device, folder):
    """Gradients and weights that change after backward, and no version with them."""
    net = sharded(device)
    both = Both(net, device)
    for step in range(6):
        loss_of(net, step, device).backward()
        await_speculation(both.ours)
        with torch.no_grad():
            if step % 3 == 0:
                for param in both.params:
                    param.grad._local_tensor.data.mul_(3)
            elif step % 3 == 1:
                for params in (both.params, both.twins):
                    torch._foreach_mul_(params, 0.5)
            else:
                for params in (both.params, both.twins):
                    for param in params:
                        param._local_tensor.data.neg_()
        both.step()


def collectives(device, folder):
    """Gradients and weights that processes add up and send by themselves."""
    torch.manual_seed(dist.get_rank())
    net = Net().to(device)
    both = Both(net, device)
    for step in range(6):
        loss_of(net, step, device).backward()
        await_speculation(both.ours)
        for param in both.params:
            dist.all_reduce(param.grad)
        for params in (both.params, both.twins) if step % 2 else ():
            for param in params:
                dist.broadcast(param.detach(), 0)
        both.step()


def fsdp_frees_and_clips(device, folder):
    """The norm is that of the whole gradients, and inf in one process is seen by all."""
    net = sharded(device)
    seen, factor = {}, [1.0]

    def note(param):
        param.grad._local_tensor.mul_(factor[0])
        seen[param] = param.grad.detach().clone()

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(note)
    both = Both(net, device, free_grads=True)
    for step, max_norm in enumerate((1e6, 0.01, 1e6, 0.01)):
        loss_of(net, step, device).backward()
        both.step(max_norm, [seen[param] for param in both.params])
    factor[0] = float("inf") if dist.get_rank() == 0 else 1.0
    loss_of(net, 0, device).backward()
    assert not both.ours.clip_and_step(1e6).isfinite()
    assert_alike(both.ours, both.plain)


def fsdp_without_synchronization(device, folder):
    """Micro-batches whose gradients are not reduced until the last one."""
    net = sharded(device)
    both = Both(net, device)
    for step in range(STEPS):
        for micro in range(3):
            net.set_requires_gradient_sync(micro == 2)
            loss_of(net, 3 * step + micro, device).backward()
        both.step()
    stats = both.ours.stats()
    assert stats["committed"] >= STEPS - 2 and stats["discarded"] == 0


def fsdp_accumulates_in_place(device, folder):
    """What is reduced first is added to afterwards: the speculative step by the sum is the one."""
    net = sharded(device)
    both = Both(net, device)
    for times in (1, 1, 1, 3, 3, 1, 2, 2, 2):
        for micro in range(times):
            loss_of(net, micro, device).backward()
            await_speculation(both.ours)
        both.step()
    stats = both.ours.stats()
    assert stats["committed"] >= 4 and stats["discarded"] >= 2


def dtensors(device, folder):
    """Sharded, whole in each process, unevenly so, and empty in some; beside a plain tensor."""
    generator = torch.Generator().manual_seed(1)
    mesh = mesh_of(row_of(device))
    for name in ("float32", "compact"):
        values = [torch.randn(size, generator=generator) for size in ((11, 7), (3, 50), (1, 9))]
        places = [[Shard(0)], [Replicate()], [Shard(0)]]
        params = [
            Parameter(distribute(v.to(device, torch.bfloat16), mesh, p))
            for v, p in zip(values, places, strict=True)
        ]
        params.append(Parameter(torch.ones(5, device=device, dtype=torch.bfloat16)))
        both = Both(nn.ParameterList(params), device, **FORMATS[name])
        for step in range(STEPS):
            for param in both.params:
                grad = torch.randn(param.shape, generator=generator).to(device, param.dtype)
                if isinstance(param, DTensor):
                    grad = distribute(grad, param.device_mesh, param.placements)
                param.grad = grad
            if step == 4:  # in other placements than those of the parameter
                grad = both.params[0].grad
                both.params[0].grad = grad.redistribute(grad.device_mesh, [Replicate()])
            both.step()


def ddp(device, folder):
    """Hooks see the gradient of one process: nothing of that is stepped."""
    for as_view in (False, True):
        net = Net().to(device)
        wrapped = DistributedDataParallel(net, gradient_as_bucket_view=as_view)
        both = Both(net, device)
        for step in range(STEPS):
            for micro in range(2):
                if micro == 0:
                    with wrapped.no_sync():
                        loss_of(wrapped, 2 * step, device).backward()
                else:
                    loss_of(wrapped, 2 * step + 1, device).backward()
            both.step()
            for param in both.params:
                alike = [torch.empty_like(param) for _ in range(dist.get_world_size())]
                dist.all_gather(alike, param.detach())
                assert all(torch.equal(a, param) for a in alike)
        stats = both.ours.stats()
        if dist.get_world_size() > 1:
            assert stats["early"] == stats["ahead"] == 0, stats
        else:  # there hooks may count; it is learnt that others write after them
            assert stats["early"] == stats["discarded"] == 1 and not stats["committed"], stats


def ddp_by_free_gradients(device, folder):
    """They leave when step() takes them: before, they are those of one process."""
    for as_view in (False, True):
        net = Net().to(device)
        wrapped = DistributedDataParallel(net, gradient_as_bucket_view=as_view)
        both = Both(net, device, free_grads=True)
        for step in range(STEPS):
            loss_of(wrapped, step, device).backward()
            both.step()
        stats = both.ours.stats()
        assert stats["early"] == stats["ahead"] == 0, stats


def ddp_made_after_the_optimizer(device, folder):
    net = Net().to(device)
    both = Both(net, device)
    wrapped = DistributedDataParallel(net)
    for step in range(STEPS):
        loss_of(wrapped, step, device).backward()
        both.step()


def state_dicts(device, folder):
    """Of DTensors, sharded as they are, both ways with the plain class."""
    net = sharded(device)
    both = Both(net, device)
    for step in range(3):
        loss_of(net, step, device).backward()
        both.step()
    assert_same_tree(both.ours.state_dict(), both.plain.state_dict())
    saved = copy.deepcopy(both.ours.state_dict()), copy.deepcopy(both.plain.state_dict())
    both.ours.load_state_dict(saved[1])
    both.plain.load_state_dict(saved[0])
    for step in range(3):
        loss_of(net, step, device).backward()
        both.step()
    other = copy.deepcopy(both.ours)
    assert_same_state(other, both.ours) if dist.get_world_size() == 1 else None


def assert_same_tree(mine, theirs):
    assert mine["param_groups"] == theirs["param_groups"]
    for i, entry in mine["state"].items():
        assert entry.keys() == theirs["state"][i].keys()
        for key, value in entry.items():
            assert same_local(value, theirs["state"][i][key]), (i, key)


def saves(device, folder):
    """What `loads` reads in all other worlds."""
    net = sharded(device)
    both = Both(net, device, master_weights=True)
    for _ in range(3):
        for param in both.params:
            whole = torch.linspace(-1, 1, param.numel()).view(param.shape).to(device)
            param.grad = distribute(whole, param.device_mesh, param.placements)
        both.step()
    content = {
        "net": {name: p.detach() for name, p in net.named_parameters()},
        "optimizer": get_optimizer_state_dict(net, both.ours),
    }
    world = dist.get_world_size()
    dcp.save(content, checkpoint_id=folder / f"{world}", no_dist=world == 1)
    whole = {
        name: (full(p).cpu(), {k: full(on_mesh(v)).cpu() for k, v in both.ours.state[p].items()})
        for name, p in net.named_parameters()
    }
    if dist.get_rank() == 0:
        torch.save(whole, folder / f"{world}.pt")


def on_mesh(value):
    """full_tensor wants parts where the mesh is."""
    if isinstance(value, DTensor) and value.device.type != value.device_mesh.device_type:
        return value.to(value.device_mesh.device_type)
    return value


def loads(device, folder):
    for world in WORLDS:
        if not (folder / f"{world}.pt").exists():
            continue
        whole = torch.load(folder / f"{world}.pt", weights_only=True)
        net = sharded(device)
        both = Both(net, device, master_weights=True)
        content = {
            "net": {name: p.detach() for name, p in net.named_parameters()},
            "optimizer": get_optimizer_state_dict(net, both.ours),
        }
        dcp.load(content, checkpoint_id=folder / f"{world}", no_dist=dist.get_world_size() == 1)
        set_optimizer_state_dict(net, both.ours, content["optimizer"])
        for name, param in net.named_parameters():
            values, entry = whole[name]
            assert torch.equal(full(param).cpu(), values), name
            for key, value in both.ours.state[param].items():
                assert torch.equal(full(on_mesh(value)).cpu(), entry[key]), (name, key)
        with torch.no_grad():
            for param, twin in zip(both.params, both.twins, strict=True):
                twin.copy_(param)
        both.plain.load_state_dict(both.ours.state_dict())
        for step in range(4):
            loss_of(net, step, device).backward()
            both.step()


FUNCTIONS = {
    fsdp: (*WORLDS, 4),
    hsdp: (4,),
    fsdp_with_model: (*WORLDS, 4),
    fsdp_mixed_precision: (2,),
    fsdp_clips: (2,),
    fsdp_clipped_by_torch: WORLDS,
    fsdp_written_untold: WORLDS,
    fsdp_frees_and_clips: WORLDS,
    collectives: WORLDS,
    fsdp_without_synchronization: (2,),
    fsdp_accumulates_in_place: (2,),
    dtensors: WORLDS,
    ddp: (*WORLDS, 4),
    ddp_by_free_gradients: WORLDS,
    ddp_made_after_the_optimizer: (2,),
    state_dicts: WORLDS,
    saves: WORLDS,
    loads: WORLDS,
}
CASES = [
    Case(world, function.__name__, device)
    for function, worlds in FUNCTIONS.items()
    for device in ("cpu", "cuda")
    for world in worlds
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function}-{c.row}-{c.world}")
def test_processes(case, groups):
    device = case.row
    if device == "cuda" and torch.cuda.device_count() < case.world:
        pytest.skip(f"needs {case.world} CUDA GPUs")
    for world in WORLDS if case.function == "loads" else ():
        if device == "cpu" or torch.cuda.device_count() >= world:
            groups[device].run(Case(world, "saves", device), device)
    groups[device].run(case, device)
