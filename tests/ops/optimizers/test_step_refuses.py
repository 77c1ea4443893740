"""The step ops: what they refuse, in which words, and that they then have changed nothing."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from step_cases import (
    ADAGRAD,
    ADAM,
    BF16,
    F16,
    F32,
    LION,
    RMSPROP,
    SGD,
    STEPS,
    Arguments,
    Dtypes,
    Step,
    as_buffers,
    each_step,
    integers,
    make,
)
from torch import Tensor

Make = Callable[[Step], Arguments]


def lists(name: str, change: Callable[[list[Tensor]], Any], dtypes: Dtypes = Dtypes()) -> Make:
    """Two tensors of shape [4] with one list changed; state in lists."""

    def made(step: Step) -> Arguments:
        arguments = make(step, [4, 4], dtypes)
        return arguments | {name: change(arguments.get(name, []))}

    return made


def buffers(name: str, value: Any) -> Make:
    """Two tensors of shape [4] with one argument replaced; state in flat buffers."""
    return lambda step: as_buffers(make(step, [4, 4])) | {name: value}


def second(change: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    """A change of the second tensor of a list."""
    return lambda tensors: [tensors[0], change(tensors[1])]


def each(change: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    return lambda tensors: [change(tensor) for tensor in tensors]


def freed(tensor: Tensor) -> Tensor:
    """The tensor with its storage let go, as sharding wrappers do between forward passes."""
    tensor.untyped_storage().resize_(0)
    return tensor


def option(name: str, value: Any) -> Make:
    return lambda step: make(step, [4, 4]) | {name: value}


def overlap(name: str, of: str, begin: int) -> Make:
    """The first tensor of `name` begins `begin` elements into the first tensor of `of`."""

    def made(step: Step) -> Arguments:
        arguments = make(step, [4, 4], states=step.most_states)
        memory = torch.zeros(8)
        arguments[of][0], arguments[name][0] = memory[:4], memory[begin : begin + 4]
        return arguments

    return made


def scalar_inside(of: str, name: str) -> Make:
    """The first tensor of `of` begins with the number that option `name` is."""

    def made(step: Step) -> Arguments:
        arguments = make(step, [4, 4])
        return arguments | {name: arguments[of][0][0]}

    return made


MASTERS = Dtypes(BF16, BF16, F32, True)
NOT_SEPARATE = "expected separate memory"
DENSE = "expected a dense layout, without gaps or overlaps"


def refused_by_every_op(state: str) -> dict[str, Make]:
    """What the code that all ops share refuses; `state` is the first state argument."""
    return {
        # lengths
        "grads has length 1, expected 2": lists("grads", lambda x: x[:1]),
        "grads has length 2, expected 0": lists("params", lambda x: []),
        f"{state} has length 3, expected 2": lists(state, lambda x: [*x, x[0]]),
        "master_params has length 1, expected 2": lists("master_params", lambda x: x[:1], MASTERS),
        "steps has length 1, expected 2": lists("steps", lambda x: x[:1]),
        "offsets has length 0, expected 2": buffers("offsets", integers([])),
        "slots has length 1, expected 2": buffers("slots", integers([0])),
        f"{state} has length 2, expected 1": buffers(state, [torch.ones(8), torch.ones(8)]),
        # shapes and layouts
        "grads[1] has shape [2, 2], expected [4]": lists("grads", second(lambda x: x.view(2, 2))),
        f"{state}[1] has shape [], expected [4]": lists(state, second(lambda x: x[0])),
        "steps[1] has 4 elements, expected 1": lists("steps", second(lambda x: torch.zeros(4))),
        f"params[1] has strides [2] for shape [4], {DENSE}":
            lists("params", second(lambda x: torch.ones(8)[::2])),
        f"params[0] has strides [0] for shape [4], {DENSE}":
            lists("params", each(lambda x: x[:1].expand(4))),
        f"{state}[0] has strides [1, 2], expected [2, 1]":
            lambda step: make(step, [(2, 2)]) | {state: [torch.zeros(2, 2).t()]},
        # dtypes
        "params[0] is float64, expected float32, bfloat16 or float16":
            lists("params", each(Tensor.double)),
        "params[0] is complex64, expected float32, bfloat16 or float16":
            lists("params", each(lambda x: x.to(torch.complex64))),
        "params[1] is float16, expected float32": lists("params", second(Tensor.half)),
        "grads[0] is int32, expected float32, bfloat16 or float16":
            lists("grads", each(Tensor.int)),
        "grads[1] is bfloat16, expected float32": lists("grads", second(Tensor.bfloat16)),
        f"{state}[0] is float16, expected float32, bfloat16 or uint8":
            lists(state, each(Tensor.half)),
        f"{state}[0] is float64, expected float32, bfloat16, float16 or uint8":
            lists(state, each(Tensor.double), Dtypes(F16)),
        "master_params[0] is bfloat16, expected float32":
            lists("master_params", each(Tensor.bfloat16), MASTERS),
        "params[0] is float32, expected bfloat16 or float16 with master_params":
            lists("master_params", lambda _: [torch.ones(4), torch.ones(4)]),
        "steps[0] is float64, expected float32": lists("steps", each(Tensor.double)),
        # devices and kinds
        "params[1] is on meta, expected cpu": lists("params", second(lambda x: x.to("meta"))),
        "grads[1] is on meta, expected cpu": lists("grads", second(lambda x: x.to("meta"))),
        "steps[1] is on meta, expected cpu": lists("steps", second(lambda x: x.to("meta"))),
        "found_inf is on meta, expected cpu": option("found_inf", torch.ones(1, device="meta")),
        "grads[1] is torch.sparse_coo, expected torch.strided":
            lists("grads", second(Tensor.to_sparse)),
        # numbers
        "lr has 2 elements, expected 1": option("lr", torch.ones(2)),
        "lr is bfloat16, expected float32 or float64": option("lr", torch.ones(1, dtype=BF16)),
        "grad_scale is int64, expected float32 or float64": option("grad_scale", torch.tensor(2)),
        "found_inf has 0 elements, expected 1": option("found_inf", torch.ones(0)),
        # flat buffers
        "offsets is float32, expected int64": buffers("offsets", torch.zeros(2)),
        "slots has shape [1, 2] and strides [2, 1], expected one contiguous dimension": buffers(
            "slots", integers([[0, 1]])
        ),
        "offsets[0] is -1, expected at least 0": buffers("offsets", integers([-1, 4])),
        "offsets[1] is 3, expected at least 4": buffers("offsets", integers([0, 3])),
        "slots[1] is 0, expected at least 1": buffers("slots", integers([0, 0])),
        f"{state}[0] has 7 elements, expected at least 8": buffers(state, [torch.ones(7)]),
        "steps[0] has 1 elements, expected at least 2": buffers("steps", [torch.ones(1)]),
        f"{state}[0] has shape [8] and strides [2], expected one contiguous dimension":
            buffers(state, [torch.ones(16)[::2]]),
        # memory
        f"{state}[0] is overlapping params[0], {NOT_SEPARATE}": overlap(state, "params", 2),
        f"grads[0] is overlapping params[0], {NOT_SEPARATE}": overlap("grads", "params", 3),
        f"params[1] is overlapping params[0], {NOT_SEPARATE}":
            lists("params", lambda x: [x[0]] * 2),
        f"lr is overlapping params[0], {NOT_SEPARATE}": scalar_inside("params", "lr"),
        f"grad_scale is overlapping {state}[0], {NOT_SEPARATE}":
            scalar_inside(state, "grad_scale"),
        f"found_inf is overlapping steps[0], {NOT_SEPARATE}":
            lambda step: (a := make(step, [4])) | dict(found_inf=a["steps"][0]),
        "params[1] has no memory, expected 4 elements": lists("params", second(freed)),
        "grads[0] has no memory, expected 4 elements": lists("grads", each(freed)),
        f"{state}[1] has no memory, expected 4 elements": lists(state, second(freed)),
        f"{state}[0] has no memory, expected 8 elements": buffers(state, [freed(torch.ones(8))]),
        "lr has no memory, expected 1 elements": option("lr", freed(torch.ones(1))),
        f"steps[1] is overlapping steps[0], {NOT_SEPARATE}": lists("steps", lambda x: [x[0]] * 2),
    }  # fmt: skip


REFUSED_BY_ONE: dict[Step, dict[str, Make]] = {
    ADAM: {
        "exp_avg_sqs has length 0, expected 2": lists("exp_avg_sqs", lambda x: []),
        "max_exp_avg_sqs has length 1, expected 2":
            lists("max_exp_avg_sqs", lambda x: [torch.ones(4)]),
        "exp_avg_sqs[0] is float32, expected float16":
            lists("exp_avg_sqs", each(Tensor.float), Dtypes(F16, F16, F16)),
        "max_exp_avg_sqs[0] is bfloat16, expected float32":
            lists("max_exp_avg_sqs", lambda _: [torch.ones(4, dtype=BF16)] * 2),
        "exp_avg_sqs[0] has shape [2, 4] and strides [4, 1], expected one contiguous dimension":
            buffers("exp_avg_sqs", [torch.ones(2, 4)]),
        f"max_exp_avg_sqs[0] is overlapping grads[0], {NOT_SEPARATE}":
            overlap("max_exp_avg_sqs", "grads", 1),
    },
    LION: {},
    ADAGRAD: {},
    RMSPROP: {
        "grad_avgs has length 1, expected 2": lists("grad_avgs", lambda _: [torch.ones(4)]),
        "momentum_buffers has length 0, expected 2": lists("momentum_buffers", lambda _: []),
        "momentum_buffers has length 2, expected 0": option("momentum", 0.0),
        "alpha is 1, expected 0 <= alpha < 1": option("alpha", 1.0),
        "momentum is -1, expected at least 0": option("momentum", -1.0),
    },
    SGD: {
        "momentum_buffers has length 0, expected 2": lists("momentum_buffers", lambda _: []),
        "momentum_buffers has length 2, expected 0": option("momentum", 0.0),
    },
}  # fmt: skip
REFUSED = [
    (step, text, made)
    for step in STEPS
    for text, made in (refused_by_every_op(step.states[0]) | REFUSED_BY_ONE[step]).items()
]


def tensors_of(arguments: Arguments) -> list[Tensor]:
    found = [value for value in arguments.values() if isinstance(value, Tensor)]
    found += [item for value in arguments.values() if isinstance(value, list) for item in value]
    found = [tensor for tensor in found if isinstance(tensor, Tensor) and not tensor.is_meta]
    return [t for t in found if t.is_sparse or t.untyped_storage().nbytes() > 0]


@pytest.mark.parametrize(
    ("step", "text", "made"), REFUSED, ids=[f"{step}: {text}" for step, text, _ in REFUSED]
)
def test_refuses(step: Step, text: str, made: Make) -> None:
    arguments = step.base | made(step)
    before = [(tensor.clone(), tensor._version) for tensor in tensors_of(arguments)]
    with pytest.raises(ValueError, match=f"^{step.title}: {re.escape(text)}$"):
        step(**arguments)
    for tensor, (value, version) in zip(tensors_of(arguments), before, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor.to_dense(), value.to_dense())


@pytest.mark.parametrize("step", [ADAM, LION], ids=str)
def test_refuses_betas(step: Step) -> None:
    for betas, text in (
        ((1.0, 0.9), "beta1 is 1, expected 0 <= beta1 < 1"),
        ((0.9, -0.5), "beta2 is -0.5, expected 0 <= beta2 < 1"),
        ((float("nan"), 0.9), "beta1 is nan, expected 0 <= beta1 < 1"),
    ):
        with pytest.raises(ValueError, match=f"^{step.title}: {re.escape(text)}$"):
            step(**make(step, [4, 4]), **(step.base | dict(betas=betas)))


@each_step
@pytest.mark.parametrize(
    "name, tensor", [("grads", [torch.ones(4)]), *((n, torch.ones(1)) for n in ("lr", "found_inf"))]
)
def test_refuses_a_tensor_on_another_device(step: Step, name: str, tensor: Any, cuda: str) -> None:
    item = "grads[0]" if name == "grads" else name
    on_cuda = make(step, [4], device=cuda) | {name: tensor}
    with pytest.raises(
        ValueError, match=f"^{step.title}: {re.escape(item)} is on cpu, expected cuda:0$"
    ):
        step(**(step.base | on_cuda))
    moved = [t.to(cuda) for t in tensor] if isinstance(tensor, list) else tensor.to(cuda)
    with pytest.raises(
        ValueError, match=f"^{step.title}: {re.escape(item)} is on cuda:0, expected cpu$"
    ):
        step(**(step.base | make(step, [4]) | {name: moved}))


@pytest.mark.parametrize("name", ["offsets", "slots"])
def test_refuses_places_beyond_int64(name: str) -> None:
    end = 2**63 - 1
    text = f"{name}[1] is {end}, expected at most"
    with pytest.raises(ValueError, match=f"^adam_step_: {re.escape(text)} "):
        ADAM(**(ADAM.base | as_buffers(make(ADAM, [4, 4])) | {name: integers([0, end])}))


@each_step
def test_what_only_touches_or_is_only_read_may_share(step: Step) -> None:
    step(**(step.base | overlap(step.states[0], "params", 4)(step)))
    step(**(step.base | lists("grads", lambda x: [x[0], x[0]])(step)))
    number = torch.ones(1)
    step(**(step.base | make(step, [4]) | dict(lr=number, grad_scale=number)))


def test_unknown_isa_is_an_error() -> None:
    environment = os.environ | {"DSX_FORCE_ISA": "sse9"}
    run = warm_python.run(Path(__file__).with_name("two_pass_cases.py"), env=environment)
    assert "ValueError: DSX_FORCE_ISA is sse9, expected one that this library has" in run.stderr
