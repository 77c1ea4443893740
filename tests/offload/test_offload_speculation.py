"""Steps taken ahead: what makes them count and what not, with the worker where the test wants it."""

import copy
import threading

import pytest
import torch
from offload_cases import FORMATS, Gate, Pair, await_ahead, count_calls, small_parts
from optim_cases import BF16, assert_same_bits, make_params, on_each_device, snapshot

from deepspeed_ext.offload.bucket import HostBucket

WARM = 4  # steps after which all that can be hastened is


def warm(device="cpu", **settings):
    """A pair whose next step will be taken ahead."""
    pair = Pair(device, **settings)
    pair.train(WARM)
    return pair


def finish(pair, validated=None, rolled_back=None):
    """Step, compare, see what counted, and that the pair goes on as before."""
    before = pair.ours.stats()
    pair.step()
    pair.check()
    after = pair.ours.stats()
    for key, wanted in (("validated", validated), ("rolled back", rolled_back)):
        if wanted is not None:
            assert after[key] - before[key] == wanted, (key, before, after)
    pair.train(3)
    assert pair.ours.stats()["validated"] > after["validated"]


@on_each_device
@pytest.mark.parametrize("name", FORMATS)
def test_nobody_sees_a_step_ahead(device, name):
    """Weights and state are those of the last step until step() is called."""
    pair = warm(device, params=make_params(device, BF16), **FORMATS[name])
    weights = [p.detach().clone() for p in pair.params]
    saved = snapshot(pair.ours)
    pair.backward()
    await_ahead(pair.ours)
    assert_same_bits(pair.params, weights)
    for i, entry in pair.ours.state_dict()["state"].items():
        for key, value in entry.items():
            assert torch.equal(value, saved["state"][i][key]), key
    finish(pair, validated=1)


@on_each_device
def test_a_second_backward(device):
    pair = warm(device)
    pair.backward()
    await_ahead(pair.ours)
    pair.backward()
    assert pair.ours.stats()["rolled back"] == 1
    finish(pair, validated=0, rolled_back=0)


@on_each_device
def test_a_second_backward_through_some_parameters(device):
    pair = warm(device)
    pair.backward()
    await_ahead(pair.ours)
    torch.autograd.backward([pair.params[2]], [pair.draw(pair.params[2])])
    finish(pair, validated=0)


@on_each_device
@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad_instead_of_step(device, set_to_none):
    pair = warm(device)
    pair.backward()
    await_ahead(pair.ours)
    pair.ours.zero_grad(set_to_none)
    assert pair.ours.stats()["rolled back"] == 1
    finish(pair, validated=0)  # gradients of zeros, or none, which is no step
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
    await_ahead(pair.ours)
    for param in pair.params:
        param.grad = None
    finish(pair, validated=0, rolled_back=1)
    pair = warm(device)
    for _ in range(2):
        pair.backward()
        await_ahead(pair.ours)
        torch.nn.ParameterList(pair.params).zero_grad()
    pair.backward()
    finish(pair, validated=0)


def by_hand(pair):
    for param in pair.params:
        param.grad = pair.draw(param)


def one_by_hand(pair):
    pair.params[4].grad = pair.draw(pair.params[4])


def same_values(pair):
    for param in pair.params:
        param.grad = param.grad.clone()


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
    await_ahead(pair.ours)
    change(pair)
    finish(pair, validated=0, rolled_back=1)


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
    await_ahead(pair.ours)
    for optimizer, _ in pair.both():
        optimizer.param_groups[0][key] = values[key]
    finish(pair, validated=0, rolled_back=1)


@on_each_device
def test_options_of_one_group_changed(device):
    pair = warm(device, groups=lambda ps: [{"params": ps[:3]}, {"params": ps[3:]}])
    pair.backward()
    await_ahead(pair.ours)
    for optimizer, _ in pair.both():
        optimizer.param_groups[1]["lr"] *= 2
    finish(pair, validated=1, rolled_back=1)


@on_each_device
@pytest.mark.parametrize("home", ["cpu", "device"])
def test_lr_tensors(device, home):
    """One on the CPU is read ahead; one on a device is not waited for in backward."""
    where = "cpu" if home == "cpu" else device
    lr = torch.tensor(0.01, device=where, dtype=torch.float64)
    pair = Pair(device, lr=lr)
    pair.plain.param_groups[0]["lr"] = float(lr)
    for step in range(6):
        pair.backward()
        await_ahead(pair.ours)
        if step == 4:
            lr.mul_(3)
            pair.plain.param_groups[0]["lr"] = float(lr)
        pair.step()
        assert_same_bits(pair.params, pair.twins)
    assert pair.ours.param_groups[0]["lr"] is lr
    stats = pair.ours.stats()
    if where == "cpu":
        assert stats["rolled back"] == 1 and stats["validated"] >= 3
    else:
        assert stats["ahead"] == 0 and stats["early"] >= 4


# Weights and state that are written between backward and step


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


# Where the worker is when step() is called


