"""memory_budget of zero.stream: what it holds rests in memory, the rest on a disk."""

import copy
import re
import sys

import pytest
import torch
from stream_cases import Model, assert_equal_models, loss_of, on_disk, some_ids

from deepspeed_ext import offload, zero
from deepspeed_ext.io.extents import whole_pages
from deepspeed_ext.offload import memory_budget
from deepspeed_ext.offload.streamed import home_of

STEPS = 6


def sizes_of(model):
    """Return what each block takes in memory, and what it takes while it is read."""
    like = copy.deepcopy(model)
    handle = zero.stream(like, to="cpu")
    sizes = [handle._piece(block).nbytes for block in like.layers]
    return sizes, whole_pages(max(sizes))


def budget_for(model, blocks, prefetch):
    """Return one that holds so many blocks beside those that are read, and not one byte more."""
    sizes, read = sizes_of(model)
    return sum(sizes) if blocks == len(sizes) else (1 + prefetch) * read + sum(sizes[:blocks])


@pytest.mark.parametrize("blocks", [0, 1, 4])
def test_the_optimizer_counts_what_rests_in_memory(tmp_path, blocks):
    """Once: what is there already is not to be had beside it."""
    model = Model(dtype=torch.bfloat16)
    budget, kept = budget_for(model, blocks, 1), sum(sizes_of(model)[0][:blocks])
    usual = offload.estimate(model.parameters(), free_grads=True)
    handle = zero.stream(model, to="cpu", memory_budget=budget, **on_disk(tmp_path))
    found = offload.estimate(model.parameters(), free_grads=True, memory_budget="1GiB")
    there = sum(p.nbytes for p in model.parameters() if home_of(p) and not handle._scratch.has(p))
    assert found.host.get("weights at rest", 0) == there <= kept
    assert found.there == there and found.needed_bytes < usual.needed_bytes + there
    least = found.needed_bytes + there - found.host["gradients"]
    for more in (0, -1):
        options = dict(model=model, lr=1e-2, free_grads=True, memory_budget=least + more)
        if more == 0:
            offload.OffloadOptimizer(model.parameters(), **options).close()
        else:
            with pytest.raises(ValueError, match=f"memory_budget is {least - 1}, expected at"):
                offload.OffloadOptimizer(model.parameters(), **options)


@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5])
def test_budgets_beside_weights_at_rest(tmp_path, monkeypatch, gpu_fraction):
    """Whatever is named as enough is enough; and without one, these are no part of what is free."""
    model = Model(dtype=torch.bfloat16)
    zero.stream(model, to="cpu")
    options = dict(model=model, lr=1e-2, free_grads=True, gpu_fraction=gpu_fraction)
    options |= dict(device="nvme", nvme_path=tmp_path)
    budget, tries = 1000, 0
    while tries < 4:
        try:
            offload.OffloadOptimizer(model.parameters(), memory_budget=budget, **options).close()
            break
        except ValueError as error:
            budget, tries = int(re.search(r"expected at least (\d+)", str(error))[1]), tries + 1
    assert tries < 4 and budget < 6 << 20
    there = sum(p.nbytes for p in model.parameters() if home_of(p))
    for module in (memory_budget, sys.modules["deepspeed_ext.offload.memory_estimate"]):
        monkeypatch.setattr(module, "free_memory", lambda: 4 * (budget - there))
    offload.OffloadOptimizer(model.parameters(), **options).close()


@pytest.mark.parametrize("device_of_weights", ["cpu", "nvme"])
def test_commits_have_room_for_weights_that_stream(tmp_path, device_of_weights):
    model = Model(dtype=torch.bfloat16)
    all_bytes = sum(p.nbytes for p in model.parameters())
    rest = on_disk(tmp_path) if device_of_weights == "nvme" else {}
    zero.stream(model, to="cpu", **rest)
    found = offload.estimate(model.parameters(), device="nvme", durable=True)
    assert found.disk["weights"] == all_bytes


@pytest.mark.parametrize("blocks", [0, 1, 4])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_so_many_blocks_rest_in_memory(device, tmp_path, blocks, prefetch):
    kept = Model(dtype=torch.bfloat16)
    streamed, budget = copy.deepcopy(kept), budget_for(kept, blocks, prefetch)
    kept_bytes = sum(sizes_of(kept)[0][:blocks])
    rest = {"prefetch": prefetch, "memory_budget": budget, **on_disk(tmp_path)}
    handle = zero.stream(streamed, to=device, **rest)
    for model in (streamed, kept.to(device)):
        with offload.OffloadOptimizer(
            model.parameters(),
            model=model,
            lr=1e-2,
            free_grads=True,
            max_grad_norm=0.5,
            state_dtype=torch.uint8,
            master="remainder",
        ) as optimizer:
            for step in range(STEPS):
                for micro in range(2):
                    loss_of(model, some_ids(device, 2 * step + micro)).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert_equal_models(streamed, kept)
    known, scratch = streamed.layers, handle._scratch
    assert [scratch.has(block.up.weight) for block in known] == [i >= blocks for i in range(4)]
    stats = handle.stats()
    assert (stats["disk_bytes"] > 0) == (blocks < 4)
    assert (stats["disk_bytes"] == stats["resting_bytes"]) == (blocks == 0)
    assert handle._staging._pool.stats()["peak"] + kept_bytes <= budget
    streamed.half()
    assert [scratch.has(block.up.weight) for block in known] == [i >= blocks for i in range(4)]


def test_a_budget_that_holds_too_little(tmp_path):
    model = Model()
    sizes, read = sizes_of(model)
    before = [(param, param.data_ptr()) for param in model.parameters()]
    text = rf"^zero.stream: memory_budget is {sum(sizes) - 1}, expected at least {sum(sizes)} for t"
    with pytest.raises(ValueError, match=text):
        zero.stream(model, to="cpu", memory_budget=sum(sizes) - 1)
    text = rf"memory_budget is {2 * read - 1}, expected at least {2 * read} for 2 blocks that are r"
    with pytest.raises(ValueError, match=text):
        zero.stream(model, to="cpu", memory_budget=2 * read - 1, **on_disk(tmp_path))
    for budget in (1.5, True, "much", -1):
        with pytest.raises(ValueError, match=r"^zero.stream: memory_budget is .*, expected "):
            zero.stream(model, to="cpu", memory_budget=budget)
    assert [(param, param.data_ptr()) for param in model.parameters()] == before
    zero.stream(model, to="cpu", memory_budget=f"{sum(sizes) / 1024}KiB").close()
