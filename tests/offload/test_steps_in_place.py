"""Parameters that are stepped where they are, in host memory: by the thread that step() awaits."""

from unittest import mock

import pytest
import torch
from torch import nn

from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.offload.worker import Worker
from deepspeed_ext.optim import DeepSpeedCPUAdam

OPTIONS = {"lr": 0.1, "weight_decay": 0.1}


def pair(**options):
    """Groups of one parameter each, kept where they are, and the plain class on twins."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(n, 3)) for n in (4, 1, 7)]
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    groups = [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(params)]
    of_twins = [{**group, "params": [p]} for group, p in zip(groups, twins, strict=True)]
    ours = OffloadOptimizer(groups, gpu_fraction=1.0, **OPTIONS, **options)
    return (ours, params), (DeepSpeedCPUAdam(of_twins, **OPTIONS), twins)


def give(params, number):
    for i, param in enumerate(params):
        param.grad = torch.full_like(param, number + i / 4.0)


def assert_alike(params, twins):
    assert all(map(torch.equal, params, twins))


def test_the_thread_steps_what_the_class_would():
    (ours, params), (plain, twins) = pair()
    for number in range(4):
        for optimizer, each in ((ours, params), (plain, twins)):
            give(each, number)
            if number % 2:
                optimizer.clip_and_step(0.5)
            else:
                optimizer.step()
        assert_alike(params, twins)
    stats = ours.stats()
    assert stats["step_seconds"] > 0 and not stats["bytes_out"] and not stats["bytes_back"]
    assert ours._pipeline.worker._thread is not None


def test_what_is_wrong_with_a_gradient_is_raised_by_step():
    (ours, params), (plain, twins) = pair()
    give(params, 0)
    params[1].grad_dtype = None
    params[1].grad = params[1].grad.double()
    with pytest.raises(ValueError, match=r"gradient of params\[1\] is torch.float64"):
        ours.step()
    for optimizer, each in ((ours, params), (plain, twins)):
        optimizer.load_state_dict({"state": {}, "param_groups": plain.state_dict()["param_groups"]})
        give(each, 1)
    with torch.no_grad():
        for param, twin in zip(params, twins, strict=True):
            twin.copy_(param)
    ours.step()
    plain.step()
    assert_alike(params, twins)


def test_a_step_that_is_interrupted_is_a_whole_one():
    (ours, params), (plain, twins) = pair()
    wait, calls = Worker.wait, []

    def interrupted(self, tasks):
        tasks = list(tasks)
        calls.append(tasks)
        if len(calls) == 1:
            raise KeyboardInterrupt
        wait(self, tasks)

    for optimizer, each in ((plain, twins), (ours, params)):
        give(each, 1)
        if optimizer is plain:
            optimizer.step()
    with mock.patch.object(Worker, "wait", interrupted), pytest.raises(KeyboardInterrupt):
        ours.step()
    assert len(calls[0]) == 3 and all(task.done for task in calls[1])
    assert_alike(params, twins)
    for optimizer, each in ((ours, params), (plain, twins)):
        give(each, 2)
        optimizer.step()
    assert_alike(params, twins)
