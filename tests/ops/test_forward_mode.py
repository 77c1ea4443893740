"""Forward-mode derivatives: no op has them, and a tangent is never lost in silence."""

import re
from collections.abc import Callable

import pytest
import torch
from functional_cases import CASES, call_of
from kv_cases import make_kv
from torch import Tensor
from torch.autograd import forward_ad

from deepspeed_ext import ops

each_case = pytest.mark.parametrize("name", CASES)
X = torch.linspace(-1, 1, 32).view(4, 8)
PACKED = ops.pack_weight(
    torch.ones(8, 8, dtype=torch.int8), torch.ones(8, 1), format="int8", group_size=8
)
REFUSED = r"^{}(\.\w+)?: {} has a tangent, expected none, as the op has no forward mode; {}$"


def of(function: Callable[[Tensor], object], x: Tensor = X) -> None:
    """Call with a tangent in the two ways that torch has."""

    def result(x: Tensor) -> Tensor:
        function(x)
        return x

    torch.func.jvp(result, (x.clone(),), (torch.ones_like(x),))


@each_case
def test_functional_ops_refuse(name: str) -> None:
    """Each argument that has a gradient, with dual numbers and without a gradient recorded."""
    call = call_of(CASES[name], 3, 8, torch.float32, "cpu")
    for i in range(len(call.leaves())):
        with forward_ad.dual_level(), torch.no_grad():
            leaves = call.leaves()
            leaves[i] = forward_ad.make_dual(leaves[i], torch.ones_like(leaves[i]))
            with pytest.raises(RuntimeError) as raised:
                call.forward(leaves)
        instead = r"use reverse mode, or plain torch, as (\w+)_ref does"
        found = re.match(REFUSED.format(r"(\w+)", r"\w+", instead), str(raised.value))
        assert found and found[1] == found[3] and hasattr(ops, f"{found[1]}_ref")


def test_the_references_have_a_forward_mode() -> None:
    """As the text of the error promises."""
    for reference in (ops.rms_norm_ref, ops.softmax_ref, ops.swiglu_ref, ops.bias_activation_ref):
        _, tangent = torch.func.jvp(reference, (X.double(),), (torch.ones(4, 8).double(),))
        step = 1e-6
        ahead, behind = (reference(X.double() + by) for by in (step, -step))
        torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("op", "argument", "function"),
    [
        ("rms_norm", "x", ops.rms_norm),
        ("rms_norm", "x", lambda x: torch.func.vmap(ops.rms_norm)(x)),
        ("rms_norm", "weight", lambda x: ops.rms_norm(X, x[0])),
        ("skinny_linear", "weight", lambda x: ops.skinny_linear(X, x)),
        ("quantized_linear", "x", lambda x: ops.quantized_linear(x, PACKED)),
        ("fake_quantize", "x", ops.fake_quantize),
        ("quantize", "x", ops.quantize),
        ("squared_norms", r"tensors\[1\]", lambda x: ops.squared_norms([X, x])),
        ("gated_activation", "gate", lambda x: ops.swiglu(x, X)),
        ("unpack_weight", "scales", lambda x: ops.unpack_weight(PACKED._replace(scales=x[:1]))),
    ],
)  # fmt: skip
def test_so_do_transforms(op: str, argument: str, function: Callable[[Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match=REFUSED.format(op, argument, ".*")):
        of(function)


def _stepped(x: Tensor) -> None:
    others = torch.zeros(4, 8), torch.zeros(())
    ops.lion_step_([torch.ones(4, 8)], [x], [others[0]], [others[1]], lr=0.1)


def _cached(append: Callable[..., object]) -> Callable[[Tensor], object]:
    def function(x: Tensor) -> object:
        q = x.view(1, 1, 2, 16)
        return append(torch.zeros(1, 1, 2, 16), torch.zeros(1, 1, 2, 16), q, kv)

    kv = make_kv([3], 2, 16, torch.float32, "cpu")
    return function


@pytest.mark.parametrize(
    ("op", "argument", "function"),
    [
        ("lion_step_", r"grads\[0\]", _stepped),
        ("rope_", "q", lambda x: ops.rope_(x.view(4, 1, 8), None, torch.arange(4), torch.ones(4))),
        ("rope_append_", "v", _cached(ops.rope_append_)),
        ("append_and_attend_", "v", _cached(ops.append_and_attend_)),
        ("quantize_packed_", "x", lambda x: ops.quantize_packed_(x.repeat(2, 1), PACKED)),
        ("ds_quantizer", "input", ops.ds_quantizer),
        ("cross_entropy", "logits", lambda x: ops.cross_entropy(x, torch.arange(4), inplace=True)),
    ],
)  # fmt: skip
def test_ops_that_write_refuse_too(
    op: str, argument: str, function: Callable[[Tensor], object]
) -> None:
    """Or a tensor would keep the tangent of what it was before."""
    with pytest.raises(RuntimeError, match=REFUSED.format(op, argument, "detach it")):
        of(function)


def test_recorded_calls_refuse_too() -> None:
    with torch.no_grad():
        _, recorded = ops.record(ops.rms_norm, X)
    with pytest.raises(RuntimeError, match=REFUSED.format("replay_", r"inputs\[0\]", "detach it")):
        of(recorded)


def test_other_tensors_pass_where_there_are_tangents() -> None:
    """Also where they are switched off, and one that was detached."""
    want = ops.rms_norm(X)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X.clone(), torch.ones(4, 8))
        assert torch.equal(ops.rms_norm(X), want)
        assert torch.equal(ops.rms_norm(dual.detach()), want)
        with forward_ad._set_fwd_grad_enabled(False):
            assert torch.equal(ops.rms_norm(dual), want)
        grad = X.clone().requires_grad_()
        ops.rms_norm(grad).sum().backward()
    assert grad.grad is not None


def test_a_compiled_function_refuses() -> None:
    def tangent(x: Tensor) -> Tensor:
        return torch.func.jvp(ops.rms_norm, (x,), (x,))[1]

    torch.compiler.reset()
    compiled = torch.compile(tangent, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match="rms_norm: x has a tangent, expected none"):
        compiled(X)


def test_a_gradient_whose_own_gradient_is_dual_refuses() -> None:
    """Reverse mode, then forward mode over it."""
    x = X.clone().requires_grad_()
    out = ops.rms_norm(x)
    with forward_ad.dual_level():
        grad = forward_ad.make_dual(torch.ones(4, 8), X)
        text = REFUSED.format("rms_norm_backward", "grad_out", "detach it, or use plain torch")
        with pytest.raises(RuntimeError, match=text):
            torch.autograd.grad(out, x, grad)
