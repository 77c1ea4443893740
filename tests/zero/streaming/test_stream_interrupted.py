"""Ctrl-C in what puts weights in place, and threads that come in between."""

import itertools
import threading
import time

import pytest
import torch
from interrupting import Interrupt, needs_its_points
from stream_cases import Model, assert_equal_models, loss_of, pair, some_ids
from torch import nn
from torch.autograd import grad_mode

from deepspeed_ext.offload import copies
from deepspeed_ext.zero.streaming import stream, windows

OURS = windows.__file__, copies.__file__


def change(model):
    for param in model.parameters():
        param.data.mul_(1.01)
        param.grad = None


@needs_its_points
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.long), 8])
def test_ctrl_c_at_points_of_a_forward(monkeypatch, step):
    monkeypatch.undo()  # copies are not late
    streamed, kept, _ = pair("cpu", layers=2)
    ids = some_ids("cpu", 0)
    for number in itertools.count(1, step):
        ctrl_c = Interrupt(number, (*OURS, grad_mode.__file__))
        ctrl_c.during(lambda: streamed(ids))
        assert torch.is_grad_enabled(), ctrl_c.where
        for model in (streamed, kept):
            change(model)
        loss, want = loss_of(streamed, ids), loss_of(kept, ids)
        assert torch.equal(loss, want), ctrl_c.where
        if not ctrl_c.where:
            break
    assert number > 100
    for value in (loss, want):
        value.backward()
    assert_equal_models(streamed, kept, gradients=True)


@needs_its_points
def test_ctrl_c_in_a_call_that_writes_weights(monkeypatch):
    monkeypatch.undo()

    def write(module, _):
        with torch.no_grad():
            module.weight.add_(1)

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    stream(model, to="cpu")
    model[0].register_forward_pre_hook(write)
    x = torch.ones(1, 8)
    for number in itertools.count(1, 3):
        ctrl_c = Interrupt(number, OURS)
        ctrl_c.during(lambda: model(x))
        model[1](x)  # closes what is open
        with torch.no_grad():
            model[0].weight.zero_()  # as an optimizer would
        model(x)
        assert (model[0].weight == 1).all(), ctrl_c.where
        if not ctrl_c.where:
            break


def test_inference_mode(device):
    streamed, kept, _ = pair(device)
    ids = some_ids(device, 0)
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(streamed(ids), kept(ids))
        for model in (streamed, kept):
            loss_of(model, ids).backward()
        assert_equal_models(streamed, kept, gradients=True)


def test_weights_that_forward_writes_in_inference_mode_are_taken_home(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    stream(model, to=device)
    model[1].register_forward_hook(lambda module, *_: module.weight.fill_(3))
    with torch.inference_mode():
        model(torch.ones(1, 8, device=device))
    assert (model[1].weight == 3).all()


def test_a_model_of_inference_mode_is_refused():
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    text = r"^zero.stream: parameter '0.weight' was made in torch.inference_mode\(\), expected"
    with pytest.raises(ValueError, match=text):
        stream(model, to="cpu")


def test_a_forward_in_another_thread_takes_nothing_from_a_backward(device):
    streamed, kept, _ = pair(device)

    def evaluate():
        with torch.no_grad():
            streamed(some_ids(device, 1))

    def meanwhile(_):
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()

    streamed.words.weight.register_hook(meanwhile)  # the last gradient of backward
    for model in (streamed, kept):
        loss_of(model, some_ids(device, 0)).backward()
    assert_equal_models(streamed, kept, gradients=True)


def test_gradients_of_a_backward_that_failed_are_dropped(device):
    streamed, kept, handle = pair(device)

    def fail(_):
        raise ValueError("no gradient")

    remove = streamed.words.weight.register_hook(fail).remove
    with pytest.raises(ValueError, match="no gradient"):
        loss_of(streamed, some_ids(device, 1)).backward()
    end = time.monotonic() + 10
    while handle._gradients._backwards and time.monotonic() < end:
        time.sleep(0.01)  # the thread of a GPU may still hold it
    assert not handle._gradients._backwards
    remove()
    streamed.zero_grad()
    for model in (streamed, kept):
        loss_of(model, some_ids(device, 0)).backward()
    assert_equal_models(streamed, kept, gradients=True)


def test_a_name_fits_the_outer_ones_of_modules_in_each_other():
    weight_norm = torch.nn.utils.parametrizations.weight_norm
    model = nn.Sequential(*(nn.Sequential(weight_norm(nn.Linear(8, 8))) for _ in range(2)))
    handle = stream(model, to="cpu", blocks=["[01]*"])
    assert handle.stats()["resting_bytes"] == sum(param.nbytes for param in model.parameters())
    with pytest.raises(TypeError, match=r"blocks is <class '.*Linear'>, expected several in a"):
        stream(Model(), blocks=nn.Linear)
