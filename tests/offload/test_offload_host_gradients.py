"""free_grads: gradients that leave the device and are added up in host memory, in float32."""

import copy

import pytest
import torch
from offload_cases import FORMATS, Gate, Pair, Summed, await_ahead, small_parts
from optim_cases import BF16, F16, F32, make_params, on_each_device
from torch import nn

STEPS = 12


@on_each_device
@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize("name", ["float32", "master", "compact"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_sums(device, dtype, name, times):
    pair = Summed(device, params=make_params(device, dtype), **FORMATS[name])
    pair.train(1)
    pair.train(STEPS - 1, times=times)
    stats = pair.ours.stats()
    assert stats["validated"] >= STEPS - 3 and stats["rolled back"] <= 1


@on_each_device
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_first_gradients_leave_too(device, dtype):
    """Before any step: a model that fits only without gradients has to get through that."""
    pair = Summed(device, params=make_params(device, dtype), master="float32")
    pair.backward(times=3)
    assert all(p.grad is None for p in pair.params)
    pair.step()
    pair.check()


@on_each_device
@pytest.mark.parametrize("kind", ["sgd", "lion", "adagrad", "rmsprop"])
def test_sums_for_each_class(device, kind, monkeypatch):
    small_parts(monkeypatch, piece=256, most=512)
    pair = Summed(device, kind, make_params(device, BF16), master="float32")
    pair.train(1)
    pair.train(STEPS - 1, times=2)
    assert pair.ours.stats()["validated"] >= STEPS - 3


@on_each_device
def test_another_number_of_gradients_each_time(device, monkeypatch):
    small_parts(monkeypatch, most=192)
    pair = Summed(device, params=make_params(device, F16), master="float32")
    for times in (1, 1, 3, 3, 1, 2, 2, 4, 1, 1):
        pair.train(1, times=times, missing=0.1)
    assert pair.ours.stats()["rolled back"] > 0


@on_each_device
@pytest.mark.parametrize("max_norm", [0.1, 1e9])
def test_clipping(device, max_norm):
    """The norm is that of the sums, which are in host memory: its last bit may differ on CUDA."""
    pair = Summed(device, params=make_params(device, BF16), max_grad_norm=max_norm)
    for step in range(STEPS):
        pair.backward(times=2 if step else 1)
        pair.give()
        await_ahead(pair.ours)
        norm = pair.ours.clip_and_step(max_norm)
        expected = pair.plain.clip_and_step(max_norm)
        torch.testing.assert_close(norm.cpu(), expected.cpu(), rtol=1e-6, atol=0)
        pair.zero_grad()
        if device == "cpu":
            pair.check()
    assert bool(pair.ours.stats()["validated"]) == (max_norm > 1)


@on_each_device
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_inf_and_nan_step_nothing(device, bad):
    pair = Summed(device, params=make_params(device, BF16), max_grad_norm=1e9)
    for step in range(8):
        pair.backward()
        if step in (2, 4, 5):
            grad = torch.full_like(pair.params[8], bad)
            torch.autograd.backward([pair.params[8]], [grad])
            pair.sums[8] = pair.sums[8] + grad.float()
        pair.step(max_norm=1e9)
        pair.check()
    assert pair.ours.stats()["rolled back"] > 0


@on_each_device
def test_zero_grad_instead_of_step(device):
    pair = Summed(device)
    pair.train(4)
    for _ in range(2):
        pair.backward(times=2)
        await_ahead(pair.ours)
        pair.zero_grad()
        pair.train(2)
    pair.backward()
    pair.zero_grad()
    pair.step()  # no gradient, so no step
    pair.check()
    pair.train(2)


@on_each_device
def test_gradients_set_by_hand(device):
    """They are added to those that have left, and go too."""
    pair = Summed(device)
    pair.train(3)
    for after_backward in (False, True):
        if after_backward:
            pair.backward()
            await_ahead(pair.ours)
        for i in (3, 8):
            grad = pair.draw(pair.params[i])
            pair.params[i].grad = grad.clone()
            pair.sums[i] = grad if pair.sums[i] is None else pair.sums[i] + grad
        pair.step()
        assert all(p.grad is None for p in pair.params)
        pair.check()
        pair.train(3)


@on_each_device
def test_a_backward_while_the_last_step_is_under_way(device, monkeypatch):
    """Its gradients wait until the step has read the sums, those of buckets behind it too."""
    small_parts(monkeypatch, most=192)
    model = nn.ParameterList(make_params(device))
    pair = Summed(device, params=model.parameters(), model=model)
    pair.train(4)
    pair.backward(times=2)  # more than expected
    pair.give()
    gate = Gate(monkeypatch, "step")
    pair.ours.step()
    gate.await_thread()
    pair.plain.step()
    pair.sums = [None] * 9
    gate.open_soon()
    pair.backward(times=2)
    pair.give()
    pair.ours.step()
    pair.plain.step()
    pair.zero_grad()
    pair.check()
    pair.train(3)


@on_each_device
def test_gradients_of_a_model(device):
    """As in training: the device keeps none of them, whatever the number of micro-batches is."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)).to(device, BF16)
    pair = Summed(device, params=net.parameters(), model=net, master="float32")
    x = torch.randn(4, 6, generator=pair.generator).to(device, BF16)
    for step in range(8):
        for _ in range(3 if step else 1):
            loss = net(x).square().sum()
            grads = torch.autograd.grad(loss, pair.params, retain_graph=True)
            loss.backward()
            assert step == 0 or all(p.grad is None for p in pair.params)
            for i, grad in enumerate(grads):
                had = pair.sums[i]
                pair.sums[i] = grad.float() if had is None else had + grad.float()
        pair.step()
    pair.check()
    assert pair.ours.stats()["validated"] >= 5


@on_each_device
def test_the_share_that_stays_keeps_its_gradients(device):
    pair = Pair(device, free_grads=True, gpu_fraction=1)
    pair.train(4)
    pair.backward()
    assert all(p.grad is not None for p in pair.params)


def thawed(pair):
    for i in (1, 4):
        pair.params[i].requires_grad_()
        grad = pair.draw(pair.params[i])
        torch.autograd.backward([pair.params[i]], [grad.clone()])
        pair.sums[i] = grad


def replaced_state(pair):
    for optimizer, params in pair.both():
        entry = optimizer.state[params[8]]
        entry["exp_avg"] = entry["exp_avg"] * 2


def loaded(pair):
    for optimizer, _ in pair.both():
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def added(pair):
    for optimizer, params in pair.both():
        new = make_params(params[0].device, seed=5)
        optimizer.add_param_group({"params": new})
        params += new
    pair.sums += [None] * 9


def with_another_layout(pair):
    for _, params in pair.both():
        params[0].data = params[0].data.clone()
        params[2].data = params[2].data.contiguous()


@on_each_device
@pytest.mark.parametrize(
    "change", [thawed, replaced_state, loaded, added, with_another_layout], ids=lambda f: f.__name__
)
def test_buckets_made_anew_between_backward_and_step(device, change):
    """Gradients that have left are not lost."""
    params = make_params(device)
    if change is thawed:
        for i in (1, 4):
            params[i].requires_grad_(False)
    pair = Summed(device, params=params)
    pair.train(3)
    pair.backward(times=2)
    await_ahead(pair.ours)
    change(pair)
    pair.step()
    pair.check()
    pair.train(3)
