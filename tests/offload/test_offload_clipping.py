"""Clipping and scaling of offloaded steps: as the plain class, speculative while no clip bites."""

import pytest
import torch
from offload_cases import FORMATS, Pair, assert_same_state, await_speculation, small_parts
from optim_cases import (
    BF16,
    F16,
    F32,
    assert_same_bits,
    make_params,
    on_each_device,
    snapshot,
    state_tensors,
)
from waiting_scaler import waiting_scaler

from deepspeed_ext.offload import verdict as decision
from deepspeed_ext.optim.clipping import clip

STEPS = 20
INF, NAN = float("inf"), float("nan")


@on_each_device
@pytest.mark.parametrize("name", ["float32", "master", "compact"])
def test_clipping_that_never_bites(device, name):
    pair = Pair(device, params=make_params(device, BF16), max_grad_norm=1e9, **FORMATS[name])
    pair.train(STEPS, max_norm=1e9)
    pair.check_speculated(STEPS)


@on_each_device
@pytest.mark.parametrize("name", ["float32", "master", "compact"])
def test_clipping_that_always_bites(device, name):
    """Gradients leave early, but nothing is stepped with what is known to be the wrong divisor."""
    pair = Pair(device, params=make_params(device, BF16), max_grad_norm=0.1, **FORMATS[name])
    pair.train(STEPS, max_norm=0.1)
    stats = pair.ours.stats()
    assert stats["early"] >= STEPS - 2 and stats["ahead"] == stats["committed"] == 0


@on_each_device
@pytest.mark.parametrize("measures", [False, True])
def test_clipping_that_bites_now_and_then(device, measures):
    """A speculative step is discarded when clipping bites; the next one after that is not tried."""
    pair = Pair(device, **({"max_grad_norm": 50.0} if measures else {}))
    bites = [False, False, False, True, True, False, False, True, False, False, False]
    for bite in bites:
        pair.backward(factor=10.0 if bite else 1.0)
        pair.step(max_norm=50.0)
        pair.check()
    stats = pair.ours.stats()
    assert stats["discarded"] == 2
    assert stats["early"] == stats["ahead"] + 3 >= len(bites) - 2
    assert stats["committed"] == stats["ahead"] - 2


@on_each_device
def test_step_clips_to_what_the_constructor_was_given(device):
    pair = Pair(device, max_grad_norm=0.1)
    assert pair.ours.grad_norm is None
    for max_norm in (0.1, 0.1, 0.1, 1e9, 1e9, INF, 1e9):
        pair.ours.max_grad_norm = max_norm
        pair.backward()
        pair.give()
        await_speculation(pair.ours)
        pair.ours.step()
        norm = pair.plain.clip_and_step(max_norm)
        assert_same_bits([pair.ours.grad_norm], [norm])
        assert pair.ours.grad_norm.device.type == device
        pair.zero_grad()
        pair.check()
    assert pair.ours.stats()["committed"] > 1


@on_each_device
def test_clip_and_step_overrides_the_constructor_for_one_call(device):
    pair = Pair(device, max_grad_norm=1e9)
    pair.train(5, max_norm=1e9)
    pair.train(1, max_norm=0.1)
    assert pair.ours.max_grad_norm == 1e9
    pair.backward()
    pair.give()
    pair.ours.step()
    pair.plain.clip_and_step(1e9)
    pair.check()


@on_each_device
def test_grad_norm_is_that_of_the_last_step(device):
    pair = Pair(device)
    pair.train(1)
    assert pair.ours.grad_norm is None
    pair.train(1, max_norm=1.0)
    assert pair.ours.grad_norm > 1
    pair.train(1)
    assert pair.ours.grad_norm is None


@on_each_device
@pytest.mark.parametrize("fraction", [0, 0.5, 1])
def test_norms_of_pieces_and_of_what_stays_where_it_is(device, fraction, monkeypatch):
    """Sums over other groups of parameters may differ in the last bit, and so may what they clip.

    So the plain class is given the number that the offloaded one has divided by.
    """
    small_parts(monkeypatch, most=512)
    clips = []
    monkeypatch.setattr(decision, "clip", lambda *how: clips.append(clip(*how)) or clips[-1])
    pair = Pair(device, params=make_params(device, BF16), gpu_fraction=fraction, master="float32")
    for max_norm in (0.1, 0.1, 1e9, 1e9, 1e9, 1e9, 0.1, 1.0):
        pair.backward()
        pair.give()
        await_speculation(pair.ours)
        norm = pair.ours.clip_and_step(max_norm)
        squares = sum(p.grad.double().square().sum() for p in pair.twins)
        torch.testing.assert_close(norm.double(), squares.sqrt(), rtol=1e-6, atol=0)
        pair.plain.grad_scale = clips[-1].divisor
        assert (clips[-1].divisor > 1) == (max_norm < 100)
        pair.plain.step()
        pair.zero_grad()
        pair.check()
    if fraction < 1:
        assert pair.ours.stats()["committed"] > 0


@on_each_device
@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("fraction", [0, 0.5])
def test_inf_and_nan_step_nothing(device, bad, fraction):
    pair = Pair(device, gpu_fraction=fraction, max_grad_norm=1e9, master="float32")
    for step in range(8):
        before = snapshot(pair.ours), [p.detach().clone() for p in pair.params]
        pair.backward()
        if step in (3, 4, 6):  # found in what was taken early
            pair.params[3].grad = None
            grad = pair.draw(pair.params[3])
            grad[1, 1] = bad
            torch.autograd.backward([pair.params[3]], [grad])
        pair.step(max_norm=1e9)
        pair.check()
        if step in (3, 4, 6):
            assert not pair.ours.grad_norm.isfinite()
            assert_same_bits(pair.params, before[1])
            assert_same_bits(state_tensors(pair.ours), tensors_of(before[0]))


