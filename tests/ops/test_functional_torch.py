"""Functional ops: what they promise to torch's compiler, autograd and autocast."""

import json
import re
from collections.abc import Sequence
from operator import itemgetter

import pytest
import torch
import warm_python
from functional_cases import CASES, WITHOUT_CASE, call_of, recorded
from samples import BF16, F16, F32
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_ext import ops

each_case = pytest.mark.parametrize("name", CASES)
NAMES_OF_OPS = """
import importlib, json, pkgutil, torch
rooms = "elementwise norm softmax_and_loss attention linear moe transformer"
for room in rooms.split():
    package = importlib.import_module("deepspeed_ext.ops." + room)
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
names = torch._C._dispatch_get_all_op_names()
print(json.dumps([name for name in names if name.startswith("deepspeed_ext::")]))
"""
FIRST_GRADIENTS = """
import torch
from deepspeed_ext.ops import skinny_linear
x = torch.ones(2, 8, requires_grad=True)
for gated in (False, True):
    skinny_linear(x, torch.ones(4, 8), activation="silu", gated=gated).sum().backward()
"""


def test_every_functional_op_has_a_case() -> None:
    """Of all that a process has which has imported nothing else; in-place ones end in _.

    decode_attention and prefill_attention have no gradient, and tests of their own.
    """
    done = warm_python.run("-c", NAMES_OF_OPS)
    assert done.returncode == 0, done.stderr
    names = {name for name in json.loads(done.stdout) if not name.partition(".")[0].endswith("_")}
    names = {name for name in names if not re.search("(decode|prefill)_attention", name)}
    calls = [call for case in CASES.values() for call in recorded(call_of(case, 3, 8, F32, "cpu"))]
    assert {op.name() for op, _, _ in calls} == names - WITHOUT_CASE


def kind(value: object) -> object:
    """What there is to an argument beside its elements."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride()
    return value


@pytest.mark.parametrize(
    ("rows", "n", "dtypes"),
    [(3, 41, (BF16, F16)), (0, 8, (F32, BF16)), (1, 40, (F32, F32))],
)
@each_case
def test_opcheck(name: str, dtypes: Sequence[torch.dtype], rows: int, n: int, device: str) -> None:
    """What a call comes to, with gradients that are wanted, and without."""
    call = call_of(CASES[name], rows, n, dtypes[0], device, others=dtypes[1])
    if rows == 1 and "rope" not in name:  # as it is, not one of several
        call = call.with_rows(itemgetter(0))
    wanted = {leaf.data_ptr() for leaf in call.leaves()} - {0}
    different = {repr((op, *map(kind, given), options)): (op, given, options)
                 for op, given, options in recorded(call)}  # fmt: skip
    for op, arguments, options in different.values():
        has_gradient = "backward" not in op.name()
        for needs_grad in (False, True) if has_gradient else (False,):
            given = tuple(
                each.detach().requires_grad_(needs_grad and each.data_ptr() in wanted)
                if isinstance(each, Tensor)
                else each
                for each in arguments
            )
            checked = torch.library.opcheck(op, given, options)
            assert set(checked.values()) == {"SUCCESS"}


@each_case
def test_can_be_compiled(name: str, device: str) -> None:
    """In one graph with dynamic sizes, gradients too, and with the same bits."""
    case = CASES[name]

    def block(*tensors: Tensor) -> list[Tensor]:
        found = case.function(*(t * 2 if t.requires_grad else t for t in tensors))
        return [t.sin() for t in ([found] if isinstance(found, Tensor) else found)]

    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, n in ((5, 40), (9, 98)):
        call = call_of(case, rows, n, F32, device)
        found = []
        for function in (compiled, block):
            leaves = call.leaves()
            results = function(*leaves, *call.fixed_of_rows, *call.fixed_for_all)
            found.append([*results, *torch.autograd.grad(results, leaves, call.grads)])
        for got, want in zip(*found, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.twice])
def test_a_gradient_of_a_gradient_is_refused(name: str, device: str) -> None:
    call = call_of(CASES[name], 3, 8, F32, device)
    leaves = call.leaves()
    results = [result.square() for result in call.forward(leaves)]
    for grad in torch.autograd.grad(results, leaves, call.grads, create_graph=True):
        text = (
            r"^(\w+)_backward: the gradient of \w+ is wanted, expected no use of it, as the op has"
            r" none; for gradients of gradients use \1_ref, which is plain torch$"
        )
        with pytest.raises(RuntimeError, match=text) as raised:
            grad.sum().backward(retain_graph=True)
        assert hasattr(ops, str(raised.value).partition("_backward")[0] + "_ref")


def test_a_gradient_needs_nothing_that_others_have_imported() -> None:
    """That of an activation is another op's, whose module a process may not have yet."""
    done = warm_python.run("-c", FIRST_GRADIENTS)
    assert done.returncode == 0, done.stderr


@each_case
def test_a_change_after_the_call_is_noticed_or_does_not_matter(name: str, device: str) -> None:
    call, noticed = call_of(CASES[name], 3, 8, F32, device), 0
    want = call.run()[-len(call.leaves()) :]
    for i in range(len(want) + len(call.grads)):
        leaves = call.leaves()
        inner = [leaf * 1 for leaf in leaves]
        results = call.forward(inner)
        with torch.no_grad():
            [*inner, *results][i].add_(1)
        try:
            got = torch.autograd.grad(results, leaves, call.grads)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            noticed += 1
        else:
            for value, expected in zip(got, want, strict=True):
                assert torch.equal(value, expected)
    # These look at positions and frequencies only, or at a seed.
    assert noticed > 0 or "rope" in name or name == "bias_dropout_residual of x"


@each_case
def test_under_autocast_nothing_is_cast(name: str, device: str) -> None:
    for dtype in (BF16, F32):
        call = call_of(CASES[name], 3, 40, dtype, device)
        want = call.run()
        with torch.autocast(device, dtype=BF16):
            got = call.run()
        for value, expected in zip(got, want, strict=True):
            assert value.dtype == expected.dtype and torch.equal(value, expected)


@pytest.mark.parametrize("dtypes", [(F32, BF16), (F16, F32)], ids=str)
@each_case
def test_on_meta_and_fake(name: str, dtypes: Sequence[torch.dtype], device: str) -> None:
    """Results and gradients are as they would be, but for their values."""
    call = call_of(CASES[name], 3, 40, dtypes[0], device, others=dtypes[1])
    want = call.run()
    pretended = []
    with FakeTensorMode() as mode:
        pretended.append(call.each(mode.from_tensor).run())
    pretended.append(call.each(lambda tensor: tensor.to("meta")).run())
    for results in pretended:
        for got, expected in zip(results, want, strict=True):
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
            assert got.stride() == expected.stride()
