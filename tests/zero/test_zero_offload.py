"""zero.shard with offload="cpu": as the same shards on the device, bit for bit, without a copy."""

import copy
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from process_groups import with_long
from processes import Case
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from zero_cases import FORMATS, Block, Net, assert_close, home, loss_of

from deepspeed_ext import zero
from deepspeed_ext.dtensors import full, local, rests_on_host
from deepspeed_ext.offload import OffloadOptimizer, estimate
from deepspeed_ext.optim import DeepSpeedCPUAdam, FusedAdam, FusedLamb, FusedSGD

OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3}
MAX_NORM = 0.05  # which bites in each step
STEPS = 4


def sharded(offload, dtype=torch.float32, model=None, **options):
    model = Net() if model is None else model
    return zero.shard(model.to(home(), dtype), 3, offload=offload, **options)


def in_host_memory(model, folder=None, **options):
    """The same class on shards wherever they are: those on a GPU get copies in host memory."""
    place = {"device": "nvme", "nvme_path": folder, "nvme_fraction": 0.5} if folder else {}
    return OffloadOptimizer(model.parameters(), model=model, **OPTIONS | place | options)


def both(make, **options):
    """A model whose shards rest in host memory, and one whose shards are on the device."""
    models = [sharded(offload, **options) for offload in ("cpu", None)]
    return [(model, make(model)) for model in models]


def step(model, optimizer, number, times=1, max_norm=None):
    for i in zero.accumulate(model, times):
        (loss_of(model, number * times + i) / times).backward()
    if max_norm is None:
        optimizer.step()
    else:  # it bites, but in steps of 20 some
        assert optimizer.clip_and_step(max_norm) > max_norm or number > STEPS
    optimizer.zero_grad()


def assert_rests(model):
    for name, param in model.named_parameters():
        part = local(param)
        assert part.device.type == "cpu" and rests_on_host(param), name
        assert part.numel() == 0 or part.is_pinned() == (home() == "cuda"), name
        assert param.grad is None or local(param.grad).device.type == "cpu", name


def assert_alike(pair, what, exact=True):
    (ours, mine), (theirs, other) = pair
    named = zip(ours.named_parameters(), theirs.parameters(), strict=True)
    for (name, param), twin in named:
        assert_close(full(param.detach()), full(twin.detach()), f"{name}, {what}", exact)
        entry, known = mine.state.get(param, {}), other.state.get(twin, {})
        assert entry.keys() == known.keys(), (name, what)
        for key, value in entry.items():
            part, twin_part = local(value).float().cpu(), local(known[key]).float().cpu()
            assert_close(part, twin_part, f"{key} of {name}, {what}", exact)


def parity(row, folder):
    """Some formats of state, accumulation, clipping, in memory and on disk."""
    for name, tier, times, max_norm in (
        ("float32", None, 3, MAX_NORM),
        ("remainder", None, 1, None),
        ("codes", folder, 3, MAX_NORM),
    ):
        trained_alike(name, tier, times, max_norm, STEPS)


def parity_of_all(row, folder):
    """All of them."""
    for name, tier, max_norm in itertools.product(FORMATS, (None, folder), (None, MAX_NORM)):
        for times in (1, 3):
            is_in_memory = tier is None and max_norm is not None
            trained_alike(name, tier, times, max_norm, 20 if is_in_memory else 3)


def trained_alike(name, tier, times, max_norm, steps):
    dtype, options = FORMATS[name]
    pair = both(lambda m: in_host_memory(m, tier, **options), dtype=dtype)
    exact = home() == "cpu" or max_norm is None  # norms are added up otherwise on CUDA
    for number in range(steps):
        for model, optimizer in pair:
            step(model, optimizer, number, times, max_norm)
            if number == 1:  # thaw what is frozen, freeze another one
                model.blocks[1].down.weight.requires_grad_(True)
                model.blocks[0].gain.requires_grad_(False)
    what = f"{name}, {times} micro-steps, {max_norm}, {'nvme' if tier else 'memory'}"
    assert_alike(pair, what, exact)
    assert_rests(pair[0][0])
    for _, optimizer in pair:
        optimizer.close()


