"""State on disk against the plain class given the same gradients: every bit after every step."""

import copy
import errno
import gc
import itertools
import os

import numpy
import pytest
import torch
from offload_cases import FORMATS, Pair
from optim_cases import BF16, F32, assert_same_bits, make_params, on_each_device
from test_offload_parity import each_pair
from torch.nn import Parameter

from deepspeed_ext.io import TensorStore
from deepspeed_ext.offload import OffloadOptimizer, estimate

STEPS = 8
BUDGET = 16 << 20
FRACTIONS = pytest.mark.parametrize("fraction", [1.0, 0.5])


@pytest.fixture
def on_disk(tmp_path):
    """Return options that put state, or some of it, on disk."""
    return lambda fraction=1.0: {
        "device": "nvme",
        "nvme_path": tmp_path,
        "memory_budget": BUDGET,
        "nvme_fraction": fraction,
    }


def tier(options):
    """Return the same for a Pair, which takes `device` for that of the parameters."""
    return {"tier" if key == "device" else key: value for key, value in options.items()}


def large(device, dtype=F32):
    """Return parameters of more elements than a piece, among small ones and empty ones."""
    shapes = [(700, 901), (17,), (0,), (600_011,), (33, 5, 7)]
    generator = torch.Generator().manual_seed(4)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [Parameter(value.to(device, dtype)) for value in values]


def train(pair, steps, **backward):
    for _ in range(steps):
        pair.backward(**backward)
        pair.step()
        assert_same_bits(pair.params, pair.twins)


@on_each_device
@each_pair
def test_each_class_and_format(device, kind, dtype, name, on_disk):
    pair = Pair(device, kind, make_params(device, dtype), **tier(on_disk()), **FORMATS[name])
    train(pair, STEPS, missing=0.3)
    pair.check()


@on_each_device
@FRACTIONS
@pytest.mark.parametrize("name", ["float32", "master", "compact"])
def test_many_pieces(device, name, fraction, on_disk):
    options = on_disk(fraction) | FORMATS[name]
    pair = Pair(device, params=large(device, BF16), **tier(options))
    train(pair, 4, times=3)
    stats = pair.ours.stats()
    pair.check()
    state = estimate(pair.params, **{k: v for k, v in options.items() if k != "nvme_path"})
    assert state.disk_bytes > 0
    assert stats["bytes_written"] == 4 * state.disk_bytes
    # Before the first step there were master weights at the most; for the next, some is read ahead.
    assert 3 * state.disk_bytes <= stats["bytes_read"] <= 5 * state.disk_bytes
    assert stats["read_ahead"] > 0.5


@on_each_device
@FRACTIONS
def test_gradients_that_leave_at_once(device, fraction, on_disk):
    pair = Pair(device, params=large(device), free_grads=True, **tier(on_disk(fraction)))
    for _ in range(4):
        grads = [pair.draw(param) for param in pair.params]
        for twin, grad in zip(pair.twins, grads, strict=True):
            twin.grad = grad.clone()
        torch.autograd.backward(pair.params, grads)
        pair.plain.step()
        pair.ours.step()
        pair.ours.zero_grad()
        assert_same_bits(pair.params, pair.twins)
    pair.check()


@on_each_device
def test_clipping_and_skipped_steps(device, on_disk):
    pair = Pair(device, params=large(device), max_grad_norm=1.0, **tier(on_disk()))
    for factor in (1.0, 1e-4, float("inf"), 1.0):
        pair.backward(factor=factor)
        pair.give()
        pair.ours.step()
        pair.plain.clip_and_step(1.0)
        for optimizer in (pair.ours, pair.plain):
            optimizer.zero_grad()
        assert_same_bits(pair.params, pair.twins)
    assert pair.ours.skipped_steps == 1
    pair.check()


@on_each_device
@pytest.mark.parametrize("untold", [False, True])
@pytest.mark.parametrize("name", ["float32", "master", "codes"])
def test_state_that_is_written(device, name, untold, on_disk):
    """Also while what was there before has been read ahead."""
    pair = Pair(device, params=large(device, BF16), **tier(on_disk()), **FORMATS[name])
    for _ in range(3):
        train(pair, 2)
        for optimizer, params in pair.both():
            for param in (params[0], params[3]):
                value = optimizer.state[param]["exp_avg"]
                (value.data if untold else value)[5:9] = 3
        pair.check()
        train(pair, 1)


