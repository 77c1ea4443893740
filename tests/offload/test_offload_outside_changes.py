"""Weights and state that somebody else writes between backward and step, or between steps."""

import copy

import pytest
import torch
from offload_cases import FORMATS, KINDS, WARM, Pair, await_speculation, finish, small_parts, warm
from optim_cases import (
    BF16,
    F16,
    F32,
    assert_close,
    assert_same_bits,
    make_params,
    needs_cuda,
    on_each_device,
    snapshot,
)

from deepspeed_ext.offload import OffloadOptimizer


def copied(pair, params, draw):
    params[1].copy_(draw(1))


def one_weight(pair, params, draw):
    params[8][7] = 3.0


def other_memory(pair, params, draw):
    params[1].data = draw(1).clone().as_strided(params[1].shape, params[1].stride())


def all_of_them(pair, params, draw):
    torch._foreach_mul_(params, 0.5)


WEIGHT_CHANGES = [copied, one_weight, other_memory, all_of_them]


@on_each_device
@pytest.mark.parametrize("when", ["before backward", "after backward"])
@pytest.mark.parametrize("name", ["float32", "master", "compact"])
@pytest.mark.parametrize("change", WEIGHT_CHANGES, ids=lambda f: f.__name__)
def test_weights_written_between_steps(device, change, name, when):
    pair = warm(device, params=make_params(device, BF16), **FORMATS[name])
    values = {1: pair.draw(pair.params[1])}
    if when == "after backward":
        pair.backward()
        await_speculation(pair.ours)
    with torch.no_grad():
        for _, params in pair.both():
            change(pair, params, values.__getitem__)
    if when == "before backward":
        pair.backward()
    finish(pair, committed=0)


UNTOLD = {
    "a gradient": lambda param: param.grad.data.mul_(0.5),
    "an element of a gradient": lambda param: param.grad.data.view(-1)[-1:].neg_(),
    "a weight": lambda param: param.data.mul_(0.5),
    "an element of a weight": lambda param: param.data.view(-1)[-1:].neg_(),
}


@on_each_device
@pytest.mark.parametrize("i", [0, 8])
@pytest.mark.parametrize("max_norm", [None, 1e6])
@pytest.mark.parametrize("write", UNTOLD.values(), ids=UNTOLD)
def test_writes_that_no_version_tells_of(device, write, max_norm, i):
    pair = warm(device)
    for _ in range(2):
        pair.backward()
        await_speculation(pair.ours)
        pair.give()
        for _, params in pair.both():
            write(params[i])
        pair.step(max_norm)
        pair.check()


STATE_WRITES = {
    "untold": lambda entry: entry["exp_avg"].data.mul_(2),
    "an element, untold": lambda entry: entry["exp_avg_sq"].data.view(-1)[-1:].fill_(2),
    "the master, untold": lambda entry: entry["master_param"].data.add_(1),
    "by numpy": lambda entry: (
        entry["exp_avg"].numpy().fill(2) if entry["exp_avg"].is_cpu else entry["exp_avg"].fill_(2)
    ),
    "in place": lambda entry: entry["exp_avg"].mul_(2),
    "one element": lambda entry: entry["exp_avg"].view(-1)[:1].fill_(2),
    "the step": lambda entry: entry["step"].add_(10),
    "the master": lambda entry: entry["master_param"].add_(1),
    "replaced": lambda entry: entry.update(exp_avg=entry["exp_avg"] * 2),
    "replaced by another dtype": lambda entry: entry.update(exp_avg=entry["exp_avg"].double()),
    "step replaced": lambda entry: entry.update(step=torch.tensor(7.0)),
}


@on_each_device
@pytest.mark.parametrize("change", WEIGHT_CHANGES, ids=lambda f: f.__name__)
def test_weights_written_whose_step_is_in_pieces(device, change, monkeypatch):
    small_parts(monkeypatch, piece=256)
    params = [torch.nn.Parameter(torch.randn(n).to(device)) for n in (5, 3000, 7, 8, 9, 10, 11, 12)]
    params.append(torch.nn.Parameter(torch.randn(2000).to(device)))
    pair = warm(device, params=params)
    values = {1: pair.draw(pair.params[1])}
    pair.backward()
    await_speculation(pair.ours)
    with torch.no_grad():
        for _, params in pair.both():
            change(pair, params, values.__getitem__)
    finish(pair)


@on_each_device
@pytest.mark.parametrize("when", ["before backward", "after backward"])
@pytest.mark.parametrize("write", STATE_WRITES.values(), ids=STATE_WRITES)
def test_state_written_between_steps(device, write, when):
    pair = warm(device, params=make_params(device, BF16), master="float32")
    if when == "after backward":
        pair.backward()
        await_speculation(pair.ours)
    for optimizer, params in pair.both():
        write(optimizer.state[params[8]])
    pair.check()
    if when == "before backward":
        pair.backward()
    finish(pair, committed=0 if when == "after backward" else None)


