"""Experts over processes: training equal to that of one process, checkpoints, optimizers."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from moe_cases import (
    EXPERTS,
    MAX_NORM,
    NAMES,
    OPTIONS,
    VOCABULARY,
    WIDTH,
    Net,
    adam,
    adamw,
    alone,
    home,
    loss_of,
    mesh_of,
)
from process_groups import with_long
from processes import Case
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import deepspeed_ext
from deepspeed_ext import io, ops, zero
from deepspeed_ext.dtensors import local
from deepspeed_ext.engine.leaf_modules import set_z3_leaf_modules
from deepspeed_ext.moe import Experts, MoE
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim import FusedLamb
from deepspeed_ext.torch_internals.fully_shard import written
from deepspeed_ext.zero.torch_steps import clip_and_step
from deepspeed_ext.zero.whole_weights import in_first_process

STEPS, TIMES = 2, 2
# Stage and ep_size of who saves after the first step, and of who goes on.
CHECKPOINTS = {
    "2 over 2, 3 over 4": ((2, 2), (3, 4)),
    "0 over 2, 1 over 1": ((0, 2), (1, 1)),
}
WAYS = [f"{stage} over {ep_size}" for stage in range(4) for ep_size in (1, 2, 4)]


def trained(model, optimizer, begin, end):
    for i in range(begin, end):
        for j in zero.accumulate(model, TIMES):
            (loss_of(model, i * TIMES + j) / TIMES).backward()
        clip_and_step(optimizer, MAX_NORM)
        optimizer.zero_grad()


@cache
def of_one(steps, times):
    return alone(adamw, steps, times, torch.float64, clip_and_step)[0]


def assert_like(model, expected, what, atol=1e-14):
    atol = max(atol, 1e-12) if home() == "cuda" else atol
    named = dict(expected.named_parameters())
    with zero.GatheredParameters(model):
        for name, param in model.named_parameters():
            torch.testing.assert_close(
                param, named[name], rtol=0, atol=atol, msg=lambda t, n=name: f"{what}, {n}: {t}"
            )


def assert_whole_like(whole, expected):
    """Compare values that are in host memory, or where the processes compute, with a model's."""
    atol = 1e-12 if home() == "cuda" else 1e-14
    for name, param in expected.named_parameters():
        torch.testing.assert_close(whole[name].cpu(), param.detach().cpu(), rtol=0, atol=atol)


def sharded(stage, ep_size, dtype=torch.float64, **options):
    model = Net(ep_size, **options).to(dtype)
    return zero.shard(model, stage)


def checkpoint(row, folder):
    for (stage, ep_size), seed in zip(CHECKPOINTS[row], (0, 5), strict=True):
        model = sharded(stage, ep_size, seed=seed)
        optimizer = adamw(model)
        if seed == 0:
            trained(model, optimizer, 0, STEPS - 1)
            zero.save(folder, row, model, optimizer)
            if dist.get_rank() == 0:
                [file] = zero.consolidate(folder, folder / "whole", tag=row)
                assert_whole_like(io.load(file), of_one(STEPS - 1, TIMES))
        else:
            zero.load(folder, row, model, optimizer)
        trained(model, optimizer, STEPS - 1, STEPS)
        assert_like(model, of_one(STEPS, TIMES), f"stage {stage} over {ep_size}")


def twenty_steps(row, folder):
    """Each way of training, and a checkpoint of it that goes on in two others."""

    def trained(model, optimizer, begin, end):
        for number in range(begin, end):
            loss_of(model, number).backward()
            clip_and_step(optimizer, MAX_NORM)
            optimizer.zero_grad()

    half, expected = of_one(10, 1), of_one(20, 1)
    i = WAYS.index(row)
    for j in (i, (i + 1) % 12, (i + 5) % 12):
        stage, ep_size = map(int, WAYS[j].split(" over "))
        model = sharded(stage, ep_size, seed=j - i)
        optimizer = adamw(model)
        if j == i:
            trained(model, optimizer, 0, 10)
            assert_like(model, half, f"half of {row}")
            zero.save(folder, row, model, optimizer)
        else:
            zero.load(folder, row, model, optimizer)
        trained(model, optimizer, 10, 20)
        assert_like(model, expected, f"{row} and then {WAYS[j]}")


