"""What an optimizer leaves behind: no thread, no pinned byte, and programs that just end."""

import gc
import resource
import threading
import weakref
from pathlib import Path

import pytest
import torch
import warm_python
from offload_cases import FORMATS, Gate, Pair, Summed, await_speculation, warm
from optim_cases import BF16, assert_same_bits, make_params, on_each_device, snapshot
from torch.nn import Parameter

from deepspeed_ext.collector import await_collected
from deepspeed_ext.io.engine import pinned
from deepspeed_ext.offload import OffloadOptimizer

HELPERS = [Path(__file__).parent, Path(__file__).parents[1] / "optim"]


def offload_threads():
    return {t for t in threading.enumerate() if t.name == "deepspeed_ext-offload"}


@pytest.fixture
def threads():
    """Return those that were not there before the test."""
    before = offload_threads()
    return lambda: offload_threads() - before


@pytest.fixture
def memory(monkeypatch):
    """Return the bytes of pinned memory that were made in the test and are still there."""
    made = weakref.WeakSet()
    original = pinned._LentPages.__init__

    def noted(pages, *args, **kwargs):
        original(pages, *args, **kwargs)
        made.add(pages)

    monkeypatch.setattr(pinned._LentPages, "__init__", noted)
    return lambda: sum(len(memoryview(pages.pages)) for pages in made)


