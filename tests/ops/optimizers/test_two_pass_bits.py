"""LAMB and LARS: the same bits however tensors lie in memory, are split, and wherever it runs."""

import itertools

import pytest
import torch
from step_cases import (
    BF16,
    F16,
    F32,
    SIZES,
    Arguments,
    Dtypes,
    as_buffers,
    as_lists,
    assert_same,
    clone,
    make,
    written,
)
from test_step_bits import LAYOUTS, relaid_arguments, threads
from two_pass_cases import CHUNK, LAMB, TwoPass, each_two_pass, each_with_dtypes


@each_two_pass
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_dense_layout(step: TwoPass, layout: str, device: str) -> None:
    shape, order = LAYOUTS[layout]
    numbers = step.base
    got = relaid_arguments(make(step, [shape] * 3, Dtypes(F16, BF16, F16, True), device), order)
    buffers = as_buffers(clone(got), gap=5)
    flat = clone(got)
    for name in ("params", "grads", *step.states, "master_params"):
        flat[name] = [t.as_strided((t.numel(),), (1,)) for t in flat[name]]
    squares = [step.both(arguments, numbers) for arguments in (got, buffers, flat)]
    assert torch.equal(squares[0], squares[1]) and torch.equal(squares[0], squares[2])
    assert_same(as_lists(buffers), got)
    for name in written(got):
        for a, b in zip(got[name], flat[name], strict=True):
            assert torch.equal(a.as_strided((a.numel(),), (1,)), b.flatten()), name


@each_with_dtypes
def test_storage_types_change_only_what_they_round(
    step: TwoPass, dtypes: Dtypes, device: str
) -> None:
    """Combinations with a loop of their own, and those that share one, do the same arithmetic."""
    arguments = make(step, SIZES, dtypes, device)
    wide_grads = clone(arguments)
    wide_grads["grads"] = [grad.float() for grad in wide_grads["grads"]]
    masters_only = clone(wide_grads)
    masters_only |= dict(params=masters_only["master_params"], master_params=[])
    squares = step.measure(arguments, step.base)
    coefficients = step.coefficients(squares, step.base)
    others = [(wide_grads, arguments)]
    if dtypes.master and dtypes.state is F32:
        others.append(
            (masters_only, arguments | dict(params=arguments["master_params"], master_params=[]))
        )
    step.apply(arguments, coefficients, step.base)
    for got, want in others:
        # On CUDA the elements of a thread depend on the types, and the last bits of a sum on them.
        again = step.measure(got, step.base)
        torch.testing.assert_close(again, squares, rtol=1e-13 if device == "cuda" else 0, atol=0)
        step.apply(got, coefficients, step.base)
        assert_same(got, want)


@each_two_pass
def test_any_thread_count(step: TwoPass) -> None:
    sizes = [7, 3 * CHUNK + 77, 0, CHUNK, 1, CHUNK + 1]
    want, *others = (make(step, sizes, Dtypes(BF16, BF16, F32, True)) for _ in range(3))
    with threads(1):
        squares = step.both(want, step.base)
    for count, got in zip((2, 3), others, strict=True):
        with threads(count):
            assert torch.equal(step.both(got, step.base), squares)
        assert_same(got, want)


@each_two_pass
def test_any_sharding_with_the_coefficients_of_the_whole(step: TwoPass) -> None:
    """Sums of shards add up to those of the whole; with those, each shard gets its elements."""
    whole = make(step, [100_003])
    cuts = [0, 1, 4096, 70_001, 100_003]
    shards: Arguments = {
        name: [tensors[0][a:b].clone() for a, b in itertools.pairwise(cuts)]
        for name, tensors in whole.items()
        if tensors and name != "steps"
    } | dict(steps=[whole["steps"][0].clone() for _ in cuts[1:]])
    squares, parts = step.measure(whole, step.base), step.measure(shards, step.base)
    torch.testing.assert_close(parts.sum(0), squares[0], rtol=1e-13, atol=0)
    factors = step.coefficients(squares, step.base)
    step.apply(whole, factors, step.base)
    step.apply(shards, factors.expand(4).contiguous(), step.base)
    for name in ("params", *step.states):
        assert torch.equal(torch.cat(shards[name]), whole[name][0]), name


@pytest.mark.parametrize("buffers", [False, True])
@each_two_pass
def test_one_call_for_all_as_one_for_each(step: TwoPass, buffers: bool, device: str) -> None:
    together, apart = (make(step, SIZES * 40, device=device) for _ in range(2))  # several launches
    for taken in (*together["steps"], *apart["steps"]):
        taken.fill_(5)  # all the same, and yet each has a coefficient of its own
    rows = []
    for i in range(len(together["params"])):
        one = {name: tensors[i : i + 1] for name, tensors in apart.items()}
        rows.append(step.both(one, step.base))
    together = as_buffers(together) if buffers else together
    assert torch.equal(step.both(together, step.base), torch.cat(rows))
    assert_same(as_lists(together) if buffers else together, apart)


@each_two_pass
def test_thousands_of_tensors(step: TwoPass, device: str) -> None:
    """More than the tables of a launch take, of steps, of tensors and of sums."""
    together, apart = (make(step, [2] * 4100, device=device) for _ in range(2))
    rows = []
    for begin in range(0, 4100, 450):
        part = {name: tensors[begin : begin + 450] for name, tensors in apart.items()}
        rows.append(step.both(part, step.base))
    assert torch.equal(step.both(together, step.base), torch.cat(rows))
    assert_same(together, apart)


@each_with_dtypes
def test_cpu_as_cuda(step: TwoPass, dtypes: Dtypes, cuda: str) -> None:
    """Sums may differ in their last bits; everything else is the same for the same coefficients."""
    on_cpu, on_cuda = (make(step, [*SIZES, 200_003], dtypes, device) for device in ("cpu", cuda))
    squares = step.measure(on_cpu, step.base)
    torch.testing.assert_close(step.measure(on_cuda, step.base).cpu(), squares, rtol=1e-12, atol=0)
    coefficients = step.coefficients(squares, step.base)
    step.apply(on_cpu, coefficients, step.base)
    step.apply(on_cuda, coefficients.to(cuda), step.base)
    for name in written(on_cpu):
        for a, b in zip(on_cuda[name], on_cpu[name], strict=True):
            assert torch.equal(a.cpu(), b), name


@each_two_pass
def test_cuda_gives_the_same_sums_in_every_run(step: TwoPass, cuda: str) -> None:
    arguments = make(step, [3_000_001, 5, 70_000], device=cuda)
    kept = clone(arguments)
    squares = step.measure(arguments, step.base)
    for _ in range(5):
        assert torch.equal(step.measure(clone(kept), step.base), squares)


def test_all_runs_of_lamb_are_the_same_on_cuda(cuda: str) -> None:
    """Three steps, twice."""
    first, second = (make(LAMB, [1 << 20, 77], device=cuda) for _ in range(2))
    for arguments in (first, second):
        for _ in range(3):
            LAMB.both(arguments, LAMB.base)
    assert_same(first, second)
