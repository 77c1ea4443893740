"""close() of streams: more than once, half-way, and while threads compute."""

import copy
import threading
from contextlib import contextmanager

import pytest
import torch
from stream_cases import LateEvent, assert_equal_models, loss_of, pair, some_ids

from deepspeed_ext import zero
from deepspeed_ext.offload.streamed import home_of
from deepspeed_ext.torch_internals.dispatch import saved_tensors_hooks_here
from deepspeed_ext.torch_internals.modules import APPLY
from deepspeed_ext.zero.streaming import is_streamed, streamed_model


def logits(model, device):
    with torch.no_grad():
        return model(some_ids(device, 9))


def assert_streams(model, handle):
    """It does so as if there had been no stream before."""
    resting = [param for param in model.layers.parameters() if home_of(param) is not None]
    assert sum(param.nbytes for param in resting) == handle.stats()["resting_bytes"] > 0
    for block in model.layers:
        assert "_zero_stream_block" in vars(block) and APPLY in vars(block.up)
    logits(model, handle.device)
    assert handle.stats()["ahead"] == 3


def assert_is_ordinary(model):
    assert not is_streamed(model)
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert APPLY not in vars(module)
        assert not any(isinstance(value, torch.Tensor) for value in vars(module).values())
    assert all(home_of(param) is None for param in model.parameters())


@contextmanager
def paused(monkeypatch, where, name):
    """Let the first call of a function wait, within this, until `go` is set."""
    call = getattr(where, name)
    inside, go, calls = threading.Event(), threading.Event(), []

    def waiting(*args):
        calls.append(args)
        if len(calls) == 1:
            inside.set()
            assert go.wait(30)
        return call(*args)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, waiting)
        try:
            yield inside, go
        finally:
            go.set()


@contextmanager
def in_thread(function):
    """Have a function called meanwhile; what it returns or raises is in a list then."""
    found = []

    def call():
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield thread, found
    finally:
        thread.join()


def test_a_second_close_leaves_a_later_stream_alone(device, rest):
    streamed, kept, first = pair(device, rest=rest)
    first.close()
    later = zero.stream(streamed, to=device, **rest)
    first.close()
    assert_streams(streamed, later)
    for model in (streamed, kept):
        loss_of(model, some_ids(device, 0)).backward()
    assert_equal_models(streamed, kept, gradients=True)
    later.close()
    assert_is_ordinary(streamed)


def test_a_second_close_in_another_thread_waits_for_the_first(device, monkeypatch):
    streamed, kept, first = pair(device)

    def again():
        first.close()
        return zero.stream(streamed, to=device)

    with (
        paused(monkeypatch, streamed_model, "set_home") as (inside, go),
        in_thread(first.close) as (_, closed),
    ):
        assert inside.wait(30)
        with in_thread(again) as (thread, found):
            thread.join(0.2)
            assert not found
            go.set()
    assert closed == [None]
    assert_streams(streamed, found[0])
    assert torch.equal(logits(streamed, device), logits(kept, device))


def test_a_second_close_finishes_one_that_failed(device, rest, monkeypatch):
    streamed, _, handle = pair(device, rest=rest)

    def fail(*_):
        raise KeyboardInterrupt

    for name in ("set_home", "set_beside"):
        with monkeypatch.context() as patch:
            patch.setattr(streamed_model, name, fail)
            with pytest.raises(KeyboardInterrupt):
                handle.close()
        assert is_streamed(streamed)  # no other stream comes in between
    handle.close()
    assert_is_ordinary(streamed)
    later = zero.stream(streamed, to=device, **rest)
    handle.close()
    assert_streams(streamed, later)


@pytest.mark.parametrize("grad", [False, True])
def test_close_is_refused_while_another_thread_computes(device, rest, grad, monkeypatch):
    streamed, kept, handle = pair(device, rest=rest)

    def compute():
        with torch.set_grad_enabled(grad):
            return streamed(some_ids(device, 9))

    text = r"^zero.stream: close\(\) is called while a Block computes in another thread, expected"
    with (
        paused(monkeypatch, streamed.layers[1].up, "forward") as (inside, go),
        in_thread(compute) as (_, found),
    ):
        assert inside.wait(30)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=text):
                handle.close()
        go.set()
    assert torch.equal(found[0], logits(kept, device))
    found.clear()
    for model in (streamed, kept):
        for param in model.parameters():
            param.data.mul_(0.5)
        loss_of(model, some_ids(device, 0)).backward()
    assert_equal_models(streamed, kept, gradients=True)
    handle.close()
    assert_is_ordinary(streamed)


def test_close_while_another_thread_fetches(monkeypatch):
    """It has got no weights yet, and computes with what rests."""
    streamed, kept, handle = pair("cpu")
    with (
        paused(monkeypatch, streamed_model, "Window") as (inside, go),
        in_thread(lambda: logits(streamed, "cpu")) as (_, found),
    ):
        assert inside.wait(30)
        handle.close()
        later = zero.stream(streamed, to="cpu")
        go.set()
    assert torch.equal(found[0], logits(kept, "cpu"))
    assert not handle._held and not handle._ahead
    later.close()
    assert_is_ordinary(streamed)


def test_close_within_a_forward_of_this_thread():
    streamed, kept, handle = pair("cpu")
    hook = streamed.layers[1].up.register_forward_hook(lambda *_: handle.close())
    assert torch.equal(logits(streamed, "cpu"), logits(kept, "cpu"))
    hook.remove()
    assert_is_ordinary(streamed)
    assert saved_tensors_hooks_here() is None


@pytest.mark.parametrize("then", ["close", "model", "block"])
def test_a_thread_that_ended_in_a_forward(device, then):
    """By what is no Exception, of which torch tells no hook."""
    streamed, kept, handle = pair(device)

    def leave(*_):
        raise SystemExit

    hook = streamed.layers[1].up.register_forward_hook(leave)
    with in_thread(lambda: logits(streamed, device)):
        pass
    hook.remove()
    for model in (streamed, kept):
        for param in model.parameters():
            param.data.mul_(0.5)
    if then == "close":
        handle.close()
        assert_is_ordinary(streamed)
        streamed.to(device)
    if then == "block":
        x = torch.ones(2, 16, device=device)
        with in_thread(lambda: streamed.layers[1](x)) as (_, found):  # may have the same number
            pass
        assert torch.equal(found[0], kept.layers[1](x))
    assert torch.equal(logits(streamed, device), logits(kept, device))
    LateEvent.found.clear()  # what was being read, nobody has used


def test_copies_stream_on(device):
    streamed, kept, handle = pair(device)
    twin = copy.deepcopy(streamed)
    handle.close()
    assert torch.equal(logits(twin, device), logits(kept, device))
    assert all(param.device.type == "cpu" for param in twin.layers[0].up.parameters())
