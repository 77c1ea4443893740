"""Steps that write elsewhere: the bits of the step in place, of any range of a parameter."""

import itertools
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from step_cases import (
    ADAM,
    BF16,
    F16,
    F32,
    LION,
    STEPS,
    Arguments,
    Dtypes,
    Step,
    compact,
    make,
    options,
)
from torch import Tensor
from two_pass_cases import LAMB, TWO_PASS, TwoPass

BLOCK = 256
SIZES = [0, 1, 17, 256, 1000, 4097, (5, 7), 33_000]
FORMS = ("float32", "bfloat16", "float16", "masters", "codes", "buffers")
READ_ONLY = ("grads", "offsets", "slots", "noise")
Out = dict[str, list[Tensor]]
each = pytest.mark.parametrize("step", [*STEPS, *TWO_PASS], ids=str)
each_form = pytest.mark.parametrize("form", FORMS)


def arguments_of(step: Step, form: str, device: str, sizes: Sequence[Any] = SIZES) -> Arguments:
    """What the step takes in this form of storage, with all the states there may be."""
    dtypes = {
        "bfloat16": Dtypes(BF16, BF16, BF16),
        "float16": Dtypes(F16, F32, F16),
        "masters": Dtypes(BF16, BF16, F32, True),
        "codes": Dtypes(BF16, BF16, F32, True),
        "buffers": Dtypes(BF16, BF16, F32, True),
    }.get(form, Dtypes())
    made = make(step, sizes, dtypes, device, step.most_states)
    if form in ("codes", "buffers"):
        made = compact(step, made)
    if form == "buffers":
        made = in_buffers(made)
    if form in ("bfloat16", "codes", "buffers"):
        made["noise"] = torch.tensor([[77 * i + 5, 1000 * i] for i in range(len(sizes))])
    return made


