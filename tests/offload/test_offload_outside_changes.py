"""Weights and state that somebody else writes between backward and step, or between steps."""

import copy

import pytest
import torch
from offload_cases import FORMATS, WARM, await_ahead, finish, warm
from optim_cases import BF16, make_params, on_each_device, snapshot


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
        await_ahead(pair.ours)
    with torch.no_grad():
        for _, params in pair.both():
            change(pair, params, values.__getitem__)
    if when == "before backward":
        pair.backward()
    finish(pair, validated=0)


STATE_WRITES = {
    "in place": lambda entry: entry["exp_avg"].mul_(2),
    "one element": lambda entry: entry["exp_avg"].view(-1)[:1].fill_(2),
    "the step": lambda entry: entry["step"].add_(10),
    "the master": lambda entry: entry["master_param"].add_(1),
    "replaced": lambda entry: entry.update(exp_avg=entry["exp_avg"] * 2),
    "replaced by another dtype": lambda entry: entry.update(exp_avg=entry["exp_avg"].double()),
    "step replaced": lambda entry: entry.update(step=torch.tensor(7.0)),
}


@on_each_device
@pytest.mark.parametrize("when", ["before backward", "after backward"])
@pytest.mark.parametrize("write", STATE_WRITES.values(), ids=STATE_WRITES)
def test_state_written_between_steps(device, write, when):
    pair = warm(device, params=make_params(device, BF16), master="float32")
    if when == "after backward":
        pair.backward()
        await_ahead(pair.ours)
    for optimizer, params in pair.both():
        write(optimizer.state[params[8]])
    pair.check()
    if when == "before backward":
        pair.backward()
    finish(pair, validated=0 if when == "after backward" else None)


@on_each_device
def test_state_that_is_read_after_backward(device):
    """Reading is no reason to roll back, and gives what the last step has left."""
    pair = warm(device)
    pair.backward()
    await_ahead(pair.ours)
    pair.check()
    assert pair.ours.state[pair.params[0]]["step"] == WARM
    finish(pair, validated=1)


@on_each_device
def test_state_that_goes_or_comes(device):
    pair = warm(device)
    pair.backward()
    await_ahead(pair.ours)
    for optimizer, params in pair.both():
        del optimizer.state[params[2]]
    finish(pair, validated=0)
    pair.backward()
    await_ahead(pair.ours)
    for optimizer, params in pair.both():
        entry = {k: v.clone() for k, v in optimizer.state[params[3]].items()}
        optimizer.state[params[3]] = entry | {"step": torch.tensor(99.0), "note": "mine"}
    finish(pair, validated=0)
    assert pair.ours.state[pair.params[3]]["note"] == "mine"


@on_each_device
def test_a_checkpoint_loaded_between_backward_and_step(device):
    pair = warm(device)
    saved = snapshot(pair.plain)
    pair.train(3)
    pair.backward()
    await_ahead(pair.ours)
    for optimizer, _ in pair.both():
        optimizer.load_state_dict(copy.deepcopy(saved))
    finish(pair, validated=0)


@on_each_device
def test_a_steady_loop_does_not_compare_masters(device, monkeypatch):
    pair = warm(device, params=make_params(device, BF16), master="float32")
    monkeypatch.setattr(torch, "where", None)
    pair.train(3)
    assert pair.ours.stats()["rolled back"] == 0
