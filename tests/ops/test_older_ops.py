"""Functions of older libraries by their names: their formulas in float64, on both devices."""

import math

import pytest
import torch
import torch.nn.functional as F
from samples import BF16, F16, F32, make
from torch import Tensor

from deepspeed_ext import interfaces
from deepspeed_ext.ops import older
from deepspeed_ext.ops.older import AttnMaskType, ColoAttention

INFERENCE = interfaces.interface_of("transformer_inference")
IMAGES = interfaces.interface_of("spatial_inference")


def near(got: Tensor, want: Tensor) -> None:
    tolerance = {F32: 1e-5, BF16: 2e-2, F16: 3e-3}[got.dtype]
    assert got.shape == want.shape
    torch.testing.assert_close(got.double().cpu(), want.cpu(), rtol=tolerance, atol=tolerance)


def test_every_name_is_a_function_of_its_module() -> None:
    for interface in (INFERENCE, IMAGES):
        for name, home in interface._homes.items():
            if home == older.__name__:
                assert callable(getattr(interface, name)), name
    assert INFERENCE.bias_gelu_fp16 is INFERENCE.bias_gelu_bf16 is older.bias_gelu
    assert INFERENCE.qkv_gemm_fp32 is older.qkv_gemm and "qkv_gemm_fp32" in dir(INFERENCE)
    for name in ("nothing_fp16", "bias_gelu_int8", "_fp16"):
        with pytest.raises(AttributeError, match=name):
            getattr(older, name)


def test_sums_of_images(device: str) -> None:
    x, other = (make((2, 3, 4, 8), F16, i, device) for i in range(2))
    bias, other_bias = (make((8,), F16, 2 + i, device) for i in range(2))
    x, other = (t.permute(0, 3, 1, 2) for t in (x, other))  # channels_last
    wide = [t.double() for t in (x, bias[:, None, None], other, other_bias[:, None, None])]
    near(IMAGES.nhwc_bias_add(x, bias), wide[0] + wide[1])
    near(IMAGES.nhwc_bias_add_add(x, bias, other), sum(wide[:3]))
    near(IMAGES.nhwc_bias_add_bias_add(x, bias, other, other_bias), sum(wide))
    rows = make((2, 5, 8), F16, 5, device)
    near(older.nhwc_bias_add(rows, bias), rows.double() + bias.double())


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_sums_at_the_end_of_a_layer(dtype: torch.dtype, device: str) -> None:
    hidden, rest, attended = (make((2, 3, 8), dtype, i, device) for i in range(3))
    attention_bias, final_bias = (make((8,), dtype, 3 + i, device) for i in range(2))
    h, r, a, ab, fb = (t.double() for t in (hidden, rest, attended, attention_bias, final_bias))
    for after, add, preln, want in (
        (True, True, True, (r + a + fb + ab) / 2 + h),
        (True, False, True, (r + a + fb + ab) / 2 + h),
        (True, True, False, r + h + fb),
        (False, True, True, h + a + (r + fb + ab) / 2),
        (False, False, True, h + a + (r + fb) / 2),
    ):
        written = rest.clone()
        given = hidden, written, attended, attention_bias, final_bias, 2, after, add, preln
        assert INFERENCE.residual_add_bias_fp16(*given) is written
        near(written, want)
    for name, want in (
        ("bias_residual", h + r + fb),
        ("bias_add", h + fb),
        ("bias_relu", (h + fb).relu()),
        ("bias_gelu", F.gelu(h + fb, approximate="tanh")),
    ):
        written = hidden.clone()
        given = (written, rest, final_bias) if name == "bias_residual" else (written, final_bias)
        assert getattr(INFERENCE, name)(*given) is written
        near(written, want)
        four = torch.stack([hidden, hidden])
        given = (four, torch.stack([rest, rest]), final_bias)
        getattr(INFERENCE, name)(*(given if name == "bias_residual" else given[::2]))
        near(four[1], want)
    both = make((2, 3, 16), dtype, 7, device)
    bias = make((16,), dtype, 8, device)
    first, gate = (both.double() + bias.double()).chunk(2, -1)
    near(INFERENCE.bias_geglu(both, bias), first * F.gelu(gate))


