"""Copies and events that come late: nothing is read before it is there, or written while it is.

Each test has its copies delayed in a way that makes the race certain; see late_copies.
"""

import random
import threading
from contextlib import nullcontext

import pytest
import torch
from late_copies import LateStreams, be_late
from late_pairs import (
    STEPS,
    DeviceError,
    Told,
    keep_busy,
    late_pair,
    needs_two,
    on_late_devices,
    params_on,
    places,
    step,
)
from offload_cases import (
    FORMATS,
    KINDS,
    PATIENCE,
    Gate,
    Pair,
    Summed,
    await_speculation,
    small_parts,
    warm,
)
from optim_cases import BF16, assert_same_bits, make_params
from torch import nn

from deepspeed_ext.offload.bucket import HostBucket
from deepspeed_ext.offload.copies import Copy, CopyStreams
from deepspeed_ext.offload.sent_gradients import sent

pytestmark = pytest.mark.usefixtures("threads_that_take_turns")


# Many steps, as they come


@on_late_devices
@pytest.mark.parametrize("name", FORMATS)
def test_steps(device, name, monkeypatch):
    dtype = torch.float32 if name in ("float32", "bfloat16", "codes") else BF16
    pair = late_pair(monkeypatch, device, dtype=dtype, **FORMATS[name])
    for number in range(STEPS):
        if number % 3 == 0:
            keep_busy(device)
        pair.backward()
        step(pair)
        pair.zero_grad()
        assert_same_bits(pair.params, pair.twins)  # ordered before all that reads them
    pair.check()
    assert pair.ours.stats()["committed"] > 0


@on_late_devices
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
@pytest.mark.parametrize("made", [Pair, Summed])
def test_clipped_steps(device, made, max_norm, monkeypatch):
    pair = late_pair(monkeypatch, device, made, max_grad_norm=max_norm)
    for _ in range(STEPS):
        pair.backward()
        step(pair, max_norm)
        pair.zero_grad()
        if device == "cpu":  # elsewhere the norm of sums is taken in another order
            pair.check()


@on_late_devices
def test_gradients_written_right_after_a_step(device, monkeypatch):
    """What they were is on its way; whoever writes comes behind."""
    pair = late_pair(monkeypatch, device, model=nn.ParameterList())
    for number in range(STEPS):
        pair.backward()
        if number % 2:  # late, all of them
            for param in pair.params:
                param.grad.mul_(2)
        step(pair)
        for param in pair.params:
            param.grad.fill_(float("nan"))
        pair.zero_grad()
        pair.check()


@on_late_devices
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shadow", [True, False])
def test_whatever_may_come_between(device, seed, shadow, monkeypatch):
    """Changes of everything, by chance, and nobody waits unless by chance."""
    budget = {} if shadow else {"memory_budget": 2 * 12 * 2**10}
    pair = late_pair(monkeypatch, device, seed=seed, model=nn.ParameterList(), **budget)
    draw = random.Random(seed)
    for _ in range(3 * STEPS):
        often = draw.random() < 0.8  # as ever, so that many steps are speculative
        times, missing = (1, 0) if often else (draw.choice([1, 2]), draw.choice([0, 0.3]))
        pair.backward(times=times, missing=missing)
        for change in draw.choices(CHANGES, k=0 if often else draw.choice([1, 2])):
            change(pair)
        if draw.random() < 0.5:
            await_speculation(pair.ours)
        step(pair, None if often else draw.choice([None, 1e9, 0.1]))
        if draw.random() < 0.2:
            pair.check()
        if draw.random() < 0.8:
            for optimizer, _ in pair.both():
                optimizer.zero_grad(set_to_none=draw.random() < 0.5)
    pair.check()
    stats = pair.ours.stats()
    assert not shadow or stats["committed"], stats
    pair.ours.close()


def other_lr(pair):
    for optimizer, _ in pair.both():
        optimizer.param_groups[0]["lr"] *= 0.9


def written_gradients(pair):
    for param in pair.params[::2]:
        if param.grad is not None:
            param.grad.mul_(0.5)


def other_gradients(pair):
    for param in pair.params[1::2]:
        if param.grad is not None:
            param.grad = param.grad * 3


def written_weights(pair):
    pair.ours.synchronize()
    with torch.no_grad():
        for _, params in pair.both():
            params[2].mul_(0.5)


def another_backward(pair):
    pair.ours.zero_grad()
    pair.backward()


CHANGES = [other_lr, written_gradients, other_gradients, written_weights, another_backward]