def in_buffers(arguments: Arguments) -> Arguments:
    """The same state in flat buffers, parameters at multiples of a block."""
    numels = [param.numel() for param in arguments["params"]]
    starts = [0, *itertools.accumulate(-(-n // BLOCK) * BLOCK for n in numels)]
    n = len(numels)
    made = dict(arguments)
    for name in arguments:
        if name in ("params", "grads", "scales", "steps") or not arguments[name]:
            continue
        buffer = arguments[name][0].new_zeros(starts[-1])
        for start, tensor in zip(starts, arguments[name], strict=False):
            buffer[start : start + tensor.numel()] = tensor.flatten()
        made[name] = [buffer]
    scales = arguments["scales"]
    made["scales"] = [torch.cat(scales[j : j + n]) for j in range(0, len(scales), n)]
    made["steps"] = [torch.cat([step.flatten() for step in arguments["steps"]])]
    return made | dict(offsets=torch.tensor(starts[:-1]), slots=torch.arange(n))


def copied(arguments: Arguments) -> Arguments:
    """A copy in memory of its own."""
    return {
        name: [t.clone() for t in value] if isinstance(value, list) else value
        for name, value in arguments.items()
    }


def other_memory(arguments: Arguments, names: Sequence[str]) -> Out:
    """Tensors to write to in the place of these, full of something else."""
    return {name: [torch.full_like(t, 3) for t in arguments[name]] for name in names}


def with_gaps_of(want: Arguments, out: Out) -> Arguments:
    """What is wanted of flat buffers: between parameters what was there before."""
    if "offsets" not in want:
        return want
    made = dict(want)
    inside = torch.zeros(want["master_params"][0].numel(), dtype=torch.bool)
    for offset, param in zip(want["offsets"].tolist(), want["params"], strict=True):
        inside[offset : offset + param.numel()] = True
    for name in out:
        if name not in ("params", "scales", "steps"):
            made[name] = [
                torch.where(inside.to(t.device), t, torch.full_like(t, 3)) for t in want[name]
            ]
    return made


def call(
    step: Step, arguments: Arguments, numbers: dict[str, Any], out: Out | None
) -> list[Tensor]:
    """Take the whole step; return what it returns."""
    given = {} if out is None else {"out": out}
    if not isinstance(step, TwoPass):
        step(**arguments, **numbers, **given)
        return []
    return two_passes(step, arguments, numbers, out)


def two_passes(
    step: TwoPass, arguments: Arguments, numbers: dict[str, Any], out: Out | None
) -> list[Tensor]:
    def part(op: str) -> Out:
        return {name: out[name] for name in written_by(op) if name in out} if out else {}

    def given(op: str) -> dict[str, Any]:
        return {"out": part(op)} if part(op) else {}

    squares = step.measure(arguments | given(step.first), numbers)
    factors = torch.linspace(0.5, 1.5, len(squares), device=squares.device)
    step.apply(arguments | part(step.first) | given(step.second), factors, numbers)
    return [squares]


def written_by(op: str) -> list[str]:
    """Names of the arguments that an op updates."""
    packet = getattr(torch.ops.deepspeed_ext, op)
    if "out" not in packet.overloads():
        return []
    names = [argument.name for argument in packet.out._schema.arguments]
    return [name.removeprefix("out_") for name in names if name.startswith("out_")]


def options_of(step: Step, device: str) -> dict[str, Any]:
    """Numbers for a call with all states."""
    change = next(c for c in step.changes if c.get("states", step.states) == step.most_states)
    return options(step, change, device)


def written_names(arguments: Arguments) -> list[str]:
    return [n for n, v in arguments.items() if n not in READ_ONLY and isinstance(v, list) and v]


def assert_equal(got: Arguments, want: Arguments, names: Sequence[str]) -> None:
    for name in names:
        for i, (a, b) in enumerate(zip(got[name], want[name], strict=True)):
            assert torch.equal(bits(a), bits(b)), f"{name}[{i}]"


def bits(tensor: Tensor) -> Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.contiguous().view(integer)


@each
@each_form
@pytest.mark.parametrize("which", ["all", "params", "all but params"])
def test_as_in_place(step: Step, form: str, which: str, device: str) -> None:
    before = arguments_of(step, form, device)
    names = written_names(before)
    if which != "all":
        names = [name for name in names if (name == "params") == (which == "params")]
    want, got, out = copied(before), copied(before), other_memory(before, names)
    numbers = options_of(step, device)
    squares = call(step, want, numbers, None)
    for a, b in zip(call(step, got, numbers, out), squares, strict=True):
        assert torch.equal(a, b)
    assert_equal(out, with_gaps_of(want, out), names)
    assert_equal(got, before, [*names, "grads"])
    assert_equal(got, want, [name for name in written_names(before) if name not in names])


@each
@pytest.mark.parametrize("form", ["float32", "masters", "codes"])
@pytest.mark.parametrize("which", ["all", "params", "all, off by one"])
def test_large_as_in_place(step: Step, form: str, which: str) -> None:
    """On the CPU these results go past the cache, if they lie so that they can."""
    before = arguments_of(step, form, "cpu", [2**18 + 2048 + 777, 300])
    names = [name for name in written_names(before) if which != "params" or name == "params"]
    want, got, out = copied(before), copied(before), other_memory(before, names)
    if which == "all, off by one":
        out = {
            k: [torch.cat([t.flatten()[:1], t.flatten()])[1:] for t in v] for k, v in out.items()
        }
        out = {
            k: [t.view(b.shape) for t, b in zip(v, before[k], strict=True)] for k, v in out.items()
        }
    numbers = options_of(step, "cpu")
    squares = call(step, want, numbers, None)
    for a, b in zip(call(step, got, numbers, out), squares, strict=True):
        assert torch.equal(a, b)
    assert_equal(out, with_gaps_of(want, out), names)
    assert_equal(got, want, [name for name in written_names(before) if name not in names])


@each
@each_form
def test_skipped(step: Step, form: str, device: str) -> None:
    """What is written is what was read."""
    before = arguments_of(step, form, device)
    names = written_names(before)
    got, out = copied(before), other_memory(before, names)
    numbers = options_of(step, device) | dict(found_inf=torch.ones((), device=device))
    squares = call(step, got, numbers, out)
    assert_equal(out, with_gaps_of(before, out), names)
    assert_equal(got, before, names)
    if step is LAMB:
        assert not squares[0].any()


def part_of(arguments: Arguments, begin: int, end: int, blocks: bool) -> Arguments:
    """The step of elements [begin, end) of the only parameter; its state in views."""
    made: Arguments = {}
    for name, tensors in arguments.items():
        if name == "noise":
            made[name] = tensors + torch.tensor([0, begin])
        elif name == "scales":
            made[name] = [t[begin // BLOCK : -(-end // BLOCK)] for t in tensors]
        else:
            made[name] = [t if name == "steps" else t[begin:end] for t in tensors]
    return made


@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "buffers"])
@settings(deadline=None, max_examples=20)
@given(cuts=st.lists(st.integers(0, 10_007), max_size=8), threads=st.booleans())
def test_ranges_on_any_thread(step: Step, form: str, cuts: list[int], threads: bool) -> None:
    """A parameter in pieces, each with memory of its own to write to, in any order."""
    before = arguments_of(step, form, "cpu", [10_007])
    want = copied(before)
    numbers = options_of(step, "cpu")
    call(step, want, numbers, None)
    if form == "codes":
        cuts = [cut // BLOCK * BLOCK for cut in cuts]
    bounds = [*itertools.pairwise([0, *sorted(cuts), 10_007])]
    names = written_names(before)
    parts = [part_of(before, a, b, form == "codes") for a, b in bounds]
    outs = [other_memory(part, names) for part in parts]

    def run(i: int) -> None:
        call(step, parts[i], numbers, outs[i])

    if threads:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(run, reversed(range(len(parts)))))
    else:
        for i in reversed(range(len(parts))):
            run(i)
    for name in names:
        pieces = (
            [torch.cat([out[name][i] for out in outs]) for i in range(len(before[name]))]
            if (name != "steps")
            else outs[0][name]
        )
        assert_equal({name: pieces}, want, [name])


Change = Callable[[Arguments, Out], None]


def second(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """A change of the second tensor to write to."""

    def made(arguments: Arguments, out: Out) -> None:
        out[name][1] = change(out[name][1])

    return made


def shorter(arguments: Arguments, out: Out) -> None:
    out["steps"].pop()


def shifted(arguments: Arguments, out: Out) -> None:
    memory = torch.zeros(9)
    memory[:8] = arguments["exp_avgs"][1]
    arguments["exp_avgs"][1], out["exp_avgs"][1] = memory[:8], memory[1:]


def crossed(arguments: Arguments, out: Out) -> None:
    out["exp_avgs"][1] = arguments["params"][1]


def twice(arguments: Arguments, out: Out) -> None:
    out["params"][1] = out["exp_avgs"][1]


def absent(arguments: Arguments, out: Out) -> None:
    out["max_exp_avg_sqs"] = [torch.zeros(8), torch.zeros(8)]


REFUSED: dict[str, Change] = {
    "out_steps has length 1, expected 2": shorter,
    "out_params[1] is bfloat16, expected float32": second("params", Tensor.bfloat16),
    "out_exp_avgs[1] has shape [2, 4], expected [8]": second("exp_avgs", lambda t: t.view(2, 4)),
    "out_exp_avgs[1] has strides [2], expected [1]":
        second("exp_avgs", lambda t: torch.zeros(16)[::2]),
    "out_exp_avg_sqs[1] is on meta, expected cpu": second("exp_avg_sqs", lambda t: t.to("meta")),
    "out_max_exp_avg_sqs has length 2, expected 0": absent,
    "out_exp_avgs[1] is overlapping exp_avgs[1], expected separate memory": shifted,
    "out_exp_avgs[1] is overlapping params[1], expected separate memory": crossed,
    "out_params[1] is overlapping out_exp_avgs[1], expected separate memory": twice,
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    arguments = make(ADAM, [3, 8])
    out = other_memory(arguments, written_names(arguments))
    REFUSED[text](arguments, out)
    before, out_before = copied(arguments), {name: list(map(values, out[name])) for name in out}
    one, other = (
        re.escape(text),
        re.escape(re.sub(r"(\S+) is overlapping (\S+),", r"\2 is overlapping \1,", text)),
    )
    with pytest.raises(ValueError, match=rf"^adam_step_(?:\.out)?: (?:{one}|{other})$"):
        ADAM(**arguments, **ADAM.base, out=out)
    assert_equal(arguments, before, written_names(arguments))
    for name, tensors in out_before.items():
        assert all(map(torch.equal, map(values, out[name]), tensors)), name


@pytest.mark.parametrize("name", ["grads", "param", "noise"])
def test_refuses_names_of_what_it_does_not_write(name: str) -> None:
    arguments = make(ADAM, [3, 8])
    before = copied(arguments)
    text = f"adam_step_: out has {name!r}, expected some of ['params', 'exp_avgs', "
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        ADAM(**arguments, **ADAM.base, out={name: arguments["grads"]})
    assert_equal(arguments, before, written_names(arguments))


def values(tensor: Tensor) -> Tensor:
    return torch.zeros(0) if tensor.is_meta else tensor.clone()


def test_inputs_that_are_only_read_may_share() -> None:
    arguments = make(ADAM, [8, 8])
    for name in ("exp_avgs", "exp_avg_sqs"):
        arguments[name] = [arguments["exp_avg_sqs"][0]] * 2
    out = other_memory(arguments, written_names(arguments))
    ADAM(**arguments, **ADAM.base, out=out)
    assert not torch.equal(out["exp_avgs"][0], out["exp_avg_sqs"][0])


def test_writes_are_counted() -> None:
    arguments = make(ADAM, [8])
    out = other_memory(arguments, ["params", "exp_avgs"])
    versions = {n: v[0]._version for n, v in (arguments | {"out": out["params"]}).items() if v}
    ADAM(**arguments, **ADAM.base, out=out)
    assert out["params"][0]._version > versions["out"]
    assert arguments["params"][0]._version == versions["params"]
    assert arguments["exp_avg_sqs"][0]._version > versions["exp_avg_sqs"]


# Beyond 7 * 8 * 65,536 elements together, of which threads take ranges as they get along, and
# below 8 * 65,536 each, so that alone each is shared out in equal parts. Ranges begin anywhere in
# a tensor; blocks of codes, vectors and what is streamed past the cache do not.
SHARED_SIZES = [1, 65_535, 0, 65_537, 300, 255, *[500_003] * 6, 256, 4097, *[262_144] * 3]


@pytest.mark.parametrize("step", [ADAM, LION], ids=str)
@pytest.mark.parametrize("form", ["float32", "codes"])
def test_threads_that_take_ranges_as_they_get_along(step: Step, form: str) -> None:
    counts, n = (1, 2, 7), len(SHARED_SIZES)
    assert sum(SHARED_SIZES) > max(counts) * 8 * 65_536 and max(SHARED_SIZES) < 8 * 65_536
    arguments, numbers = arguments_of(step, form, "cpu", SHARED_SIZES), options_of(step, "cpu")
    apart = copied(arguments)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for i in range(n):
            parts = {k: v[i::n] if k == "scales" else v[i : i + 1] for k, v in apart.items()}
            step(**parts, **numbers)
        for count in counts:
            torch.set_num_threads(count)
            together = copied(arguments)
            out = other_memory(arguments, [k for k in step.op.written if arguments.get(k)])
            step(**arguments, **numbers, out=out)
            step(**together, **numbers)
            for name, tensors in out.items():
                for i, want in enumerate(apart[name]):
                    assert torch.equal(together[name][i], want), f"{name}[{i}], {count} threads"
                    assert torch.equal(tensors[i], want), f"{name}[{i}], {count}, elsewhere"
    finally:
        torch.set_num_threads(before)