def test_norms_and_products(device: str) -> None:
    x, rest = (make((2, 3, 8), F32, i, device) for i in range(2))
    gamma, beta, bias8 = (make((8,), F32, 2 + i, device) for i in range(3))
    weight, bias, out_weight = (make(s, F32, 5 + i, device) for i, s in enumerate(
        ((8, 12), (12,), (12, 8))
    ))  # fmt: skip
    wide = {
        name: t.double() for name, t in dict(x=x, rest=rest, g=gamma, b=beta, b8=bias8, w=weight,
                                             bias=bias, out=out_weight).items()
    }  # fmt: skip

    def norm(t: Tensor) -> Tensor:
        return F.layer_norm(t, (8,), wide["g"], wide["b"], 1e-5)

    near(INFERENCE.layer_norm(x, gamma, beta, 1e-5), norm(wide["x"]))
    total = wide["x"] + wide["b8"] + wide["rest"]
    summed = INFERENCE.layer_norm_residual_store_pre_ln_res(x, bias8, rest, gamma, beta, 1e-5)
    for got, want in zip(summed, (norm(total), total), strict=True):
        near(got, want)
    near(INFERENCE._layer_norm_residual(x, bias8, rest, gamma, beta, 1e-5), norm(total))
    scale = torch.ones(1, device=device)
    for transposed in (False, True):
        w, o = (t.t().contiguous() if transposed else t for t in (weight, out_weight))
        near(
            INFERENCE.vector_matmul_fp16(x, w, False, scale, False, transposed),
            wide["x"] @ wide["w"],
        )
        for adds in (False, True):
            more = wide["bias"] if adds else 0.0
            near(
                older.linear_layer(x, w, bias, adds, False, 2, transposed),
                wide["x"] @ wide["w"] + more,
            )
            got = older.qkv_gemm(
                x, w, scale, bias, gamma, beta, 1e-5, adds, 3, False, 1, 0, False, transposed
            )
            near(got[0], norm(wide["x"]) @ wide["w"] + more)
            near(got[1], norm(wide["x"]))
        gelu = F.gelu(wide["x"] @ wide["w"] + wide["bias"], approximate="tanh") @ wide["out"]
        near(
            older.fused_gemm_gelu(x, w, scale, bias, o, scale, 0.0, True, False, False, transposed),
            gelu,
        )
        for kind, after in ((1, True), (2, False)):
            given = x, rest, bias8, w, o, bias, gamma, beta, 1e-5, True, after, scale, scale, False
            out, normed = older.mlp_gemm(*given, kind, transposed)
            want = norm(total if after else wide["rest"])
            up = want @ wide["w"] + wide["bias"]
            active = F.gelu(up, approximate="tanh") if kind == 1 else up.relu()
            near(normed, want)
            near(out, active @ wide["out"])
    with pytest.raises(ValueError, match=r"^mlp_gemm: activation_func_type is 3, expected 1 or 2$"):
        older.mlp_gemm(*given, 3)
    heads = older.linear_layer(x, weight, bias, True, True, 2)
    plain = (wide["x"] @ wide["w"] + wide["bias"]).view(2, 3, 3, 2, 2).permute(2, 0, 3, 1, 4)
    assert heads.shape == (3, 2, 2, 3, 32) and not heads[..., 2:].any()
    near(heads[..., :2], plain)


def test_codes_of_8_bits(device: str) -> None:
    """Groups of elements in the order of memory, with a scale each, the first of three."""
    x, weight = make((3, 8), F32, 0, device), make((12, 8), F32, 1, device)
    groups = weight.view(6, 16)
    scale = groups.abs().amax(1, keepdim=True) / 127
    codes = (groups / scale).round().to(torch.int8).view(12, 8)
    three = torch.cat([scale, scale * 5, scale * 7], 1)
    got = older.vector_matmul(x, codes, False, three, True)
    near(got, x.double() @ (codes.view(6, 16).double() * scale.double()).view(12, 8).t())


