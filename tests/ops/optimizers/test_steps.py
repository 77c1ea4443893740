"""The step ops: values, element by element against float64, and against torch.optim."""

import itertools
from typing import Any

import pytest
import torch
from format_cases import random_bits, rounded
from step_cases import (
    ADAGRAD,
    ADAM,
    AMSGRAD,
    BF16,
    F16,
    F32,
    LION,
    SGD,
    SIZES,
    Arguments,
    Dtypes,
    Step,
    as_buffers,
    clone,
    compact,
    each_step,
    each_step_and_dtypes,
    expanded,
    make,
    map_tensors,
    options,
    states_of,
    written,
)
from tolerance import assert_within
from torch import Tensor
from two_pass_cases import LAMB, each_step_op

from deepspeed_ext import ops
from deepspeed_ext.ops import adam_step_, lion_step_, rmsprop_step_


def of(arguments: Arguments, i: int) -> dict[str, Tensor]:
    """The tensors of parameter i, by argument."""
    return {name: tensors[i] for name, tensors in arguments.items() if tensors}


@each_step_and_dtypes()
def test_matches_reference(step: Step, dtypes: Dtypes, device: str) -> None:
    shifts = itertools.cycle((0, 1))  # 1: nothing is aligned
    for change, shift in zip(step.changes, shifts, strict=False):
        got = make(step, SIZES, dtypes, device, change.get("states"), shift)
        before = map_tensors(torch.Tensor.double, got)
        want = clone(before)
        step(**got, **options(step, change, device))
        step.reference(**want, **options(step, change, device))
        assert all(map(torch.equal, map(torch.Tensor.double, got["grads"]), before["grads"]))
        for i in range(len(SIZES)):
            number = got["steps"][i].item()
            assert number == before["steps"][i].item() + 1
            errors = step.errors(of(before, i), of(want, i), number, options(step, change))
            for name in ("params", *states_of(got)):
                if got[name]:
                    text = f"{name}[{i}] of {change}, shift {shift}"
                    assert_within(text, got[name][i], want[name][i], errors[name])


NUMBERS: dict[Step, dict[str, Any]] = {  # that torch's optimizers know by the same names
    ADAM: dict(lr=0.1, betas=(0.8, 0.95), eps=1e-2, weight_decay=0.1),
    ADAGRAD: dict(lr=0.1, lr_decay=0.1, eps=1e-2, weight_decay=0.1),
    SGD: dict(lr=0.1, momentum=0.8, weight_decay=0.1),
}
TORCH: list[tuple[Step, Any, dict[str, Any], dict[str, Any]]] = [  # theirs; what ours gets besides
    (ADAM, torch.optim.AdamW, {}, {}),
    (ADAM, torch.optim.Adam, {}, dict(decoupled=False)),
    (ADAM, torch.optim.AdamW, dict(amsgrad=True), {}),
    (ADAM, torch.optim.AdamW, dict(maximize=True), dict(maximize=True)),
    (ADAGRAD, torch.optim.Adagrad, {}, {}),
    (ADAGRAD, torch.optim.Adagrad, dict(maximize=True), dict(maximize=True)),
    (SGD, torch.optim.SGD, dict(dampening=0.3), dict(dampening=0.3)),
    (SGD, torch.optim.SGD, dict(nesterov=True), dict(nesterov=True)),
    (SGD, torch.optim.SGD, dict(momentum=0.0, maximize=True), dict(momentum=0.0, maximize=True)),
]


@pytest.mark.parametrize("case", TORCH, ids=lambda case: f"{case[1].__name__}-{case[2]}")
def test_matches_torch_optim(case: Any, device: str) -> None:
    step, optimizer, flags, options = case
    torch.manual_seed(0)
    theirs = [torch.randn(n, device=device).requires_grad_() for n in SIZES]
    torch_optimizer = optimizer(theirs, **(NUMBERS[step] | flags))
    states = AMSGRAD if "amsgrad" in flags else () if flags.get("momentum") == 0 else None
    ours = make(step, SIZES, device=device, states=states)
    for name in (*states_of(ours), "steps"):
        for tensor in ours[name]:
            tensor.zero_()
    for number in range(4):
        for i, param in enumerate(theirs):  # from equal state, so that rounding cannot add up
            param.grad = torch.randn_like(param)
            if number == 3:
                param.grad[:3] = torch.tensor([float("inf"), -float("inf"), float("nan")])[
                    : SIZES[i]
                ]
            ours["params"][i].copy_(param.detach())
            ours["grads"][i].copy_(param.grad)
            for name, value in torch_optimizer.state[param].items():
                ours[name + "s"][i].copy_(value)
        torch_optimizer.step()
        step(**ours, **(NUMBERS[step] | options))
        for i, param in enumerate(theirs):
            results = dict(torch_optimizer.state[param], param=param.detach())
            for name, want in results.items():
                got = ours[name + "s"][i].reshape(want.shape).to(want.device)
                torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6, equal_nan=True)


@each_step_and_dtypes(Dtypes(), Dtypes(BF16, F32, F32, True))
def test_inf_and_nan_do_what_they_do_in_the_reference(
    step: Step, dtypes: Dtypes, device: str
) -> None:
    infinity, nan = float("inf"), float("nan")
    special = torch.tensor([1.0, infinity, -infinity, nan], device=device)
    for name in ("grads", *step.states):
        got = make(step, [4], dtypes, device)
        got[name] = [special.abs() if name not in {"grads", *step.signed} else special]
        got["steps"][0].fill_(5)
        want = map_tensors(torch.Tensor.double, got)
        step(**got, **step.base)
        step.reference(**want, **step.base)
        for written_name in written(got):
            for a, b in zip(got[written_name], want[written_name], strict=True):
                torch.testing.assert_close(a.double(), b, rtol=1e-2, atol=1e-2, equal_nan=True)
        assert got["params"][0][0].isfinite() and got["params"][0][3].isnan()