def classes(row, folder):
    """Any that steps on the CPU takes the shards as they are; torch's are clipped by our helper."""
    from deepspeed_ext.zero.torch_steps import clip_and_step

    kinds = {
        "DeepSpeedCPUAdam": lambda m: DeepSpeedCPUAdam(m.parameters(), **OPTIONS),
        "FusedLamb": lambda m: FusedLamb(m.parameters(), lr=0.02),
        "FusedSGD": lambda m: FusedSGD(m.parameters(), lr=0.02, momentum=0.9),
        "AdamW": lambda m: torch.optim.AdamW(m.parameters(), **OPTIONS),
    }
    for name, make in kinds.items():
        if home() == "cuda" and name == "DeepSpeedCPUAdam":
            continue  # which steps nothing on CUDA: `parity` has it
        pair = both(make)
        for number in range(STEPS):
            for model, optimizer in pair:
                loss_of(model, number).backward()
                if name == "AdamW" and number == 0:  # by torch, as there is gloo too
                    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                    assert norm.full_tensor() > MAX_NORM
                    optimizer.step()
                elif name == "AdamW":
                    assert clip_and_step(optimizer, MAX_NORM) > MAX_NORM
                else:
                    optimizer.clip_and_step(MAX_NORM)
                optimizer.zero_grad()
        assert_alike(pair, name, exact=home() == "cpu")
        assert_rests(pair[0][0])


def scaled(row, folder):
    """float16 under a LossScaler, with an overflow in one process that all skip."""
    halves = {"param_dtype": torch.float16, "reduce_dtype": torch.float32}
    for make in (in_host_memory, lambda m: FusedSGD(m.parameters(), lr=0.02)):
        pair = both(make, **halves)
        scalers = [zero.LossScaler(2.0**10, hysteresis=1) for _ in pair]
        for number in range(STEPS):
            for (model, optimizer), scaler in zip(pair, scalers, strict=True):
                for i in zero.accumulate(model, 2):
                    scaler.scale(loss_of(model, 2 * number + i) / 2).backward()
                if number == 1 and dist.get_rank() == 0:
                    local(model.head.weight.grad)[0] = math.inf
                assert scaler.step(optimizer, MAX_NORM) is (number != 1)
                optimizer.zero_grad()
            assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_alike(pair, "scaled", exact=home() == "cpu")


def no_copy(row, folder):
    """Weights stay where they are, and the estimate counts them there, once."""
    model = sharded("cpu")
    assert_rests(model)
    nbytes = sum(local(p).nbytes for p in model.parameters())
    trained = sum(local(p).nbytes for p in model.parameters() if p.requires_grad)
    for tier in (None, folder):
        kinds = {"device": "nvme", "nvme_fraction": 1.0} if tier else {}
        found = estimate(model, **kinds)
        assert found.gpu_bytes == 0 and found.host["weights at rest"] == nbytes == found.there
        assert found.host["gradients"] == trained and found.host["weights"] == 0
        assert found.needed_bytes == found.host_bytes - nbytes - found.host["steps ahead"]
        optimizer = in_host_memory(model, tier, memory_budget="1GiB")
        step(model, optimizer, 0)  # the first one may pin what it finds
        places = [local(p).data_ptr() for p in model.parameters()]
        versions = [p._version for p in model.parameters()]
        step(model, optimizer, 1, 3, MAX_NORM)
        assert places == [local(p).data_ptr() for p in model.parameters()]
        assert model.head.weight._version > versions[0]  # or a stale backward went unnoticed
        stats = optimizer.stats()
        assert (stats["step_seconds"] > 0 and stats["bytes_out"] == 0) or tier
        assert stats["bytes_back"] == 0 and stats["ahead"] == 0
        optimizer.close()
    with pytest.raises(ValueError, match=r"memory_budget is 64, expected at least \d+ for weights"):
        in_host_memory(model, memory_budget=64)


def commits(row, folder):
    """What rests in memory is committed with its state, and the next run goes on from there."""
    made = []
    for is_broken in (False, True):
        path = folder / f"commits-{home()}-{dist.get_world_size()}-{is_broken}"
        options = {"nvme_fraction": 0.5, "durable": True, "memory_budget": "1GiB"}
        model = sharded("cpu")
        optimizer = in_host_memory(model, path, **options)
        step(model, optimizer, 0)
        optimizer.commit(step=0)
        if is_broken:
            step(model, optimizer, 7)
            optimizer.close()
            model = sharded("cpu", model=Net(seed=5))
            optimizer = in_host_memory(model, path, resume=True, **options)
            assert optimizer.committed == {"step": 0}
        step(model, optimizer, 1, 2)
        made.append((model, optimizer))
    assert_alike(made, "committed")
    for _, optimizer in made:
        optimizer.close()


