"""Exceptions in hooks, in backward and in the worker; steps without backward; forks and Ctrl-C."""

import os
import signal
import sys
import threading
import time
import traceback

import pytest
import torch
from offload_cases import (
    PATIENCE,
    WARM,
    Gate,
    Pair,
    await_speculation,
    finish,
    same_values,
    small_parts,
    warm,
)
from optim_cases import assert_same_bits, make_params, on_each_device, snapshot
from torch.nn import Parameter

from deepspeed_ext.offload.bucket import HostBucket
from deepspeed_ext.offload.worker import Worker


class Broken(Exception):
    """What a test lets go wrong."""


def breaking(monkeypatch, method, times=1, owner=HostBucket):
    """Let the next calls of a method raise, then work again."""
    original, left = getattr(owner, method), [times]

    def broken(*args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise Broken(f"in {method}")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, broken)


@on_each_device
def test_an_exception_in_backward(device, monkeypatch):
    """As when memory runs out: some gradients are there, and some have left already."""
    small_parts(monkeypatch, most=192)
    layers = [torch.nn.Linear(8, 8).to(device) for _ in range(5)]
    model = torch.nn.Sequential(*layers)
    pair = Pair(device, params=model.parameters())
    x = torch.ones(2, 8, device=device)

    def fail(grad):
        raise torch.OutOfMemoryError("no memory")

    def run(breaks_after=None):
        out = x
        for i, layer in enumerate(layers):
            out = layer(out)
            if i == breaks_after:
                out.register_hook(fail)
        out.square().mean().backward()

    for _ in range(WARM):
        run()
        pair.step()
    for after, goes_on in ((2, "zero"), (0, "zero"), (3, "more"), (2, "step")):
        with pytest.raises(torch.OutOfMemoryError):
            run(after)
        await_speculation(pair.ours)
        if goes_on == "zero":
            pair.ours.zero_grad()
        if goes_on != "step":
            run()
        pair.step()
        pair.check()
        for _ in range(3):
            run()
            pair.step()
            pair.check()


@on_each_device
@pytest.mark.parametrize("where", ["before", "after"])
def test_an_exception_in_a_hook_of_the_user(device, where):
    params = make_params(device)
    raises = [False]

    def hook(param):
        if raises[0]:
            raise Broken("mine")

    if where == "before":
        params[4].register_post_accumulate_grad_hook(hook)
    pair = Pair(device, params=params)
    if where == "after":
        params[4].register_post_accumulate_grad_hook(hook)
    pair.train(WARM)
    raises[0] = True
    with pytest.raises(Broken):
        pair.backward()
    await_speculation(pair.ours)
    raises[0] = False
    finish(pair)


@on_each_device
def test_an_exception_while_gradients_leave(device, monkeypatch):
    """Hooks only start work sooner: no backward fails by them, and step() does it all again."""
    pair = warm(device)
    breaking(monkeypatch, "fetch")
    pair.backward()
    finish(pair, committed=0)


@on_each_device
def test_an_exception_while_a_step_begins(device, monkeypatch):
    """Nothing was stepped, and the step can be made up for."""
    pair = warm(device)
    saved, weights = snapshot(pair.ours), [p.detach().clone() for p in pair.params]
    pair.backward()
    await_speculation(pair.ours)
    same_values(pair)
    breaking(monkeypatch, "fetch")
    with pytest.raises(Broken):
        pair.ours.step()
    assert_same_bits(pair.params, weights)
    assert torch.equal(pair.ours.state_dict()["state"][8]["step"], saved["state"][8]["step"])
    finish(pair)


@on_each_device
@pytest.mark.parametrize("over", [False, True])
def test_an_exception_in_a_speculative_step(device, over, monkeypatch):
    """It was speculation: the step is taken anew, whether that is over by then or not."""
    pair = warm(device)
    gate = Gate(monkeypatch, "step_speculatively")
    breaking(monkeypatch, "_step_part")
    pair.backward()
    gate.await_thread()
    if over:
        gate.open()
        finish(pair, committed=0)
        return
    pair.give()
    gate.open_soon()
    pair.ours.step()
    pair.plain.step()
    pair.zero_grad()
    pair.check()
    pair.train(3)


