"""Weights on their way: what does not wait, what is left of it, and what can go wrong meanwhile."""

import gc
import threading

import pytest
import torch
from offload_cases import KINDS, PATIENCE, Gate, Pair, await_speculation, warm
from optim_cases import assert_same_bits, make_params, needs_cuda
from test_offload_arriving import UnderWay
from torch import Tensor, nn
from torch.nn import Parameter

from deepspeed_ext.collector import await_collected
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.offload.arriving import arrive, set_out
from deepspeed_ext.offload.bucket import HostBucket
from deepspeed_ext.optim import DeepSpeedCPUAdam


class Layer(nn.Module):
    """One weight, and no module that is called."""

    def __init__(self, made=Parameter):
        super().__init__()
        self.weight = made(torch.linspace(-1, 1, 12).view(3, 4))


def test_gradients_are_not_on_their_way(monkeypatch):
    """What comes between a step and the next forward waits for nothing."""
    under_way = UnderWay(monkeypatch)
    for param in under_way.net.parameters():
        assert param.requires_grad and param.is_leaf and isinstance(param, Parameter)
        param.grad = None
        assert param.grad is None and param.__class__ is Parameter and hash(param) == id(param)
    under_way.pair.ours.zero_grad()
    under_way.net.zero_grad()
    assert all(under_way.is_arriving())
    under_way.finish()


def test_what_is_touched_waits_for_its_bucket_only(monkeypatch):
    under_way = UnderWay(monkeypatch, net=nn.ModuleList(nn.Linear(8, 8) for _ in range(3)))
    under_way.gate.open()
    under_way.pair.ours._pipeline.worker.wait(
        bucket.task for bucket in under_way.pair.ours._pipeline._buckets
    )
    assert all(under_way.is_arriving())
    assert under_way.net[1].weight.shape == (8, 8)
    assert not under_way.is_arriving()[2] and under_way.is_arriving()[0]
    under_way.finish()


def test_backward_knows_of_a_step_that_is_under_way(monkeypatch):
    """A weight that it has saved is neither the old nor the new one for sure."""
    under_way = UnderWay(monkeypatch, net=Layer())
    under_way.gate.open()
    loss = under_way.net.weight.square().sum()
    under_way.gate = Gate(monkeypatch, "adopt")
    under_way.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    under_way.finish()


class Mine(Parameter):
    """A class of the user's, which is asked by torch."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


@pytest.mark.parametrize("made", [Mine, lambda value: value.requires_grad_()])
def test_other_classes(made, monkeypatch):
    """One of the user's is left alone: step() waits. A plain tensor is waited for as any."""
    torch.manual_seed(0)
    weight = made(torch.randn(3, 4))
    pair = Pair(params=[weight], model=nn.Module())
    pair.twins = [Parameter(weight.detach().clone())]
    pair.plain = KINDS["adam"].offloaded(pair.twins, **KINDS["adam"].options)
    pair.train(4)
    gate = Gate(monkeypatch, "adopt")
    pair.backward()
    pair.give()
    await_speculation(pair.ours)
    if type(weight) is Mine:
        gate.open_soon()
    pair.ours.step()
    if type(weight) is Mine:
        with torch._C.DisableTorchFunctionSubclass():
            got = weight.detach().clone()
    else:
        gate.await_thread()
        gate.open_soon()
        got = weight * 1
    pair.plain.step()
    assert torch.equal(got, pair.twins[0])
    assert type(weight) in (Mine, Tensor)
    pair.zero_grad()
    pair.check()


def test_a_class_that_is_given_meanwhile(monkeypatch):
    under_way = UnderWay(monkeypatch, net=Layer())
    under_way.gate.open_soon()
    under_way.net.weight.__class__ = Mine
    assert type(under_way.net.weight) is Mine
    assert torch.equal(under_way.net.weight, under_way.twin.weight)


