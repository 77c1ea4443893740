"""What block_sparse_attention does on CUDA, tried on the CPU: it is plain torch."""

import re
from typing import Any

import pytest
import sparse_cases
import test_block_sparse_attention as on_cpu
import torch
from samples import BF16
from sparse_cases import OPTIONS, Sparse
from test_block_sparse_contract import REFUSED, operands
from torch import Tensor

from deepspeed_ext.ops import block_sparse_attention
from deepspeed_ext.ops.attention import block_sparse_cuda


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: Any, *masks: Any) -> Tensor:
        out, lse = block_sparse_cuda.forward(q, k, v, *masks, **options)
        ctx.save_for_backward(q, k, v, out, lse, *masks)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        options = ctx.options | dict(needs_q=True, needs_kv=True)
        grads = block_sparse_cuda.backward(grad, None, *ctx.saved_tensors, **options)
        return *grads, *[None] * 5


def attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Tensor, block: int, **options: Any
) -> Tensor:
    masks = [options.pop(name, None) for name in ("key_padding_mask", "attn_mask", "rpe")]
    scale = max(q.shape[-1], 1) ** -0.5
    options = dict(scale=scale, causal=False, block=block) | options
    return _Attention.apply(q, k, v, options, layout, *masks)  # type: ignore[no-any-return]


@pytest.fixture(params=[1 << 24, 20_000], ids=["at once", "by tiles"], autouse=True)
def of_cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sparse_cuda, "_MOST_SCORES", request.param)
    monkeypatch.setattr(sparse_cases, "block_sparse_attention", attention)


def test_numbers() -> None:
    for block, tokens in ((16, 1), (32, 130), (128, 257)):
        Sparse((2, 4, tokens, 24), 2, block).assert_right()
    for name, make in OPTIONS.items():
        options = make(2, 4, 100, "cpu")
        dtypes = (BF16,) * 3 if name == "all" else (torch.float32,) * 3
        Sparse((2, 4, 100, 20), 2, 16, None, dtypes, "cpu", options).assert_right()


def test_layouts() -> None:
    for name in on_cpu.layouts():
        on_cpu.test_every_layout(name, "cpu")


def test_what_is_left_out_does_not_matter() -> None:
    for name in ("plain", "mask", "keys added"):
        on_cpu.test_what_is_left_out_does_not_matter(name, "cpu")
    on_cpu.test_a_nan_in_what_nobody_sees("cpu")


def test_under_autocast_nothing_is_cast() -> None:
    call = Sparse((1, 2, 40, 8), 1, 16)
    want = call.run()
    with torch.autocast("cpu", BF16):
        assert all(map(torch.equal, call.run(), want))


@pytest.mark.parametrize("text", [text for text in REFUSED if not re.search("memory|spar", text)])
def test_refuses_the_same(text: str) -> None:
    given = operands() | dict(scale=0.3) | REFUSED[text]
    with pytest.raises(ValueError, match=rf"^block_sparse_attention: {re.escape(text)}$"):
        attention(**given)


def test_it_is_what_is_called_on_cuda(cuda: str) -> None:
    given = _given(cuda)
    out, _ = block_sparse_cuda.forward(given.pop("q"), **given)
    given = {k: v for k, v in _given(cuda).items() if v is not None}
    assert torch.equal(block_sparse_attention(**given), out)


def _given(device: str) -> dict[str, Any]:
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in operands().items()}
    nothing = dict(key_padding_mask=None, attn_mask=None, rpe=None)
    return given | nothing | dict(scale=0.3, causal=False)