@each_step
def test_an_infinite_param_without_weight_decay_leaves_state_finite(
    step: Step, device: str
) -> None:
    for change in ({}, dict(decoupled=False)) if step is ADAM else ({},):
        arguments = make(step, [20], device=device)
        arguments["params"][0][::2] = float("inf")
        step(**arguments, **(step.base | dict(weight_decay=0.0) | change))
        assert arguments["params"][0].isinf().tolist() == [True, False] * 10
        for name in step.states:
            assert arguments[name][0].isfinite().all(), name


@each_step_op
@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("found", [1.0, float("inf"), float("nan"), -1e-30])
def test_found_inf_leaves_everything_as_it_is(
    step: Step, buffers: bool, found: float, device: str
) -> None:
    for dtypes in (Dtypes(), Dtypes(BF16, F16, BF16, True)):
        arguments = make(step, [0, 1, 1000, 5000], dtypes, device, step.most_states)
        if buffers:
            arguments = as_buffers(arguments)
        kept = {
            name: [t.clone() for t in arguments[name]] for name in [*written(arguments), "grads"]
        }
        flag = torch.tensor([found], device=device)
        squares = step(**arguments, **step.base, found_inf=flag)
        assert step is not LAMB or not squares.any()
        for name, tensors in kept.items():
            assert all(map(torch.equal, arguments[name], tensors)), name
        step(**arguments, **step.base, found_inf=flag.zero_())
        for name in [name for name in written(arguments) if kept[name]]:
            assert not any(map(torch.equal, arguments[name][-1:], kept[name][-1:])), name


@each_step
def test_compact_state_is_the_state_of_the_step_in_float32(step: Step, device: str) -> None:
    for change in step.changes:
        states = change.get("states", step.states)
        got = compact(step, make(step, SIZES, Dtypes(BF16, BF16, F32, True), device, states))
        want = clone(expanded(step, got))
        for arguments in (got, want):
            step(**arguments, **options(step, change, device))
        want = compact(step, want | dict(master_params=want["params"]))
        for name in ("params", *states, "scales", "master_params"):
            for i, (a, b) in enumerate(zip(got[name], want[name], strict=True)):
                assert torch.equal(a, b), f"{name}[{i}] of {change}"


@each_step_op
def test_state_is_rounded_with_the_bits_of_the_hash(step: Step, device: str) -> None:
    got = make(step, [3000], Dtypes(F32, F32, BF16), device)
    exact = {
        name: [t.float() if name in step.states else t.clone() for t in tensors]
        for name, tensors in got.items()
    }
    step(**got, **step.base, noise=torch.tensor([[77, 5]]))
    step(**exact, **step.base)
    random = random_bits(77, exact["steps"][0].item(), 5, 3000)
    for j, name in enumerate(step.states):
        assert torch.equal(got[name][0].cpu(), rounded(exact[name][0].cpu(), random, j)), name


def test_the_first_step_of_sgd_does_not_read_the_buffer(device: str) -> None:
    arguments = make(SGD, [5], device=device)
    arguments["momentum_buffers"] = [torch.full((5,), float("nan"), device=device)]
    SGD(**arguments, lr=0.1, momentum=0.9, dampening=0.5)
    assert torch.equal(arguments["momentum_buffers"][0], arguments["grads"][0])


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_lion_steps_by_the_sign_of_anything_that_is_not_zero(
    dtype: torch.dtype, device: str
) -> None:
    least = torch.finfo(dtype).smallest_normal  # subnormals of float32 may be flushed on a device
    grads = torch.tensor([0.0, -0.0, least, -least, 1e4, -1e4, float("nan")], dtype=dtype)
    param, exp_avg = (torch.zeros(7, device=device) for _ in range(2))
    LION(
        [param],
        [grads.to(device)],
        [exp_avg],
        [torch.zeros((), device=device)],
        lr=0.5,
        betas=(0.0, 0.5),
    )
    assert param[:6].tolist() == [0, 0, -0.5, 0.5, -0.5, 0.5]
    assert param[6].isnan()


@pytest.mark.parametrize("momentum", [-0.5, float("nan")])
def test_sgd_refuses_a_momentum_below_0(momentum: float) -> None:
    tensors = [torch.ones(3) for _ in range(3)]
    with pytest.raises(ValueError, match=r"sgd_step_: momentum is .*, expected at least 0"):
        ops.sgd_step_(*([t] for t in tensors[:2]), steps=[torch.zeros(())],
                      momentum_buffers=[tensors[2]], lr=0.1, momentum=momentum)  # fmt: skip


def test_what_a_decay_rate_leaves_is_exact(device: str) -> None:
    """1 - 0.9999 is not what is left of the float32 that is nearest to 0.9999."""
    rate, one = 0.9999, torch.ones(1, device=device)
    left = torch.tensor([1 - rate], device=device)
    param, state, square, count = (torch.zeros_like(one) for _ in range(4))
    adam_step_([param], [one], [state], [square], [count], lr=0.0, betas=(rate, rate))
    assert torch.equal(state, left) and torch.equal(square, left)
    state.zero_()
    lion_step_([param], [one], [state], [count], lr=0.0, betas=(0.5, rate))
    assert torch.equal(state, left)
    state.zero_(), square.zero_()
    rmsprop_step_([param], [one], [square], [count], grad_avgs=[state], lr=0.0, alpha=rate)
    assert torch.equal(state, left) and torch.equal(square, left)
