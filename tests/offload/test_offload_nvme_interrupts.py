"""State on disk where something comes in between: forks, Ctrl-C, the end of Python, collections."""

import copy
import gc
import itertools
import os
import random
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
import warm_python
from disks import PIECES, disk as disk, few, on_disk
from interrupting import Interrupt, needs_its_points
from offload_cases import Gate
from optim_cases import BF16, assert_same_bits
from test_offload_faults import FORK, in_child, is_in
from torch.utils.data import DataLoader

from deepspeed_ext.collector import await_collected
from deepspeed_ext.offload.worker import Worker

HELPERS = [Path(__file__).parent, Path(__file__).parents[1] / "optim"]


def warm(path, **options):
    """Return a pair after two steps."""
    pair = on_disk(path, **options)
    for _ in range(2):
        pair.backward()
        pair.step()
    return pair


# Forks


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_refuses_and_the_parent_goes_on(disk, tmp_path):
    """While pieces are read and written; the ring is the parent's, and so is its lock."""
    pair = warm(tmp_path)
    ring = pair.ours._pipeline.ring
    disk.hold(after=PIECES - 1)
    pair.backward()
    pair.step()
    *others, _ = list(ring._writes)
    for write in others:
        write.future.result()
    ring.run_ahead()
    assert disk.held == 1 and ring._reads
    gc.collect()  # or the child would have to, of what others have left
    held, over = threading.Event(), threading.Event()

    def hold():
        with ring._lock:
            held.set()
            assert over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)

    def backward():
        for param in pair.params:
            param.grad = torch.ones_like(param)
            pair.ours._pipeline.note_gradient(param)

    def end():
        pair.ours = None
        gc.collect()

    refused = (
        lambda: pair.ours.step(),
        lambda: pair.ours.state_dict(),
        lambda: str(pair.ours.state[pair.params[3]]),
        lambda: pair.ours.load_state_dict(pair.plain.state_dict()),
    )
    try:
        for call in refused:
            assert in_child(call) == FORK
        for call in (backward, end, lambda: pair.ours.close(), lambda: pair.ours.zero_grad()):
            assert in_child(call) == ""
    finally:
        over.set()
        thread.join()
    for _ in range(2):
        pair.backward()
        pair.step()
    pair.check()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_data_loader(tmp_path):
    """They begin while pieces are read ahead, and end with what they have of the optimizer."""
    pair = warm(tmp_path)
    for _ in range(2):
        pair.backward()
        values = list(DataLoader(torch.arange(8), num_workers=2, multiprocessing_context="fork"))
        assert len(values) == 8
        pair.step()
        assert_same_bits(pair.params, pair.twins)
    pair.check()


def test_a_fork_in_the_middle_of_a_step(tmp_path):
    """It ends as Python does, with all that it has of the optimizer, and the parent goes on."""
    run = warm_python.run(Path(__file__).with_name("fork_in_a_step.py"), tmp_path)
    assert (run.returncode, run.stdout) == (0, "went on\n"), run.stderr


# Ctrl-C


def test_a_step_of_which_only_a_part_is_queued_is_no_step(tmp_path, monkeypatch):
    """Ctrl-C between two buckets: the optimizer refuses, rather than go on with half of a step."""
    params = [*few(), *few(dtype=BF16)]  # a bucket is of one dtype
    pair = warm(tmp_path, params=params)
    buckets = pair.ours._pipeline._buckets
    assert len(buckets) > 1

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(buckets[-1], "fetch", interrupt)
    pair.backward()
    with pytest.raises(KeyboardInterrupt):
        pair.ours.step()
    monkeypatch.undo()
    for call in (pair.ours.synchronize, pair.ours.step, pair.ours.state_dict):
        with pytest.raises(RuntimeError, match="a step was broken off by KeyboardInterrupt"):
            call()