@on_late_devices
@pytest.mark.parametrize("free_grads", [False, True])
def test_modules_that_read_weights_as_they_return(device, free_grads, monkeypatch):
    """Forward begins right after step() and finds each weight when it comes to it."""
    small_parts(monkeypatch, piece=64, most=64)
    be_late(monkeypatch, device)
    torch.manual_seed(0)
    where = places(device)
    net = nn.Sequential(*(nn.Linear(8, 8).to(next(where)) for _ in range(6)))
    pair = Pair(device, params=net.parameters(), model=net, free_grads=free_grads)
    twin_of = dict(zip(pair.params, pair.twins, strict=True))
    for layer in net:

        def look(module, args):
            assert_same_bits(module.parameters(), map(twin_of.get, module.parameters()))

        layer.register_forward_pre_hook(look)
    for number in range(STEPS):
        x = torch.randn(4, 8, generator=pair.generator)
        out = x
        for layer in net:
            out = layer(out.to(layer.weight.device))
        loss = out.square().sum()
        grads = torch.autograd.grad(loss, pair.params, retain_graph=True)
        keep_busy(device)  # so that backward reads weights while the next ones are there already
        loss.backward()
        assert not free_grads or number == 0 or all(sent(p.grad) is not None for p in pair.params)
        for twin, grad in zip(pair.twins, grads, strict=True):
            twin.grad = grad
        pair.ours.step()
        pair.plain.step()
        pair.zero_grad()
    pair.check()
    # Speculative steps are begun only if the worker gets to them.
    assert pair.ours.stats()["early"] > 0


# Devices that fail


@pytest.mark.parametrize("where", ["gradients", "after", "room"])
def test_a_device_that_fails_when_it_is_asked(where, monkeypatch):
    """CUDA says so in whatever is called next: the thread goes on, and who waits is told."""
    failing = []

    class Failing(LateStreams):
        def fetch(self, copies):
            super().fetch(copies).synchronize()
            return Told([DeviceError("asked")] if failing and where == "gradients" else [True])

        def event_now(self):
            return Told([DeviceError("asked")] if failing and where == "after" else [True])

        def has_room(self):
            if failing and where == "room":
                raise DeviceError("asked")
            return super().has_room()

    monkeypatch.setattr(
        "deepspeed_ext.offload.gradient_intake.CopyStreams", lambda d: Failing(d, lambda: 0)
    )
    pair = warm()
    before = [p.detach().clone() for p in pair.params]
    pair.backward()
    for param in pair.params:
        param.grad = param.grad.clone()  # so that no step is speculative
    failing.append(True)
    with pytest.raises(DeviceError, match="asked"):
        pair.ours.step()
    failing.clear()
    assert pair.ours._pipeline.worker._thread.is_alive()
    if where == "gradients":
        assert_same_bits(pair.params, before)
    pair.ours.close()


class Full(Exception):
    """Of memory, say."""


def test_an_exception_in_the_middle_of_a_step(monkeypatch):
    """What was queued before takes the gradients that there were, whatever comes after."""
    pair = late_pair(monkeypatch, "cpu")
    for _ in range(3):
        pair.backward()
        for param in pair.params:
            param.grad = param.grad.clone()  # so that none is taken before step()
        step(pair)
        pair.zero_grad()
    pair.backward()
    pair.give()
    for param in pair.params:
        param.grad = param.grad.clone()
    fetch, taken, gate = HostBucket.fetch, [], Gate(monkeypatch, "step")

    def broken(bucket):
        if len(taken) == 3:
            raise Full
        taken.extend(bucket.owners)
        return fetch(bucket)

    with monkeypatch.context() as patch:
        patch.setattr(HostBucket, "fetch", broken)
        with pytest.raises(Full):
            pair.ours.step()
    for param in pair.params:
        param.grad.fill_(float("nan"))
    gate.open()
    pair.ours.synchronize()
    pair.plain.step()
    assert taken
    for param, twin in zip(pair.params, pair.twins, strict=True):
        assert any(param is p for p in taken) == torch.equal(param, twin) or not param.numel()


# Weights on their way back


def test_no_more_than_some_weights_are_queued_for_a_device(monkeypatch):
    """What is stepped later may be wanted sooner, and goes before what is not queued yet."""
    small_parts(monkeypatch, most=64)
    be_late(monkeypatch, "cpu", most=0)
    most, order = [], []
    send = LateStreams.send

    def noted(streams, copies, after):
        event = send(streams, copies, after)
        event._in_vain = 10**9  # it is over only for who waits
        most.append(len(streams._returning))
        order.append(copies[0].target.data_ptr())
        return event

    monkeypatch.setattr(LateStreams, "send", noted)
    params = [nn.Parameter(torch.randn(64)) for _ in range(30)]
    pair = Pair(params=params, model=nn.ParameterList())
    pair.train(4)
    pair.backward()
    pair.give()
    await_speculation(pair.ours)  # what step() asks for goes as it is made
    pair.ours.step()
    buckets = pair.ours._pipeline._buckets
    pair.ours._pipeline.worker.wait([bucket.task for bucket in buckets])
    assert len(buckets) == 30 and pair.ours.stats()["committed"] >= 30
    assert max(most[-30:]) == 8
    assert order[-30:] == [p.data_ptr() for p in params]
    pair.plain.step()
    pair.zero_grad()
    pair.check()


