"""State on disk in several processes with one folder: every bit as the plain class has it there."""

import itertools
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from offload_cases import FORMATS, KINDS, Pair
from process_groups import with_long
from processes import Case
from test_offload_distributed import same_local
from torch import nn
from torch.nn import Parameter
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from deepspeed_ext import zero
from deepspeed_ext.offload import OffloadOptimizer, estimate, memory_budget, memory_estimate
from deepspeed_ext.offload.tiers.ring import Ring

STEPS = 6
THAW, ADD, LOOK = 2, 3, 4  # steps before which this happens
MAX_NORM = 0.02  # which bites in each step
WORDS, WIDTH = 1201, 300
FLOAT32, LOW = torch.float32, torch.bfloat16
OPTIONS = KINDS["adam"].options


class Run(NamedTuple):
    """A training.

    Attributes:
        stage: of zero.shard, or "ddp".
        where: options that say what is on disk.
        dtype: of weights.
        name: of the format of state.
        times: micro-steps in a step.
        clips: whether gradients are clipped.
        frees: whether gradients leave at once.
    """

    stage: int | str
    where: dict
    dtype: torch.dtype
    name: str
    times: int = 1
    clips: bool = False
    frees: bool = False


ALL = {"nvme_fraction": 1.0, "memory_budget": "16MiB"}
HALF = {"nvme_fraction": 0.5, "memory_budget": "64MiB"}
BUDGET = {"memory_budget": "10MiB"}  # which decides by itself
RUNS = {  # pairwise: each two settings of two columns meet in one of the rows
    "0": Run(0, ALL, LOW, "compact", 3, True),
    "1": Run(1, HALF, LOW, "master", 3),
    "2": Run(2, BUDGET, FLOAT32, "float32", 1, True),
    "3": Run(3, ALL, LOW, "remainder", 1),
    "ddp": Run("ddp", HALF, LOW, "compact", 1, True),
    "0-half": Run(0, HALF, FLOAT32, "bfloat16", 1),
    "1-frees": Run(1, ALL, FLOAT32, "float32", 1, True, frees=True),
    "2-codes": Run(2, HALF, FLOAT32, "codes", 3, frees=True),
    "3-half": Run(3, HALF, LOW, "master", 3, True),
    "3-budget": Run(3, BUDGET, LOW, "bfloat16", 3, True),
    "ddp-budget": Run("ddp", BUDGET, FLOAT32, "master", 3),
}