@on_each_device
@pytest.mark.parametrize("waits", ["step", "state", "synchronize", "forward", "next step", "close"])
def test_an_exception_in_the_worker_surfaces_where_somebody_waits(device, waits, monkeypatch):
    others = offload_threads()
    model = torch.nn.Linear(6, 5).to(device)
    x = torch.ones(2, 6, device=device)
    watched = {} if waits == "step" else {"model": model}
    pair = Pair(device, params=model.parameters(), **watched)
    pair.train(WARM)
    before = [p.detach().clone() for p in pair.params]
    pair.backward()
    await_speculation(pair.ours)
    same_values(pair)
    breaking(monkeypatch, "_step_part")
    waiting = {
        "step": lambda: None,
        "state": lambda: pair.ours.state,
        "synchronize": lambda: pair.ours.synchronize(),
        "forward": lambda: model(x),
        "next step": lambda: pair.ours.step(),
        "close": lambda: pair.ours.close(),
    }
    with pytest.raises(Broken, match="in _step_part") as caught:
        pair.ours.step()
        waiting[waits]()
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "broken" in names  # where it was raised, in the worker
    if waits == "close":
        assert set(offload_threads()) <= set(others)
        return
    assert_same_bits(pair.params, before)  # it told so once, and nothing was stepped
    finish(pair)


def test_an_exception_in_the_last_step_of_an_optimizer_that_goes(monkeypatch, caplog):
    """Nobody is left to raise it: it is logged, once."""
    model = torch.nn.Linear(6, 5)
    for closes in (False, True):
        caplog.clear()
        pair = Pair(params=model.parameters(), model=model)
        pair.train(WARM)
        pair.backward()
        same_values(pair)
        await_speculation(pair.ours)
        pair.ours.param_groups[0]["lr"] *= 2  # so no speculative step counts
        breaking(monkeypatch, "_step_part")
        pair.ours.step()
        if closes:
            with pytest.raises(Broken):
                pair.ours.close()
        pair.ours = None
        texts = [record.getMessage() for record in caplog.records]
        assert texts == ([] if closes else ["OffloadOptimizer: its last step failed"])


@on_each_device
def test_one_bucket_of_several_fails(device, monkeypatch):
    """The error is told once; others have been stepped, as the plain class does it."""
    small_parts(monkeypatch, most=192)
    pair = warm(device)
    counts = [float(pair.ours.state[p]["step"]) for p in pair.params]
    pair.backward()
    await_speculation(pair.ours)
    same_values(pair)
    await_speculation(pair.ours)
    pair.ours.param_groups[0]["lr"] *= 2  # so no speculative step counts
    breaking(monkeypatch, "_step_part")
    with pytest.raises(Broken):
        pair.ours.step()
    after = [float(pair.ours.state[p]["step"]) for p in pair.params]
    assert sum(after) > sum(counts) and min(b - a for a, b in zip(counts, after, strict=True)) == 0
    pair.ours.zero_grad()
    pair.backward()
    pair.ours.step()  # goes on


@on_each_device
def test_steps_without_backward(device):
    pair = warm(device)
    for _ in range(3):
        pair.step()
        pair.check()
    pair.train(3)
    pair.backward()
    for _ in range(3):  # with the same gradients
        pair.give()
        await_speculation(pair.ours)
        pair.ours.step()
        pair.plain.step()
        pair.check()
    pair.zero_grad()
    pair.train(3)


@on_each_device
def test_gradients_kept_from_one_step_to_the_next(device):
    """Without zero_grad they add up, as in torch."""
    pair = Pair(device)
    for _ in range(8):
        pair.backward()
        pair.give()
        await_speculation(pair.ours)
        pair.ours.step()
        pair.plain.step()
        pair.check()
    assert pair.ours.stats()["committed"] >= 5


# Forks, signals


def offload_threads():
    return [t for t in threading.enumerate() if t.name == "deepspeed_ext-offload"]