@on_each_device
@pytest.mark.parametrize("name", ["float32", "master", "codes"])
def test_state_that_is_written_and_not_stepped(device, name, on_disk):
    """It counts when its parameter has a gradient again, however many steps that takes."""
    pair = Pair(device, params=large(device, BF16), **tier(on_disk()), **FORMATS[name])
    train(pair, 2)
    for optimizer, params in pair.both():
        optimizer.state[params[3]]["exp_avg"][300_000:300_009] = 3  # no other one is in that piece
        params[3].requires_grad_(False)
    train(pair, 2)
    for _, params in pair.both():
        params[3].requires_grad_(True)
    train(pair, 2)
    pair.check()


@on_each_device
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["master", "remainder"])
def test_weights_that_are_written(device, name, when, on_disk):
    pair = Pair(device, params=large(device, BF16), **tier(on_disk()), **FORMATS[name])
    train(pair, 2)
    for number in range(3):
        if when == "after":
            pair.backward()
        for params in (pair.params, pair.twins):
            with torch.no_grad():
                params[number][..., 1:] = 0.25
        if when == "before":
            pair.backward()
        pair.step()
        assert_same_bits(pair.params, pair.twins)
    pair.check()


@on_each_device
def test_what_comes_goes_and_is_thawed(device, on_disk):
    params = large(device)
    params[0].requires_grad_(False)
    pair = Pair(device, params=params[:4], **tier(on_disk(0.5)))
    train(pair, 2)
    for frozen in (pair.params[0], pair.twins[0]):
        frozen.requires_grad_(True)
    train(pair, 2)
    late, twin = params[4], Parameter(params[4].detach().clone())
    pair.ours.add_param_group({"params": [late], "lr": 0.3})
    pair.plain.add_param_group({"params": [twin], "lr": 0.3})
    pair.params.append(late)
    pair.twins.append(twin)
    train(pair, 3)
    pair.check()


@on_each_device
@pytest.mark.parametrize("name", FORMATS)
def test_state_dicts_go_from_one_to_another(device, name, on_disk):
    first = Pair(device, params=large(device, BF16), **tier(on_disk()), **FORMATS[name])
    train(first, 2)
    second = Pair(device, params=first.params, **tier(on_disk(0.5)), **FORMATS[name])
    second.ours.load_state_dict(first.ours.state_dict())
    second.plain.load_state_dict(first.plain.state_dict())
    second.twins[:] = [param for group in second.plain.param_groups for param in group["params"]]
    train(second, 2)
    second.check()


def test_state_that_is_written_after_it_was_loaded(on_disk):
    pair = Pair(params=large("cpu"), **tier(on_disk()))
    train(pair, 2)
    for optimizer, params in pair.both():
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.state[params[3]]["exp_avg"].fill_(0.5)
    train(pair, 2)
    pair.check()


def test_state_outlives_its_optimizer(on_disk):
    """It shows a file, whose end must not come while somebody looks."""
    params = large("cpu")
    ours = OffloadOptimizer(params, **on_disk())
    for param in params:
        param.grad = torch.ones_like(param)
    ours.step()
    entry = ours.state[params[3]]
    ours.close()
    del ours
    gc.collect()
    assert torch.equal(entry["exp_avg"], torch.full_like(params[3], 0.1))


def test_one_optimizer_after_another(on_disk):
    """Descriptors stay as many as they were."""
    counts = []
    for _ in range(6):
        param = Parameter(torch.ones(5000))
        with OffloadOptimizer([param], **on_disk()) as ours:
            param.grad = torch.ones(5000)
            ours.step()
        del ours
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[2] == counts[-1]


@pytest.mark.parametrize("verb", ["put_async", "get_async"])
def test_a_disk_that_fails(verb, on_disk, monkeypatch):
    """The step that finds it out says so; no other one is taken, and weights can still be read."""
    params = large("cpu")
    ours = OffloadOptimizer(params, **on_disk())
    for param in params:
        param.grad = torch.ones_like(param)
    ours.step()
    ours.synchronize()
    real, calls = getattr(TensorStore, verb), itertools.count()

    def fails(*args, **kwargs):
        if next(calls) == 2:
            raise OSError(errno.EIO, "the disk is broken")
        return real(*args, **kwargs)

    monkeypatch.setattr(TensorStore, verb, fails)
    with pytest.raises((OSError, RuntimeError), match="the disk is broken"):
        for _ in range(3):
            ours.step()
    with pytest.raises(RuntimeError, match=r"OffloadOptimizer: state on disk .*the disk is broken"):
        ours.step()
    with pytest.raises(RuntimeError, match="the disk is broken"):
        ours.close()
    assert torch.isfinite(params[0]).all()


