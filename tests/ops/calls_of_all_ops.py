"""Calls of every op, with each of its tensors in one of them."""

from typing import Any

import torch
from functional_cases import CASES, Recorder, call_of, recorded as calls_of
from kv_cases import make_kv, queries
from norms_around_cases import NextNorm

from deepspeed_ext import ops
from deepspeed_ext.ops import *  # noqa: F403  # registers all
from deepspeed_ext.ops._library import _tensors
from deepspeed_ext.ops.linear.grouped_products import clear_rows_of_nobody

F32 = torch.float32
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def linear(bits: int) -> None:
    """Call what multiplies with codes of so many bits."""
    x, residual, bias = torch.randn(2, 16), torch.randn(2, 8), torch.randn(8)
    format = "int8" if bits == 8 else "int4"
    made = ops.quantize(torch.randn(8, 16), format, group_size=8, symmetric=False)
    weight = ops.pack_weight(*made, format=format, group_size=8)
    ops.quantize_packed_(torch.randn(8, 16), weight, torch.zeros(8, 2, dtype=torch.float64))
    ops.quantized_linear(x, weight, bias, residual=residual)
    norm = NextNorm(torch.randn(8))
    _, normed = ops.quantized_linear_norm(x, weight, bias, residual=residual, norm=norm)
    square = ops.pack_weight(*ops.quantize(torch.eye(8), format, group_size=8), format=format,
                             group_size=8)  # fmt: skip
    ops.quantized_linear_norm(normed, square, norm=norm)
    ops.unpack_weight(weight)
    ends, slots = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([[0], [1]])
    two = ops.pack_weight(*(torch.cat([part, part]) for part in made), format=format, group_size=8)
    of_two = torch.randn(2, 8)
    for activation in (None, "silu"):
        ops.grouped_quantized_linear(x, two, ends, of_two, slots=slots, activation=activation)
    numbers = dict(format=0 if bits == 8 else 1, group_size=8, length=16, transposed=False)
    torch.ops.deepspeed_ext.grouped_quantized_products(x, *two[:3], ends, of_two, **numbers)


def cached(dtype: torch.dtype) -> None:
    """Call what reads and writes a cache."""
    kv, heads = make_kv([5, 3], 2, 16, dtype, "cpu"), torch.ones(2)
    q = queries(2, 1, 2, 16, F32, "cpu")
    options: dict[str, Any] = dict(frequencies=torch.ones(8), q_weight=q[0, 0, 0])
    options |= dict(k_weight=q[0, 0, 1], slots=torch.tensor([1, 0], dtype=torch.int32))
    options["counts"] = torch.ones(2, dtype=torch.int32)
    ops.rope_append_(q.clone(), q, q, kv, **options)
    ops.append_and_attend_(q, q, q, kv, **options, alibi_slopes=heads, sinks=heads)
    for function in (ops.decode_attention, ops.prefill_attention):
        some = dict(slots=options["slots"], counts=options["counts"])
        function(q, kv, **some, alibi_slopes=heads, sinks=heads)


def others() -> None:
    """Call what is in no other table."""
    x = torch.randn(2, 16)
    weight, bias, residual = torch.randn(8, 16), torch.randn(8), torch.randn(2, 8)
    ops.skinny_linear(x, weight, bias, residual=residual)
    norm = NextNorm(torch.randn(8))
    _, normed = ops.skinny_linear_norm(x, weight, bias, residual=residual, norm=norm)
    ops.skinny_linear_norm(normed, torch.randn(8, 8), norm=norm)
    ends = torch.tensor([1, 2], dtype=torch.int32)
    experts = torch.randn(2, 8, 16, requires_grad=True)
    form: dict[str, Any] = dict(slots=torch.tensor([[1], [0]]), activation="silu", gated=True)
    ops.grouped_linear(x, experts, ends, torch.randn(2, 8), **form).sum().backward()
    ops.grouped_linear(torch.randn(513, 16), experts, ends, torch.randn(2, 8))
    clear_rows_of_nobody(torch.randn(9, 4), ends)
    made = ops.quantize(x, symmetric=False)
    ops.dequantize(*made)
    ops.fake_quantize(x)
    ops.ds_quantizer(x.clone())
    ops.squared_norms([x, bias])
    ops.fingerprints([x, bias])
    q = torch.randn(3, 2, 16)
    ops.rope_(q, q.clone(), torch.arange(3), torch.ones(8))
    ops.rope(q, None, torch.arange(3), torch.ones(8))
    of_heads = torch.randn(3, 1, 2, 3, 4).requires_grad_()
    mask, seed = torch.zeros(3), torch.tensor([3])
    ops.dropout_attention(*of_heads, mask, p=0.3, seed=seed).sum().backward()
    leaf = torch.randn(3, 16, requires_grad=True)
    loss = ops.cross_entropy(leaf * 1, torch.arange(3), inplace=True)
    loss.backward()
    head, bias_of_head = (t.clone().requires_grad_() for t in (weight, bias))
    for reduction in ("none", "mean"):
        arguments = (leaf, head, torch.arange(3))
        ops.linear_cross_entropy(
            *arguments, bias=bias_of_head, reduction=reduction, softcap=4.0
        ).sum().backward()
    gate = torch.randn(2, 16, requires_grad=True)
    ops.swiglu(gate).sum().backward()
    ops.rms_norm(gate, residual=x, return_sum=False).sum().backward()
    ops.skinny_linear(gate, weight, activation="silu", gated=True).sum().backward()
    words, codes = torch.zeros(8, 1).int(), torch.empty(8, 128, dtype=torch.uint8)
    ops.repack_weight_(words, codes, torch.arange(8), format="int4", length=8)
    raw, options = torch.ops.deepspeed_ext, dict(eps=1e-5, weight_offset=0.0)
    vector = torch.randn(16)
    raw.rms_norm(gate, vector, vector, **options).sum().backward()  # which has no function
    raw.rms_norm.residual(gate, x, vector, vector, vector, **options, needs_sum=True)


