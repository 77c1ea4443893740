"""Checkpoints of state on disk: other numbers of processes, tiers and formats; little memory."""

import ctypes
import threading
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from offload_cases import FORMATS, KINDS, Pair
from process_groups import with_long
from processes import Case
from test_offload_distributed import same_local
from test_offload_nvme_processes import BUDGET, FLOAT32, HALF, LOW, Net, loss_of
from torch import nn
from torch.nn import Parameter

from deepspeed_ext import zero
from deepspeed_ext.io import AsyncIO
from deepspeed_ext.io.checkpoint import packed_writer
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim import formats
from deepspeed_ext.zero.checkpoint import data_file, reading, storage

OPTIONS = KINDS["adam"].options
DTYPES = {name: LOW for name in FORMATS} | {"float32": FLOAT32, "codes": FLOAT32}
ALL = {"nvme_fraction": 1.0, "memory_budget": "16MiB"}
TIERS = {"all": ALL, "half": HALF, "budget": BUDGET}
SOURCE = {1: 2, 2: 1, 4: 2}  # how many processes have saved what is loaded by so many
PAIRS = [  # format and tier of who saves and of who loads, and the stages of both
    ("float32", "all", "float32", "half", 3, 1),
    ("compact", "all", "compact", "all", 1, 2),
    ("master", "half", "compact", "all", 2, 3),
    ("compact", "budget", "master", "all", 0, 3),
    ("float32", "all", "remainder", "all", 3, 0),
    ("codes", "all", "bfloat16", "half", 2, 1),
    ("bfloat16", "cpu", "codes", "all", 1, 3),
    ("compact", "all", "float32", "cpu", 1, 0),
]


def training(name, tier, stage, folder, seed=3):
    net = Net()
    if seed != 3:
        with torch.no_grad():
            for param in net.parameters():
                param.add_(0.01)
    model = zero.shard(net.to(DTYPES[name]), stage)
    options = OPTIONS | FORMATS[name]
    if tier == "plain":
        return model, KINDS["adam"].offloaded(model.parameters(), **options)
    where = {"device": "nvme", "nvme_path": folder, **TIERS[tier]} if tier != "cpu" else {}
    return model, OffloadOptimizer(model.parameters(), **where, **options)


def train(model, optimizer, steps, first=0):
    for number in range(first, first + steps):
        loss_of(model, number).backward()
        optimizer.step()
        model.zero_grad()


def assert_alike(mine, theirs):
    """Weights and all state of two trainings, in this process."""
    both = [
        (dict(model.named_parameters()), o.state_dict()["state"]) for model, o in (mine, theirs)
    ]
    for name, param in both[0][0].items():
        assert same_local(param, both[1][0][name]), name
    assert both[0][1].keys() == both[1][1].keys()
    for number, entry in both[0][1].items():
        others = both[1][1][number]
        assert entry.keys() == others.keys()
        for key, value in entry.items():
            assert value.dtype == others[key].dtype
            assert same_local(value, others[key]), f"{key} of parameter {number}"


def pairs(row):
    """All of them, or every second one."""
    return list(enumerate(PAIRS))[int(row[0]) :: int(row[1])]


def saves(row, folder):
    for number, (name, tier, *_, stage, _) in pairs(row):
        made = training(name, tier, stage, folder)
        train(*made, 2)
        zero.save(folder / f"from{dist.get_world_size()}", f"{number}", *made)
        if tier != "cpu":  # it goes on as if nobody had looked
            plain = training(name, "plain", stage, folder)
            train(*plain, 2)
            for each in (made, plain):
                train(*each, 1, 2)
            assert_alike(made, plain)


def loads(row, folder):
    """As the plain class does, into state that is there already and into state that is not."""
    saved = folder / f"from{SOURCE[dist.get_world_size()]}"
    for number, (*_, name, tier, _, stage) in pairs(row):
        both = []
        for kind in (tier, "plain"):
            made = training(name, kind, stage, folder, seed=4)
            train(*made, number % 3)
            zero.load(saved, f"{number}", *made)
            both.append(made)
        if name != "master":  # half way between two weights it loses a bit by now, or in a step
            assert_alike(*both)
        for made in both:
            train(*made, 1, 2)
        assert_alike(*both)
        for made in both:  # again, over what is there
            zero.load(saved, f"{number}", *made)
            train(*made, 1, 2)
        assert_alike(*both)