def replicas(row, folder):
    """All else on a mesh with replicas, and whole weights for the first process."""
    mesh = init_device_mesh(home(), (2, 2), mesh_dim_names=("replicate", "shard"))
    for stage, ep_size in ((1, 2), (3, 2), (2, 4)):
        model = zero.shard(Net(ep_size).double(), stage, mesh=mesh)
        trained(model, adamw(model), 0, STEPS)
        expected = of_one(STEPS, TIMES)
        assert_like(model, expected, f"replicas, stage {stage} over {ep_size}")
        whole = in_first_process(
            "test", model, lambda weights: {name: weights.read(name) for name in weights.described}
        )
        if whole:
            assert_whole_like(whole, expected)


def optimizers(row, folder):
    makes = {
        "cpu": lambda model: adam()(model.parameters(), **OPTIONS),
        "host": lambda model: OffloadOptimizer(model.parameters(), model=model, **OPTIONS),
        "nvme": lambda model: OffloadOptimizer(
            model.parameters(), nvme_path=folder, device="nvme", **OPTIONS
        ),
        "lamb": lambda model: FusedLamb(model.parameters(), lr=0.02),
    }
    for name, make in makes.items():
        first = makes["cpu"] if name in ("host", "nvme") else make
        expected, norm = alone(
            first, 2, 1, torch.float32, lambda optimizer, most: optimizer.clip_and_step(most)
        )
        model = sharded(2, 2, torch.float32)
        optimizer = make(model)
        for number in range(2):
            loss_of(model, number).backward()
            got = optimizer.clip_and_step(MAX_NORM)
            optimizer.zero_grad()
        assert norm > MAX_NORM
        torch.testing.assert_close(got, norm, rtol=1e-6, atol=0)
        assert_like(model, expected, name, 2e-6)


def clipping(row, folder):
    plain, model = Net().to(home()), sharded(2, 2, torch.float32)
    for rank in range(dist.get_world_size()):
        (loss_of(plain, 0, rank) / dist.get_world_size()).backward()
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="must have the same mesh"):
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    norms = [ops.clip_grad_norm_(each.parameters(), MAX_NORM) for each in (plain, model)]
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
    for param, alike in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), alike.grad, rtol=1e-5, atol=1e-8)


def few_bits(row, folder):
    for ep_size, stage in ((2, 2), (2, 0), (4, 3)):
        model = sharded(stage, ep_size, torch.float32)
        make = {"state_dtype": torch.uint8, **OPTIONS}
        if stage == 2:
            with pytest.raises(ValueError, match=r"placements \(Shard\(dim=1\), Shard\(dim=0\)\)"):
                adam()(model.parameters(), **make)
            continue
        optimizer = adam()(model.parameters(), **make)
        loss_of(model, 0).backward()
        optimizer.step()
        expected, _ = alone(
            lambda model, make=make: adam()(model.parameters(), **make),
            1,
            1,
            torch.float32,
            lambda optimizer, most: optimizer.step(),
        )
        assert_like(model, expected, f"8 bits over {ep_size}", 1e-5)


def kept_for_micro_steps(row, folder):
    """What was gathered of experts is known to be what there is, and not to be."""
    model = sharded(2, 2)
    for i in zero.accumulate(model, 2):
        if i == 1:
            assert not written(model)
            if dist.get_rank() == 3:
                with torch.no_grad():
                    next(model.blocks[0].moe.experts.parameters()).to_local().mul_(2)
            assert bool(written(model)) is (dist.get_rank() == 3)
        loss_of(model, i).backward()
    with zero.GatheredParameters(model):
        whole = [param.detach().clone() for param in model.parameters()]
    other = sharded(3, 4)
    with zero.GatheredParameters(other, modifier_rank=1):
        if dist.get_rank() == 1:
            for param, value in zip(other.parameters(), whole, strict=True):
                param.data.copy_(value)
    torch.testing.assert_close(loss_of(other, 1), loss_of(model, 1), rtol=0, atol=1e-14)