@on_each_device
def test_state_written_after_backward_that_was_read_before(device):
    pair = warm(device, params=make_params(device, BF16), master="float32")
    for _ in range(2):
        states = [optimizer.state[params[8]]["exp_avg"] for optimizer, params in pair.both()]
        pair.backward()
        await_speculation(pair.ours)
        for state in states:
            state.data.mul_(2)
        finish(pair, committed=0)


@on_each_device
def test_state_that_is_read_after_backward(device):
    """Reading is no reason to roll back, and gives what the last step has left."""
    pair = warm(device)
    pair.backward()
    await_speculation(pair.ours)
    pair.check()
    assert pair.ours.state[pair.params[0]]["step"] == WARM
    finish(pair, committed=1)


@on_each_device
def test_state_that_goes_or_comes(device):
    pair = warm(device)
    pair.backward()
    await_speculation(pair.ours)
    for optimizer, params in pair.both():
        del optimizer.state[params[2]]
    finish(pair, committed=0)
    pair.backward()
    await_speculation(pair.ours)
    for optimizer, params in pair.both():
        entry = {k: v.clone() for k, v in optimizer.state[params[3]].items()}
        optimizer.state[params[3]] = entry | {"step": torch.tensor(99.0), "note": "mine"}
    finish(pair, committed=0)
    assert pair.ours.state[pair.params[3]]["note"] == "mine"


@on_each_device
def test_a_checkpoint_loaded_between_backward_and_step(device):
    pair = warm(device)
    saved = snapshot(pair.plain)
    pair.train(3)
    pair.backward()
    await_speculation(pair.ours)
    for optimizer, _ in pair.both():
        optimizer.load_state_dict(copy.deepcopy(saved))
    finish(pair, committed=0)


@on_each_device
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_a_steady_loop_does_not_compare_master_weights(device, max_norm, monkeypatch):
    """Neither when speculative steps count nor when all are taken as they are asked for."""
    pair = Pair(device, params=make_params(device, BF16), master="float32")
    pair.train(WARM, max_norm)
    monkeypatch.setattr(torch, "where", None)
    pair.train(3, max_norm)
    assert bool(pair.ours.stats()["committed"]) == (max_norm is None)


# Parameters that become others


def retyped(pair, dtype):
    for params in (pair.params, pair.twins):
        for param in params:
            param.grad = None
            param.data = param.data.to(dtype)


@on_each_device
@pytest.mark.parametrize("fraction", [0, 0.5, 1])
@pytest.mark.parametrize(("before", "after"), [(F32, BF16), (BF16, F32), (BF16, F16)])
def test_another_dtype(device, before, after, fraction):
    pair = warm(device, params=make_params(device, before), master="float32", gpu_fraction=fraction)
    retyped(pair, after)
    pair.train(4)
    assert pair.ours.state[pair.params[0]]["step"] == WARM + 4


@on_each_device
def test_another_dtype_after_backward(device):
    pair = warm(device)
    pair.backward()
    await_speculation(pair.ours)
    retyped(pair, BF16)
    for param in pair.params:
        param.grad = pair.draw(param)
    finish(pair, committed=0)


@on_each_device
@pytest.mark.parametrize("fraction", [0, 1])
def test_another_layout(device, fraction):
    params = [torch.nn.Parameter(torch.randn(4, 6, 5, 3).to(device)) for _ in range(2)]
    pair = warm(device, params=params, gpu_fraction=fraction)
    for _, params in pair.both():
        for param in params:
            param.grad = None
            param.data = param.data.to(memory_format=torch.channels_last)
    pair.train(4)


@on_each_device
@pytest.mark.parametrize("fraction", [0, 1])
def test_another_shape(device, fraction):
    pair = warm(device, params=make_params(device)[:1], gpu_fraction=fraction)
    for _, params in pair.both():
        params[0].data = params[0].data.view(-1)
    pair.train(4)
    assert pair.ours.state[pair.params[0]]["exp_avg"].shape == (15,)


@on_each_device
def test_a_model_that_loads_a_checkpoint(device):
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4)).to(device, BF16)
    pair = Pair(device, params=model.parameters(), master="float32", model=model)
    pair.train(WARM)
    saved = {k: torch.full_like(v, 0.25) for k, v in model.state_dict().items()}
    pair.backward()
    await_speculation(pair.ours)
    model.load_state_dict(saved)
    with torch.no_grad():
        for twin in pair.twins:
            twin.fill_(0.25)
    finish(pair, committed=0)
    pair.train(1)
    model.load_state_dict(saved, assign=False)
    for twin in pair.twins:
        twin.data = torch.full_like(twin, 0.25)
    pair.train(3)


