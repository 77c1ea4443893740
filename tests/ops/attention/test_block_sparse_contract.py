"""block_sparse_attention: what it promises to torch, what it refuses, its bits."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from at_once import in_threads
from functional_cases import Recorder
from samples import BF16, F32, make
from sparse_cases import OPTIONS, Sparse, bits_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_ext.ops import block_sparse_attention, block_sparse_attention_ref


def case(
    name: str, device: str, dtype: torch.dtype = F32, tokens: int = 70, batch: int = 2
) -> Sparse:
    options = OPTIONS[name](batch, 4, tokens, device)
    return Sparse((batch, 4, tokens, 24), 2, 16, None, (dtype,) * 3, device, options)


def test_opcheck(device: str) -> None:
    for name, tokens in (("all", 70), ("plain", 0)):
        with Recorder() as recorder:
            case(name, device, BF16, tokens).run()
        assert len(recorder.calls) == 2
        for op, arguments, options in recorder.calls:
            has_gradient = "backward" not in op.name()
            for needs_grad in (False, True) if has_gradient else (False,):
                given = [
                    each.detach().requires_grad_(needs_grad and i < 3)
                    if isinstance(each, Tensor)
                    else each
                    for i, each in enumerate(arguments)
                ]
                checked = torch.library.opcheck(op, tuple(given), options)
                assert set(checked.values()) == {"SUCCESS"}


def test_can_be_compiled(device: str) -> None:
    """In one graph with dynamic sizes, gradients too, and with the same bits."""

    def block(q: Tensor, k: Tensor, v: Tensor, layout: Tensor, **options: Any) -> Tensor:
        return block_sparse_attention(q * 2, k, v, layout, 16, **options).sin()

    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens, batch in ((70, 2), (33, 3), (150, 2)):
        call = case("all", device, tokens=tokens, batch=batch)
        found = []
        for function in (compiled, block):
            leaves = [t.detach().requires_grad_() for t in call.qkv]
            out = function(*leaves, call.layout, **call.options)
            found.append([out, *torch.autograd.grad(out, leaves, call.grad)])
        assert all(map(torch.equal, *found))


def test_on_meta_and_fake(device: str) -> None:
    call = case("all", device, BF16)
    want, pretended = call.run(), []
    masks = {k: v for k, v in call.options.items() if isinstance(v, Tensor)}

    def run(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaves = [change(t).detach().requires_grad_() for t in call.qkv]
        options = call.options | {k: change(v) for k, v in masks.items()}
        out = block_sparse_attention(*leaves, change(call.layout), 16, **options)
        return [out, *torch.autograd.grad(out, leaves, change(call.grad))]

    with FakeTensorMode() as mode:
        pretended.append(run(mode.from_tensor))
    pretended.append(run(lambda t: t.to("meta")))
    for results in pretended:
        for got, expected in zip(results, want, strict=True):
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
            assert got.stride() == expected.stride()


def test_nothing_is_a_call(device: str) -> None:
    for shape in ((0, 2, 40, 8), (2, 0, 40, 8), (2, 2, 0, 8)):
        out, *grads = Sparse(shape, 2, 16, device=device).run()
        assert out.shape == shape and not any(t.any() for t in grads)


def test_a_gradient_of_a_gradient_is_refused(device: str) -> None:
    call = case("plain", device)
    q = call.qkv[0].requires_grad_()
    out = block_sparse_attention(q, *call.qkv[1:], call.layout, 16)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    text = "^block_sparse_attention_backward: the gradient of .* block_sparse_attention_ref"
    with pytest.raises(RuntimeError, match=text):
        grad.sum().backward()


@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask", "rpe"])
def test_masks_have_no_gradient(name: str, device: str) -> None:
    call = case("plain", device)
    mask = torch.zeros((2, 70) if name[0] == "k" else (70, 70), device=device, requires_grad=True)
    given = (*call.qkv, call.layout, 16)
    with pytest.raises(RuntimeError, match=f"^block_sparse_attention: {name} requires a gradient"):
        block_sparse_attention(*given, **{name: mask})
    with torch.no_grad():
        out = block_sparse_attention(*given, **{name: mask})
    assert torch.equal(out, call.run()[0])


def test_a_change_after_the_call_is_noticed(device: str) -> None:
    for i in range(5):
        call = case("plain", device)
        leaves = [t.detach().requires_grad_() for t in call.qkv]
        inner = [t * 1 for t in leaves]
        out = block_sparse_attention(*inner, call.layout, 16)
        with torch.no_grad():
            [*inner, out, call.layout][i].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, leaves, call.grad)


def test_several_threads_at_once(device: str) -> None:
    calls = [case(name, device) for name in ("plain", "all")]
    want = [call.run() for call in calls]
    for found, expected in zip(in_threads(device, 20, *(c.run for c in calls)), want, strict=True):
        assert all(bits_of(each) == bits_of(expected) for each in found)


def test_numbers_of_other_kinds(device: str) -> None:
    call = case("plain", device)
    given = (*call.qkv, call.layout)
    want = block_sparse_attention(*given, 16, scale=0.5)
    assert torch.equal(block_sparse_attention(*given, 16, scale=np.float64(0.5)), want)
    with pytest.raises(TypeError, match=r"block is 16\.0, expected a whole number"):
        block_sparse_attention(*given, 16.0)
    with pytest.raises(TypeError, match="scale is '1', expected a number"):
        block_sparse_attention(*given, 16, scale="1")
    with pytest.raises(TypeError, match="q is None, expected a tensor"):
        block_sparse_attention(None, *given[1:], 16)
    with pytest.raises(TypeError, match="layout is None, expected a tensor"):
        block_sparse_attention(*given[:3], None, 16)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def freed(tensor: Tensor) -> Tensor:
    """The tensor with its storage let go, as sharding wrappers do between forward passes."""
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED: dict[str, dict[str, Any]] = {
    "q has shape [2, 4, 70], expected [batch, heads, tokens, head_dim]": dict(q=ones(2, 4, 70)),
    "q has head_dim 257, expected 1 to 256": dict(q=ones(2, 4, 70, 257)),
    "q has head_dim 0, expected 1 to 256": dict(q=ones(2, 4, 70, 0)),
    "q is float64, expected float32, bfloat16 or float16": dict(q=ones(2, 4, 70, 8).double()),
    "q has 3 heads, expected a multiple of 2, the heads of k": dict(q=ones(2, 3, 70, 8)),
    "q has 4 heads, expected a multiple of 0, the heads of k":
        dict(k=ones(2, 0, 70, 8), v=ones(2, 0, 70, 8)),
    "k has shape [2, 2, 71, 8], expected [2, kv_heads, 70, 8], as q has":
        dict(k=ones(2, 2, 71, 8)),
    "k has shape [2, 2, 70, 9], expected [2, kv_heads, 70, 8], as q has":
        dict(k=ones(2, 2, 70, 9)),
    "k has shape [70, 8], expected [2, kv_heads, 70, 8], as q has": dict(k=ones(70, 8)),
    "k has no memory, expected 2240 elements": dict(k=freed(ones(2, 2, 70, 8))),
    "k is on meta, expected cpu": dict(k=ones(2, 2, 70, 8).to("meta")),
    "v has shape [2, 1, 70, 8], expected [2, 2, 70, 8]": dict(v=ones(2, 1, 70, 8)),
    "v is int64, expected float32, bfloat16 or float16": dict(v=ones(2, 2, 70, 8).long()),
    "block is 48, expected 16, 32, 64 or 128": dict(block=48),
    "block is 0, expected 16, 32, 64 or 128": dict(block=0),
    "scale is inf, expected a finite float32": dict(scale=math.inf),
    "scale is nan, expected a finite float32": dict(scale=math.nan),
    "layout has shape [5, 5], expected [4 or 1, 5, 5], as q has 70 tokens":
        dict(layout=ones(5, 5).long()),
    "layout has shape [2, 5, 5], expected [4 or 1, 5, 5], as q has 70 tokens":
        dict(layout=ones(2, 5, 5).long()),
    "layout has shape [1, 5, 4], expected [4 or 1, 5, 5], as q has 70 tokens":
        dict(layout=ones(1, 5, 4).long()),
    "layout is float32, expected bool, uint8, int32 or int64": dict(layout=ones(1, 5, 5)),
    "layout is on meta, expected cpu": dict(layout=ones(1, 5, 5).long().to("meta")),
    "layout is torch.sparse_coo, expected torch.strided":
        dict(layout=ones(1, 5, 5).long().to_sparse()),
    "key_padding_mask has shape [70], expected [2, 70], of batch and tokens":
        dict(key_padding_mask=ones(70)),
    "key_padding_mask has shape [1, 70], expected [2, 70], of batch and tokens":
        dict(key_padding_mask=ones(1, 70)),
    "key_padding_mask is int64, expected bool, float32, bfloat16 or float16":
        dict(key_padding_mask=ones(2, 70).long()),
    "attn_mask has shape [2, 70, 70], expected one that can be broadcast to [2, 4, 70, 70]":
        dict(attn_mask=ones(2, 70, 70)),
    "attn_mask has shape [1, 2, 4, 70, 70], expected one that can be broadcast to [2, 4, 70, 70]":
        dict(attn_mask=ones(1, 2, 4, 70, 70)),
    "attn_mask is uint8, expected bool, float32, bfloat16 or float16":
        dict(attn_mask=ones(70, 70).byte()),
    "rpe is bool, expected float32, bfloat16 or float16": dict(rpe=ones(70, 70).bool()),
    "rpe has no memory, expected 4900 elements": dict(rpe=freed(ones(70, 70))),
}  # fmt: skip


def operands() -> dict[str, Any]:
    q, k, v = ones(2, 4, 70, 8), ones(2, 2, 70, 8), ones(2, 2, 70, 8)
    return dict(q=q, k=k, v=v, layout=ones(1, 5, 5).long(), block=16)


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    block_sparse_attention(**operands())  # loads the library, so that it is what refuses
    with pytest.raises(ValueError, match=rf"^block_sparse_attention: {re.escape(text)}$"):
        block_sparse_attention(**(operands() | REFUSED[text]))


def test_backward_refuses_what_is_not_of_the_call() -> None:
    call = case("plain", "cpu")
    with Recorder() as recorder:
        call.run()
    op, arguments, options = recorder.calls[1]
    for i, text in (
        (0, "grad_out has shape [2, 4, 69, 24], expected [2, 4, 70, 24]"),
        (5, "out has shape [2, 4, 69, 24], expected [2, 4, 70, 24]"),
        (6, "lse has shape [2, 4, 69], expected [2, 4, 70]"),
    ):
        given = list(arguments)
        given[i] = given[i].narrow(2, 0, 69)
        with pytest.raises(ValueError, match=re.escape(f"block_sparse_attention_backward: {text}")):
            op(*given, **options)


def test_under_autocast_nothing_is_cast(device: str) -> None:
    call = case("plain", device)
    want = call.run()
    with torch.autocast(device, BF16):
        assert all(map(torch.equal, call.run(), want))


def test_gradients_add_up_over_uses(device: str) -> None:
    """One tensor as q, k and v."""
    x = make((1, 2, 50, 8), F32, 0, device).requires_grad_()
    layout = torch.ones(1, 4, 4, dtype=torch.bool, device=device)
    (got,) = torch.autograd.grad(block_sparse_attention(x, x, x, layout, 16).sin().sum(), x)
    wide = x.detach().double().requires_grad_()
    out = block_sparse_attention_ref(wide, wide, wide, layout, 16)
    (want,) = torch.autograd.grad(out.sin().sum(), wide)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