def in_child(run):
    """Run a function in a fork of this process and return what it returned, a text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(PATIENCE)
            text = run()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, (text or "").encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child has ended with {status}: {text}"
    return text


FORK = (
    "RuntimeError: OffloadOptimizer: this process is a fork of the one that made it, expected the "
    "same; make one here, or call synchronize() before the fork to read weights"
)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("when", ["idle", "speculative", "under way"])
def test_a_fork_cannot_step_and_the_parent_goes_on(when, monkeypatch):
    model = torch.nn.Linear(6, 5)
    pair = Pair(params=model.parameters(), **({"model": model} if when == "under way" else {}))
    pair.train(WARM)
    gate = None
    pair.backward()
    if when == "speculative":
        gate = Gate(monkeypatch, "step_speculatively")
        pair.ours.zero_grad()
        pair.backward()
        gate.await_thread()
    if when == "under way":
        gate = Gate(monkeypatch, "adopt")
        pair.give()
        await_speculation(pair.ours)
        pair.ours.step()
        gate.await_thread()

    def child():
        for param in pair.params:
            param.grad = torch.ones_like(param)
        pair.ours.step()
        return "stepped"

    assert in_child(child) == FORK
    if when == "under way":  # of which the child has a part
        reads = (
            lambda: pair.ours.state_dict(),
            lambda: model(torch.ones(1, 6)),
            lambda: model.weight * 1,
        )
        for read in reads:
            assert in_child(lambda read=read: f"read {read()}") == FORK
    else:
        assert in_child(lambda: str(len(pair.ours.state_dict()))) == "2"
    assert in_child(lambda: pair.ours.close()) == ""
    assert in_child(lambda: pair.ours.zero_grad()) == ""
    assert in_child(lambda: str(len(pair.ours.stats()) > 4)) == "True"

    def other():
        if gate:
            gate.open()
        params = [Parameter(torch.ones(4))]
        fresh = Pair(params=params)
        fresh.train(4)
        fresh.check_speculated(4)
        fresh.ours.close()

    if not torch.cuda.is_initialized():  # else torch has no backward in a fork
        assert in_child(other) == ""
    if gate:
        gate.open()
    if when == "under way":
        pair.plain.step()
        pair.ours._pipeline.worker.wait([b.task for b in pair.ours._pipeline._buckets])
        wanted = str(pair.twins[0][0].tolist())  # it is whole, though nobody has waited for it
        assert in_child(lambda: str((model.weight[0] * 1).tolist())) == wanted
        pair.zero_grad()
        pair.check()
        pair.train(3)
    else:
        finish(pair)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("whose", ["the worker's", "the hooks'"])
def test_a_fork_while_a_thread_holds_a_lock(whose):
    """Nobody opens it in the child, which has no thread but one."""
    pair = warm()
    pair.backward()
    await_speculation(pair.ours)
    pipeline = pair.ours._pipeline
    lock = pipeline.worker._changed if whose == "the worker's" else pipeline._lock
    held, over = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            assert over.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(PATIENCE)
    try:
        assert in_child(lambda: pair.ours.zero_grad()) == ""
        assert in_child(lambda: str(len(pair.ours.state_dict()))) == "2"
        assert in_child(lambda: pair.ours.step()) == FORK
        assert in_child(lambda: pair.ours.close()) == ""
    finally:
        over.set()
        thread.join()
    finish(pair, committed=1)


class CtrlC:
    """SIGINT for a thread that waits for the worker, once; for as long as the block is."""

    def __enter__(self):
        self._arrived = threading.Event()
        self._before = signal.signal(signal.SIGINT, self._arrive)

    def _arrive(self, *_):
        if not self._arrived.is_set():
            self._arrived.set()
            raise KeyboardInterrupt

    def __exit__(self, *_):
        signal.signal(signal.SIGINT, self._before)

    def send(self, gate, thread):
        """Send it again and again: one that comes right before a wait begins does not end it."""
        gate.await_thread()
        while not self._arrived.is_set():
            if is_in(sys._current_frames()[thread], Worker.wait.__code__):
                signal.pthread_kill(thread, signal.SIGINT)
            time.sleep(0.01)


WAITS = {
    "touch": lambda pair: pair.params[0] * 1,
    "step": lambda pair: pair.ours.step(),
    "synchronize": lambda pair: pair.ours.synchronize(),
    "state": lambda pair: pair.ours.state,
    "state_dict": lambda pair: pair.ours.state_dict(),
}


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_a_wait_and_not_the_step(wait, monkeypatch):
    model = torch.nn.Linear(6, 5)
    pair = Pair(params=model.parameters(), **({} if wait == "step" else {"model": model}))
    pair.train(WARM)
    gate = Gate(monkeypatch, "adopt")
    pair.backward()
    pair.give()
    await_speculation(pair.ours)
    if wait != "step":
        pair.ours.step()
        gate.await_thread()
    for _ in range(1 if wait == "step" else 2):
        ctrl_c = CtrlC()
        helper = threading.Thread(target=ctrl_c.send, args=(gate, threading.get_ident()))
        with ctrl_c:
            helper.start()
            with pytest.raises(KeyboardInterrupt):
                WAITS[wait](pair)
            helper.join()
    gate.open()
    pair.plain.step()
    pair.zero_grad()
    pair.check()
    pair.train(3)


def is_in(frame, code):
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