def grows(row, folder):
    """Groups that come later, state dicts, and copies of the optimizer."""
    pair = [(sharded(offload), None) for offload in ("cpu", None)]
    made = []
    for model, _ in pair:
        optimizer = OffloadOptimizer(model.blocks.parameters(), model=model, **OPTIONS)
        step(model, optimizer, 0)
        optimizer.add_param_group({"params": [model.head.weight], "lr": 0.1})
        step(model, optimizer, 1)
        kept = copy.deepcopy(optimizer.state_dict())
        step(model, optimizer, 2)
        optimizer.load_state_dict(kept)
        model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()})
        step(model, optimizer, 3)
        made.append((model, optimizer))
    assert_alike(made, "grown")
    assert_rests(made[0][0])


def filled(row, folder):
    """zero.Init: drawn on the device, or read from files, and kept in host memory."""
    pair = []
    for offload in ("cpu", None):
        with zero.Init(seed=3, init=_scale) as init:
            model = Net()
        zero.shard(model, 3, offload=offload)
        optimizer = in_host_memory(model)  # before there is any memory
        init.fill(model)
        pair.append((model, optimizer))
    for number in range(2):
        for model, optimizer in pair:
            step(model, optimizer, number)
    assert_alike(pair, "filled")
    assert_rests(pair[0][0])


def _scale(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.3)
    elif isinstance(module, Block):
        nn.init.ones_(module.gain)


def whole_for_a_while(row, folder):
    """GatheredParameters: read, called, written by one process; trained on."""
    pair = both(in_host_memory)
    for model, optimizer in pair:
        step(model, optimizer, 0)
        with zero.GatheredParameters(model), torch.no_grad():
            assert all(p.device.type == home() for p in model.parameters())
            inside = loss_of(model, 9, 0)
        torch.testing.assert_close(loss_of(model, 9, 0).detach(), inside)
        with zero.GatheredParameters(model.head.weight, modifier_rank=0) as weight:
            weight.data.add_(dist.get_rank() + 0.5)
        step(model, optimizer, 1)
    assert_alike(pair, "gathered")
    assert_rests(pair[0][0])


def checkpoints(row, folder):
    """What either has saved the other loads; whole weights come out as they are."""
    pair = both(in_host_memory)
    names = ("rests", "is there")
    path = folder / f"checkpoints-{home()}-{dist.get_world_size()}"
    for (model, optimizer), name in zip(pair, names, strict=True):
        step(model, optimizer, 0)
        zero.save(path, name, model, optimizer)
    for (model, optimizer), name in zip(pair, reversed(names), strict=True):
        step(model, optimizer, 1)
        zero.load(path, name, model, optimizer)
        step(model, optimizer, 2, 1, MAX_NORM)
    assert_alike(pair, "loaded", exact=home() == "cpu")
    assert_rests(pair[0][0])
    model = pair[0][0]
    zero.save(path, "last", model, pair[0][1])
    if dist.get_rank() == 0:
        zero.consolidate(path, path / "consolidated", tag="last")
    dist.barrier()
    with zero.Init(files=path / "consolidated") as init:
        other = Net()
    init.fill(zero.shard(other, 3, offload="cpu"))
    for (name, param), twin in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(local(param), local(twin)), name


def ends_in_errors(row, folder):
    """In forward and backward, also between micro-steps; what comes after is as ever."""

    def fail(*_):
        raise MemoryError

    pair = both(in_host_memory)
    for model, optimizer in pair:
        step(model, optimizer, 0)
        for register in ("register_forward_hook", "register_full_backward_hook"):
            with pytest.raises(MemoryError):
                for i in zero.accumulate(model, 2):
                    handle = None
                    if i:
                        handle = getattr(model.blocks[1].up, register)(fail)
                    try:
                        loss_of(model, i).backward()
                    finally:
                        if handle is not None:
                            handle.remove()
            optimizer.zero_grad()
            step(model, optimizer, 1, 2, MAX_NORM)
    assert_alike(pair, "after errors", exact=home() == "cpu")
    assert_rests(pair[0][0])


