"""Commits beside what else is there: schedulers, other threads, steps, copies."""

import copy
import pickle
import threading

import pytest
import torch
from durable_net import Net, folder as folder, opened, train, values
from optim_cases import assert_same_bits

from deepspeed_ext.offload.bucket import HostBucket
from deepspeed_ext.offload.tiers.stream import StreamWriter


def test_a_scheduler_that_resumes(folder):
    """To make one sets the learning rate, which its own state does not have."""

    def made(net):
        optimizer = opened(net, folder)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
        if optimizer.committed is not None:
            scheduler.load_state_dict(optimizer.committed["scheduler"])
        optimizer.restore_options()
        return optimizer, scheduler

    def run(net, optimizer, scheduler, first, last):
        for step in range(first, last + 1):
            net.last.weight.grad = torch.full_like(net.last.weight, step)
            optimizer.step()
            scheduler.step()

    net = Net()
    optimizer, scheduler = made(net)
    run(net, optimizer, scheduler, 1, 3)
    optimizer.commit(scheduler=scheduler.state_dict())
    run(net, optimizer, scheduler, 4, 6)
    expected, rates = values(net, optimizer), [g["lr"] for g in optimizer.param_groups]
    optimizer.close()
    net = Net()
    optimizer, scheduler = made(net)
    run(net, optimizer, scheduler, 4, 6)
    assert_same_bits(values(net, optimizer), expected)
    assert [g["lr"] for g in optimizer.param_groups] == rates
    optimizer.close()


def test_another_thread_commits(folder):
    """While this one steps: each of its commits is of one step."""
    net = Net(width=60)
    optimizer = opened(net, folder)
    train(net, optimizer, 1, 1)
    failures, over = [], threading.Event()

    def commit():
        try:
            while not over.is_set():
                optimizer.commit(count=int(optimizer.state[net.last.weight]["step"]))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=commit)
    thread.start()
    try:
        for _ in range(25):
            net.last.weight.grad = torch.ones_like(net.last.weight)
            optimizer.step()
    finally:
        over.set()
        thread.join()
    assert failures == []
    expected = values(net, optimizer)
    optimizer.commit(count=26)
    optimizer.close()
    again = Net(width=60)
    with opened(again, folder) as optimizer:
        assert optimizer.committed == {"count": 26}
        assert_same_bits(values(again, optimizer), expected)


def test_steps_and_commits_take_turns(folder, monkeypatch):
    """Nobody else comes in while one of them is under way."""
    net = Net(width=60)
    with opened(net, folder) as optimizer:
        entered = []

        def tried(original):
            def call(*args, **named):
                turn = optimizer._disk.ring._turn
                other = threading.Thread(
                    target=lambda: entered.append(turn.acquire(blocking=False))
                )
                other.start()
                other.join()
                return original(*args, **named)

            return call

        for owner, name in ((StreamWriter, "append"), (HostBucket, "_step_part")):
            monkeypatch.setattr(owner, name, tried(getattr(owner, name)))
        train(net, optimizer, 1, 1)
        steps = len(entered)
        optimizer.commit()
        assert len(entered) > steps > 0 and not any(entered)


def test_copies_are_scratch(folder):
    """They have its state, and no folder: a commit is the original's alone."""
    net = Net()
    with opened(net, folder) as optimizer:
        train(net, optimizer, 1, 2)
        optimizer.commit(step=2)
        expected = values(net, optimizer)
        for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert made.committed is None
            params = [param for group in made.param_groups for param in group["params"]]
            own = [param for group in optimizer.param_groups for param in group["params"]]
            for param, other in zip(params, own, strict=True):
                assert torch.equal(param, other)
                for key, value in optimizer.state.get(other, {}).items():
                    assert torch.equal(made.state[param][key], value)
            with pytest.raises(RuntimeError, match="commit is called of a scratch store"):
                made.commit()
            made.close()
        assert_same_bits(values(net, optimizer), expected)
        optimizer.commit(step=3)