def entries(optimizer, params):
    """Return weights and state of each parameter, as they are now."""
    return [[p, *map(torch.as_tensor, optimizer.state[p].values())] for p in params]


def train_interrupted(pair, at):
    """Take a step in which Ctrl-C comes, and see what is there then.

    Returns:
        How many points there were, and whether it goes on.
    """
    ours, grads = pair.ours, [pair.draw(param) for param in pair.params]
    before = copy.deepcopy(entries(pair.plain, pair.twins))
    for twin, grad in zip(pair.twins, grads, strict=True):
        twin.grad = grad
    pair.plain.step()
    after = entries(pair.plain, pair.twins)

    def step():
        torch.autograd.backward(pair.params, [grad.clone() for grad in grads])
        ours.step()
        ours.zero_grad()
        ours.synchronize()
        ours.state_dict()

    ctrl_c = Interrupt(at)
    ctrl_c.during(step)
    torch.set_grad_enabled(True)  # no_grad of torch may have been broken off as it ended
    ours.zero_grad()
    pair.plain.zero_grad()
    try:
        ours.synchronize()
    except RuntimeError as error:
        assert "a step was broken off by KeyboardInterrupt" in str(error), ctrl_c.where
        for call in (ours.step, ours.state_dict, ours.close):
            with pytest.raises(RuntimeError, match="was broken off by KeyboardInterrupt"):
                call()
        return ctrl_c.count, False
    now = list(itertools.chain.from_iterable(entries(ours, pair.params)))
    known = [list(itertools.chain.from_iterable(one)) for one in (before, after)]
    assert any(all(map(torch.equal, now, one)) for one in known), ctrl_c.where  # all of one step
    ring = ours._pipeline.ring
    assert len(ring._free) + len(ring._reads) + len(ring._writes) == ring._count, ctrl_c.where
    with torch.no_grad():
        for param, twin in zip(pair.params, pair.twins, strict=True):
            twin.copy_(param)
    pair.plain.load_state_dict(copy.deepcopy(ours.state_dict()))
    pair.twins = [param for group in pair.plain.param_groups for param in group["params"]]
    pair.backward()
    pair.step()
    assert_same_bits(pair.params, pair.twins)
    return ctrl_c.count, True


def interrupt(path, times, **options):
    """Let Ctrl-C come at so many points of a step, one step after another."""
    pair = warm(path, **options)
    chance, (points, _) = random.Random(times), train_interrupted(pair, at=0)
    outcomes = []
    for _ in range(times):
        _, goes_on = train_interrupted(pair, chance.randint(1, points))
        outcomes.append(goes_on)
        if not goes_on:
            pair = warm(path, **options)
    return outcomes


@needs_its_points
def test_ctrl_c_at_any_point(tmp_path):
    """It goes on with right numbers, or says that it cannot."""
    assert set(interrupt(tmp_path, 60)) == {False, True}


@pytest.mark.long
@needs_its_points
@pytest.mark.parametrize("name", ["model", "master", "half"])
def test_ctrl_c_at_many_points(name, tmp_path):
    options = {
        "model": {"model": torch.nn.ParameterList()},
        "master": {"master": "float32", "params": few(dtype=BF16)},
        "half": {"nvme_fraction": 0.5, "memory_budget": 6 << 20},
    }
    interrupt(tmp_path, 200, **options[name])


class Signals:
    """SIGINT for this thread while it waits for the worker, so many times."""

    def __init__(self, gate, times):
        self._gate, self._left, self._thread = gate, times, threading.get_ident()

    def __enter__(self):
        self._before = signal.signal(signal.SIGINT, self._arrive)
        self._sender = threading.Thread(target=self._send)
        self._sender.start()

    def __exit__(self, *_):
        self._sender.join()
        signal.signal(signal.SIGINT, self._before)

    def _arrive(self, *_):
        if self._left:
            self._left -= 1
            raise KeyboardInterrupt

    def _send(self):
        """Send it again and again: one that comes right before a wait begins does not end it."""
        self._gate.await_thread()
        while self._left:
            if is_in(sys._current_frames()[self._thread], Worker.wait.__code__):
                signal.pthread_kill(self._thread, signal.SIGINT)
            threading.Event().wait(0.01)
        self._gate.open()


