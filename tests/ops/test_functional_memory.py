"""Functional ops: no memory beside their results, but 1 % of what their operands take.

One process measures all ops on the CPU.
"""

import itertools
import math
from collections.abc import Iterable
from functools import cache

import pytest
import torch
from allocated import Taken, measured, on_cuda, share
from functional_cases import CASES, Call, Case, Recorder, call_of
from samples import BF16, F32
from torch import Tensor

# Rows and their length. Of under 200 classes, cross_entropy's loss of each row is over 1 %.
SHAPES = [(4000, 264), (257, 4096), (65, 16_384), (8, 131_072)]
DTYPES = {"bf16": (BF16, BF16), "bf16 and fp32": (BF16, F32)}
EXCEPTED = {  # of backward; by the beginnings of what is measured
    "gated_activation of halves, ": "torch adds up the gradients of slices",
    "softmax with an added mask, bf16 and fp32": "the gradient of a mask is cast to its dtype",
    "softmax with a mask added to all, ": "the gradient of a mask is added up from that of scores",
}
CONTROL = {"takes a copy": Case(lambda x: (x * 2) * 3, lambda n: [(n,)])}


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of their memory, once where they share it."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def shares(call: Call, taken: Taken) -> list[float]:
    """Return what forward and backward take beside their results, as shares of their operands.

    What an op keeps for its gradient is among its results.
    """
    leaves, recorder = call.leaves(), Recorder()
    with recorder:
        results, forward = taken(call.forward, leaves)
    forward -= bytes_of([*results, *recorder.results])
    recorder.results.clear()
    grads, backward = taken(torch.autograd.grad, results, leaves, call.grads)
    operands = bytes_of(call.tensors())
    of_both = operands + bytes_of(call.grads)
    return [share(forward, operands), share(backward - bytes_of(grads), of_both)]


def measure(device: str, taken: Taken) -> dict[str, list[float]]:
    """Return the shares of each case, mixture of dtypes and shape."""
    found = {}
    cases = CASES | CONTROL
    for case in cases.values():  # what torch imports, and the libraries
        shares(call_of(case, 2, 8, BF16, device), taken)
    for name, mixture, (rows, n) in itertools.product(cases, DTYPES, SHAPES):
        width = sum(math.prod(shape) for shape in cases[name].of_rows(n)) // n
        rows = math.ceil(rows / width)
        dtype, others = DTYPES[mixture]
        call = call_of(cases[name], rows, n, dtype, device, others=others)
        found[f"{name}, {mixture}, {rows} x {n}"] = shares(call, taken)
    return found


measured_once = cache(measured)


def measured_of(name: str, device: str) -> dict[str, list[float]]:
    """Return what was measured of one case."""
    of_all: dict[str, list[float]] = measured_once(measure, device)
    found = {key: value for key, value in of_all.items() if key.startswith(f"{name}, ")}
    assert len(found) == len(DTYPES) * len(SHAPES)
    return found


@pytest.mark.parametrize("name", CASES)
def test_no_more_than_a_hundredth(name: str, device: str) -> None:
    too_much = {key: value for key, value in measured_of(name, device).items() if max(value) > 0.01}
    reasons = set()
    for beginning, reason in EXCEPTED.items():
        for key, (forward, _) in list(too_much.items()):
            if key.startswith(beginning) and forward <= 0.01:
                del too_much[key]
                reasons.add(reason)
    assert too_much == {}
    if reasons:
        pytest.xfail(", ".join(reasons))


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_sums_of_norms_beyond_the_cache(name: str, device: str) -> None:
    """What is too large to be read again from the cache on CUDA: 1 / 24 for sums over rows."""
    if device == "cpu":
        pytest.skip("there it is 1 % at any size: see above")
    call = call_of(CASES[name], 4096, 16_384, BF16, device)
    call.run()  # loads the library
    assert max(shares(call, on_cuda)) <= 1 / 24


def test_a_copy_is_noticed(device: str) -> None:
    (name,) = CONTROL
    assert all(min(value) > 0.45 for value in measured_of(name, device).values())
