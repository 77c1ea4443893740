"""Offloaded steps against the plain class given the same gradients: every bit after every step."""

import copy
import itertools
from operator import eq, lt

import pytest
import torch
from offload_cases import FORMATS, Pair, count_calls, small_parts
from optim_cases import BF16, F16, F32, make_params, on_each_device
from torch.nn import Parameter

from deepspeed_ext.offload.host_optimizer import HostOptimizer

STEPS = 20
# Each class with each format at least once, and each format with all dtypes that it is for.
PAIRS = [
    *(("adam", dtype, name) for dtype in (F32, BF16, F16) for name in FORMATS),
    ("amsgrad", BF16, "compact"),
    ("amsgrad", F32, "codes"),
    ("adagrad", F32, "float32"),
    ("adagrad", BF16, "codes"),
    ("adagrad", F16, "master"),
    ("lion", BF16, "remainder"),
    ("lion", F32, "bfloat16"),
    ("lion", F32, "codes"),
    ("sgd", BF16, "bfloat16"),
    ("sgd", BF16, "compact"),
    ("sgd", F16, "float32"),
    ("sgd without state", BF16, "remainder"),
    ("sgd without state", F32, "float32"),
    ("rmsprop", BF16, "master"),
    ("rmsprop", F32, "codes"),
    ("centered", F32, "master"),
]


def fits(dtype, name):
    """Remainders are for bfloat16; and for float32, which needs none."""
    return dtype != F16 or "remainder" not in FORMATS[name].get("master", "")


each_pair = pytest.mark.parametrize(
    ("kind", "dtype", "name"),
    [pair for pair in PAIRS if fits(*pair[1:])],
    ids=lambda value: str(value).removeprefix("torch."),
)


@on_each_device
@each_pair
def test_each_class_and_format(device, kind, dtype, name):
    pair = Pair(device, kind, make_params(device, dtype), **FORMATS[name])
    pair.train(STEPS)
    pair.check_speculated(STEPS)


@on_each_device
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_parameters_in_pieces(device, kind, name, monkeypatch):
    """Blocks of 8-bit codes and the keys of random bits keep their numbers when cut."""
    small_parts(monkeypatch)
    calls = count_calls(monkeypatch, HostOptimizer, "step_part")
    sizes = [(3, 5), (1500,), (40, 60), (512,), (513,), (16, 4, 6, 10), (7,), (0,), (1025,)]
    params = [Parameter(torch.randn(size).to(device, BF16)) for size in sizes]
    params[2] = Parameter(params[2].detach().t())
    params[5] = Parameter(params[5].detach().to(memory_format=torch.channels_last))
    pair = Pair(device, kind, params, **FORMATS[name])
    pair.train(STEPS)
    buckets = len(pair.ours._pipeline._buckets)
    assert buckets > 5
    pair.check_speculated(STEPS, buckets)
    assert len(calls) > 1.5 * buckets * STEPS  # some buckets are cut


@on_each_device
@pytest.mark.parametrize("name", ["float32", "compact"])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_accumulation(device, name, times):
    pair = Pair(device, params=make_params(device, BF16), **FORMATS[name])
    pair.train(STEPS, times=times)
    pair.check_speculated(STEPS)


@on_each_device
def test_accumulation_of_another_number_each_time(device):
    """A speculative step by fewer gradients than there are in the end does not count."""
    pair = Pair(device)
    counts = [1, 1, 1, 3, 3, 1, 2, 4, 4, 4, 2, 1, 1]
    for times in counts:
        pair.train(1, times=times)
    learned = list(itertools.pairwise(counts[1:]))
    same, more = (sum(map(compare, *zip(*learned, strict=True))) for compare in (eq, lt))
    stats = pair.ours.stats()
    assert stats["discarded"] == more and 0 <= stats["committed"] - same <= 1
    assert stats["early"] == stats["ahead"] == stats["committed"] + more


@on_each_device
@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
def test_missing_gradients(device, kind, monkeypatch):
    small_parts(monkeypatch, most=192)  # some buckets lack some, and some none
    pair = Pair(device, kind)
    pair.train(STEPS, missing=0.15)
    stats = pair.ours.stats()
    assert stats["committed"] > 10 and stats["late"] > 10


@on_each_device
def test_steps_without_any_gradient(device):
    pair = Pair(device)
    pair.train(1, missing=1.1)
    assert not pair.ours.state
    pair.train(3)
    pair.train(2, missing=1.1)
    pair.train(3)
    assert pair.ours.state[pair.params[0]]["step"] == 6