def used(device="cpu", **settings):
    """An optimizer with a speculative step, and its parameters."""
    params = make_params(device)
    optimizer = OffloadOptimizer(params, **settings)
    for _ in range(4):
        torch.autograd.backward(params, [torch.ones_like(p) for p in params])
        await_speculation(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.stats()["committed"] > 0
    return optimizer, params


@on_each_device
def test_a_thread_is_started_by_the_first_step_and_there_is_one(device, threads):
    params = make_params(device)
    optimizer = OffloadOptimizer(params)
    assert not threads()
    for _ in range(4):
        torch.autograd.backward(params, [torch.ones_like(p) for p in params])
        optimizer.step()
        assert len(threads()) == 1
    [thread] = threads()
    assert not thread.daemon  # Python would end it in the middle of torch, and abort


@on_each_device
@pytest.mark.usefixtures("garbage_stays")
def test_everything_goes_with_the_last_reference(device, threads, memory):
    """Not at the next garbage collection, which knows nothing about the size of tensors."""
    optimizer, params = used(device)
    assert threads() and memory() > 0
    pipeline = weakref.ref(optimizer._pipeline)
    torch.autograd.backward(params, [torch.ones_like(p) for p in params])
    del optimizer
    assert not threads()
    assert pipeline() is None
    assert memory() == 0
    torch.autograd.backward(params, [torch.ones_like(p) for p in params])  # hooks are harmless


@on_each_device
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.usefixtures("garbage_stays")
def test_everything_goes_by_garbage_collection(device, watched, threads, memory):
    model = torch.nn.Linear(4, 4).to(device)
    optimizer = OffloadOptimizer(model.parameters(), **({"model": model} if watched else {}))
    for _ in range(4):
        model(torch.ones(1, 4, device=device)).sum().backward()
        optimizer.step()
    optimizer.itself = optimizer
    assert threads() and memory() > 0
    del optimizer
    gc.collect()
    await_collected()
    assert not threads() and memory() == 0
    model(torch.ones(1, 4, device=device)).sum().backward()
    assert not model.weight._post_accumulate_grad_hooks
    OffloadOptimizer(model.parameters(), model=model).close()
    assert not model._forward_pre_hooks


@on_each_device
def test_close(device, threads):
    optimizer, params = used(device)
    weights, saved = [p.detach().clone() for p in params], snapshot(optimizer)
    optimizer.close()
    optimizer.close()
    assert not threads()
    torch.autograd.backward(params, [torch.ones_like(p) for p in params])
    for step in (optimizer.step, lambda: optimizer.clip_and_step(1.0)):
        with pytest.raises(RuntimeError, match=r"^OffloadOptimizer: it is closed, expected to be"):
            step()
    assert_same_bits(params, weights)
    for i, entry in optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            assert torch.equal(value, saved["state"][i][key])
    optimizer.zero_grad()
    optimizer.synchronize()
    other = OffloadOptimizer(params)
    other.load_state_dict(optimizer.state_dict())
    assert not threads()


def test_a_speculative_step_before_close(threads):
    """step() refuses, and then nobody waits for what was never queued."""
    pair = warm()
    pair.backward()
    await_speculation(pair.ours)
    pair.ours.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^OffloadOptimizer: it is closed"):
            pair.ours.step()
    pair.check()
    pair.ours.close()
    assert not threads()


def test_close_waits_for_the_step(threads, monkeypatch):
    model = torch.nn.Linear(6, 5)
    pair = Pair(params=model.parameters(), model=model)
    pair.train(4)
    gate = Gate(monkeypatch, "adopt")
    pair.backward()
    pair.give()
    await_speculation(pair.ours)
    pair.ours.step()
    gate.await_thread()
    gate.open_soon()
    pair.ours.close()
    assert not threads()
    pair.plain.step()
    pair.check()


def test_close_while_a_speculative_step_is_under_way(threads, monkeypatch):
    pair = warm()
    gate = Gate(monkeypatch, "step_speculatively")
    pair.backward()
    gate.await_thread()
    gate.open_soon()
    pair.ours.close()
    assert not threads()
    pair.check()


@on_each_device
def test_a_block_closes(device, threads):
    with OffloadOptimizer(make_params(device)) as optimizer:
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert threads()
    assert not threads()
    with pytest.raises(KeyError, match="mine"), OffloadOptimizer(make_params(device)):
        raise KeyError("mine")


def test_close_lets_go_of_the_model():
    model = torch.nn.Linear(4, 4)
    optimizer = OffloadOptimizer(model.parameters(), model=model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.close()
    assert not model._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_refused_constructor_leaves_nothing(threads, memory):
    for arguments in ({"memory_budget": 1}, {"lr": -1}, {"gpu_fraction": 2}):
        with pytest.raises(ValueError):
            OffloadOptimizer(make_params(), **arguments)
    gc.collect()
    assert not threads() and memory() == 0


@on_each_device
@pytest.mark.parametrize("name", ["float32", "compact"])
def test_what_is_left_alone_is_not_kept(device, name, memory):
    """Pinned memory is weights, gradients, shadow buffers for weights; and once only."""
    params = [Parameter(torch.randn(4096, device=device).to(BF16)) for _ in range(4)]
    optimizer = OffloadOptimizer(params, **FORMATS[name])
    sizes = []
    for _ in range(8):
        torch.autograd.backward(params, [torch.ones_like(p) for p in params])
        await_speculation(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(memory())
    weights = sum(p.nbytes for p in params)
    assert sizes[3:] == sizes[3:4] * 5
    assert sizes[-1] <= 4 * weights + 3 * 4096


# Many


@pytest.mark.long
@on_each_device
def test_200_optimizers_leave_no_memory_and_no_thread(device, threads, memory):
    params = [Parameter(torch.ones(20_000, device=device)) for _ in range(4)]

    def bytes_in_memory_after(count):
        for _ in range(count):
            optimizer = OffloadOptimizer(params, master="float32")
            for _ in range(4):
                torch.autograd.backward(params, [torch.ones_like(p) for p in params])
                optimizer.step()
                optimizer.zero_grad()
            del optimizer
        gc.collect()
        assert not threads() and memory() == 0
        on_device.append(torch.cuda.memory_allocated() if device == "cuda" else 0)
        return bytes_in_memory()

    on_device = []
    before = bytes_in_memory_after(40)
    assert bytes_in_memory_after(200) - before < 0.1 * 200 * 4 * 12 * 20_000
    assert on_device[1] == on_device[0]


def bytes_in_memory():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@on_each_device
@pytest.mark.parametrize("free_grads", [False, True])
def test_what_is_over_is_let_go(device, free_grads):
    """A task knows those before it, and they theirs: all would stay, with what they hold."""
    pair = (Summed if free_grads else Pair)(device)
    kept = weakref.WeakSet()
    submit = pair.ours._pipeline.worker.submit

    def noted(task):
        kept.add(task)
        return submit(task)

    pair.ours._pipeline.worker.submit = noted
    for _ in range(8):
        pair.train(1, times=2)
        assert len(kept) <= 3 * len(pair.params)


@pytest.mark.long
@on_each_device
@pytest.mark.parametrize("free_grads", [False, True])
def test_2000_steps_leave_no_memory(device, free_grads, threads, memory):
    """Of any kind: on the host, pinned, on the device, or lists that grow."""
    small = [Parameter(torch.ones(3000, device=device)) for _ in range(4)]
    settings = {"free_grads": free_grads, "max_grad_norm": 1e9}
    optimizer = OffloadOptimizer(small, master="float32", **settings)
    grads = [torch.ones_like(p) for p in small]

    def run(steps):
        for step in range(steps):
            for _ in range(1 + (step % 5 == 0)):
                torch.autograd.backward(small, grads)
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        on_device = torch.cuda.memory_allocated() if device == "cuda" else 0
        objects = len(gc.get_objects())
        return memory(), on_device, objects, bytes_in_memory()

    run(100)
    pinned_before, device_before, objects_before, before = run(100)
    pinned_after, device_after, objects_after, after = run(2000)
    assert pinned_after <= pinned_before * 2  # not all that are in use at times were so by then
    assert device_after == device_before
    assert objects_after - objects_before < 200
    assert after - before < 2000 * 512  # less than the smallest object of each step
    assert len(threads()) == 1


@pytest.mark.long
@pytest.mark.parametrize("changes", [False, True])
def test_500_steps_take_no_more_memory_than_20(changes, threads, memory):
    pair = Pair(params=[Parameter(torch.ones(20_000)) for _ in range(4)], max_grad_norm=1e9)

    def run(steps):
        for step in range(steps):
            pair.backward()
            if changes and step % 3 == 0:
                pair.backward()
            if changes and step % 5 == 0:
                pair.ours.load_state_dict(pair.ours.state_dict())
            if changes and step % 7 == 0:
                pair.ours.zero_grad()
                continue
            pair.ours.step()
            pair.ours.zero_grad()
        gc.collect()
        return memory(), bytes_in_memory()

    run(40)
    pinned_before, before = run(40)
    pinned_after, after = run(500)
    assert pinned_after < pinned_before * 2  # not all that are in use at times were so by then
    assert after - before < 20 * 20_000 * 4
    assert len(threads()) == 1


# Programs


PROGRAM = """
import sys, threading, torch

sys.path += sys.argv[3:]
from offload_cases import Gate, await_speculation
from deepspeed_ext.offload import OffloadOptimizer
import pytest

torch.set_num_threads(1)
model = torch.nn.Linear(6, 5)
optimizer = OffloadOptimizer(model.parameters(), model=model, lr=1.0)
for _ in range(4):
    model(torch.ones(1, 6)).sum().backward()
    await_speculation(optimizer)
    optimizer.step()
    optimizer.zero_grad()
gate = Gate(pytest.MonkeyPatch(), sys.argv[1])
model(torch.ones(1, 6)).sum().backward()
if sys.argv[1] == "adopt":
    await_speculation(optimizer)
    optimizer.step()
gate.await_thread()
gate.open_soon()
if sys.argv[2] == "error":
    raise SystemExit(3)
if sys.argv[2] == "kept":
    sys.modules["kept"] = optimizer, model
print("end")
"""


@pytest.mark.parametrize(
    ("method", "how"), [("adopt", "plain"), ("adopt", "error"), ("step_speculatively", "kept")]
)
def test_a_program_ends_while_a_step_is_under_way(method, how):
    run = warm_python.run("-c", PROGRAM, method, how, *HELPERS)
    assert run.returncode == (3 if how == "error" else 0), run.stderr
    assert run.stderr == ""
    assert run.stdout == ("" if how == "error" else "end\n")


def test_a_worker_uses_no_processor_while_there_is_nothing_to_do():
    """It sleeps in a wait, and does not look again and again."""
    optimizer, _ = used()
    [thread] = [t for t in offload_threads() if t is optimizer._pipeline.worker._thread]
    ids = Path(f"/proc/self/task/{thread.native_id}")

    def switches():
        return [line for line in (ids / "status").read_text().splitlines() if "ctxt" in line]

    before = None
    while before != switches():  # until it has gone to sleep, which the last step may be before
        before = switches()
        threading.Event().wait(0.3)
    threading.Event().wait(0.3)
    assert switches() == before
