"""Optimizers that the garbage collector takes, wherever it runs: what they leave does no harm."""

import gc
from pathlib import Path

import pytest
import torch
import warm_python
from torch import nn

from deepspeed_ext.collector import await_collected, end_outside, is_collecting
from deepspeed_ext.offload import OffloadOptimizer

HELPERS = [Path(__file__).parent, Path(__file__).parents[1] / "optim"]


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def hooks_in(model):
    both = ("_state_dict_pre_hooks", "_forward_pre_hooks")
    return [len(getattr(module, name)) for module in model.modules() for name in both]


def used(model):
    optimizer = OffloadOptimizer(model.parameters(), model=model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer


def in_a_cycle(model):
    optimizer = used(model)
    optimizer.itself = optimizer
    return [optimizer]


@pytest.mark.usefixtures("garbage_stays")
def test_collected_while_torch_goes_through_hooks_of_state_dicts():
    model, calls = net(), []
    old = in_a_cycle(model)

    def collect(*_):
        old.clear()
        gc.collect()
        calls.append("collect")

    model.register_state_dict_pre_hook(collect)
    with used(model) as _:  # whose hooks are behind
        model.register_state_dict_pre_hook(lambda *_: calls.append("behind"))
        expected = [name for name, _ in model.named_parameters()]
        assert list(model.state_dict()) == expected
        assert calls == ["collect", "behind"]
        model(torch.ones(1, 4)).sum().backward()


@pytest.mark.usefixtures("garbage_stays")
def test_hooks_of_those_that_were_collected_go_with_the_next():
    model = net()
    hooks = hooks_in(model)
    for _ in range(3):
        in_a_cycle(model)
        gc.collect()
    used(model).close()
    assert hooks_in(model) == hooks


@pytest.mark.usefixtures("garbage_stays")
def test_hooks_of_one_that_is_dropped_go_with_it():
    """What compiles or scripts a model looks at its hooks, and does not know these."""
    model = net()
    hooks = hooks_in(model)
    optimizer = used(model)
    assert hooks_in(model) != hooks
    del optimizer
    assert hooks_in(model) == hooks
    torch.jit.script(model)


@pytest.mark.usefixtures("garbage_stays")
def test_a_step_of_one_that_is_collected_is_taken():
    model, same = net(), net()
    same.load_state_dict(model.state_dict())
    in_a_cycle(model)
    gc.collect()
    used(same).close()
    for param, expected in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(param, expected)  # who looks at it waits for it
    await_collected()


@pytest.mark.usefixtures("garbage_stays")
def test_ends_are_left_to_a_thread_by_the_collector_alone():
    class Noting:
        def __init__(self):
            self.itself = self

        def __del__(self):
            assert is_collecting()
            end_outside(lambda: ends.append(is_collecting()))

    ends = []
    end_outside(lambda: ends.append(is_collecting()))
    assert ends == [False]
    gc.collect()
    Noting()
    gc.collect()
    assert not is_collecting()
    await_collected()
    assert ends == [False, False]


PROGRAM = """
import gc, sys, threading, torch

sys.path += sys.argv[3:]
from durable_net import Net, opened, train, values
from deepspeed_ext.offload.worker import Task, Urgency

where, folder = sys.argv[1:3]
net = Net()
optimizer = opened(net, folder, resume=False)
train(net, optimizer, 1, 2)
optimizer.commit()
expected = values(net, optimizer)
train(net, optimizer, 3, 3)  # nobody is shown state any more
optimizer.synchronize()
pipeline = optimizer._pipeline
ring, worker = pipeline.ring, pipeline.worker
ring.settle()  # nothing is under way

held, go, over = threading.Event(), threading.Event(), threading.Event()

def collect():
    held.set()
    go.wait()
    gc.collect()
    over.set()

gc.collect()
gc.disable()
optimizer.itself = optimizer
if where == "hook":  # it holds a lock that the worker wants
    with ring._lock:
        def work(lock=ring._lock):
            held.set()
            with lock:
                over.set()
        worker.submit(Task(work, Urgency.STEP))
        held.wait()
        del optimizer, pipeline, ring, worker, work
        gc.collect()
elif where == "worker":
    worker.submit(Task(collect, Urgency.STEP))
    held.wait()
    worker.submit(Task(lambda: None, Urgency.STEP))
    del optimizer, pipeline, ring, worker
    go.set()
else:
    thread = ring.records._checking if where == "reads" else ring.records._putting
    thread.submit(collect)
    held.wait()
    if where == "reads":
        ring.start_anew()
        assert ring._reads
    else:
        place = ring._order[0]
        slab = ring.take(place)
        ring.give_back(place, slab, None)
        assert ring._writes
        del slab, place
    del optimizer, pipeline, ring, worker, thread
    go.set()
gc.enable()
if sys.argv[-1] != "at once":
    assert over.wait(60)
    net = Net()
    with opened(net, folder) as optimizer:  # nobody has the folder any more
        for ours, other in zip(values(net, optimizer), expected, strict=True):
            assert torch.equal(ours, other)
print("end")
"""


@pytest.mark.parametrize("where", ["reads", "writes", "worker", "hook"])
@pytest.mark.parametrize("how", ["goes on", "at once"])
def test_collected_in_a_thread_that_its_end_waits_for(where, how, tmp_path):
    run = warm_python.run("-c", PROGRAM, where, tmp_path, *HELPERS, how, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, "end\n", "")
