"""LAMB and LARS: what their ops promise to torch and to CUDA graphs, and what they refuse."""

import re
from typing import Any

import pytest
import torch
from step_cases import (
    BF16,
    make,
    written,
)
from torch import Tensor
from two_pass_cases import LAMB, LARS, TwoPass, each_two_pass

from deepspeed_ext import ops
from deepspeed_ext.ops.optimizers import self_checks


@each_two_pass
@pytest.mark.parametrize("which", ["first", "second"])
def test_self_check_finds_a_wrong_op(
    step: TwoPass, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = getattr(step, which)
    right = getattr(self_checks, name)

    def wrong(*args: Any, **arguments: Any) -> Any:
        result = right(*args, **(arguments | (dict(lr=0.101) if which == "second" else {})))
        return result * torch.tensor([1.0, 1.1]) if which == "first" else None

    monkeypatch.setattr(self_checks, name, wrong)
    with pytest.raises(RuntimeError, match=rf"^{step}_step: .* on cpu .*, expected "):
        getattr(self_checks, step.name)("cpu")


def refused(step: TwoPass, which: str, change: dict[str, Any], **made: Any) -> str:
    """What one of the ops says, after a check that nothing has changed."""
    arguments = make(step, [4, 4], **made)
    coefficients = dict(coefficients=torch.ones(2))
    kept = {name: [t.clone() for t in arguments[name]] for name in written(arguments)}
    known = step.base | arguments | coefficients | change
    with pytest.raises(ValueError) as caught:
        if which == "first":
            step.measure(known, {})
        else:
            step.apply(known, known["coefficients"], {})
    for name, tensors in kept.items():
        assert all(map(torch.equal, arguments[name], tensors)), name
    return str(caught.value)


@pytest.mark.parametrize(
    ("coefficients", "text"),
    [
        (torch.ones(3), "coefficients has length 3, expected 2"),
        (torch.ones(2, dtype=BF16), "coefficients is bfloat16, expected float32"),
        (
            torch.ones(2, 1),
            "coefficients has shape [2, 1] and strides [1, 1], expected one contiguous dimension",
        ),
    ],
)
@each_two_pass
def test_refuses_coefficients(step: TwoPass, coefficients: Tensor, text: str) -> None:
    assert refused(step, "second", dict(coefficients=coefficients)) == f"{step.second}: {text}"


@each_two_pass
def test_refuses_coefficients_in_what_it_writes(step: TwoPass) -> None:
    memory = torch.ones(8)
    params = [memory[:4], torch.ones(4)]
    text = refused(step, "second", dict(params=params, coefficients=memory[2:4]))
    assert re.fullmatch(
        rf"{step.second}: coefficients is overlapping params\[0\], expected separate memory", text
    )
    assert torch.equal(memory, torch.ones(8))


def test_refuses_options_out_of_range() -> None:
    for which, title in (("first", LAMB.first), ("second", LAMB.second)):
        text = refused(LAMB, which, dict(betas=(1.0, 0.9)))
        assert text == f"{title}: beta1 is 1, expected 0 <= beta1 < 1"
        text = refused(LAMB, which, dict(betas=(0.9, -0.1)))
        assert text == f"{title}: beta2 is -0.1, expected 0 <= beta2 < 1"
    text = refused(LARS, "second", dict(momentum=1.5))
    assert text == "lars_apply_: momentum is 1.5, expected 0 <= momentum < 1"
    text = refused(LARS, "second", dict(momentum_buffers=[]))
    assert text == "lars_apply_: momentum is 0.9, expected 0 without momentum_buffers"


@each_two_pass
def test_refuses_gradients_without_params(step: TwoPass) -> None:
    text = refused(step, "first", dict(params=[]))
    assert text == f"{step.first}: params has length 0, expected at least 1"


@each_two_pass
def test_refuses_what_every_step_op_refuses(step: TwoPass) -> None:
    """The checks are those of the other step ops: one of each kind shows that they are made."""
    text = refused(step, "first", dict(grads=[torch.ones(4), torch.ones(3)]))
    assert text == f"{step.first}: grads[1] has shape [3], expected [4]"
    for which, title in (("first", step.first), ("second", step.second)):
        bad = dict(master_params=[torch.ones(4)] * 2)
        text = refused(step, which, bad)
        assert text == (
            f"{title}: params[0] is float32, expected bfloat16 or float16 with master_params"
        )
    text = refused(step, "second", dict(steps=[torch.zeros(())]))
    assert text == f"{step.second}: steps has length 1, expected 2"


def test_the_reference_is_exported() -> None:
    for name in ("lamb_moments_ref_", "lamb_apply_ref_", "lars_norms_ref", "lars_apply_ref_"):
        assert name in ops.__all__
