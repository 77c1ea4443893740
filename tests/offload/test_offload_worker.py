"""The worker, held where the test wants it: what is under way when step() and others come."""

import threading

import pytest
import torch
from offload_cases import (
    WARM,
    Gate,
    Pair,
    await_speculation,
    count_calls,
    finish,
    same_values,
    small_parts,
    warm,
)
from optim_cases import make_params, on_each_device

from deepspeed_ext.offload.bucket import HostBucket


@on_each_device
@pytest.mark.parametrize("where", ["not begun", "begun"])
@pytest.mark.parametrize("ending", ["committed", "discarded"])
def test_a_speculative_step_that_is_not_over(device, where, ending, monkeypatch):
    """One that nobody has begun is taken back; one under way is waited for and then decided."""
    pair = warm(device)
    gate = Gate(monkeypatch, "step_speculatively")
    pair.backward()
    gate.await_thread()
    if where == "not begun":  # behind the one that is held
        pair.ours.zero_grad()
        pair.backward()
    if ending == "discarded":
        for optimizer, _ in pair.both():
            optimizer.param_groups[0]["lr"] = 0.5
    pair.give()
    before = pair.ours.stats()
    opener = threading.Timer(0.0, open_when_decided, (pair, gate, before))
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


def open_when_decided(pair, gate, before):
    """Open when step() has decided about the speculative step."""
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
    for method in ("adopt", "step"):
        with pytest.MonkeyPatch.context() as patch:
            gate = Gate(patch, method)
            pair.backward()
            if method == "step":
                same_values(pair)
            pair.give()
            await_speculation(pair.ours)
            before = [p.detach().clone() for p in pair.params]
            pair.ours.step()
            gate.await_thread()
            if device == "cpu":
                with torch._C.DisableTorchFunctionSubclass():  # else this thread would wait
                    assert all(map(torch.equal, pair.params, before))
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
    await_speculation(pair.ours)
    backward = pair.later()
    pair.ours.step()
    gate.await_thread()
    pair.plain.step()
    pair.zero_grad()
    backward()
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
        await_speculation(pair.ours)
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
    assert pair.ours.stats()["discarded"] == 0


@on_each_device
def test_gradients_are_read_once(device, monkeypatch):
    """What left early is not copied again, and a step that counts is not taken again."""
    pair = warm(device)
    takes = count_calls(monkeypatch, HostBucket, "fetch")
    steps = count_calls(monkeypatch, HostBucket, "step")
    pair.train(3)
    assert len(takes) == 3 and not steps