def frozen(row, folder):
    """Experts that are not trained, or in part, let gradients through to what is before them."""
    grads = []
    for ep_size in (1, 4):
        model = Net(ep_size)
        for name, param in model.blocks[0].moe.experts.named_parameters():
            param.requires_grad_(name.endswith("bias"))
        zero.shard(model, 2)
        loss_of(model, 0).backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert not any("experts" in name and "weight" in name for name in found)
        grads.append({name: grad.full_tensor() for name, grad in found.items()})
        model.zero_grad()
        model.blocks[0].moe.experts.requires_grad_(False)
        loss_of(model, 1).backward()
        assert model.embedding.weight.grad.full_tensor().count_nonzero() > 0
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-4, atol=1e-7, msg=name)


def filled(row, folder):
    """A model without memory is filled as one that nobody has sharded out."""
    made = []
    for ep_size in (1, 2):
        torch.manual_seed(0)
        with torch.device("meta"):
            model = Net(ep_size).double()
        zero.shard(model, 3)
        zero.Init(seed=1).fill(model)
        made.append(model)
    with zero.GatheredParameters(made[0]):
        assert_like(made[1], made[0], "filled", 0)


def rests(row, folder):
    """Experts in host memory are stepped as those on the device, clipped over both meshes."""
    for ep_size in (1, 2, 4):
        made = []
        for offload in ("cpu", None):
            model = zero.shard(Net(ep_size).float(), 3, offload=offload)
            with zero.GatheredParameters(model):
                assert all(p.device.type == home() for p in model.parameters())
            optimizer = OffloadOptimizer(model.parameters(), model=model, lr=0.1)
            trained_by(optimizer, model)
            made.append(model)
        for (name, ours), theirs in zip(
            made[0].named_parameters(), made[1].parameters(), strict=True
        ):
            part, kept = local(ours).detach(), local(theirs).detach().cpu()
            assert part.device.type == "cpu", name
            atol = 1e-6 if home() == "cuda" else 0  # norms are added up otherwise there
            torch.testing.assert_close(part, kept, rtol=0, atol=atol, msg=f"{name}, {ep_size}")


def trained_by(optimizer, model):
    for i in range(STEPS):
        for j in zero.accumulate(model, TIMES):
            (loss_of(model, i * TIMES + j) / TIMES).backward()
        assert optimizer.clip_and_step(MAX_NORM) > MAX_NORM
        optimizer.zero_grad()


def engine(row, folder):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": MAX_NORM,
        "optimizer": {"type": "AdamW", "params": OPTIONS},
        "zero_optimization": {
            "stage": 3,
            "stage3_gather_16bit_weights_on_model_save": True,
            "leaf_module": {"classes": ["Layer"]},
        },
    }
    models = []
    for ep_size in (1, 2):
        model = Net(ep_size)
        set_z3_leaf_modules(model, ["Layer"])
        trained, *_ = deepspeed_ext.initialize(model=model, config=config)
        for number in range(4):
            trained.backward(loss_of(trained, number))
            trained.step()
        models.append(trained)
    with zero.GatheredParameters(models[0].module):
        expected = {n: p.detach().clone() for n, p in models[0].module.named_parameters()}
        assert_like(models[1].module, models[0].module, "engine", 1e-6)
    torch.testing.assert_close(*(each.get_global_grad_norm() for each in models), rtol=1e-5, atol=0)
    models[1].save_16bit_model(folder, "weights.pt")
    dist.barrier()
    loaded = torch.load(folder / "weights.pt")
    for name, value in expected.items():
        torch.testing.assert_close(loaded[name].cpu(), value.cpu(), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r'"sum" and .blocks.0.moe.experts. has experts'):
        deepspeed_ext.initialize(model=Net(2), config={**config, "gradient_allreduce_op": "sum"})


