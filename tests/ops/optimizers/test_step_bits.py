"""The step ops: the same bits however tensors lie in memory, are split, and wherever it runs."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from os import environ
from pathlib import Path

import pytest
import torch
import warm_python
from hypothesis import given, settings, strategies as st
from step_cases import (
    BF16,
    F16,
    F32,
    LION,
    SIZES,
    Arguments,
    Dtypes,
    Step,
    as_buffers,
    as_lists,
    assert_same,
    clone,
    digest,
    each_step,
    each_step_and_dtypes,
    make,
    map_tensors,
    options,
    results,
    states_of,
)
from torch import Tensor
from two_pass_cases import digests

LAYOUTS = {  # shape, and its dimensions from the outermost to the innermost in memory
    "transposed": ((37, 113), (1, 0)),
    "channels last": ((5, 7, 4, 61), (0, 2, 3, 1)),
    "permuted": ((9, 11, 53), (1, 2, 0)),
    "a dimension of one": ((9, 1, 13), (2, 1, 0)),
    "no dimension": ((), ()),
}
Order = tuple[int, ...]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def relaid(tensor: Tensor, order: Order) -> Tensor:
    """A copy with its dimensions in that order in memory."""
    memory = tensor.permute(order).clone(memory_format=torch.contiguous_format)
    return memory.permute([order.index(i) for i in range(len(order))])


def relaid_arguments(arguments: Arguments, order: Order) -> Arguments:
    steps = [step.clone() for step in arguments["steps"]]
    tensors = {name: value for name, value in arguments.items() if name != "steps"}
    return map_tensors(lambda tensor: relaid(tensor, order), tensors) | dict(steps=steps)


@each_step
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_dense_layout(step: Step, layout: str, device: str) -> None:
    shape, order = LAYOUTS[layout]
    for dtypes in (Dtypes(), Dtypes(F16, BF16, F16, True)):
        want = make(step, [shape] * 3, dtypes, device, step.most_states)
        got = relaid_arguments(want, order)
        buffers = as_buffers(clone(got), gap=5)
        for arguments in (want, got, buffers):
            step(**arguments, **step.base)
        assert_same(got, want)
        assert_same(as_lists(buffers), want)


@each_step
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_in_another_layout_than_their_param(step: Step, layout: str, device: str) -> None:
    shape, order = LAYOUTS[layout]
    contiguous = make(step, [shape] * 4, device=device)
    for param_order in (order, tuple(range(len(shape)))):
        want = relaid_arguments(contiguous, param_order)
        got = clone(want)
        one, two, three, four = contiguous["grads"]
        rows = (three[:1] if shape else three).expand(shape)  # all in the same memory
        gappy = torch.stack([four, four], -1)[..., 0]
        got["grads"] = [one, relaid(two, order), rows, gappy]
        want["grads"] = [relaid(grad, param_order) for grad in got["grads"]]
        before = [grad.clone() for grad in got["grads"]]
        step(**want, **step.base)
        step(**got, **step.base)
        assert_same(got, want)
        assert all(map(torch.equal, got["grads"], before))


@each_step_and_dtypes()
def test_buffers_as_lists(step: Step, dtypes: Dtypes, device: str) -> None:
    for change, gap in zip(step.changes, itertools.cycle((0, 3)), strict=False):
        lists = make(step, SIZES, dtypes, device, change.get("states"))
        buffers = as_buffers(clone(lists), gap)
        step(**lists, **options(step, change, device))
        step(**buffers, **options(step, change, device))
        assert_same(as_lists(buffers), lists)
        for name in [*states_of(lists), "steps"]:  # what lies between is not touched
            places = buffers["slots" if name == "steps" else "offsets"].tolist()
            if lists[name]:
                ends = [a + t.numel() for a, t in zip(places, lists[name], strict=True)]
                for end, begin in zip(ends, places[1:], strict=False):
                    assert (buffers[name][0][end:begin] == 3).all()


@each_step_and_dtypes()
def test_storage_types_change_only_what_they_round(step: Step, dtypes: Dtypes, device: str) -> None:
    """Combinations with a loop of their own, and those that share one, do the same arithmetic."""
    arguments = make(step, SIZES, dtypes, device)
    wide_grads = clone(arguments)
    wide_grads["grads"] = [grad.float() for grad in wide_grads["grads"]]
    masters_only = clone(wide_grads)
    step(**arguments, **step.base)
    step(**wide_grads, **step.base)
    assert_same(wide_grads, arguments)
    if dtypes.master:
        for param, master in zip(arguments["params"], arguments["master_params"], strict=True):
            assert torch.equal(param, master.to(dtypes.param))
    if dtypes.master and dtypes.state is F32:
        masters_only |= dict(params=masters_only["master_params"], master_params=[])
        step(**masters_only, **step.base)
        want = arguments | dict(params=arguments["master_params"], master_params=[])
        assert_same(masters_only, want)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_conversions_are_exact(dtype: torch.dtype, device: str) -> None:
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    values = values[values.isfinite()].to(device)
    exact = values.float().sort().values
    halfway = (exact[1:] + exact[:-1]) / 2
    infinity = torch.tensor(float("inf"), device=device)
    above, below = halfway.nextafter(infinity), halfway.nextafter(-infinity)
    ends = torch.tensor([65519.9, 65520, 7e4, -7e4, 3.4e38, float("inf"), float("nan")])
    master = torch.cat([exact, halfway, above, below, ends.to(device)])
    param = torch.empty_like(master, dtype=dtype)
    zeros = [[torch.zeros_like(master)] for _ in range(2)]
    steps = [torch.zeros((), device=device)]
    LION([param], *zeros, steps, master_params=[master], lr=0.0)
    torch.testing.assert_close(param, master.to(dtype), rtol=0, atol=0, equal_nan=True)

    # With both betas 0, exp_avg becomes the gradient as it was widened.
    param, exp_avg = (torch.zeros_like(values, dtype=F32) for _ in range(2))
    LION([param], [values], [exp_avg], steps, lr=0.0, betas=(0.0, 0.0))
    assert torch.equal(exp_avg, values.float())


expected = cache(digests)  # of the widest ISA


def test_every_isa(isa: str) -> None:
    environment = environ | {"DSX_FORCE_ISA": isa}
    done = warm_python.run(Path(__file__).with_name("two_pass_cases.py"), env=environment)
    assert done.stdout.splitlines() == expected(), done.stderr


LONG = 140_003  # over two chunks


@cache
def whole_step(step: Step) -> tuple[Arguments, Arguments]:
    """Return arguments, and what a step makes of a copy of them in one piece by one thread."""
    before = make(step, [LONG], Dtypes(F16, BF16, F32, True))
    after = clone(before)
    with threads(1):
        step(**after, **step.base)
    return before, after


@each_step
@settings(deadline=None, max_examples=25)
@given(
    cuts=st.lists(st.integers(0, LONG), max_size=20),
    count=st.sampled_from([1, 2, 3]),
    buffers=st.booleans(),
)
def test_any_sharding_and_thread_count(
    step: Step, cuts: list[int], count: int, buffers: bool
) -> None:
    before, whole = whole_step(step)
    bounds = [0, *sorted(cuts), LONG]
    split = {
        name: [tensors[0][a:b] for a, b in itertools.pairwise(bounds)] if tensors else []
        for name, tensors in (clone(before) | dict(steps=[])).items()
    } | dict(steps=[torch.zeros(()) for _ in bounds[1:]])
    split = as_buffers(split) if buffers else split
    with threads(count):
        step(**split, **step.base)
    split = as_lists(split) if buffers else split
    for name in ("params", *states_of(whole)):
        assert torch.equal(torch.cat(split[name]), whole[name][0]), name


@each_step
@pytest.mark.parametrize("buffers", [False, True])
def test_one_call_for_all_as_one_for_each(step: Step, buffers: bool, device: str) -> None:
    shapes = SIZES * (90 if device == "cuda" else 9)  # several launches
    together, apart = (make(step, shapes, Dtypes(), device) for _ in range(2))
    for i in range(len(together["params"])):
        one = {name: tensors[i : i + 1] for name, tensors in apart.items()}
        step(**one, **step.base)
    together = as_buffers(together) if buffers else together
    step(**together, **step.base)
    assert_same(as_lists(together) if buffers else together, apart)


@each_step
def test_cpu_as_cuda(step: Step, cuda: str) -> None:
    for (name, on_cpu), (_, on_cuda) in zip(results(step, "cpu"), results(step, cuda), strict=True):
        torch.testing.assert_close(on_cuda, on_cpu, rtol=0, atol=0, equal_nan=True, msg=name)
    assert digest(step, cuda) == digest(step, "cpu")