class Peak:
    """The most memory of its own that this process has meanwhile, more than in the beginning.

    Pages that show files, unchanged, are not counted: the kernel takes them back as it wants.
    """

    def __enter__(self):
        self.begin = self.most = anonymous_bytes()
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.is_over.wait(0.002):
            self.most = max(self.most, anonymous_bytes())

    def __exit__(self, *_):
        self.is_over.set()
        self.thread.join()
        self.bytes = self.most - self.begin


def anonymous_bytes():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10


def memory(row, folder):
    """State is many times the budget; none is in memory for longer than it takes to move it."""
    ctypes.CDLL(None).mallopt(-3, 1 << 17)  # M_MMAP_THRESHOLD: what is freed is gone
    budget, most = 4 << 20, 24 << 20
    small = partial(AsyncIO, block_size=1 << 18, queue_depth=4)  # else it has 64 MiB for itself
    with (
        mock.patch.object(storage, "AsyncIO", lambda **_: small()),
        mock.patch.object(packed_writer, "HELD_BYTES", budget),
        mock.patch.object(data_file, "_HELD_PARTS", budget),
        mock.patch.object(reading, "_HELD", budget),
        mock.patch.object(formats, "_AT_ONCE", 1 << 16),
    ):
        net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(16 * dist.get_world_size())))
        model = zero.shard(net.to(DTYPES[row]), 2, blocks=[])
        where = {"nvme_path": folder, "nvme_fraction": 1.0}
        where["memory_budget"] = 3 * budget if row == "compact" else budget
        options = OPTIONS | FORMATS[row]
        optimizer = OffloadOptimizer(model.parameters(), device="nvme", **where, **options)
        for param in model.parameters():
            param.grad = param.detach().clone()
        optimizer.step()
        optimizer.synchronize()
        for _ in range(1 if row == "compact" else 2):
            with Peak() as save:
                zero.save(folder / "memory", row, model, optimizer)
            with Peak() as load:
                zero.load(folder / "memory", row, model, optimizer)
            with Peak() as step:
                optimizer.step()
            found = save.bytes, load.bytes, step.bytes
            assert max(found) < most, found
    [saved, *_] = (folder / "memory" / row).glob("*.safetensors")
    assert saved.stat().st_size > 1.9 * most


@pytest.mark.parametrize("is_stepped", [False, True])
def test_state_that_is_loaded_and_written(is_stepped, tmp_path):
    """Also where no step has been since the optimizer was made, or since it was loaded."""
    where = {"tier": "nvme", "nvme_path": tmp_path, **ALL}
    first = Pair(params=[Parameter(torch.ones(40_000))], **where)
    first.train(2)
    second = Pair(params=[Parameter(torch.ones(40_000))], **where)
    if is_stepped:
        second.train(1)
    for given, (optimizer, params) in zip((first.ours, first.plain), second.both(), strict=True):
        optimizer.load_state_dict(given.state_dict())
        optimizer.state[params[0]]["exp_avg"][5:9] = 3
    second.train(2)


CASES = [
    *(Case(1, "memory", name) for name in ("float32", "compact")),
    *(Case(world, "memory", name) for name, world in (("master", 2), ("compact", 4))),
    Case(1, "loads", "02"),
    Case(2, "loads", "12"),
    Case(4, "loads", "01"),
]


@pytest.mark.parametrize(
    "case", with_long(CASES, "loads-01-4", "memory-master-2", "memory-compact-4")
)
def test_processes(case, groups):
    if case.function == "loads":
        groups["cpu"].run(Case(SOURCE[case.world], "saves", case.row), "cpu")
    groups["cpu"].run(case, "cpu")