def test_ctrl_c_while_a_step_is_waited_for(monkeypatch, tmp_path):
    """It reads gradients, which are the user's again after that: so it is over first."""
    pair = warm(tmp_path)
    pair.backward()
    pair.give()
    gate = Gate(monkeypatch, "_step_part")
    with Signals(gate, times=1), pytest.raises(KeyboardInterrupt):
        pair.ours.step()
    for param in pair.params:
        param.grad.zero_()
    pair.plain.step()
    pair.zero_grad()
    for _ in range(2):
        pair.check()
        pair.backward()
        pair.step()


def test_ctrl_c_again_breaks_off_the_step(monkeypatch, tmp_path):
    pair = warm(tmp_path)
    pair.backward()
    gate = Gate(monkeypatch, "_step_part")
    with Signals(gate, times=2), pytest.raises(KeyboardInterrupt):
        pair.ours.step()
    for call in (pair.ours.step, pair.ours.state_dict, pair.ours.close):
        with pytest.raises(RuntimeError, match="a step was broken off by KeyboardInterrupt, exp"):
            call()


# The end


PROGRAM = """
import sys, torch

sys.path += sys.argv[3:]
from deepspeed_ext.io import AsyncIO, File
from deepspeed_ext.offload import OffloadOptimizer

torch.set_num_threads(1)
model = torch.nn.Linear(300, 300)
optimizer = OffloadOptimizer(
    model.parameters(), model=model, device="nvme", nvme_path=sys.argv[1], memory_budget=2 << 20,
    nvme_fraction=1.0,
)
broken, write = [], AsyncIO.write
if sys.argv[2] == "broken":
    bad = File(torch.__file__, "read")
    def write_nowhere(engine, tensor, file, offset=0):
        broken.append(offset)
        return write(engine, tensor, bad if len(broken) == 18 else file, offset)
    AsyncIO.write = write_nowhere
for _ in range(3):
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    if sys.argv[2] == "backward":
        optimizer.zero_grad()
if sys.argv[2] == "backward":
    model(torch.ones(1, 300)).sum().backward()
if sys.argv[2] == "kept":
    sys.modules["kept"] = optimizer, model
print("end")
"""


@pytest.mark.parametrize("how", ["plain", "backward", "kept", "broken"])
def test_a_program_ends_while_pieces_are_read_and_written(how, tmp_path):
    """What fails then is logged: nobody is left to raise it."""
    run = warm_python.run("-c", PROGRAM, tmp_path, how, *HELPERS)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "end\n"
    if how == "broken":
        assert run.stderr.startswith("OffloadOptimizer: state on disk is OSError ("), run.stderr
    else:
        assert run.stderr == ""


@pytest.mark.usefixtures("garbage_stays")
def test_an_optimizer_is_collected_during_backward(tmp_path):
    """With all that it has under way; hooks that were called are over, others do not come."""
    pair = warm(tmp_path)
    weights = [param.detach().clone() for param in pair.params]
    ring = pair.ours._pipeline.ring
    files = len(os.listdir("/proc/self/fd"))

    def collect(grad):
        pair.ours = None
        gc.collect()

    outputs = [param * 1 for param in pair.params]
    outputs[2].register_hook(collect)
    pair.ours.itself = pair.ours
    torch.autograd.backward(outputs, [torch.ones_like(param) for param in pair.params])
    assert pair.ours is None
    await_collected()
    assert not ring._reads and not ring._writes and ring._free is None
    assert not any(param._post_accumulate_grad_hooks for param in pair.params)
    assert_same_bits(pair.params, weights)
    del ring
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < files
