"""LAMB and LARS: what their ops promise to torch and to CUDA graphs, and what they refuse."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_cases import (
    BF16,
    F16,
    F32,
    Arguments,
    Dtypes,
    as_buffers,
    assert_same,
    clone,
    make,
    written,
)
from torch import Tensor
from two_pass_cases import LAMB, LARS, TwoPass, each_two_pass

from deepspeed_ext import ops
from deepspeed_ext.ops.optimizers import self_checks

OPCHECKED: dict[str, Callable[[TwoPass], Arguments]] = {
    "lists": lambda step: make(step, [0, 17]),
    "masters": lambda step: make(step, [5, 3], Dtypes(BF16, F16, F32, True)),
    "buffers": lambda step: as_buffers(make(step, [5, 17], Dtypes(F16, F16, F16))),
}


@pytest.mark.parametrize("case", OPCHECKED)
@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "scalar tensors"])
@each_two_pass
def test_opcheck(step: TwoPass, case: str, tensors: bool, device: str) -> None:
    numbers = dict(step.base)
    beta1, beta2 = numbers.pop("betas", (0.0, 0.0))
    given: dict[str, Any] = numbers | dict(beta1=beta1, beta2=beta2)
    given["coefficients"] = torch.tensor([0.5, 2.0], device=device)
    if tensors:
        scalars = dict(lr_tensor=0.1, grad_scale=2.0, found_inf=0.0)
        given |= {name: torch.tensor(x, device=device) for name, x in scalars.items()}
    for name, value in OPCHECKED[case](step).items():
        given[name] = [t.to(device) for t in value] if isinstance(value, list) else value
    nothing = {"List[Tensor]": [], "bool": False, "Optional[Tensor]": None, "float": None}
    for op_name in (step.first, step.second):
        op = getattr(torch.ops.deepspeed_ext, op_name).default
        arguments = [
            given[a.name] if a.name in given else nothing[str(a.type)] for a in op._schema.arguments
        ]
        checked = torch.library.opcheck(op, tuple(arguments))
        assert list(checked.values()) == ["SUCCESS"] * 4


@each_two_pass
def test_can_be_compiled(step: TwoPass) -> None:
    def step_and_use(arguments: Arguments) -> tuple[Tensor, Tensor]:
        before = arguments["params"][0] + 1
        squares = step.both(arguments, step.base)
        return squares * 2, torch.mul(arguments["params"][0], before)

    compiled = torch.compile(step_and_use, fullgraph=True, backend="aot_eager")
    for n in (17, 33):  # the second with dynamic shapes
        got = make(step, [n, 5], Dtypes(BF16, BF16, F32, True))
        want = clone(got)
        version = got["params"][0]._version
        assert all(map(torch.equal, compiled(got), step_and_use(want)))
        assert_same(got, want)
        assert got["params"][0]._version > version


@pytest.mark.parametrize("buffers", [False, True])
@each_two_pass
def test_counts_every_write(step: TwoPass, buffers: bool) -> None:
    arguments = make(step, [4, 0], Dtypes(BF16, BF16, F32, True))
    arguments = as_buffers(arguments) if buffers else arguments
    names = [*written(arguments), "grads"]
    versions = {name: [t._version for t in arguments[name]] for name in names}
    step.both(arguments, step.base)
    for name, before in versions.items():
        bump = 0 if name == "grads" else 1
        assert [t._version for t in arguments[name]] == [version + bump for version in before], name


@each_two_pass
def test_params_that_require_grad_need_no_no_grad(step: TwoPass, device: str) -> None:
    arguments, want = (make(step, [4], device=device) for _ in range(2))
    arguments["params"][0].requires_grad_()
    arguments["grads"][0] = arguments["grads"][0].requires_grad_() * 1.0
    squares = step.both(arguments, step.base)
    step.both(want, step.base)
    assert_same(arguments, want)
    assert arguments["params"][0].is_leaf and not squares.requires_grad


@each_two_pass
def test_nothing_to_do(step: TwoPass, device: str) -> None:
    nothing = {name: [] for name in ("params", "grads", *step.states, "steps")}
    assert step.both(nothing, step.base).shape == (0, 2)
    arguments = make(step, [0, (3, 0)], device=device)  # no elements, yet a step
    assert step.both(arguments, step.base).tolist() == [[0, 0], [0, 0]]
    assert [step.item() for step in arguments["steps"]] == [1, 38]


@each_two_pass
def test_all_on_meta_or_fake_is_legal_and_does_nothing(step: TwoPass) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert step.both(make(step, [4], device="meta"), step.base).shape == (1, 2)
    with FakeTensorMode():
        assert step.both(make(step, [4, 3]), step.base).shape == (2, 2)


@each_two_pass
def test_self_check_passes(step: TwoPass, device: str) -> None:
    getattr(self_checks, step.name)(device)


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


@each_two_pass
def test_cuda_graph_takes_new_scalars_at_every_replay(step: TwoPass, cuda: str) -> None:
    numbers = dict(lr=0.1, grad_scale=1.0, found_inf=0.0)
    scalars = {name: torch.tensor(x, device=cuda) for name, x in numbers.items()}
    dtypes = Dtypes(BF16, BF16, F32, True)
    sizes = [1, 1000, 8193] * 300  # several launches
    got, want = (as_buffers(make(step, sizes, dtypes, cuda)) for _ in range(2))
    step.both(make(step, [4], dtypes, cuda), step.base | scalars)  # loads the library
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.both(got, step.base | scalars)
    for lr, scale, found in ((0.1, 1.0, 0.0), (0.03, 8.0, 0.0), (0.2, 2.0, 1.0), (0.3, 4.0, 0.0)):
        for name, x in zip(numbers, (lr, scale, found), strict=True):
            scalars[name].fill_(x)
        graph.replay()
        step.both(want, step.base | scalars)
        assert_same(got, want)
    assert got["steps"][0][0].item() == 3


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