@on_late_devices
@pytest.mark.parametrize("ending", ["close", "gone"])
def test_weights_are_there_when_the_optimizer_is_not(device, ending, monkeypatch):
    """Nothing waits for them any more, on whatever stream they are read."""
    pair = late_pair(monkeypatch, device, model=nn.ParameterList())
    for _ in range(4):
        pair.backward()
        step(pair)
        pair.zero_grad()
    keep_busy(device)
    pair.backward()
    step(pair)
    if ending == "close":
        pair.ours.close()
    else:
        pair.ours = None
    got = []
    for param in pair.params:
        on_another = torch.cuda.stream(torch.cuda.Stream(param.device)) if param.is_cuda else None
        with on_another or nullcontext():
            got.append(param.detach().clone())
    for where in {param.device for param in pair.params if param.is_cuda}:
        torch.cuda.synchronize(where)
    assert_same_bits(got, pair.twins)


# Threads


def test_two_threads_wait_for_one_step(monkeypatch):
    """As one that saves a checkpoint beside training."""
    pair = Pair(params=make_params(), model=nn.ParameterList())
    pair.train(4)
    for _ in range(20):
        with monkeypatch.context() as patch:
            gate = Gate(patch, "adopt")
            pair.backward()
            pair.give()
            pair.ours.step()
            errors = []

            def wait(errors=errors):
                try:
                    pair.ours.synchronize()
                except BaseException as error:
                    errors.append(error)

            waiting = [threading.Thread(target=wait) for _ in range(4)]
            for thread in waiting:
                thread.start()
            gate.open()
            for thread in waiting:
                thread.join(PATIENCE)
            assert not errors
        pair.plain.step()
        pair.zero_grad()
    pair.check()


# Devices of which there are several


@needs_two
@pytest.mark.parametrize("free_grads", [False, True])
def test_parameters_that_move_from_one_gpu_to_another(free_grads, monkeypatch):
    """The copies of their gradients wait for the streams of the other device from then on."""
    be_late(monkeypatch, "cuda")
    made = Summed if free_grads else Pair
    pair = made("cuda", params=params_on("cuda:0"))
    for number in range(9):
        if number in (4, 6):
            where = "cuda:1" if number == 4 else "cuda:0"
            for params in (pair.params, pair.twins):
                for param in params[::2] if number == 4 else params:
                    param.data = param.data.to(where)
            state = pair.plain.state_dict()
            pair.plain = KINDS["adam"].on_cuda(pair.twins, **KINDS["adam"].options)
            pair.plain.load_state_dict(state)
        keep_busy("two")
        pair.backward()
        step(pair)
        pair.zero_grad()
        assert_same_bits(pair.params, pair.twins)
        buckets = pair.ours._pipeline._buckets
        assert all(p.device == b.streams.device for b in buckets for p in b.owners)


@needs_two
def test_memory_of_a_copy_that_nobody_wants_goes_to_no_other_device(monkeypatch):
    """It is still written to."""
    streams = [CopyStreams(torch.device("cuda", i)) for i in range(2)]
    sources = [torch.full((1 << 20,), float(i), device=f"cuda:{i}") for i in range(2)]
    for _ in range(3):
        unwanted = streams[0].staged(sources[:1])
        with torch.cuda.device(0):
            torch.cuda._sleep(200_000_000)
        streams[0].fetch([Copy(unwanted[0], sources[0])])
        del unwanted
        [wanted] = streams[1].staged(sources[1:])
        streams[1].fetch([Copy(wanted, sources[1])]).synchronize()
        torch.cuda.synchronize(0)
        assert (wanted == 1).all()


def test_copy_streams_share_no_memory():
    """The same with no GPU: what one has given back goes only to itself."""
    streams = [LateStreams(torch.device("cpu"), lambda: 0) for _ in range(2)]
    source = [torch.ones(1 << 16)]
    [first] = streams[0].staged(source)
    address = first.data_ptr()
    del first
    [other] = streams[1].staged(source)
    [again] = streams[0].staged(source)
    assert again.data_ptr() == address != other.data_ptr()
