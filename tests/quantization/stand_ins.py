"""TEMPORARY: references in place of ops that other branches bring."""

import sys
import types
from collections import namedtuple

import torch

import deepspeed_ext.ops as ops
from deepspeed_ext.ops.quantization import packed_weight as pw
from deepspeed_ext.ops.quantization import quantized_linear as ql
from deepspeed_ext.ops.quantization.formats import (
    FORMATS,
    LEAST_SCALE,
    NF4_LEVELS,
    groups_of,
    number_of,
    pack_nibbles,
    unpack_nibbles,
)

Quantized = namedtuple("Quantized", "codes scales offsets")


def quantize(x, format="int8", *, group_size=None, group_rows=1, symmetric=True, seed=None):
    f = FORMATS[number_of("quantize", format)]
    k = x.shape[-1]
    g = group_size or max(k, 1)
    n = groups_of(k, g)
    xp = torch.nn.functional.pad(x.double(), (0, n * g - k)).unflatten(-1, (n, g))
    off = None
    if symmetric:
        s = (xp.abs().amax(-1) / f.largest).clamp_min(LEAST_SCALE).float()
        q = xp / s.double()[..., None]
    else:
        hi = (
            torch.nn.functional.pad(x.double(), (0, n * g - k), value=-1e300)
            .unflatten(-1, (n, g))
            .amax(-1)
        )
        lo = (
            torch.nn.functional.pad(x.double(), (0, n * g - k), value=1e300)
            .unflatten(-1, (n, g))
            .amin(-1)
        )
        s = ((hi - lo) / f.asymmetric_largest).clamp_min(LEAST_SCALE).float()
        off = lo.float()
        q = (xp - lo[..., None]) / s.double()[..., None]
    q = q.flatten(-2)[..., :k]
    if f.float8 is not None:
        return Quantized(q.float().to(f.float8), s, None)
    if format == "nf4":
        c = (
            (q[..., None] - torch.tensor(NF4_LEVELS, dtype=torch.float64))
            .abs()
            .argmin(-1)
            .to(torch.uint8)
        )
        return Quantized(pack_nibbles(c), s, None)
    L = f.largest if symmetric else f.asymmetric_largest
    c = q.round().clamp(-L if symmetric else 0, L)
    if format == "int4":
        return Quantized(pack_nibbles((c + (8 if symmetric else 0)).to(torch.uint8)), s, off)
    return Quantized(c.to(f.code_dtype(symmetric)), s, off)


def dequantize(
    codes,
    scales,
    offsets=None,
    *,
    format,
    group_size,
    group_rows=1,
    length=None,
    dtype=torch.float32,
):
    f = FORMATS[number_of("dequantize", format)]
    assert f.float8 is not None
    v = codes.double()
    return (v * scales.double().repeat_interleave(group_size, -1)[..., : v.shape[-1]]).to(dtype)


def install():
    ops.quantize, ops.dequantize = quantize, dequantize
