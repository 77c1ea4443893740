"""The memory that state on disk takes: within the budget, as the kernel counts it, and flat."""

import gc
import os
import threading
from pathlib import Path

import pytest
import torch
import warm_python
from disks import BUDGET, PIECES, SLABS, few, on_disk
from optim_cases import BF16
from torch.nn import Parameter

from deepspeed_ext.offload import OffloadOptimizer, estimate

MIB = 1 << 20
HELPERS = [Path(__file__).parent, Path(__file__).parents[1] / "optim"]


def large(count=20, elements=100_000):
    """Return parameters of 8 MB, whose state has 16 MB."""
    return [Parameter(torch.ones(elements)) for _ in range(count)]


# The plan


@pytest.mark.parametrize("free_grads", [False, True])
@pytest.mark.parametrize("budget", [10, 16, 27, 64, 99])
def test_a_plan_is_within_its_budget(budget, free_grads):
    """Where gradients are freed they are in host memory, those of state on disk too."""
    found = estimate(large(), device="nvme", memory_budget=budget * MIB, free_grads=free_grads)
    found.check("plan")
    assert found.host_bytes <= budget * MIB
    sums = found.host.get("sums of gradients", 0)
    assert sums == (4 * 20 * 100_000 if free_grads else 0)


def test_a_budget_that_does_not_hold_gradients_says_what_does(tmp_path):
    needed = 3 * 256 * 1024 + 20 * 400_000 + 400_000 + 20 * 4
    options = {"device": "nvme", "free_grads": True}
    with pytest.raises(ValueError, match=f"expected at least {needed} for three pieces of state: "):
        OffloadOptimizer(large(), nvme_path=tmp_path, memory_budget=needed - 1, **options)
    assert estimate(large(), memory_budget=needed, **options).needed_bytes <= needed


# As the kernel counts it


PROGRAM = """
import ctypes, re, sys, torch

sys.path += sys.argv[3:]
from pathlib import Path
from deepspeed_ext.offload import OffloadOptimizer

torch.set_num_threads(1)
ctypes.CDLL(None).mallopt(-3, 65536)  # what is freed goes back to the kernel at once


def anonymous():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])


def train(elements, steps, **options):
    params = [torch.nn.Parameter(torch.ones(elements)) for _ in range(10)]
    grads = [torch.ones(elements) for _ in params]
    for param, grad in zip(params, grads):
        param.grad = grad
    before = peak = anonymous()
    optimizer = OffloadOptimizer(
        params, device="nvme", nvme_path=sys.argv[1], threads=1, **options
    )
    for _ in range(steps):
        if options.get("free_grads"):
            torch.autograd.backward(params, grads)
        optimizer.step()
        peak = max(peak, anonymous())
    optimizer.synchronize()
    return peak - before


options = eval(sys.argv[2])
train(1000, 2, **options | {"memory_budget": 2 << 20})  # what is loaded, and stays
print(train(1_000_000, 3, **options))
"""