class Tangled(nn.Module):
    """An expert that is run by its own forward, and returns more than is used."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))), None


class LayerNet(nn.Module):
    """Layers as users have them, in blocks that are run again in backward."""

    def __init__(self, ep_size):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        plain = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        mesh = mesh_of(ep_size) if ep_size > 1 else None
        options = {"ep_size": ep_size, "drop_tokens": False, "mesh": mesh}
        self.blocks = nn.ModuleList(
            [
                MoE(WIDTH, plain, EXPERTS, k=2, **options),
                MoE(WIDTH, Tangled(), EXPERTS, k=1, use_residual=True, **options),
            ]
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            found, aux, _ = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            x = x + found + 0.01 * aux
        return self.head(x)


def layers(row, folder):
    def step(optimizer, most):
        return optimizer.clip_and_step(most)

    def make(model):
        return adam()(model.parameters(), **OPTIONS)

    expected, _ = alone(make, 2, 1, torch.float32, step, LayerNet)
    stage, ep_size = (3, 2) if row == "two" else (1, dist.get_world_size())
    model = zero.shard(LayerNet(ep_size), stage)
    optimizer = make(model)
    for number in range(2):
        loss_of(model, number).backward()
        step(optimizer, MAX_NORM)
        optimizer.zero_grad()
    assert_like(model, expected, f"layers over {ep_size}", 1e-6)
    with zero.GatheredParameters(model), torch.no_grad():
        for number in range(dist.get_rank()):  # which each process does as often as it likes
            torch.testing.assert_close(loss_of(model, number), loss_of(expected, number))


class Wrapped(nn.Module):
    def __init__(self, experts, also=None):
        super().__init__()
        self.experts, self.also = experts, also


def refusals(row, folder):
    def experts(mesh, width=8):
        return Experts(nn.Linear(width, width), EXPERTS, mesh)

    tied = experts(mesh_of(2))
    also = nn.Linear(8, 8)
    also.weight = tied.weight
    mixed = experts(mesh_of(2))
    mixed.bias = nn.Parameter(torch.zeros(2, 8))
    cube = init_device_mesh(home(), (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    half = init_device_mesh(home(), (2, 2), mesh_dim_names=NAMES)["expert"]
    cases = {
        r"model is Experts, expected": experts(mesh_of(2)),
        r"'also.weight' is also a parameter of the experts 'experts'": Wrapped(tied, also),
        r"'experts.bias' is a plain tensor among experts": Wrapped(mixed),
        r"'experts.weight' is shared out over .*expected a dimension, by": Wrapped(
            experts(cube["c"])
        ),
        r"'experts.weight' has shape \[4, 9, 9\], .*multiple of 2": Wrapped(experts(mesh_of(2), 9)),
    }
    for text, model in cases.items():
        with pytest.raises(ValueError, match=text):
            zero.shard(model, 2)
    with pytest.raises(ValueError, match=rf"of a mesh of the processes \[0, 1, 2, 3\] on {home()}"):
        zero.shard(Wrapped(experts(mesh_of(2))), 2, mesh=half)
    names = NAMES if dist.get_rank() else ("data", "other")
    differ = init_device_mesh(home(), (2, 2), mesh_dim_names=names)[names[1]]
    with pytest.raises(ValueError, match=r"process . has experts 'experts' over .* has experts"):
        zero.shard(Wrapped(experts(differ)), 2)
    plain = nn.Module()
    plain.gain = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match=r"'experts.gain' has no dimensions in an expert"):
        zero.shard(Wrapped(Experts(plain, EXPERTS, mesh_of(4))), 2)
    model = zero.shard(Wrapped(experts(mesh_of(2), 9)), 0)  # which shares nothing out
    assert model.experts.bias.to_local().shape == (2, 9)
    model = zero.shard(Wrapped(Experts(nn.Linear(8, 5, bias=False), EXPERTS, mesh_of(2))), 2)
    weight = model.experts.weight
    assert isinstance(weight, DTensor)
    assert weight.placements == (Shard(2), Shard(0)) and weight.to_local().shape == (2, 5, 4)


FUNCTIONS = [
    optimizers,
    clipping,
    few_bits,
    kept_for_micro_steps,
    frozen,
    filled,
    rests,
    engine,
    refusals,
]
CASES = [
    Case(4, "checkpoint", "2 over 2, 3 over 4"),
    *(Case(4, function.__name__, "all") for function in FUNCTIONS),
    Case(4, "layers", "two"),
]
LONG = [
    Case(4, "checkpoint", "0 over 2, 1 over 1"),
    Case(4, "layers", "all"),
    Case(4, "replicas", "all"),
    *(Case(4, "twenty_steps", row) for row in WAYS),
]
ON_TWO = [*CASES[1:3], *LONG[:2]]
NAMES_OF_LONG = [f"{case.function}-{case.row}-4" for case in LONG]


@pytest.mark.parametrize("case", with_long([*CASES, *LONG], *NAMES_OF_LONG))
def test_processes(groups, case):
    groups.run(case, least=2 if case in ON_TWO else 4)