@on_each_device
@pytest.mark.parametrize("where", ["not begun", "begun"])
@pytest.mark.parametrize("ending", ["validated", "rolled back"])
def test_a_step_ahead_that_is_not_over(device, where, ending, monkeypatch):
    """One that nobody has begun is taken back; one under way is waited for and then decided."""
    pair = warm(device)
    gate = Gate(monkeypatch, "step_ahead")
    pair.backward()
    gate.await_thread()
    if where == "not begun":  # behind the one that is held
        pair.ours.zero_grad()
        pair.backward()
    if ending == "rolled back":
        for optimizer, _ in pair.both():
            optimizer.param_groups[0]["lr"] = 0.5
    pair.give()
    before = pair.ours.stats()
    opener = threading.Timer(0.0, open_when_settled, (pair, gate, before))
    opener.start()
    pair.ours.step()
    opener.join()
    pair.plain.step()
    pair.zero_grad()
    pair.check()
    after = pair.ours.stats()
    counted = 0 if where == "not begun" else 1
    assert after[ending] - before[ending] == counted
    pair.train(3)


def open_when_settled(pair, gate, before):
    """Open when step() has decided about the step ahead."""
    decided = threading.Event()
    for _ in range(6000):
        stats = pair.ours.stats()
        if stats != before:
            break
        decided.wait(0.01)
    gate.open()


@on_each_device
def test_all_steps_wait_while_the_worker_is_held(device, monkeypatch):
    """With a model, step() returns at once; state and weights are there for who waits for them."""
    model = torch.nn.ParameterList(make_params(device))
    pair = Pair(device, params=model.parameters(), model=model)
    pair.train(WARM)
    for method in ("step", "adopt"):
        with pytest.MonkeyPatch.context() as patch:
            gate = Gate(patch, method)
            pair.backward()
            if method == "step":
                same_values(pair)
            pair.give()
            await_ahead(pair.ours)
            before = [p.detach().clone() for p in pair.params]
            pair.ours.step()
            gate.await_thread()
            if device == "cpu":
                assert_same_bits(pair.params, before)
            waiter = Waiter(lambda: pair.ours.state_dict())
            assert waiter.is_waiting()
            gate.open()
            waiter.end()
        pair.plain.step()
        pair.zero_grad()
        pair.check()


class Waiter:
    """A thread that is to wait."""

    def __init__(self, run):
        self._thread = threading.Thread(target=run)
        self._thread.start()

    def is_waiting(self):
        self._thread.join(0.05)  # no proof that it will wait longer, but it never fails wrongly
        return self._thread.is_alive()

    def end(self):
        self._thread.join()


@on_each_device
def test_gradients_may_go_while_a_step_is_under_way(device, monkeypatch):
    """The step has its own copies: zero_grad, new gradients and writes do not reach it."""
    model = torch.nn.ParameterList(make_params(device))
    pair = Pair(device, params=model.parameters(), model=model)
    pair.train(WARM)
    gate = Gate(monkeypatch, "step")
    pair.backward()
    same_values(pair)
    pair.give()
    grads = [p.grad for p in pair.params]
    pair.ours.step()
    gate.await_thread()
    for grad in grads:
        grad.fill_(float("nan"))
    pair.ours.zero_grad()
    pair.ours.param_groups[0]["lr"] = 100.0
    gate.open()
    pair.ours.synchronize()
    pair.ours.param_groups[0]["lr"] = pair.plain.param_groups[0]["lr"]
    pair.plain.step()
    pair.zero_grad()
    pair.check()


@on_each_device
def test_backward_while_the_last_step_is_under_way(device, monkeypatch):
    """Its gradients are counted, and taken when step() is called."""
    model = torch.nn.ParameterList(make_params(device))
    pair = Pair(device, params=model.parameters(), model=model)
    pair.train(WARM)
    gate = Gate(monkeypatch, "adopt")
    pair.backward()
    pair.give()
    await_ahead(pair.ours)
    pair.ours.step()
    gate.await_thread()
    pair.plain.step()
    pair.zero_grad()
    pair.backward()
    gate.open()
    finish(pair)


@on_each_device
def test_buckets_are_stepped_as_their_gradients_appear(device, monkeypatch):
    """In the middle of backward the last layers are stepped already."""
    small_parts(monkeypatch, most=192)
    layers = [torch.nn.Linear(8, 8).to(device) for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    pair = Pair(device, params=model.parameters())
    x = torch.randn(4, 8, generator=pair.generator).to(device)
    seen = []

    def look(grad):
        await_ahead(pair.ours)
        seen.append(pair.ours.stats()["ahead"])

    for _ in range(5):
        out = layers[0](x)
        out.register_hook(look)
        for layer in layers[1:]:
            out = layer(out)
        out.square().mean().backward()
        pair.step()
        pair.check()
    done_before = [b - a for a, b in zip([0, *seen], seen, strict=False)]
    assert done_before[-1] >= 5, seen
    assert pair.ours.stats()["rolled back"] == 0


@on_each_device
def test_gradients_are_read_once(device, monkeypatch):
    """What left early is not copied again, and a step that counts is not taken again."""
    pair = warm(device)
    takes = count_calls(monkeypatch, HostBucket, "take")
    steps = count_calls(monkeypatch, HostBucket, "step")
    pair.train(3)
    assert len(takes) == 3 and not steps


@on_each_device
def test_a_steady_loop_does_not_compare_masters(device, monkeypatch):
    pair = warm(device, params=make_params(device, BF16), master="float32")
    monkeypatch.setattr(torch, "where", None)
    pair.train(3)
    assert pair.ours.stats()["rolled back"] == 0
