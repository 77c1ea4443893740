"""adam_step_: values, element by element against float64, and against torch.optim."""

import itertools
from typing import Any

import pytest
import torch
from adam_cases import (
    BF16,
    DTYPES,
    F16,
    F32,
    OPTIONS,
    SIZES,
    STATE,
    WRITTEN,
    Arguments,
    Dtypes,
    as_slabs,
    clone,
    make,
    map_tensors,
    options,
)
from tolerance import adam_errors, assert_within
from torch import Tensor

from deepspeed_ext.ops import adam_step_, adam_step_ref_


def of(arguments: Arguments, i: int) -> dict[str, Tensor]:
    """The tensors of parameter i, by argument."""
    return {name: tensors[i] for name, tensors in arguments.items() if tensors}


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_matches_reference(dtypes: Dtypes, device: str) -> None:
    for change, shift in itertools.product(OPTIONS, (0, 1)):  # 1: nothing is aligned to a vector
        got = make(SIZES, dtypes, device, change.get("amsgrad", False), shift)
        before = map_tensors(torch.Tensor.double, got)
        want = clone(before)
        adam_step_(**got, **options(change, device))
        adam_step_ref_(**want, **options(change, device))
        assert all(map(torch.equal, map(torch.Tensor.double, got["grads"]), before["grads"]))
        for i in range(len(SIZES)):
            assert got["steps"][i].item() == before["steps"][i].item() + 1
            step = got["steps"][i].item()
            errors = adam_errors(of(before, i), of(want, i), step, options(change))
            for name in ("params", *STATE):
                if got[name]:
                    text = f"{name}[{i}] of {change}, shift {shift}"
                    assert_within(text, got[name][i], want[name][i], errors[name])


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("flags", [{}, {"amsgrad": True}, {"maximize": True}], ids=str)
def test_matches_torch_optim(
    optimizer: type[torch.optim.Adam], flags: dict[str, bool], device: str
) -> None:
    torch.manual_seed(0)
    theirs = [torch.randn(n, device=device).requires_grad_() for n in SIZES]
    numbers: dict[str, Any] = dict(lr=0.1, betas=(0.8, 0.95), eps=1e-2, weight_decay=0.1)
    torch_optimizer = optimizer(theirs, **numbers, **flags)
    ours = make(SIZES, device=device, amsgrad="amsgrad" in flags)
    for name in ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "steps"):
        for tensor in ours[name]:
            tensor.zero_()
    for _ in range(3):
        for i, param in enumerate(theirs):  # from equal state, so that rounding cannot add up
            param.grad = torch.randn_like(param)
            ours["params"][i].copy_(param.detach())
            ours["grads"][i].copy_(param.grad)
            for name, value in torch_optimizer.state[param].items():
                ours[name + "s"][i].copy_(value)
        torch_optimizer.step()
        adam_step_(
            **ours,
            **numbers,
            maximize="maximize" in flags,
            decoupled=optimizer is torch.optim.AdamW,
        )
        for i, param in enumerate(theirs):
            written = dict(torch_optimizer.state[param], param=param.detach())
            for name, want in written.items():
                got = ours[name + "s"][i].reshape(want.shape).to(want.device)
                torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtypes", [Dtypes(), Dtypes(BF16, F32, F32, True)], ids=str)
def test_grads_of_inf_and_nan_do_what_they_do_in_torch(dtypes: Dtypes, device: str) -> None:
    grads = torch.tensor([1.0, float("inf"), -float("inf"), float("nan")], device=device)
    arguments = make([4], dtypes, device) | dict(grads=[grads])
    want = map_tensors(torch.Tensor.float, arguments)
    leaf = (want["master_params"] or want["params"])[0].requires_grad_()
    leaf.grad = grads
    torch_optimizer = torch.optim.AdamW([leaf], lr=0.1, weight_decay=0.1)
    state: dict[str, Any] = dict(step=torch.tensor(0.0))
    state |= dict(exp_avg=want["exp_avgs"][0], exp_avg_sq=want["exp_avg_sqs"][0])
    torch_optimizer.state[leaf] = state
    torch_optimizer.step()
    adam_step_(**arguments, lr=0.1, weight_decay=0.1)
    for got, wanted in (
        (arguments["params"][0], leaf.detach().to(dtypes.param)),
        (arguments["exp_avgs"][0], state["exp_avg"]),
        (arguments["exp_avg_sqs"][0], state["exp_avg_sq"]),
    ):
        torch.testing.assert_close(got, wanted, equal_nan=True)
    assert arguments["params"][0].isfinite().tolist() == [True, False, False, False]


@pytest.mark.parametrize("decoupled", [True, False])
def test_an_infinite_param_without_weight_decay_leaves_moments_finite(
    decoupled: bool, device: str
) -> None:
    arguments = make([20], device=device)
    arguments["params"][0][::2] = float("inf")
    adam_step_(**arguments, lr=0.1, weight_decay=0.0, decoupled=decoupled)
    assert arguments["params"][0].isinf().tolist() == [True, False] * 10
    assert arguments["exp_avgs"][0].isfinite().all()
    assert arguments["exp_avg_sqs"][0].isfinite().all()


@pytest.mark.parametrize("dtypes", [Dtypes(), Dtypes(BF16, F16, BF16, True)], ids=str)
@pytest.mark.parametrize("slabs", [False, True])
@pytest.mark.parametrize("found", [1.0, float("inf"), float("nan"), -1e-30])
def test_found_inf_leaves_everything_as_it_is(
    dtypes: Dtypes, slabs: bool, found: float, device: str
) -> None:
    arguments = make([0, 1, 1000, 5000], dtypes, device, amsgrad=True)
    if slabs:
        arguments = as_slabs(arguments)
    kept = {name: [t.clone() for t in arguments[name]] for name in [*WRITTEN, "grads"]}
    flag = torch.tensor([found], device=device)
    adam_step_(**arguments, lr=0.1, weight_decay=0.1, found_inf=flag)
    for name, tensors in kept.items():
        assert all(map(torch.equal, arguments[name], tensors)), name
    adam_step_(**arguments, lr=0.1, weight_decay=0.1, found_inf=flag.zero_())
    for name in [name for name in WRITTEN if kept[name]]:
        assert not any(map(torch.equal, arguments[name][-1:], kept[name][-1:])), name
