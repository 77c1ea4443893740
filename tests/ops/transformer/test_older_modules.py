"""MultiHeadAttention, FusedScaleMaskSoftmax and LayerNorm as Colossal-AI has them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_ext.ops import dropout_attention_ref
from deepspeed_ext.ops._dropout import draw_seeds, kept_ref
from deepspeed_ext.ops.transformer import (
    AttnMaskType,
    FusedScaleMaskSoftmax,
    LayerNorm,
    MultiHeadAttention,
)


@pytest.mark.parametrize("norm_first", [False, True])
def test_multi_head_attention(norm_first: bool) -> None:
    """In training and not, with padding and without, against float64."""
    torch.manual_seed(0)
    block = MultiHeadAttention(24, 3, 2, 64, 0.3, norm_first)
    with torch.no_grad():
        for parameter in (block.norm_weight, block.norm_bias, block.out_proj_bias):
            parameter.add_(0.2 * torch.randn(24))
    x, grad = torch.randn(2, 7, 24), torch.randn(2, 7, 24)
    padding = torch.zeros(2, 7)
    padding[1, 4:] = 1
    for training, mask in ((True, padding), (False, None), (False, padding)):
        block.train(training)
        seeds = (None, None)
        torch.manual_seed(3)
        if training:
            seeds = draw_seeds(x.device, 2)
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        out = block(leaf, mask)
        got = [out, *torch.autograd.grad(out, [leaf, *block.parameters()], grad)]
        p = {name: value.detach().double().requires_grad_()
             for name, value in block.named_parameters()}  # fmt: skip
        wide = x.double().requires_grad_()

        def norm(t: Tensor, p: dict[str, Tensor] = p) -> Tensor:
            return F.layer_norm(t, (24,), p["norm_weight"], p["norm_bias"])

        first = norm(wide) if norm_first else wide
        joined = torch.einsum("bsh,tih->tbsi", first, p["in_proj_weight"])
        q, k, v = (joined + p["in_proj_bias"][:, None, None]).unflatten(-1, (3, 8)).transpose(2, 3)
        seen = None if mask is None else (mask == 0)[:, None, None]
        some = dropout_attention_ref(q, k, v, seen, p=0.3 if training else 0, seed=seeds[0])
        some = F.linear(some.transpose(1, 2).flatten(2), p["out_proj_weight"], p["out_proj_bias"])
        total = some * kept_ref(seeds[1], 0.3, some) + wide
        want = total if norm_first else norm(total)
        grads = torch.autograd.grad(want, [wide, *p.values()], grad.double())
        for value, expected in zip(got, [want, *grads], strict=True):
            off = (value.double() - expected).abs().max()
            assert off <= 2e-5 * expected.abs().max()


def test_multi_head_attention_refuses() -> None:
    with pytest.raises(ValueError, match=r"pg is given, expected None; use torch\.distributed"):
        MultiHeadAttention(24, 3, 2, 64, pg=object())
    with pytest.raises(ValueError, match="hidden_size is 24, expected a multiple of nhead, 5"):
        MultiHeadAttention(24, 5, 2, 64)
    with pytest.raises(ValueError, match=r"dropout is 1\.5, expected a number from 0 to 1"):
        MultiHeadAttention(24, 3, 2, 64, 1.5)
    with pytest.raises(
        TypeError, match=r"^MultiHeadAttention: nhead is 3\.0, expected a whole num"
    ):
        MultiHeadAttention(24, 3.0, 2, 64)  # type: ignore[arg-type]
    block, x = MultiHeadAttention(24, 3, 2, 64), torch.randn(2, 7, 24)
    turned = torch.zeros(7, 2)  # as many elements
    with pytest.raises(
        ValueError, match=r"encoder_padding_mask has shape \[7, 2\], expected \[2, 7"
    ):
        block(x, turned)
    assert block(x[:0]).shape == (0, 7, 24) and block(x[:1], turned[:, 0]).shape == (1, 7, 24)


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("kind", AttnMaskType)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_mask_softmax(dtype: torch.dtype, kind: AttnMaskType, fusion: bool) -> None:
    x = torch.randn(2, 3, 7, 7).to(dtype).requires_grad_()
    mask = torch.rand(2, 1, 7, 7) < 0.3
    mask[..., 0] = False
    above = torch.ones(7, 7).triu(1).bool()
    left_out = {"padding": mask, "causal": above, "paddedcausal": mask | above}[kind.name]
    func = None if fusion else (lambda scores, given: scores.masked_fill(given, -10000.0))
    module = FusedScaleMaskSoftmax(False, dtype == torch.bfloat16, kind, fusion, func, True, 0.5)
    given = mask if fusion else left_out
    out = module(x, given)
    wide = x.detach().double().requires_grad_()
    want = (wide * 0.5).masked_fill(left_out, -torch.inf).softmax(-1)
    bound = 1e-6 if dtype == torch.float32 else 5e-3
    assert out.dtype == dtype and (out.double() - want).abs().max() < bound
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    (right,) = torch.autograd.grad(want.square().sum(), wide)
    assert (grad.double() - right).abs().max() < 4 * bound
    assert module.is_kernel_available(mask, 2, 3, 7, 7) is fusion


def test_scale_mask_softmax_refuses() -> None:
    with pytest.raises(ValueError, match="input_in_bf16 is True, expected False, as is input_in"):
        FusedScaleMaskSoftmax(True, True, AttnMaskType.causal, True, None, True, None)
    with pytest.raises(ValueError, match="softmax_in_fp32 is False, expected True with a scale"):
        FusedScaleMaskSoftmax(True, False, AttnMaskType.causal, True, None, False, 2.0)


def test_layer_norm() -> None:
    norm = LayerNorm((3, 8), 1e-3, "cpu", torch.bfloat16)
    assert norm.weight.dtype == torch.bfloat16 and norm.eps == 1e-3
    x = torch.randn(5, 3, 8)
    want = F.layer_norm(x.double(), (3, 8), eps=1e-3)
    torch.testing.assert_close(norm(x).double(), want, rtol=0, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x.bfloat16()).dtype == torch.float32
    assert LayerNorm(np.int64(8))(x).shape == x.shape