@on_each_device
@pytest.mark.parametrize("name", ["float32", "compact"])
@pytest.mark.parametrize("fraction", [0, 0.5, 1])
def test_a_share_that_is_stepped_where_it_is(device, fraction, name):
    pair = Pair(device, params=make_params(device, BF16), gpu_fraction=fraction, **FORMATS[name])
    pair.train(STEPS)
    stays = [pair.ours.state[p]["step"].data_ptr() for p in pair.params]
    pair.backward()
    pair.step()
    moved = [pair.ours.state[p]["step"].data_ptr() for p in pair.params]
    alike = sum(a == b for a, b in zip(stays, moved, strict=True))
    # A speculative step lies elsewhere; what stays on the device does not.
    assert {0: alike == 0, 0.5: 0 < alike < 9, 1: alike == 9}[fraction]
    pair.check_speculated(STEPS + 1, 0 if fraction == 1 else 1)
    if device == "cuda":
        homes = [pair.ours.state[p]["step"].is_cuda for p in pair.params]
        assert homes == sorted(homes, reverse=True) and sum(homes) == alike


@on_each_device
def test_dtypes_together(device):
    params = [p for dtype in (F32, BF16, F16) for p in make_params(device, dtype)]
    pair = Pair(device, params=params, master="float32")
    pair.train(STEPS, missing=0.02)
    assert pair.ours.stats()["committed"] > 10


@on_each_device
def test_frozen_and_thawed(device):
    pair = Pair(device)
    for step in range(STEPS):
        for i, param in enumerate(pair.params):
            param.requires_grad_(i % 3 != 0 or 6 <= step < 12)
        pair.train(1)
    assert pair.ours.stats()["committed"] >= 6
    frozen = [float(pair.ours.state[p]["step"]) for p in pair.params]
    assert frozen == [6 if i % 3 == 0 else STEPS for i in range(9)]


@on_each_device
def test_frozen_from_the_beginning(device):
    params = make_params(device)
    for param in params[::2]:
        param.requires_grad_(False)
    pair = Pair(device, params=params)
    pair.train(5)
    pair.check_speculated(5)
    assert [p in pair.ours.state for p in params] == [i % 2 == 1 for i in range(9)]
    for param in params:
        param.requires_grad_()
    pair.train(5)
    assert pair.ours.stats()["committed"] > 3


@on_each_device
def test_groups_and_schedules(device):
    def groups(params):
        return [
            {"params": params[:4], "lr": 0.1},
            {"params": params[4:], "betas": (0.5, 0.6), "weight_decay": 0.0},
        ]

    pair = Pair(device, groups=groups)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.2], total_steps=STEPS + 1)
        for o in (pair.ours, pair.plain)
    ]
    for _ in range(STEPS):
        pair.train(1)
        for schedule in schedules:
            schedule.step()
    pair.check_speculated(STEPS, 2)


@on_each_device
def test_groups_added_later(device):
    pair = Pair(device)
    pair.train(4)
    more = make_params(device, BF16, seed=1)
    twins = copy.deepcopy(more)
    for optimizer, params in ((pair.ours, more), (pair.plain, twins)):
        optimizer.add_param_group({"params": params, "lr": 0.5, "weight_decay": 0.2})
    pair.params += more
    pair.twins += twins
    pair.train(STEPS)
    stats = pair.ours.stats()
    assert stats["committed"] >= 2 * (STEPS - 3) and stats["discarded"] <= 1


@on_each_device
def test_no_room_for_speculative_steps(device):
    """Gradients leave early all the same, and no step is taken before it is asked for."""
    needed = sum(12 * p.numel() + 4 for p in make_params())
    pair = Pair(device, memory_budget=needed + 5000)  # each part begins at 256 bytes
    pair.train(STEPS)
    stats = pair.ours.stats()
    assert stats["early"] >= STEPS - 2 and stats["ahead"] == stats["committed"] == 0
    pair = Pair(device, memory_budget=needed * 20)
    pair.train(STEPS)
    pair.check_speculated(STEPS)


@on_each_device
@pytest.mark.parametrize("set_to_none", [False, True])
def test_the_ways_to_clear_gradients(device, set_to_none):
    model = torch.nn.ParameterList(make_params(device))
    pair = Pair(device, params=model.parameters())
    for step in range(STEPS):
        pair.backward()
        pair.give()
        pair.ours.step()
        pair.plain.step()
        if step % 3 == 0:
            model.zero_grad(set_to_none)
        elif step % 3 == 1:
            pair.ours.zero_grad(set_to_none)
        else:
            for param in pair.params:
                param.grad = None
        pair.check()
    assert pair.ours.stats()["early"] >= STEPS - 2
