"""Pairs of optimizers whose copies come late, and events that say what they are told to."""

import threading

import pytest
import torch
from late_copies import CYCLES, LateStreams, be_late
from offload_cases import Pair, small_parts
from optim_cases import make_params, needs_cuda
from torch import nn

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda), pytest.param("two", marks=needs_two)]
on_late_devices = pytest.mark.parametrize("device", DEVICES)
STEPS = 14


def params_on(device, dtype=torch.float32):
    """Parameters of every layout, on two GPUs by turns."""
    params = make_params("cpu", dtype)
    return [
        nn.Parameter(p.detach().to(where)) for p, where in zip(params, places(device), strict=False)
    ]


def places(device):
    """Where parameters go, one after the other."""
    while True:
        yield from ("cuda:0", "cuda:1") if device == "two" else (device,)


def late_pair(monkeypatch, device, made=Pair, seed=0, dtype=torch.float32, **settings):
    """Return a pair of many buckets whose copies are late."""
    small_parts(monkeypatch, piece=256, most=192)
    be_late(monkeypatch, device, seed)
    return made(device, params=params_on(device, dtype), **settings)


def keep_busy(device):
    """Let what the devices are given from now on come late, by some hundredths of a second."""
    for where in {"cpu": [], "cuda": [0], "two": [0, 1]}[device]:
        with torch.cuda.device(where):
            torch.cuda._sleep(50 * CYCLES)


def step(pair, max_norm=None):
    """Step both, without waiting for what goes on."""
    pair.give()
    if max_norm is None:
        pair.ours.step()
        pair.plain.step()
    else:
        pair.ours.clip_and_step(max_norm)
        pair.plain.clip_and_step(max_norm)


class Told:
    """An event that says that it is over when it was told so, or when somebody waits for it."""

    def __init__(self, answers=()):
        self.answers, self.awaited = list(answers), threading.Event()

    def query(self):
        answer = self.answers.pop(0) if self.answers else self.awaited.is_set()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def synchronize(self):
        self.awaited.set()


def tell(monkeypatch, events):
    """Let copies to host memory have these events, one after the other."""

    class ToldStreams(LateStreams):
        def fetch(self, copies):
            for target, source in copies:
                target.copy_(source)
            return events.pop(0) if events else Told([True] * 99)

    monkeypatch.setattr(
        "deepspeed_ext.offload.gradient_intake.CopyStreams", lambda d: ToldStreams(d, lambda: 0)
    )


class DeviceError(RuntimeError):
    """What CUDA raises from all calls after a kernel has failed."""
