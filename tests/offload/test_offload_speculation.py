"""Speculative steps: which changes of gradients and options discard them, and which do not."""

import pytest
import torch
from offload_cases import FORMATS, Pair, await_speculation, finish, same_values, small_parts, warm
from optim_cases import BF16, assert_same_bits, make_params, on_each_device, snapshot


@on_each_device
@pytest.mark.parametrize("name", FORMATS)
def test_nobody_sees_a_speculative_step(device, name):
    """Weights and state are those of the last step until step() is called."""
    pair = warm(device, params=make_params(device, BF16), **FORMATS[name])
    weights = [p.detach().clone() for p in pair.params]
    saved = snapshot(pair.ours)
    pair.backward()
    await_speculation(pair.ours)
    assert_same_bits(pair.params, weights)
    for i, entry in pair.ours.state_dict()["state"].items():
        for key, value in entry.items():
            assert torch.equal(value, saved["state"][i][key]), key
    finish(pair, committed=1)


@on_each_device
def test_a_bucket_does_not_take_the_writes_of_others_for_writes_to_its_weights(device, monkeypatch):
    """It would make its master weights anew, which takes longer than the step."""
    small_parts(monkeypatch, most=192)
    pair = warm(device, params=make_params(device, BF16), master="float32")
    assert len(pair.ours._pipeline._buckets) > 2
    made = []
    where = torch.where
    monkeypatch.setattr(torch, "where", lambda *arguments: made.append(1) or where(*arguments))
    pair.train(3, max_norm=0.01)  # so that no step is speculative
    assert not made


@on_each_device
def test_a_second_backward(device):
    pair = warm(device)
    pair.backward()
    await_speculation(pair.ours)
    pair.backward()
    assert pair.ours.stats()["discarded"] == 1
    finish(pair, committed=0, discarded=0)


@on_each_device
def test_a_second_backward_through_some_parameters(device):
    pair = warm(device)
    pair.backward()
    await_speculation(pair.ours)
    torch.autograd.backward([pair.params[2]], [pair.draw(pair.params[2])])
    finish(pair, committed=0)


@on_each_device
@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad_instead_of_step(device, set_to_none):
    pair = warm(device)
    pair.backward()
    await_speculation(pair.ours)
    pair.ours.zero_grad(set_to_none)
    assert pair.ours.stats()["discarded"] == 1
    finish(pair, committed=0)  # gradients of zeros, or none, which is no step
    pair = warm(device)
    pair.backward()
    pair.ours.zero_grad(set_to_none)
    pair.backward()
    finish(pair)


@on_each_device
def test_zero_grad_of_the_model_instead_of_step(device):
    """The optimizer learns nothing of it but that gradients are others."""
    pair = warm(device)
    pair.backward()
    await_speculation(pair.ours)
    for param in pair.params:
        param.grad = None
    finish(pair, committed=0, discarded=1)
    pair = warm(device)
    for _ in range(2):
        pair.backward()
        await_speculation(pair.ours)
        torch.nn.ParameterList(pair.params).zero_grad()
    pair.backward()
    finish(pair, committed=0)


def by_hand(pair):
    for param in pair.params:
        param.grad = pair.draw(param)


def one_by_hand(pair):
    pair.params[4].grad = pair.draw(pair.params[4])


def one_without(pair):
    pair.params[1].grad = None


def in_place(pair):
    pair.params[8].grad.mul_(0.5)


def one_element(pair):
    pair.params[8].grad[200] = 9.0


def clipped(pair):
    torch.nn.utils.clip_grad_norm_(pair.params, 0.5)


def foreach(pair):
    torch._foreach_add_([p.grad for p in pair.params], 1.0)


def another_memory(pair):
    pair.params[0].grad.data = pair.draw(pair.params[0])


GRADIENT_CHANGES = [
    by_hand,
    one_by_hand,
    same_values,
    one_without,
    in_place,
    one_element,
    clipped,
    foreach,
    another_memory,
]


@on_each_device
@pytest.mark.parametrize("change", GRADIENT_CHANGES, ids=lambda f: f.__name__)
def test_gradients_changed_after_backward(device, change):
    pair = warm(device)
    pair.backward()
    await_speculation(pair.ours)
    change(pair)
    finish(pair, committed=0, discarded=1)


@on_each_device
def test_gradients_set_by_hand_without_backward(device):
    pair = Pair(device)
    for _ in range(5):
        by_hand(pair)
        pair.step()
        pair.check()
    stats = pair.ours.stats()
    assert stats["early"] == stats["ahead"] == 0 and stats["late"] == 5


@on_each_device
@pytest.mark.parametrize("key", ["lr", "betas", "eps", "weight_decay", "maximize"])
def test_options_changed_after_backward(device, key):
    values = {"lr": 0.2, "betas": (0.3, 0.4), "eps": 1e-3, "weight_decay": 0.0, "maximize": True}
    pair = warm(device)
    pair.backward()
    await_speculation(pair.ours)
    for optimizer, _ in pair.both():
        optimizer.param_groups[0][key] = values[key]
    finish(pair, committed=0, discarded=1)


@on_each_device
def test_options_of_one_group_changed(device):
    pair = warm(device, groups=lambda ps: [{"params": ps[:3]}, {"params": ps[3:]}])
    pair.backward()
    await_speculation(pair.ours)
    for optimizer, _ in pair.both():
        optimizer.param_groups[1]["lr"] *= 2
    finish(pair, committed=1, discarded=1)


@on_each_device
@pytest.mark.parametrize("home", ["cpu", "device"])
def test_lr_tensors(device, home):
    """One on the CPU is read early; one on a device is not waited for in backward."""
    where = "cpu" if home == "cpu" else device
    lr = torch.tensor(0.01, device=where, dtype=torch.float64)
    pair = Pair(device, lr=lr)
    pair.plain.param_groups[0]["lr"] = float(lr)
    for step in range(6):
        pair.backward()
        await_speculation(pair.ours)
        if step == 4:
            lr.mul_(3)
            pair.plain.param_groups[0]["lr"] = float(lr)
        pair.step()
        assert_same_bits(pair.params, pair.twins)
    assert pair.ours.param_groups[0]["lr"] is lr
    stats = pair.ours.stats()
    if where == "cpu":
        assert stats["discarded"] == 1 and stats["committed"] >= 3
    else:
        assert stats["ahead"] == 0 and stats["early"] >= 4
