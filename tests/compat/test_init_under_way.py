"""compat.zero.Init and the process: all is as before, in any order and threads, and if patched."""

import gc
import sys
import threading
from contextlib import ExitStack, contextmanager

import pytest
import torch.distributed as dist
from processes import Case
from torch import nn
from torch.nn.modules.module import (
    _global_parameter_registration_hooks,
    register_module_parameter_registration_hook,
)

from deepspeed_ext.compat.zero import Init

PLAIN = nn.Module.apply


def assert_as_before():
    """A plain model is made and applied to as ever."""
    assert nn.Module.apply is PLAIN and not _global_parameter_registration_hooks
    layer = nn.Linear(4, 4)
    assert layer.apply(lambda module: None) is layer and layer.weight.numel() == 16


def in_thread(function):
    """Return what it returns in another thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@contextmanager
def broadcasts():
    """Yield a list of the threads that broadcast."""
    seen, own = [], dist.broadcast

    def broadcast(*args, **keywords):
        seen.append(threading.get_ident())
        return own(*args, **keywords)

    dist.broadcast = broadcast
    try:
        yield seen
    finally:
        dist.broadcast = own


def building():
    """Leave a model half-way."""
    with Init():
        yield nn.Linear(4, 4)


def orders(row, folder):
    """One that began first ends first; garbage; one within itself; another thread ends it."""
    first, second = Init(), Init()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    inner = nn.Linear(4, 4)
    second.__exit__(None, None, None)
    assert inner.weight.ds_shape == (4, 4)
    assert_as_before()
    with first:
        with pytest.raises(
            RuntimeError, match=r"^compat.zero.Init: this Init is under way already, expected"
        ):
            first.__enter__()
        inner = nn.Linear(4, 4)
        inner.apply(lambda module: module.weight.data.fill_(dist.get_rank() + 1))
    assert inner.weight.ds_tensor.eq(1).all()
    assert_as_before()
    with pytest.raises(
        RuntimeError, match=r"^compat.zero.Init: this Init is not under way, expected"
    ):
        first.__exit__(None, None, None)
    early, late = building(), building()
    next(early)
    next(late)
    del early
    gc.collect()
    late.close()
    assert_as_before()
    elsewhere = building()
    in_thread(lambda: next(elsewhere))
    assert in_thread(lambda: nn.Linear(2, 2).apply(lambda module: None)).weight.numel() == 4
    elsewhere.close()
    assert_as_before()


def threads(row, folder):
    """Two that build, one by one, while a third makes plain modules."""
    began, done, failed = threading.Barrier(2), threading.Event(), []

    def plain():
        while not done.is_set():
            try:
                nn.Linear(2, 2).apply(lambda module: None)
            except Exception as error:
                failed.append(error)

    def wait_inside():
        with Init():
            began.wait()
            began.wait()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    other, beside = threading.Thread(target=wait_inside), threading.Thread(target=plain)
    other.start()
    began.wait()
    beside.start()
    with broadcasts() as seen:
        for _ in range(50):
            with Init():
                made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
                made.apply(lambda module: None)
        last = Init()
        last.__enter__()
        began.wait()
        other.join()
        assert nn.Module.apply is not PLAIN
        last.__exit__(None, None, None)
    for _ in range(200):
        with Init():
            pass
    done.set()
    beside.join()
    sys.setswitchinterval(interval)
    assert failed == []
    assert {*seen} == {threading.get_ident()} and made[1].weight.ds_shape == (4, 4)
    assert_as_before()


def patches(row, folder):
    """An apply that another has put there stays, inside and around; so does a hook."""
    calls, model = [], nn.Sequential(nn.Linear(4, 4))

    def around(own):
        def apply(self, fn):
            calls.append(type(self).__name__)
            return own(self, fn)

        return apply

    with Init():
        ours = nn.Module.apply
        nn.Module.apply = theirs = around(ours)
    assert nn.Module.apply is theirs
    with broadcasts() as seen:
        model.apply(lambda module: None)
        assert calls == ["Sequential", "Linear"] and not seen
        with Init():  # around what goes through ours once more
            assert nn.Module.apply is not theirs
            nn.Linear(4, 4).apply(lambda module: None)
        assert calls[2:] == ["Linear"] and len(seen) == 2  # its weight and bias, once
    assert nn.Module.apply is theirs
    nn.Module.apply = ours
    for _ in range(3):  # ours was put back: it is not put around itself
        with Init(), ExitStack() as stack:
            hook = register_module_parameter_registration_hook(lambda *args: None)
            stack.callback(hook.remove)
            assert len(_global_parameter_registration_hooks) == 2
    nn.Module.apply = PLAIN
    assert_as_before()


@pytest.mark.parametrize(
    "case",
    [Case(2, "orders", ""), Case(1, "threads", ""), Case(1, "patches", "")],
    ids=lambda case: case.function,
)
def test_process_is_as_before(groups, case):
    groups.run(case)
