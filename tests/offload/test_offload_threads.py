"""The threads that step: how many, where they run, and that nobody else's go with them."""

import copy
import logging
import os
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
from offload_cases import Pair
from optim_cases import assert_same_bits, on_each_device
from processes import Case

from deepspeed_ext.io import PinnedBuffer
from deepspeed_ext.offload import OffloadOptimizer, host_optimizer, host_tensors, pipeline
from deepspeed_ext.offload.worker import Task, Urgency
from deepspeed_ext.op_builder import BuildError
from deepspeed_ext.optim.buckets import zeros

LARGE = 2**20 + 5  # elements, whose state is touched first by whoever steps it


def large(device="cpu", **settings):
    generator = torch.Generator().manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in (LARGE, 40_000)]
    return Pair(device, params=[p.to(device).detach().requires_grad_() for p in params], **settings)


def of_new_thread():
    """What a thread that the user starts begins with."""
    found = []
    thread = threading.Thread(
        target=lambda: found.extend((torch.get_num_threads(), os.sched_getaffinity(0)))
    )
    thread.start()
    thread.join()
    return found


def worker_of(optimizer):
    return optimizer._pipeline.worker


def threads_of(optimizer):
    """What torch says in the thread that steps."""
    found, worker = [], worker_of(optimizer)
    worker.wait([worker.submit(Task(lambda: found.append(torch.get_num_threads()), Urgency.ADD))])
    return found[0]


@on_each_device
@pytest.mark.parametrize("threads", [None, 1, 3])
def test_threads_are_what_was_asked_for_and_change_no_bit(device, threads):
    """The user's threads go on with as many as they had, those started later too."""
    before = torch.get_num_threads(), os.sched_getaffinity(0), of_new_thread()
    pair = large(device, threads=threads)
    pair.train(4)
    wanted = threads or 1  # torch has one in these tests
    assert threads_of(pair.ours) == pair.ours.stats()["threads"] == wanted
    assert pair.ours.stats()["processors"] == sorted(os.sched_getaffinity(0))
    assert (torch.get_num_threads(), os.sched_getaffinity(0), of_new_thread()) == before


def test_as_many_as_torch_has_when_the_first_step_comes():
    pair, wanted = large(), min(2, len(os.sched_getaffinity(0)))
    torch.set_num_threads(2)
    try:
        assert pair.ours.stats()["threads"] == wanted
        pair.train(1)
    finally:
        torch.set_num_threads(1)
    assert threads_of(pair.ours) == pair.ours.stats()["threads"] == wanted


def test_copies_have_as_many():
    pair = large(threads=3)
    pair.train(2)
    for other in (copy.deepcopy(pair.ours), pickle.loads(pickle.dumps(pair.ours))):
        assert other.stats()["threads"] == 3
    assert "threads" not in pair.ours.state_dict()["param_groups"][0]


@pytest.mark.parametrize(
    ("threads", "error"), [(0, ValueError), (True, TypeError), ("2", TypeError)]
)
def test_what_is_no_number_of_threads_is_refused(threads, error):
    want = f"OffloadOptimizer: threads is {threads!r}, expected a whole number above 0, or None"
    with pytest.raises(error, match=want):
        OffloadOptimizer([torch.zeros(3, requires_grad=True)], threads=threads)


def test_it_is_said_once(caplog):
    pair = large()
    with caplog.at_level(logging.INFO, "deepspeed_ext"):
        pair.train(3)
    said = [record.message for record in caplog.records if "threads" in record.message]
    [text] = said
    assert text.startswith("OffloadOptimizer: threads that step: 1, on any of processors ")


@pytest.mark.parametrize("error", [None, BuildError("cpu_adam", "no compiler", "install one")])
def test_a_library_is_compiled_on_all_processors(error, monkeypatch):
    """If that fails, the step says so: it tries again."""
    mask, loaded = os.sched_getaffinity(0), []

    def load(name):
        loaded.append((name, os.sched_getaffinity(0)))
        if error is not None:
            raise error

    monkeypatch.setattr(pipeline, "load", load)
    for name, value in as_torchrun(0, 2).items():
        monkeypatch.setenv(name, value)
    pair = large()
    pair.train(1)
    assert loaded == [("cpu_adam", mask)]
    worker = worker_of(pair.ours)._thread.native_id
    assert os.sched_getaffinity(worker) == set(pair.ours.stats()["processors"])


# Two processes, started as torchrun does


def as_torchrun(rank, count):
    return {"LOCAL_WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}


def divides(device, folder):
    """Each has its own processors, all of them together, and they keep to these alone."""
    rank, mask = dist.get_rank(), os.sched_getaffinity(0)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in as_torchrun(rank, 2).items():
            patch.setenv(name, value)
        made = watch_memory(patch)
        pair = large(device)
        pair.train(3)
        own = pair.ours.stats()["processors"]
        assert threads_of(pair.ours) == pair.ours.stats()["threads"] == len(own)
        assert made[0] == (0, mask)  # before all others: it may have to be compiled
        large_ones = [where for nbytes, where in made if nbytes > 4 * LARGE]
        assert large_ones == [set(own)] * 6  # weights and two moments, and their shadow buffers
        assert [where for nbytes, where in made if 0 < nbytes < LARGE] == [mask] * 2  # counts
        worker = worker_of(pair.ours)._thread.native_id
        assert os.sched_getaffinity(worker) == set(own)
        assert os.sched_getaffinity(0) == mask and of_new_thread() == [1, mask]
        others = large(device, threads=1)
        others.train(2)
        assert others.ours.stats()["threads"] == 1
        many = large(device, threads=len(mask) + 1)
        assert many.ours.stats()["processors"] == sorted(mask)
        again = copy.deepcopy(pair.ours)
        assert again.stats()["processors"] == own
        assert_same_bits(again.param_groups[0]["params"], pair.params)
    all_of_them = [[], []]
    dist.all_gather_object(all_of_them, own)
    assert set().union(*all_of_them) == mask
    assert len(mask) == 1 or sum(map(len, all_of_them)) == len(mask)


def watch_memory(patch):
    """Return a list that gets the bytes of host memory that is made, and on which processors."""
    made = []

    def weights(nbytes):
        made.append((nbytes, os.sched_getaffinity(0)))
        return PinnedBuffer(nbytes)

    def state(elements, dtype, device):
        made.append((elements * dtype.itemsize, os.sched_getaffinity(0)))
        return zeros(elements, dtype, device)

    patch.setattr(host_tensors, "PinnedBuffer", weights)
    patch.setattr(host_optimizer, "zeros", state)
    return made


CASES = [Case(2, "divides", "cpu"), Case(2, "divides", "cuda")]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function}-{c.row}-{c.world}")
def test_processes(case, groups):
    device = case.row
    if device == "cuda" and torch.cuda.device_count() < case.world:
        pytest.skip(f"needs {case.world} CUDA GPUs")
    groups[device].run(case, device)
