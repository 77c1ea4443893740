"""Gradients that come late and are added up in host memory, before any step by their sum."""

import random
import threading

import pytest
import torch
from late_pairs import STEPS, DeviceError, Told, late_pair, on_late_devices, step, tell
from offload_cases import Gate, Summed, await_speculation
from optim_cases import BF16, assert_same_bits, make_params
from torch import nn

from deepspeed_ext.offload.host_gradients import Adder, Sum

pytestmark = pytest.mark.usefixtures("threads_that_take_turns")


@on_late_devices
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_sums(device, waits, seed, monkeypatch):
    pair = late_pair(monkeypatch, device, Summed, seed, dtype=BF16, model=nn.ParameterList())
    draw = random.Random(seed)
    for number in range(STEPS):
        pair.backward(times=draw.choice([1, 2, 2, 3]) if number else 1, missing=0.1)
        if draw.random() < 0.2:
            pair.zero_grad()
            pair.backward(times=2)
        step(pair)
        pair.zero_grad()
        if waits:
            pair.check()
    pair.check()


def summed_one(monkeypatch, events, **settings):
    """Return a pair of one parameter whose gradients leave, after some steps."""
    tell(monkeypatch, events)
    pair = Summed(params=[nn.Parameter(torch.ones(40))], **settings)
    pair.train(1)
    pair.train(3, times=2)
    return pair


def test_a_step_by_sums_waits_until_they_are_added_up(monkeypatch):
    """The step itself has nothing to wait for: it would come first."""
    events = []
    pair = summed_one(monkeypatch, events)
    for _ in range(2):
        events += [Told([False] * 9), Told([False] * 9)]
        pair.backward(times=2)
        step(pair)
        pair.zero_grad()
        pair.check()


def test_gradients_are_added_up_in_their_order(monkeypatch):
    """The second may be there when it is asked for, and the first not a moment before."""
    events = []
    pair = summed_one(monkeypatch, events)
    gate = Gate(monkeypatch, "adopt")  # while it is held, both are queued
    pair.backward(times=2)
    pair.give()
    await_speculation(pair.ours)
    closer = threading.Thread(target=pair.ours.step)
    closer.start()
    gate.await_thread()
    adder, first, second = Adder(pair.ours._pipeline.worker), Told([False]), Told([True])
    streams = pair.ours._pipeline._streams[torch.device("cpu")]
    events += [first, second]
    known = Sum(nn.Parameter(torch.zeros(3)))
    for value in (1.0, 2.0):
        adder.take(known, torch.full((3,), value), streams)
    gate.open()
    closer.join()
    adder.finish()
    known.check()
    assert known.value.tolist() == [3.0] * 3


@pytest.mark.parametrize("clips", [False, True])
def test_a_gradient_that_could_not_be_added(clips, monkeypatch):
    """No step is taken by what is left of the sum, and it is told; then all goes on."""
    events = []
    pair = summed_one(monkeypatch, events)
    before = [p.detach().clone() for p in pair.params]
    events += [Told([DeviceError("copy")]), Told([True] * 9)]
    pair.backward(times=2)
    with pytest.raises(DeviceError, match="copy"):
        pair.ours.clip_and_step(1.0) if clips else pair.ours.step()
    assert_same_bits(pair.params, before)
    pair.zero_grad()
    pair.check()
    pair.train(3, times=2)


def test_an_error_of_the_last_step_is_not_lost_in_a_hook(monkeypatch):
    """A gradient that leaves waits for that step; who can raise its error does."""
    pair = Summed(params=make_params(), model=nn.ParameterList())
    pair.train(4)
    pair.backward(times=2)  # more than expected, so no step is speculative

    def broken(*args):
        raise DeviceError("step")

    backward = pair.later()
    with monkeypatch.context() as patch:
        patch.setattr("deepspeed_ext.offload.bucket.HostBucket._step_part", broken)
        pair.ours.step()
        backward()
    with pytest.raises(DeviceError, match="step"):
        pair.ours.step()