def turned(x: Tensor, start: int, dims: int, half: bool) -> Tensor:
    """Rotary embedding of (batch, tokens, heads, width) in complex numbers."""
    angle = torch.arange(start, start + x.shape[1], dtype=torch.float64)[:, None]
    angle = angle * 10000.0 ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    first = x[..., :dims].double()
    pairs = torch.stack(first.chunk(2, -1), -1) if half else first.unflatten(-1, (-1, 2))
    out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    whole = torch.cat([out[..., 0], out[..., 1]], -1) if half else out.flatten(-2)
    return torch.cat([whole, x[..., dims:].double()], -1)


@pytest.mark.parametrize(("half", "every_two"), [(True, False), (False, True), (False, False)])
def test_attention_in_steps(half: bool, every_two: bool, device: str) -> None:
    """A prompt and then tokens one by one are the whole at once; against plain float64."""
    batch, tokens, heads, width, dims = 2, 7, 3, 8, 4
    qkv = make((batch, tokens, 3 * heads * width), F32, 0, device)
    mask = torch.zeros(batch, 1, 1, tokens, device=device)
    mask[0, ..., 1] = -10000.0
    alibi = make((heads, 1, tokens), F32, 1, device)
    for local in (False, True):
        q, k, v = qkv.cpu().view(batch, tokens, 3, heads, width).double().unbind(2)
        if half or every_two:
            q, k = (turned(t, 0, dims, half) for t in (q, k))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.5**2 + alibi.cpu().double() + mask.cpu()
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        hidden = (distance < 0) | (distance >= 3) if local else distance < 0
        chances = scores.masked_fill(hidden, -math.inf).softmax(-1)
        want = torch.einsum("bhqk,bkhd->bqhd", chances, v).flatten(2)
        options = dims, half, every_two, heads, 0.5, True, local, 3, False, 0, 1
        whole, keys, values = older.softmax_context(qkv, mask, *options, alibi)
        near(whole, want)
        near(keys, k.transpose(1, 2))
        near(values, v.transpose(1, 2))
        out, past = [], None
        for start, end in ((0, 4), (4, 5), (5, 7)):
            part = older.softmax_context(
                qkv[:, start:end], mask[..., :end], *options, alibi[..., :end], past=past
            )
            out.append(part[0])
            past = part[1:]
        torch.testing.assert_close(torch.cat(out, 1), whole)
    with pytest.raises(
        ValueError, match=r"^softmax_context: past is None beside one token, expected"
    ):
        older.softmax_context(qkv[:, :1], mask, *options)
    first = older.softmax_context(qkv[:, :1], torch.zeros(1), *options, past=())[0]
    torch.testing.assert_close(first, qkv[:, :1, -heads * width :])
    got = older.apply_rotary_pos_emb(*qkv.chunk(3, -1)[:2], dims, 5, heads, half, every_two)
    want_q = qkv.cpu().double()[..., : heads * width]
    if half or every_two:
        want_q = turned(want_q.view(batch, tokens, heads, width), 5, dims, half).flatten(2)
    near(got[0], want_q)


def test_padding(device: str) -> None:
    q, k = make((2, 3, 5, 40), F32, 0, device), make((2, 3, 6, 40), F32, 1, device)
    for got, given, tokens in zip(
        older.add_padding(q, k, -k), (q, k, -k), (5, 128, 128), strict=True
    ):
        assert got.shape == (2, 3, tokens, 64) and got.count_nonzero() == given.count_nonzero()
        assert torch.equal(got[:, :, : given.shape[2], :40], given)
    flat = [t.transpose(1, 2).flatten(2) for t in (q, k, -k)]
    plain = older.pad_transform(*flat, 3, False)
    assert all(map(torch.equal, plain, (q, k, -k)))
    assert all(map(torch.equal, older.pad_transform(*flat, 3, True), older.add_padding(q, k, -k)))
    with pytest.raises(
        ValueError, match=r"^add_padding: key has 129 tokens, expected 128 at the most"
    ):
        older.add_padding(q, make((1, 1, 129, 8), F32, 0, device), k)