def sparse() -> None:
    """Call attention to the blocks of a layout."""
    q, k, v = (torch.randn(1, heads, 20, 3, requires_grad=True) for heads in (2, 1, 1))
    layout = torch.tensor([[[1, 0], [1, 1]]])
    masks = dict(attn_mask=torch.randn(20, 20), rpe=torch.randn(2, 20, 20))
    masks["key_padding_mask"] = torch.randn(1, 20)
    ops.block_sparse_attention(q, k, v, layout, 16, **masks).sum().backward()
    raw = torch.ops.deepspeed_ext.block_sparse_attention
    out, lse = raw(q, k, v, layout, None, None, None, block=16, scale=0.5, causal=True)
    (out.sum() + lse.sum()).backward()


def experts() -> None:
    """Call what moves tokens to their experts, with a choice that no small change changes."""
    logits = torch.linspace(-1, 1, 24)[torch.arange(24) * 7 % 24].view(6, 4).requires_grad_()
    x = torch.randn(6, 5, requires_grad=True)
    for score in ("softmax", "sigmoid"):
        options: dict[str, Any] = dict(score=score, normalize=True, bias=torch.zeros(4))
        routing = ops.moe_route(logits, 2, **options, capacity=2, keep="random")
        seed = torch.tensor(3)
        ops.moe_assign(routing.experts, routing.weights, 5, capacity=2, keep="random", seed=seed)
        out = ops.moe_unpermute(ops.moe_permute(x, routing), routing)
        loss = ops.moe_load_balancing_loss(routing) + ops.moe_z_loss(routing)
        (out.sum() + loss).backward()


def dropping() -> None:
    """Call what takes some tokens out, and back."""
    x, part, ids = torch.randn(2, 5, 8), torch.randn(2, 3, 8), torch.tensor([[4, 1, 0], [2, 3, 1]])
    kept = ops.token_sort_(ids.int(), 5)
    ops.token_scatter_(x, part, kept)
    ops.mask_gather_bert(torch.randn(2, 1, 5, 5), kept[None])
    leaf = torch.randn(2, 5, 8, requires_grad=True)
    ops.token_scatter(leaf, ops.token_gather(leaf, kept), kept).sum().backward()


def make_all() -> None:
    """Call all of these."""
    dropping()
    others()
    sparse()
    experts()
    for bits in (4, 8):
        linear(bits)
    for dtype in (F32, torch.int8, torch.float8_e4m3fn):
        cached(dtype)


def all_calls() -> list[Call]:
    """What all these come to, each op with each form of its arguments once."""
    found = [call for case in CASES.values() for call in calls_of(call_of(case, 3, 8, F32, "cpu"))]
    with Recorder() as recorder:
        make_all()
    with torch.no_grad():
        x = torch.randn(2, 16)
        _, again = ops.record(ops.rms_norm, x)
        given = [x, *again._given]
    replay = torch.ops.deepspeed_ext.replay_.default, (again._names, again._code, given), {}
    found += [*recorder.calls, replay]
    return list({(op, str(forms(op, args))): (op, args, kw) for op, args, kw in found}.values())


def forms(op: Any, args: tuple[Any, ...]) -> list[tuple[str, torch.dtype]]:
    names = [argument.name for argument in op._schema.arguments]
    return [(name, t.dtype) for name, t in _tensors(dict(zip(names, args, strict=False)))]
