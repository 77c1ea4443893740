"""dropout_attention: numbers and gradients in blocks of queries, and what torch asks of an op."""

import re
from typing import Any

import pytest
import torch
from samples import BF16, F16, F32, make
from torch import Tensor

from deepspeed_ext.ops import dropout_attention, dropout_attention_ref
from deepspeed_ext.ops._dropout import draw_seeds
from deepspeed_ext.ops.transformer import attention

SEED = torch.tensor([11])
MASKS = {
    "none": None,
    "keys": torch.linspace(-3, 0, 9),
    "batch": (torch.arange(18).view(2, 1, 1, 9) % 5 != 0),
    "queries": torch.ones(7, 9).tril().bool(),
    "all": torch.linspace(-5, 0, 2 * 3 * 7 * 9).view(2, 3, 7, 9),
    "some see nothing": torch.arange(7)[:, None] > 2,
}


def heads(dtype: torch.dtype = F32, queries: int = 7, keys: int = 9) -> list[Tensor]:
    """Return q, k and v, of which q lies as a projection gives it."""
    q = make((2, queries, 3, 8), dtype, 0).transpose(1, 2)
    return [q, *(make((2, 3, keys, 8), dtype, i) for i in (1, 2))]


def run(function: Any, tensors: list[Tensor], grad: Tensor, *args: Any, **options: Any) -> Any:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = function(*leaves, *args, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


@pytest.mark.parametrize("elements", [1, 200, 1 << 21])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_values(
    mask: str, dtype: torch.dtype, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one query at a time, of two, and of all."""
    monkeypatch.setattr(attention, "_ELEMENTS", elements)
    tensors, given, grad = heads(dtype), MASKS[mask], make((2, 3, 7, 8), dtype, 3)
    wide = [tensor.double() for tensor in tensors]
    if given is not None and given.is_floating_point():
        given = given.to(dtype)
    for p in (0.0, 0.4, 1.0):
        got = run(dropout_attention, tensors, grad, given, p=p, seed=SEED)
        want = run(dropout_attention_ref, wide, grad, given, p=p, seed=SEED)
        bound = 40 * torch.finfo(dtype).eps
        for value, expected in zip(got, want, strict=True):
            assert value.dtype == dtype and value.shape == expected.shape
            assert (value.double() - expected).abs().max() <= bound * max(1, expected.abs().max())


def test_rates() -> None:
    """A value of ones gives the sum of what is kept of equal probabilities."""
    q = torch.zeros(1, 4, 600, 8)
    out = dropout_attention(q, q, torch.ones_like(q), p=0.1, seed=SEED)[..., 0] * 0.9 * 600
    assert abs(float(out.mean()) - 540) < 0.8
    assert abs(float(out.std()) / (600 * 0.09) ** 0.5 - 1) < 0.06
    assert (out - out.round()).abs().max() < 1e-2 and not torch.equal(out[0, 0], out[0, 1])


def test_without_a_seed_it_is_torchs() -> None:
    """Where nothing is dropped; else one is drawn, once a call."""
    tensors = heads()
    want = torch.nn.functional.scaled_dot_product_attention(*tensors)
    assert torch.equal(dropout_attention(*tensors, p=0), want)
    torch.manual_seed(2)
    found = dropout_attention(*tensors, p=0.5)
    torch.manual_seed(2)
    (seed,) = draw_seeds(want.device)
    assert torch.equal(found, dropout_attention(*tensors, p=0.5, seed=seed))
    assert not torch.equal(found, want)


def test_opcheck_and_compile() -> None:
    tensors = heads()
    options = dict(p=0.3, scale=0.5)
    for mask in (None, MASKS["queries"]):
        given = [t.detach().requires_grad_() for t in tensors]
        checked = torch.library.opcheck(
            torch.ops.deepspeed_ext.dropout_attention, (*given, mask, SEED), options
        )
        assert set(checked.values()) == {"SUCCESS"}
    args = (make((2, 3, 7, 8), F32, 3), *tensors, None, SEED)
    checked = torch.library.opcheck(
        torch.ops.deepspeed_ext.dropout_attention_backward, args, options
    )
    assert set(checked.values()) == {"SUCCESS"}
    compiled = torch.compile(dropout_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for queries in (7, 5):
        some = heads(queries=queries)
        want = dropout_attention(*some, p=0.3, seed=SEED)
        assert torch.equal(compiled(*some, p=0.3, seed=SEED), want)


def test_what_has_no_gradient_is_refused() -> None:
    mask = torch.zeros(9, requires_grad=True)
    with pytest.raises(
        RuntimeError, match=r"^dropout_attention: mask requires a gradient, expecte"
    ):
        dropout_attention(*heads(), mask, p=0.3, seed=SEED)
    with pytest.raises(TypeError, match=r"^dropout_attention: q is None, expected a tensor$"):
        dropout_attention(None, *heads()[1:], p=0.3)  # type: ignore[arg-type]


def test_refuses() -> None:
    """With a seed and without, where torch or another op would have the word."""
    q, k, v = heads()
    for args, text in (
        ((q[0], k, v), "q has shape [3, 7, 8], expected [batch, heads, queries, head size]"),
        ((q, k[:, :1], v), "k has shape [2, 1, 9, 8], expected [2, 3, keys, 8]"),
        ((q, k, v[:, :, :4]), "v has shape [2, 3, 4, 8], expected [2, 3, 9, 8]"),
        ((q, k, v.half()), "v is float16, expected float32"),
        ((q, k, v, torch.ones(7, 9).long()), "mask is int64, expected bool, True where a key is"),
        ((q, k, v, torch.ones(2, 9)), "mask has shape [2, 9], expected one that can be broadcast"),
    ):
        for seed in (None, SEED):
            with pytest.raises(ValueError, match=f"^dropout_attention: {re.escape(text)}"):
                dropout_attention(*args, p=0.3, seed=seed)
    for p in (2, -0.1, float("nan")):
        with pytest.raises(ValueError, match=rf"^dropout_attention: p is {float(p)}, expected a n"):
            dropout_attention(q, k, v, p=p)