def test_another_argument_has_a_class_of_its_own(monkeypatch):
    """It is asked, too, when the weight has arrived."""

    class Counted(Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if not all(
                issubclass(kind, (Tensor, cls)) and "Arriving" not in kind.__name__
                for kind in types
            ):
                return NotImplemented
            cls.calls += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    under_way = UnderWay(monkeypatch, net=Layer())
    x = torch.ones(2, 4).as_subclass(Counted)
    under_way.gate.open_soon()
    got = nn.functional.linear(x, under_way.net.weight)
    assert type(got) is Counted and Counted.calls == 1
    assert torch.equal(got.as_subclass(Tensor), torch.ones(2, 4) @ under_way.twin.weight.T)


def test_two_steps_of_two_optimizers(monkeypatch):
    """Both have the same weights, as in training by turns."""
    params = [Parameter(torch.ones(3, 4))]
    twins = [Parameter(torch.ones(3, 4))]
    ours = [OffloadOptimizer(params, model=nn.Module(), lr=0.1 * (i + 1)) for i in range(2)]
    plain = [DeepSpeedCPUAdam(twins, lr=0.1 * (i + 1)) for i in range(2)]
    for step in range(6):
        for one, other in zip(ours, plain, strict=True):
            params[0].grad = torch.full((3, 4), float(step))
            twins[0].grad = torch.full((3, 4), float(step))
            one.step()
            other.step()
    assert_same_bits(params, twins)


# What can go wrong


class Broken(Exception):
    """In the worker."""


def test_an_error_is_raised_once_by_the_first_touch(monkeypatch):
    pair = Pair(params=make_params(), model=nn.Module())
    pair.train(4)
    before = [p.detach().clone() for p in pair.params]
    pair.backward(times=2)

    def broken(*_):
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(HostBucket, "_step_part", broken)
        pair.ours.step()
        with pytest.raises(Broken):
            pair.params[0] * 1
    assert_same_bits(pair.params, before)
    assert all(type(p) is Parameter and not vars(p) for p in pair.params)
    pair.ours.step()


@pytest.mark.parametrize("way", ["close", "gone", "collected"])
@pytest.mark.usefixtures("garbage_stays")
def test_classes_are_given_back_by_an_optimizer_that_ends(way, monkeypatch):
    under_way = UnderWay(monkeypatch)
    net, twin, pair = under_way.net, under_way.twin, under_way.pair
    under_way.gate.open_soon()
    if way == "close":
        pair.ours.close()
    else:
        if way == "collected":
            pair.ours.itself = pair.ours
        pair.ours = None
        gc.collect()
        await_collected()
    assert all(type(p) is Parameter and not vars(p) for p in net.parameters())
    assert_same_bits(net.parameters(), twin.parameters())


def test_a_thread_that_reads_while_a_step_is_queued(monkeypatch):
    """The weights are on their way already, and there is no task to wait for yet."""
    pair = Pair(params=[Parameter(torch.randn(8, 8))], model=nn.Module())
    pair.train(4)
    pair.backward()
    pair.give()
    await_speculation(pair.ours)
    worker, got = pair.ours._pipeline.worker, []
    submit, thread = worker.submit, threading.Thread(target=lambda: got.append(pair.params[0] * 1))

    def late(task):
        if not thread.ident:
            assert type(pair.params[0]) is not Parameter
            thread.start()
            thread.join(0.05)  # no proof that it will wait longer, but it never fails wrongly
        return submit(task)

    monkeypatch.setattr(worker, "submit", late)
    pair.ours.step()
    thread.join(PATIENCE)
    pair.plain.step()
    assert torch.equal(got[0], pair.twins[0])
    pair.zero_grad()
    pair.check()


def test_a_thread_that_has_waited_for_the_step_before(monkeypatch):
    """It gives nothing back that has set out since."""
    under_way = UnderWay(monkeypatch)
    worker = under_way.pair.ours._pipeline.worker
    wait, waited, go_on = worker.wait, threading.Event(), threading.Event()

    def slow(tasks):
        wait(tasks)
        if threading.current_thread() is thread:
            waited.set()
            assert go_on.wait(PATIENCE)

    thread = threading.Thread(target=under_way.pair.ours.synchronize)
    monkeypatch.setattr(worker, "wait", slow)
    under_way.gate.open()
    thread.start()
    assert waited.wait(PATIENCE)
    under_way.gate = Gate(monkeypatch, "adopt")
    under_way.step()
    first = next(iter(under_way.pair.ours._pipeline._buckets))._underway
    assert first and all(type(param) is not Parameter for param in first)
    monkeypatch.setattr(worker, "wait", wait)
    go_on.set()
    thread.join(0.05)  # it goes on to what is held now, or ends
    assert first and all(type(param) is not Parameter for param in first)
    under_way.finish()
    thread.join(PATIENCE)


def test_a_weight_that_sets_out_again_as_it_arrives():
    """Whoever touches it waits for that, too: another thread may have queued the next step."""
    param = Parameter(torch.zeros(2))
    came = []

    def arrive_twice():
        arrive([param])
        came.append("first")
        set_out([param], arrive_at_last)

    def arrive_at_last():
        arrive([param])
        came.append("second")
        param.fill_(7.0)

    with torch.no_grad():
        assert set_out([param], arrive_twice)
        assert (param + 1).tolist() == [8.0, 8.0]
    assert came == ["first", "second"] and type(param) is Parameter


def test_threads_that_touch_the_same_weight(monkeypatch):
    for _ in range(5):
        with monkeypatch.context() as patch:
            under_way = UnderWay(patch)
            got, errors = [], []

            def touch(net=under_way.net, got=got, errors=errors):
                try:
                    got.append(net.head.weight * 1)
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=touch) for _ in range(4)]
            for thread in threads:
                thread.start()
            under_way.gate.open()
            for thread in threads:
                thread.join(PATIENCE)
            assert not errors and len(got) == 4
            assert all(torch.equal(value, under_way.twin.head.weight) for value in got)
            under_way.finish()