def test_there_is_no_workspace() -> None:
    assert INFERENCE.allocate_workspace_fp16(8, 2, 3, 4, 5, 1, False, 0, 1024, 1) is True
    assert INFERENCE.release_workspace() is None and INFERENCE.reset_cache() is None
    assert INFERENCE.retake_workspace() is True


KINDS: list[tuple[AttnMaskType | None, bool]] = [
    (None, False), (AttnMaskType.padding, False), (AttnMaskType.causal, False),
    (AttnMaskType.paddedcausal, False), (AttnMaskType.padding, True), (AttnMaskType.causal, True),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("kind", "has_bias"), KINDS)
def test_colo_attention(
    kind: AttnMaskType | None, has_bias: bool, dtype: torch.dtype, device: str
) -> None:
    """With gradients; on CUDA in 16 bits by attention of variable length."""
    layer = ColoAttention(3 * 16, 3).train()
    q, k, v = (make((2, 9, 3, 16), dtype, i, device).requires_grad_() for i in range(3))
    kept = torch.ones(2, 9, dtype=torch.int64, device=device)
    kept[1, 5:] = 0
    bias = make((2, 3, 9, 9), dtype, 5, device) if has_bias else None
    out = layer(q, k, v, kept, kind, bias)
    wide = [t.detach().cpu().double().requires_grad_() for t in (q, k, v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", wide[0], wide[1]) / 4
    scores = scores if bias is None else scores + bias.cpu().double()
    is_padded = kind in (AttnMaskType.padding, AttnMaskType.paddedcausal)
    if is_padded:
        scores = scores.masked_fill(kept.cpu()[:, None, None] == 0, -math.inf)
    if kind in (AttnMaskType.causal, AttnMaskType.paddedcausal):
        scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
    want = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), wide[2])
    want = want.where(kept.cpu()[..., None, None] > 0, 0) if is_padded else want
    near(out.detach(), want.flatten(2).detach())
    grad = make(tuple(out.shape), dtype, 9, device)
    got = torch.autograd.grad(out, [q, k, v], grad)
    right = torch.autograd.grad(want, wide, grad.cpu().double().view(want.shape))
    for one, other in zip(got, right, strict=True):
        near(one / 2, other / 2)


def test_colo_attention_refuses() -> None:
    with pytest.raises(
        ValueError, match=r"^ColoAttention: embed_dim is 7, expected a multiple of 2"
    ):
        ColoAttention(7, 2)
    x = torch.ones(1, 2, 2, 4)
    with pytest.raises(ValueError, match=r"^ColoAttention: attn_mask is None, expected one beside"):
        ColoAttention(8, 2)(x, x, x, None, AttnMaskType.padding)
    torch.manual_seed(0)
    layer = ColoAttention(8, 2, dropout=0.5).train()
    assert not torch.equal(layer(x, x, x), layer.eval()(x, x, x))


def test_gradients_come_or_an_error_does() -> None:
    x = torch.ones(2, 3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(older.vector_matmul(x, torch.eye(8) * 3).sum(), x)
    assert torch.equal(grad, torch.full_like(x, 3))
    options = torch.zeros(1), 4, True, False, 2, 0.5, True, False, 1, True
    (grad,) = torch.autograd.grad(older.softmax_context(x.repeat(1, 1, 3), *options)[0].sum(), x)
    torch.testing.assert_close(grad.sum(), torch.tensor(48.0))
    (grad,) = torch.autograd.grad(older.bias_add(x * 2, x[0, 0].detach()).sum(), x)
    assert torch.equal(grad, torch.full_like(x, 2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        older.bias_gelu(x * 2, x[0, 0].detach()).sum().backward()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        older.bias_gelu(x, x[0, 0].detach())