@on_each_device
@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_speculative_step_by_a_bad_gradient_is_discarded(device, bad):
    pair = Pair(device, max_grad_norm=1e9)
    pair.train(4, max_norm=1e9)
    torch.autograd.backward(
        pair.params, [torch.full_like(p, bad if p.numel() == 257 else 1.0) for p in pair.params]
    )
    pair.step(max_norm=1e9)
    pair.check()
    stats = pair.ours.stats()
    assert stats["discarded"] == 1 and stats["ahead"] == stats["committed"] + 1
    pair.train(3, max_norm=1e9)
    assert pair.ours.stats()["committed"] > stats["committed"]


@on_each_device
def test_without_clipping_bad_gradients_are_stepped_as_they_are(device):
    pair = Pair(device)
    pair.train(3)
    torch.autograd.backward(pair.params, [torch.full_like(p, INF) for p in pair.params])
    pair.give()
    await_speculation(pair.ours)
    pair.ours.step()
    pair.plain.step()
    for mine, theirs in zip(pair.params, pair.twins, strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan()) and mine.isnan().all()


# GradScaler


def scale_and_step(pair, scalers, overflow=False, unscales=False, clips=False):
    """One step of both by scalers that hold the same number."""
    scale = scalers[0].get_scale()
    for scaler in scalers:
        scaler.scale(torch.zeros((), device=pair.params[0].device))
    pair.backward(factor=scale)
    if overflow:
        torch.autograd.backward([pair.params[8]], [torch.full_like(pair.params[8], INF)])
    pair.give()
    await_speculation(pair.ours)
    for scaler, (optimizer, params) in zip(scalers, pair.both(), strict=True):
        if unscales:
            scaler.unscale_(optimizer)
        if clips:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
    pair.zero_grad()
    assert not hasattr(pair.ours, "grad_scale") and not hasattr(pair.ours, "found_inf")
    pair.check()


@on_each_device
@pytest.mark.parametrize(("dtype", "unscales"), [(F16, False), (F32, False), (F32, True)])
def test_a_grad_scaler(device, dtype, unscales, monkeypatch):
    pair = Pair(device, params=make_params(device, dtype), master="float32")
    scalers = [waiting_scaler(monkeypatch, device, 64.0) for _ in pair.both()]
    for step in range(STEPS):
        scale_and_step(pair, scalers, overflow=step in (5, 6, 12), unscales=unscales)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 8.0
    stats = pair.ours.stats()
    if unscales:  # gradients were written to after they had been taken, which is learnt once
        assert stats["committed"] == 0 and stats["early"] == stats["discarded"] == 1
    else:
        # Not counted: the first three, those of an overflow, and those after one, whose scale is
        # half of what was expected, or whose gradient came twice.
        assert stats["committed"] >= STEPS - 3 - 2 * 3 and stats["discarded"] >= 3


@on_each_device
def test_a_scale_that_grows(device):
    pair = Pair(device)
    scalers = [torch.amp.GradScaler(device, init_scale=4.0, growth_interval=3) for _ in pair.both()]
    for _ in range(12):
        scale_and_step(pair, scalers)
    assert scalers[0].get_scale() == 64.0
    stats = pair.ours.stats()
    assert stats["discarded"] >= 3 and stats["committed"] >= 4


@on_each_device
def test_a_scaler_and_clipping_by_hand(device):
    pair = Pair(device)
    scalers = [torch.amp.GradScaler(device, init_scale=4.0) for _ in pair.both()]
    for _ in range(6):
        scale_and_step(pair, scalers, unscales=True, clips=True)
    assert pair.ours.stats()["committed"] == 0


@on_each_device
def test_a_scaler_and_clip_and_step(device):
    pair = Pair(device, max_grad_norm=1e6)
    for max_norm in (1e6, 1e6, 1e6, 1e6, 0.5, 1e6, 1e6, 1e6):
        pair.backward(factor=16.0)
        for optimizer, _ in pair.both():
            optimizer.grad_scale = torch.tensor(16.0, device=device)
        pair.step(max_norm)
        pair.check()
    stats = pair.ours.stats()
    assert stats["discarded"] >= 1 and stats["committed"] >= 2


@on_each_device
@pytest.mark.parametrize("scale", [0.0, INF, NAN, 1e-45])
def test_a_scale_that_is_no_number_to_divide_by(device, scale):
    pair = Pair(device, max_grad_norm=1e6)
    pair.train(3)
    for optimizer, _ in pair.both():
        optimizer.grad_scale = torch.tensor(scale, device=device)
    pair.backward()
    pair.step(max_norm=1.0)
    pair.check()


@on_each_device
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_numbers_set_by_hand(device, found):
    pair = Pair(device)
    for where in ("cpu", device, "cpu", device, device):
        for optimizer, _ in pair.both():
            optimizer.grad_scale = torch.tensor([4.0], device=where)
            optimizer.found_inf = torch.tensor([found], device=where)
        pair.train(1)
    assert_same_state(pair.ours, pair.plain)
    assert bool(pair.ours.stats()["committed"]) != bool(found)


def tensors_of(saved):
    return [v for entry in saved["state"].values() for _, v in sorted(entry.items())]