@needs_cuda
def test_a_touch_on_another_stream_is_for_all(monkeypatch):
    """Whoever comes after it finds a plain parameter, and waits for nothing any more."""
    from late_copies import SleepyStreams

    monkeypatch.setattr("deepspeed_ext.offload.gradient_intake.CopyStreams", SleepyStreams)
    pair = warm("cuda", model=nn.Module())
    for _ in range(4):
        pair.backward()
        pair.give()
        pair.ours.step()
        pair.plain.step()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            on_side = [p.detach().clone() for p in pair.params]
        here = [p.detach().clone() for p in pair.params]
        torch.cuda.synchronize()
        assert_same_bits(on_side, pair.twins)
        assert_same_bits(here, pair.twins)
        pair.zero_grad()


# Compiled code


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


def of_weights(net, x):
    """A head that is not called, as where it is one operator with the loss."""
    return nn.functional.linear(x, net.one.weight, net.one.bias) * net.two.weight.sum()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.parametrize("forward", [lambda net, x: net(x), of_weights])
@pytest.mark.parametrize("hooked", [False, True])
def test_graphs_of_an_earlier_model_of_the_same_classes(hooked, forward, monkeypatch):
    """They know nothing of our hooks. Something is compiled once more, and then no more."""
    torch._dynamo.reset()
    frames = torch._dynamo.utils.counters["frames"]
    run = torch.compile(forward, backend="eager")
    x = torch.linspace(-1, 1, 8).view(2, 4)
    earlier = Block()
    run(earlier, x).sum().backward()
    counts = []
    net = Block()
    twin = Block()
    twin.load_state_dict(net.state_dict())
    settings = {"model": net} if hooked else {"model": nn.Module()}
    ours = OffloadOptimizer(net.parameters(), lr=0.1, **settings)
    plain = DeepSpeedCPUAdam(twin.parameters(), lr=0.1)
    for step in range(10):
        out, wanted = run(net, x), forward(twin, x)
        assert torch.equal(out, wanted), step
        out.square().sum().backward()
        for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            theirs.grad = None if mine.grad is None else mine.grad.clone()
        await_speculation(ours)
        with monkeypatch.context() as patch:
            gate = Gate(patch, "_send")
            ours.step()
            gate.await_thread()
        gate.open_soon()
        plain.step()
        ours.zero_grad()
        counts.append(frames["total"])
    assert counts[-1] == counts[2], counts
    torch._dynamo.reset()