WRONG = [
    ({"device": "disk"}, "device is 'disk', expected 'cpu' or 'nvme'"),
    ({"device": "nvme"}, "nvme_path is None, expected a folder"),
    ({"nvme_path": "."}, "nvme_path is given, expected device='nvme'"),
    ({"nvme_fraction": 0.5}, "nvme_fraction is given, expected device='nvme'"),
    ({"device": "nvme", "nvme_path": ""}, "nvme_path is '', expected a folder"),
    ({"device": "nvme", "nvme_path": 5}, "nvme_path is 5, expected a folder"),
    ({"device": "nvme", "nvme_path": ".", "nvme_fraction": 2}, "nvme_fraction is 2, expected 0"),
    ({"device": "nvme", "nvme_path": ".", "nvme_fraction": "1"}, "nvme_fraction is '1', expected"),
    ({"device": "nvme", "nvme_path": ".", "memory_budget": 1000}, "expected at least 786436 for"),
    ({"memory_budget": "2 apples"}, "memory_budget is '2 apples', expected bytes, as"),
    ({"memory_budget": float("nan")}, "memory_budget is nan, expected bytes, as"),
    ({"memory_budget": "1e400GiB"}, "memory_budget is '1e400GiB', expected bytes, as"),
    ({"memory_budget": -1}, "memory_budget is -1, expected bytes, as"),
    ({"memory_budget": 10**30}, "memory_budget is 10+, expected bytes, as"),
    ({"memory_budget": True}, "memory_budget is True, expected bytes, as"),
    ({"memory_budget": [1]}, r"memory_budget is \[1\], expected bytes, as"),
]


@pytest.mark.parametrize(("options", "text"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_options(options, text):
    with pytest.raises(ValueError, match=text):
        OffloadOptimizer([Parameter(torch.ones(3))], **options)


@pytest.mark.parametrize("budget", [6.4e7, numpy.int64(64_000_000), numpy.float32(6.4e7)], ids=type)
def test_a_budget_is_any_number(budget, tmp_path):
    """As a share of the memory that is free is."""
    params = [Parameter(torch.ones(3))]
    OffloadOptimizer(params, device="nvme", nvme_path=tmp_path, memory_budget=budget).close()


def test_a_folder_that_is_not_there_and_a_full_disk(on_disk, tmp_path, monkeypatch):
    options = on_disk()
    with pytest.raises(FileNotFoundError):
        OffloadOptimizer(large("cpu"), **options | {"nvme_path": tmp_path / "none"})

    def full(self, nbytes, in_parts):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(TensorStore, "reserve", full)
    with pytest.raises(OSError, match=r"nvme_path is .* with too little room: no space left"):
        OffloadOptimizer(large("cpu"), **options)


def test_what_the_budget_holds_stays_in_memory(tmp_path):
    """The first ones do: their gradients come last, and their weights are wanted first."""
    params = [Parameter(torch.ones(100_000)) for _ in range(20)]
    options = {"device": "nvme", "memory_budget": BUDGET}
    planned = estimate(params, **options)
    assert planned.on_disk == set(range(min(planned.on_disk), 20))
    assert 0 < min(planned.on_disk) < 20
    assert planned.host_bytes <= BUDGET
    assert "disk" in str(planned)
    ours = OffloadOptimizer(params, nvme_path=tmp_path, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    ours.step()
    assert ours.stats()["bytes_written"] == planned.disk_bytes


def test_a_ring_is_no_larger_than_what_it_is_for(tmp_path):
    params = [Parameter(torch.ones(3))]
    with OffloadOptimizer(params, device="nvme", nvme_path=tmp_path, nvme_fraction=1.0) as ours:
        assert ours._pipeline.ring._count == 3


def test_a_copy_finds_the_folder_after_a_chdir(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.chdir(tmp_path)
    params = [Parameter(torch.ones(3))]
    with OffloadOptimizer(params, device="nvme", nvme_path="disk", nvme_fraction=1.0) as ours:
        monkeypatch.chdir("/")
        copy.deepcopy(ours).close()