class Net(nn.Module):
    """A tied weight of many pieces, frozen and unused ones, few rows, and one that comes late."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.gain = Parameter(torch.ones(1))
        self.unused = nn.Linear(3, 2)
        self.late = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[0].weight.requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in (*self.blocks, self.late):
            x = x + self.gain * torch.tanh(block(x))
        return self.head(x)


def loss_of(model, number):
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    tokens, targets = torch.randint(WORDS, (2, 2, 7), generator=generator)
    return cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


class Training:
    """A model whose optimizer has state on disk, and the plain class on twins of its parameters."""

    def __init__(self, run, folder):
        self.run = run
        self.models = [self.model_of(Net().to(run.dtype))]
        net = self.models[0].module if run.stage == "ddp" else self.models[0]
        late = set(net.late.parameters())
        self.params = [param for param in net.parameters() if param not in late]
        self.late = list(net.late.parameters())
        self.twin = {param: self.twin_of(param) for param in net.parameters()}
        if run.frees:  # nobody sees the gradients of ours: another model makes those of the twins
            self.models.append(self.model_of(Net().to(run.dtype)))
            self.twin = dict(zip(*(model.parameters() for model in self.models), strict=True))
        given = OPTIONS | FORMATS[run.name]
        own = {"device": "nvme", "nvme_path": folder, "free_grads": run.frees, **run.where}
        max_norm = {"max_grad_norm": MAX_NORM} if run.clips else {}
        self.ours = OffloadOptimizer(self.params, **own, **max_norm, **given)
        self.plain = KINDS["adam"].offloaded(self.twins, **given)

    def model_of(self, net):
        if self.run.stage == "ddp":
            return DistributedDataParallel(net, find_unused_parameters=True)
        return zero.shard(net, self.run.stage)

    def twin_of(self, param):
        return Parameter(param.detach().clone(), requires_grad=param.requires_grad)

    @property
    def twins(self):
        return [self.twin[param] for param in self.params]

    def add_late_ones(self):
        self.params = self.params + self.late
        twins = [self.twin[param] for param in self.late]
        for optimizer, params in ((self.ours, self.late), (self.plain, twins)):
            optimizer.add_param_group({"params": params, "lr": 0.03})

    def thaw(self):
        for params in (self.params, self.twins):
            for param in params:
                param.requires_grad_(True)

    def backward(self, number):
        for model in self.models:
            for i in self.micro_steps(model):
                (loss_of(model, number * self.run.times + i) / self.run.times).backward()

    def micro_steps(self, model):
        times = self.run.times
        if self.run.stage != "ddp":
            yield from zero.accumulate(model, times)
            return
        for i in range(times):
            model.require_backward_grad_sync = i == times - 1
            yield i

    def step(self):
        for param in () if self.run.frees else self.params:
            self.twin[param].grad = None if param.grad is None else param.grad.detach().clone()
        self.ours.step()
        if self.run.clips:
            norm = self.plain.clip_and_step(MAX_NORM)
            assert norm > MAX_NORM and torch.equal(norm, self.ours.grad_norm)
        else:
            self.plain.step()
        for given in (*self.models, self.plain):
            given.zero_grad()
        for i, (param, twin) in enumerate(zip(self.params, self.twins, strict=True)):
            assert same_local(param, twin), f"parameter {i}"

    def check_state(self):
        pairs = list(zip(self.params, self.twins, strict=True))
        assert [p in self.ours.state for p, _ in pairs] == [q in self.plain.state for _, q in pairs]
        for i, (param, twin) in enumerate(pairs):
            mine, theirs = self.ours.state.get(param, {}), self.plain.state.get(twin, {})
            assert mine.keys() == theirs.keys()
            for key, value in mine.items():
                assert value.dtype == theirs[key].dtype, (i, key)
                assert same_local(value, theirs[key]), f"{key} of parameter {i}"


def parity(row, folder):
    """All of the difficult parameters, in each step."""
    training = Training(RUNS[row], folder)
    for number in range(STEPS):
        if number == THAW:
            training.thaw()
        if number == ADD:
            training.add_late_ones()
        training.backward(number)
        training.step()
        if number == LOOK:
            training.check_state()
    training.check_state()
    stats = training.ours.stats()
    assert stats["bytes_written"] > 0, stats
    training.ours.close()


def choices(row, folder):
    """All processes choose the same parameters, with shards and budgets that differ a little."""
    net = nn.Sequential(*(nn.Linear(301, 211) for _ in range(12)))
    zero.shard(net, 3, blocks=[])
    budget = (4 << 20) - 200_000 * dist.get_rank()
    where = {"device": "nvme", "nvme_path": folder, "memory_budget": budget}
    chosen = []
    for given in (where, where | {"memory_budget": None}):
        with mock.patch.object(memory_budget, "free_memory", lambda: budget * 4 // 3):
            ours = OffloadOptimizer(net.parameters(), **given, **OPTIONS)
        rows = map(ours._pipeline.table.get, net.parameters())
        chosen.append([row.is_on_disk for row in rows])
        ours.close()
    assert chosen[0] == chosen[1]
    of_all = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, chosen)
    assert all(each == chosen for each in of_all), of_all
    assert any(chosen[0]) and not all(chosen[0])


def test_processes_of_one_host_share_its_memory(monkeypatch):
    params = [(100_000,)] * 20
    for module in (memory_budget, memory_estimate):
        monkeypatch.setattr(module, "free_memory", lambda: 16 << 20)
    alone = estimate(params, device="nvme")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    among = estimate(params, device="nvme")
    assert alone.memory_budget == 2 * among.memory_budget == 12 << 20
    assert len(alone.on_disk) < len(among.on_disk)
    assert among.host_bytes <= among.memory_budget
    assert among == estimate(params, device="nvme", memory_budget="6MiB")


def test_a_disk_that_is_slow(tmp_path, monkeypatch):
    """Pieces that are shown are stepped while the writes of the step before are under way."""
    monkeypatch.setattr(Ring, "_collect", lambda ring: None)  # none seems to be over, by itself
    where = {"tier": "nvme", "nvme_path": tmp_path, **ALL}
    pair = Pair(params=[Parameter(torch.ones(40_000))], **where)
    for shows in (False, True, False, True, True):
        pair.backward()
        pair.step()
        if shows:
            pair.check()
            for optimizer, params in pair.both():
                optimizer.state[params[0]]["exp_avg"][5:9] = 3
    pair.check()


SHORT = ("0", "1-frees", "3-half", "ddp-budget")  # of four processes, which take long
CASES = [
    Case(4, "choices", ""),
    *(Case(world, "parity", row) for world, row in itertools.product((1, 2, 4), RUNS)),
]


LONG = [f"parity-{row}-{world}" for row in RUNS if row not in SHORT for world in (2, 4)]


@pytest.mark.parametrize("case", with_long(CASES, *LONG))
def test_processes(case, groups):
    groups["cpu"].run(case, "cpu")