KINDS = {
    "all on disk": ({"memory_budget": 16 * MIB, "nvme_fraction": 1.0}, 16),
    "some of it": ({"memory_budget": 64 * MIB}, 64),
    "master": ({"memory_budget": 32 * MIB, "master": "float32", "nvme_fraction": 1.0}, 32),
    "freed": ({"memory_budget": 80 * MIB, "free_grads": True}, 80),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_kernel_counts_no_more_than_the_budget(name, tmp_path):
    """State has 80 MB, and master weights 40 MB more."""
    options, most = KINDS[name]
    run = warm_python.run("-c", PROGRAM, tmp_path, repr(options), *HELPERS)
    assert run.returncode == 0, run.stderr
    assert most * MIB // 2 < int(run.stdout) <= (most + 4) * MIB


# Many


def taken():
    """Return what this process has, when garbage is collected."""
    gc.collect()
    return taken_without_collecting()


def taken_without_collecting():
    """Return what this process has by now: of memory, descriptors, threads and mappings."""
    status = Path("/proc/self/status").read_text()
    kib = {line.split()[0]: int(line.split()[1]) for line in status.splitlines() if " kB" in line}
    return {
        "anonymous": kib["RssAnon:"] * 1024,
        "locked": kib["VmLck:"] * 1024,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def assert_flat(before, after, anonymous):
    assert after["anonymous"] - before["anonymous"] < anonymous
    for kind in ("files", "threads"):
        assert after[kind] <= before[kind], kind
    # As many gradients are on their way at a time as it happens.
    assert after["locked"] <= before["locked"] + (1 << 18)
    assert after["maps"] <= before["maps"] + 20


def train(optimizer, params, steps):
    grads = [torch.ones_like(param) for param in params]
    for _ in range(steps):
        torch.autograd.backward(params, grads)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()


@pytest.mark.long
@pytest.mark.parametrize("free_grads", [False, True])
def test_2000_steps_take_no_more_than_200(free_grads, tmp_path):
    params = few(dtype=BF16)[1:]
    optimizer = on_disk(
        tmp_path, params=params, free_grads=free_grads, master="float32", max_grad_norm=1.0
    ).ours
    train(optimizer, params, 200)
    before, store = taken(), optimizer._pipeline.ring.records.store
    file = store.stats()["file_bytes"]
    objects = len(gc.get_objects())
    train(optimizer, params, 2000)
    assert_flat(before, taken(), 2000 * 512)  # less than the smallest object of each step
    assert len(gc.get_objects()) - objects < 200
    assert store.stats()["file_bytes"] == file
    assert threading.active_count() < 10


@pytest.mark.parametrize("times", [30, pytest.param(200, marks=pytest.mark.long)])
def test_optimizers_that_are_made_and_dropped_leave_nothing(times, tmp_path):
    """Some with state that the user has looked at, some closed, some in the middle."""
    params = few()

    def make(count):
        for i in range(count):
            settings = {"nvme_path": tmp_path, "memory_budget": BUDGET, "nvme_fraction": 1.0}
            optimizer = OffloadOptimizer(params, device="nvme", **settings)
            train(optimizer, params, 1)
            if i % 3 == 0:
                optimizer.state_dict()
            if i % 5 == 0:
                optimizer.close()
            torch.autograd.backward(params, [torch.ones_like(param) for param in params])
            del optimizer
            for param in params:
                param.grad = None

    make(10)
    before = taken()
    make(times)
    assert_flat(before, taken(), times * BUDGET // 10)


@pytest.mark.usefixtures("garbage_stays")
def test_all_goes_with_the_last_reference(tmp_path):
    """Not at the next garbage collection, which knows nothing about the size of a ring."""
    params = few()
    on_disk(tmp_path, params=params).ours.close()
    before = taken()
    optimizer = on_disk(tmp_path, params=params).ours
    train(optimizer, params, 2)
    if not torch.cuda.is_available():  # which locks memory in a way of its own
        assert taken_without_collecting()["locked"] > before["locked"]
    del optimizer
    after = taken_without_collecting()
    assert (after["locked"], after["threads"]) == (before["locked"], before["threads"])
    assert after["files"] <= before["files"]


# Overlap


def test_reads_are_ahead_and_bytes_are_exact(tmp_path):
    """Each byte on disk is read once and written once in a step, and is there when it is wanted."""
    pair = on_disk(tmp_path)
    state = estimate(pair.params, device="nvme", memory_budget=BUDGET, nvme_fraction=1.0)
    pair.backward()
    pair.step()  # of zeros, which nobody reads
    before = pair.ours.stats()
    for _ in range(10):
        pair.backward()
        pair.step()
        pair.ours.synchronize()
    stats = pair.ours.stats()
    assert stats["bytes_written"] - before["bytes_written"] == 10 * state.disk_bytes
    ring = pair.ours._pipeline.ring
    ahead = sum(place[0].shape.nbytes for place in ring._reads)
    read = stats["bytes_read"] - ahead
    assert read == 10 * state.disk_bytes
    ahead = (stats["read_ahead"] * 11 - before["read_ahead"]) * PIECES
    assert ahead > 10 * SLABS - 1  # a slab is free, or not yet, when the others are wanted