class Adapted(nn.Module):
    """A frozen base with a low-rank update, as peft makes it; blocks recompute in backward."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.net.requires_grad_(False)
        self.net.to(torch.bfloat16)
        for block in self.net.blocks:
            block.low = nn.Linear(6, 2, bias=False)
            block.high = nn.Linear(2, 6, bias=False)
            block.forward = _Adapted(block)

    def forward(self, tokens):
        return self.net(tokens)


class _Adapted:
    def __init__(self, block):
        self.block, self.inner = block, type(block).forward

    def __call__(self, x):
        return checkpoint(self.inside, x, use_reentrant=False)

    def inside(self, x):
        low = self.block.high(self.block.low(x.float()))
        return self.inner(self.block, x) + low.to(x.dtype)


def adapted(row, folder):
    """Mixed dtypes: a base in bfloat16 that is frozen, adapters in float32 alone have gradients."""
    pair = []
    for offload in ("cpu", None):
        torch.manual_seed(0)
        model = sharded_as_it_is(Adapted(), offload)
        params = [p for p in model.parameters() if p.requires_grad]
        pair.append((model, OffloadOptimizer(params, model=model, **OPTIONS)))
    for number in range(STEPS):
        for model, optimizer in pair:
            step(model, optimizer, number, 2)
    assert_alike(pair, "adapted")
    assert {p.dtype for p in pair[0][0].parameters()} == {torch.bfloat16, torch.float32}
    assert all(p.grad is None for p in pair[0][0].parameters() if not p.requires_grad)


def sharded_as_it_is(model, offload):
    return zero.shard(model.to(home()), 3, offload=offload, blocks=["net.blocks.*"])


def compiled(row, folder):
    """Blocks that torch.compile has made; what is traced does not depend on where weights rest."""
    pair = both(in_host_memory)
    for model, _ in pair:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    for number in range(2):
        for model, optimizer in pair:
            step(model, optimizer, number, 1, MAX_NORM)
    assert_alike(pair, "compiled", exact=home() == "cpu")
    torch.compiler.reset()


def replicas(row, folder):
    """Two by two: sums of replicas come to host memory with the last micro-step."""
    mesh = init_device_mesh(home(), (2, 2), mesh_dim_names=("replica", "shard"))
    pair = both(in_host_memory, mesh=mesh)
    for number in range(2):
        for model, optimizer in pair:
            step(model, optimizer, number, 3, MAX_NORM)
    assert_alike(pair, "replicas", exact=home() == "cpu")


def refusals(row, folder):
    """Before anything is sharded, and in all processes."""
    model = Net()
    with pytest.raises(ValueError, match=r"^zero\.shard: offload is 'nvme', expected \"cpu\" or"):
        zero.shard(model, 3, offload="nvme")
    for stage in (0, 1, 2):
        with pytest.raises(
            ValueError, match=f'offload is "cpu" in stage {stage}, expected stage 3'
        ):
            zero.shard(model, stage, offload="cpu")
    if dist.get_world_size() > 1:
        with pytest.raises(ValueError, match=r"^zero\.shard: .*offload"):
            zero.shard(model, 3, offload="cpu" if dist.get_rank() else None)
    zero.shard(model, 3, offload="cpu")
    with pytest.raises(ValueError, match="is on cpu, expected cuda; use DeepSpeedCPUAdam"):
        FusedAdam(model.parameters())
    optimizer = in_host_memory(model, free_grads=True, gpu_fraction=0.5)  # which change nothing
    loss_of(model, 0).backward()
    model.head.weight.grad_dtype = None
    model.head.weight.grad = model.head.weight.grad.double()
    with pytest.raises(ValueError, match=r"grads\[\d+\] has dtype|float64"):
        optimizer.step()  # what the thread raises
    optimizer.zero_grad()
    step(model, optimizer, 1)


FUNCTIONS = {
    **dict.fromkeys(
        (parity, no_copy, commits, filled, whole_for_a_while, checkpoints, refusals), (1, 2)
    ),
    **dict.fromkeys((classes, scaled, grows, ends_in_errors, adapted, compiled), (2,)),
    parity_of_all: (2,),
    replicas: (4,),
}
CASES = [
    Case(world, function.__name__, device)
    for function, worlds in FUNCTIONS.items()
    for device in ("cpu", "cuda")
    for world in worlds
]


LONG = ("parity_of_all-cpu-2", "parity_of_all-cuda-2", "compiled-cpu-2")


@pytest.mark.parametrize("case", with_long(CASES, *LONG))
def test_processes(case, groups):
    device = case.row
    if device == "cuda" and torch.cuda.device_count() < case.world:
        pytest.skip(f"needs {case.world} CUDA GPUs")
    groups.run(case, device)
