"""What the offload tests share: the classes, a pair of optimizers to compare, a worker in hand."""

import copy
import threading
from dataclasses import dataclass

import torch
from optim_cases import BF16, assert_same_bits, make_params
from torch import Tensor

from deepspeed_ext.offload import OffloadOptimizer, bucket, host_optimizer, param_table
from deepspeed_ext.offload.sent_gradients import sent
from deepspeed_ext.optim import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdagrad,
    FusedAdam,
    FusedLion,
    FusedRMSprop,
    FusedSGD,
)

WARM = 4  # steps after which all that can be started early is
PATIENCE = 60  # seconds until what should have happened counts as never


@dataclass(frozen=True)
class Kind:
    """A class of optimizers that can be offloaded.

    Attributes:
        offloaded: the class that is.
        on_cuda: the one that does the same on CUDA.
        options: of both.
    """

    offloaded: type
    on_cuda: type
    options: dict


KINDS = {
    "adam": Kind(DeepSpeedCPUAdam, FusedAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "amsgrad": Kind(DeepSpeedCPUAdam, FusedAdam, {"lr": 0.01, "amsgrad": True, "eps": 1e-3}),
    "adagrad": Kind(
        DeepSpeedCPUAdagrad,
        FusedAdagrad,
        {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
    ),
    "lion": Kind(DeepSpeedCPULion, FusedLion, {"lr": 0.01, "weight_decay": 0.1}),
    "sgd": Kind(FusedSGD, FusedSGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd without state": Kind(FusedSGD, FusedSGD, {"lr": 0.1, "weight_decay": 0.1}),
    "rmsprop": Kind(FusedRMSprop, FusedRMSprop, {"lr": 0.01, "momentum": 0.5, "eps": 1e-2}),
    "centered": Kind(FusedRMSprop, FusedRMSprop, {"lr": 0.01, "centered": True, "eps": 1e-2}),
}
FORMATS = {
    "float32": {},
    "bfloat16": {"state_dtype": BF16, "seed": 5},
    "codes": {"state_dtype": torch.uint8, "seed": 6},
    "master": {"master": "float32"},
    "remainder": {"master": "remainder"},
    "compact": {"state_dtype": torch.uint8, "master": "remainder"},
}
OF_OFFLOAD = (
    "model",
    "max_grad_norm",
    "tier",  # as `device` of OffloadOptimizer
    "nvme_path",
    "nvme_fraction",
    "memory_budget",
    "gpu_fraction",
    "free_grads",
    "threads",
)


class Pair:
    """An offloaded optimizer and the plain class, for parameters that begin alike.

    Only those of the first are in a graph: the others get copies of their gradients.

    Args:
        device: of the parameters.
        kind: name of the class.
        params: of the offloaded optimizer; default, of every layout.
        groups: returns what both optimizers are made from, given parameters.
        settings: of both, and of the offloaded one alone.
    """

    def __init__(self, device="cpu", kind="adam", params=None, groups=list, **settings):
        self.params = make_params(device) if params is None else list(params)
        self.twins = copy.deepcopy(self.params)
        kind = KINDS[kind]
        own = {key: settings.pop(key) for key in OF_OFFLOAD if key in settings}
        options = kind.options | settings
        plain = kind.offloaded if device == "cpu" else kind.on_cuda
        if "tier" in own:
            own["device"] = own.pop("tier")
        self.ours = OffloadOptimizer(groups(self.params), kind.offloaded, **own, **options)
        self.plain = plain(groups(self.twins), **options)
        self.generator = torch.Generator().manual_seed(1)

    def backward(self, missing=0.0, factor=1.0, times=1):
        """Accumulate gradients, of which some are missing all these times."""
        present = [p for p in self.params if torch.rand((), generator=self.generator) >= missing]
        present = [p for p in present if p.requires_grad]
        for _ in range(times if present else 0):
            torch.autograd.backward(present, [self.draw(p, factor) for p in present])

    def later(self):
        """Return a backward of all parameters that touches none of them."""
        outputs = [param * 1 for param in self.params]
        grads = [self.draw(param) for param in self.params]
        return lambda: torch.autograd.backward(outputs, grads)

    def draw(self, param, factor=1.0):
        """Return something of the shape of a parameter."""
        return (torch.randn(param.shape, generator=self.generator) * factor).to(
            param.device, param.dtype
        )

    def give(self):
        """Let the twins have the gradients."""
        for param, twin in zip(self.params, self.twins, strict=True):
            twin.grad = None if param.grad is None else torch.empty_like(twin)
            if param.grad is not None:
                twin.grad.data = param.grad.detach().clone()  # of any dtype

    def step(self, max_norm=None):
        """Step both and compare what they return; the first after all that it may do early."""
        self.give()
        await_speculation(self.ours)
        if max_norm is None:
            self.ours.step()
            self.plain.step()
        else:
            norm, expected = (o.clip_and_step(max_norm) for o in (self.ours, self.plain))
            torch.testing.assert_close(norm, expected, rtol=0, atol=0, equal_nan=True)
        self.zero_grad()

    def both(self):
        """Return each optimizer with its parameters."""
        return (self.ours, self.params), (self.plain, self.twins)

    def zero_grad(self):
        """Drop all gradients."""
        self.ours.zero_grad()
        self.plain.zero_grad()

    def train(self, steps, max_norm=None, **how):
        """Backward, step and compare, so many times."""
        for _ in range(steps):
            self.backward(**how)
            self.step(max_norm)
            self.check()

    def check(self):
        """Compare parameters and state dicts, bit for bit."""
        self.ours.synchronize()
        assert_same_bits(self.params, self.twins)
        assert_same_state(self.ours, self.plain)

    def check_speculated(self, steps, buckets=1):
        """Assert that all buckets of so many steps were stepped early, and that all steps counted.

        The first steps make the buckets and learn how many gradients there are.
        """
        stats = self.ours.stats()
        assert stats["early"] + stats["late"] == steps * buckets, stats
        assert stats["late"] <= 2 * buckets and stats["discarded"] == 0, stats
        assert stats["early"] == stats["ahead"] == stats["committed"], stats


class Summed(Pair):
    """A pair whose plain class gets float32 sums of the gradients that the other one was given."""

    def __init__(self, device="cpu", kind="adam", params=None, **settings):
        super().__init__(device, kind, params, free_grads=True, **settings)
        self.sums = [None] * len(self.params)

    def backward(self, missing=0.0, factor=1.0, times=1):
        for _ in range(times):
            for i, param in enumerate(self.params):
                is_missing = torch.rand((), generator=self.generator) < missing
                if is_missing or not param.requires_grad:
                    continue
                grad = self.draw(param, factor)
                torch.autograd.backward([param], [grad.clone()])
                assert sent(param.grad) is not None or param not in self.ours.state
                had = self.sums[i]
                self.sums[i] = grad.float() if had is None else had + grad.float()

    def give(self):
        for twin, grad in zip(self.twins, self.sums, strict=True):
            twin.grad = None if grad is None else torch.empty_like(twin)
            if grad is not None:
                twin.grad.data = torch.empty_strided(
                    twin.shape, twin.stride(), device=twin.device
                ).copy_(grad)

    def zero_grad(self):
        super().zero_grad()
        self.sums = [None] * len(self.params)


def assert_same_state(one, other):
    """Compare the state dicts of two optimizers, bit for bit."""
    a, b = one.state_dict(), other.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for i, entry in a["state"].items():
        assert entry.keys() == b["state"][i].keys()
        for key, value in entry.items():
            theirs = b["state"][i][key]
            if not isinstance(value, Tensor):
                assert value == theirs, (i, key)
                continue
            assert value.dtype == theirs.dtype and value.shape == theirs.shape, (i, key)
            assert torch.equal(value.cpu(), theirs.cpu()), (i, key)


def await_speculation(optimizer):
    """Return when all speculative steps are over, so that step() finds them done."""
    found = optimizer._pipeline
    found.worker.wait(
        [b.speculative_task for b in found._buckets if b.speculative_task is not None]
    )


def small_parts(monkeypatch, piece=512, most=1024):
    """Let buckets and the pieces of their steps be so small that many are under way."""
    monkeypatch.setattr(host_optimizer, "PIECE", piece)
    monkeypatch.setattr(param_table, "BUCKET", most)


def count_calls(monkeypatch, owner, method):
    """Return a list that grows with each call of a method."""
    original, calls = getattr(owner, method), []

    def counted(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, counted)
    return calls


def warm(device="cpu", **settings):
    """Return a pair whose next step will be speculative."""
    pair = Pair(device, **settings)
    pair.train(WARM)
    return pair


def finish(pair, committed=None, discarded=None):
    """Step, compare, see what counted, and that the pair goes on as before."""
    before = pair.ours.stats()
    pair.step()
    pair.check()
    after = pair.ours.stats()
    for key, wanted in (("committed", committed), ("discarded", discarded)):
        if wanted is not None:
            assert after[key] - before[key] == wanted, (key, before, after)
    pair.train(3)
    assert pair.ours.stats()["committed"] > after["committed"]


def same_values(pair):
    """Put other gradients of the same values in place of those that backward made."""
    for param in pair.params:
        param.grad = param.grad.clone()


class Gate:
    """Hold whatever thread calls a method of a bucket until it is opened.

    Args:
        monkeypatch: for as long as methods are to be replaced.
        method: its name.
        only: the bucket in question, or None for all.

    Attributes:
        reached: set when a thread is held.
        calls: how many have come.
    """

    def __init__(self, monkeypatch, method, only=None):
        self.reached, self._open, self.calls = threading.Event(), threading.Event(), 0
        original = getattr(bucket.HostBucket, method)

        def held(self_, *args):
            if only is None or self_ is only:
                self.calls += 1
                self.reached.set()
                assert self._open.wait(PATIENCE), f"nobody has opened the gate of {method}"
            return original(self_, *args)

        monkeypatch.setattr(bucket.HostBucket, method, held)

    def await_thread(self):
        """Return when a thread is held."""
        assert self.reached.wait(PATIENCE)

    def open(self):
        """Let all pass, from now on."""
        self._open.set()

    def open_soon(self):
        """Do that when this thread waits, or a moment later if it does not."""
        threading.Timer(0.05, self.open).start()