@on_each_device
def test_a_model_that_gets_other_tensors_for_its_weights(device):
    pair = warm(device, params=make_params(device, BF16), master="float32")
    for _, params in pair.both():
        for param in params:
            param.data = param.data.clone() * 2
    pair.train(3)
    for _, params in pair.both():
        for a, b in zip(params, make_params(device, BF16, seed=4), strict=True):
            a.data = b.data
    pair.train(3)


@on_each_device
@pytest.mark.parametrize("fraction", [0, 0.5])
@pytest.mark.parametrize("master", [None, "float32", "remainder"])
def test_reset_master_takes_what_no_version_tells_of(device, master, fraction):
    pair = warm(device, params=make_params(device, BF16), master=master, gpu_fraction=fraction)
    for optimizer, params in pair.both():
        for param in params:
            param.data.mul_(0.5)
        optimizer.reset_master()
    pair.check()
    pair.train(3)
    pair.backward()
    await_speculation(pair.ours)
    for optimizer, params in pair.both():
        params[8].data.mul_(0.5)
        optimizer.reset_master()
    finish(pair, committed=0)


@on_each_device
def test_parameters_that_get_memory_after_construction(device):
    """They are offloaded like all others."""
    values = make_params(device)
    with torch.device("meta"):
        params = [torch.nn.Parameter(torch.empty_like(v, device="meta")) for v in values]
    optimizer = OffloadOptimizer(params, **KINDS["adam"].options)
    for param, value in zip(params, values, strict=True):
        torch.utils.swap_tensors(param, value)
    pair = Pair(device, params=params)
    pair.ours = optimizer
    pair.train(5)
    pair.check_speculated(5)
    assert pair.ours.state[params[0]]["exp_avg"].device.type == "cpu"


def test_lazy_modules_that_take_shape_after_construction():
    model = torch.nn.LazyLinear(2)
    optimizer = OffloadOptimizer(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert_close([model.weight], [before - 0.5])


@needs_cuda
@pytest.mark.parametrize("name", ["float32", "compact"])
@pytest.mark.parametrize(("one", "other"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_parameters_that_move_to_another_device(one, other, name):
    pair = warm(one, params=make_params(one, BF16), **FORMATS[name])
    plain = KINDS["adam"].on_cuda if other == "cuda" else KINDS["adam"].offloaded
    saved = pair.plain.state_dict()
    for params in (pair.params, pair.twins):
        for param in params:
            param.grad = None
            param.data = param.data.to(other)
    pair.plain = plain(pair.twins, **KINDS["adam"].options, **FORMATS[name])
    pair.plain.load_state_dict(saved)
    before = pair.ours.stats()["committed"]
    for _ in range(6):
        pair.backward()
        pair.step()
        assert_same_bits(pair.params, pair.twins)
    assert pair.ours.stats()["committed"] > before
    assert all(v.device.type == "cpu" for v in pair.ours.state[pair.params[0]].values())


# Weights that are written when buckets are made, or made anew, too


@on_each_device
@pytest.mark.parametrize("master", [None, "float32", "remainder"])
def test_weights_written_before_the_first_step(device, master):
    pair = Pair(device, params=make_params(device, BF16), master=master)
    for when in range(2):
        with torch.no_grad():
            for _, params in pair.both():
                for param in params:
                    param.mul_(0.5 if when else 3.0)
        pair.train(1)


@on_each_device
def test_weights_written_before_the_first_gradient(device):
    params = make_params(device)
    for param in params[::2]:
        param.requires_grad_(False)
    pair = warm(device, params=params)
    for param in params:
        param.requires_grad_()
    with torch.no_grad():
        for _, params in pair.both():
            for param in params:
                param.mul_(3.0)
    pair.train(3)


@on_each_device
def test_weights_and_state_written_between_the_same_steps(device):
    pair = warm(device)
    for optimizer, params in pair.both():
        with torch.no_grad():
            for param in params:
                param.mul_(3.0)
        entry = optimizer.state[params[8]]
        entry["exp_avg"] = entry["exp_avg"] * 2
    pair.train(3)


@on_each_device
def test_weights_of_all_written_and_one_of_another_dtype(device):
    pair = warm(device)
    for _, params in pair.both():
        for param in params:
            param.data = param.data * 3
        params[2].data = params[2].data.bfloat16()
    pair.train(3)


@on_each_device
def test_weights_written_before_a_checkpoint_is_loaded(device):
    pair = warm(device, params=make_params(device, BF16), master="float32")
    saved = snapshot(pair.plain)
    for optimizer, params in pair.both():
        with torch.no_grad():
            for param in params:
                param.mul_(3.0)
        optimizer.load_state_dict(copy.deepcopy(saved))
    pair.train(3)
    for optimizer, params in pair.both():
        optimizer.load_state_dict(copy.deepcopy(saved))
        with torch.no_grad():
            for param in params:
                param.mul_(3.0)
    pair.train(3)
