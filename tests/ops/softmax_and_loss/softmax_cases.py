"""Inputs of softmax for the tests, what it may be off by, and a digest of its results."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from samples import BF16, DTYPES, F32, make
from tolerance import assert_within
from torch import Tensor

from deepspeed_ext.ops import softmax, softmax_ref

ROUNDING = torch.finfo(F32).eps / 2
# Around the vectors, the running sums, and what a warp, sixteen of them and shared memory hold.
LENGTHS = [1, 2, 7, 8, 16, 31, 32, 33, 127, 129, 256, 1000, 1032, 4100]
LONG = [16384, 16392, 16400, 40_001, 106_504, 131_072, 131_080]
# And around what two, four and eight blocks of a cluster have of a row of 16 bits.
IN_CLUSTERS = [16_385, 32_768, 32_776, 36_864, 65_528, 65_536, 65_544, 98_304, 131_064, 131_071]
ROWS = 37

# Every option, alone and together: functions of device and shape (..., heads, queries, keys).
OPTIONS: dict[str, Callable[[str, tuple[int, ...]], dict[str, Any]]] = {
    "plain": lambda device, shape: {},
    "scale": lambda device, shape: dict(scale=-0.3),
    "softcap": lambda device, shape: dict(scale=2.0, softcap=3.0),
    "alibi": lambda device, shape: dict(alibi_slopes=slopes(device, shape)),
    "causal": lambda device, shape: dict(causal=True),
    "causal from the first key": lambda device, shape: dict(causal=True, offset=0),
    "beyond all keys": lambda device, shape: dict(causal=True, offset=-shape[-2] // 2),
    "window": lambda device, shape: dict(window=(5, 2)),
    "window behind": lambda device, shape: dict(window=(33, -1), causal=True, offset=40),
    "window ahead": lambda device, shape: dict(window=(-1, 17), offset=3),
    "bool mask": lambda device, shape: dict(mask=chosen(device, shape)),
    "bool mask for all": lambda device, shape: dict(mask=chosen(device, shape[-2:])),
    "keys of a batch": lambda device, shape: dict(mask=chosen(device, (shape[0], 1, 1, shape[-1]))),
    "uint8 mask by columns": lambda device, shape: dict(
        mask=chosen(device, (shape[-1], shape[-2])).to(torch.uint8).t()
    ),
    "one column for all": lambda device, shape: dict(mask=chosen(device, (shape[-2], 1))),
    "additive mask": lambda device, shape: dict(mask=make(shape[-3:], F32, 7, device)),
    "bf16 mask by columns": lambda device, shape: dict(
        mask=make((shape[-1], shape[-2]), BF16, 7, device).t()
    ),
    "additive mask of -inf": lambda device, shape: dict(
        mask=torch.zeros(shape[-2:], device=device).masked_fill(
            ~chosen(device, shape[-2:]), -torch.inf
        )
    ),
    "all": lambda device, shape: dict(
        scale=0.5,
        softcap=4.0,
        alibi_slopes=slopes(device, shape),
        window=(60, -1),
        causal=True,
        mask=chosen(device, shape),
    ),
}


def slopes(device: str, shape: tuple[int, ...]) -> Tensor:
    return torch.linspace(0.5, 0.01, shape[-3], device=device)


def chosen(device: str, shape: tuple[int, ...]) -> Tensor:
    """A boolean mask, with rows of which nothing takes part."""
    mask = make(shape, F32, 5) > -0.5
    mask.view(-1, shape[-1])[::5] = False
    return mask.to(device)


def errors_of(
    x: Tensor, out: Tensor, grad: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Bound what float32 does to the result and the gradient, all in float64.

    A score is made by a few roundings of its parts, the soft cap by more; the power of its distance
    d from the largest is off by 2 + 2 |d| units, and a sum of n terms adds n / 32 + 16 roundings.
    """
    n = x.shape[-1]
    parts = (x * options.get("scale", 1.0)).abs()
    if options.get("softcap", 0):
        parts = 4 * torch.full_like(parts, options["softcap"])
    if options.get("alibi_slopes") is not None:
        reach = n + x.shape[-2] + abs(options.get("offset") or 0)
        parts = parts + options["alibi_slopes"].cpu().double()[..., None, None] * reach
    mask = options.get("mask")
    if mask is not None and mask.is_floating_point():
        parts = parts + mask.cpu().double().nan_to_num(neginf=0).abs()
    most = parts.amax(-1, keepdim=True) if n else parts
    relative = ROUNDING * (4 * (parts + most) + 2 * (parts + most) + 8 + n / 32 + 16)
    error = relative * out + 2**-126
    product = (out * grad).abs()
    dot = product.sum(-1, keepdim=True)
    size = product + out * dot
    # The output is used as it was rounded, which the caller's `out` is; the dot product adds up.
    error_x = abs(options.get("scale", 1.0)) * size * ROUNDING * (n / 32 + 40)
    if options.get("softcap", 0):
        error_x = error_x * 2 + size * 1e-6
    return error, error_x + 2**-126


def assert_right(x: Tensor, **options: Any) -> None:
    """Compare result and gradient with the reference, element by element."""
    grad = make(tuple(x.shape), x.dtype, 90, str(x.device))
    leaf = x.detach().clone().requires_grad_()
    got = softmax(leaf, **options)
    (grad_x,) = torch.autograd.grad(got, leaf, grad)
    on_host = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in options.items()}
    wide = x.detach().cpu().double().requires_grad_()
    want = softmax_ref(wide, **on_host)
    out = got.detach().cpu().double()
    error, error_x = errors_of(wide.detach(), want.detach(), grad.cpu().double(), options)
    assert got.shape == x.shape and got.dtype == x.dtype and got.is_contiguous()
    assert_within("out", got.detach().cpu(), want.detach(), error)
    # Of the output as it was rounded.
    g = grad.cpu().double()
    want_x = out * (g - (out * g).sum(-1, keepdim=True)) * options.get("scale", 1.0)
    if cap := options.get("softcap", 0):
        want_x = want_x * (1 - (wide.detach() * options.get("scale", 1.0) / cap).tanh() ** 2)
    assert_within("grad x", grad_x.cpu(), want_x, error_x)
    # And near that of the reference: all there is between them is that the output was rounded.
    (right,) = torch.autograd.grad(want, wide, g)
    stored, p = torch.finfo(x.dtype), want.detach()
    off = stored.eps * p.clamp(min=stored.smallest_normal) + error
    off_x = off * (g.abs() + (p * g.abs()).sum(-1, True)) + p * (off * g.abs()).sum(-1, True)
    off_x = 2 * abs(options.get("scale", 1.0)) * off_x + error_x
    assert_within("gradient", grad_x.cpu(), right, off_x)


def of_both(x: Tensor, grad: Tensor, **options: Any) -> list[Tensor]:
    """Return the result, and the gradient of x."""
    leaf = x.detach().requires_grad_()
    out = softmax(leaf, **options)
    return [out.detach(), *torch.autograd.grad(out, leaf, grad)]


def digest(device: str = "cpu") -> str:
    """Return a digest of the bits of results and gradients, of every dtype, option and length."""
    found = hashlib.sha256()
    for dtype in DTYPES:
        for n in (1, 31, 129, 1000, 20_000):
            shape = (2, 3, 11, n)
            x, grad = make(shape, dtype, 0, device), make(shape, dtype, 1, device)
            for name in OPTIONS if n < 2000 else ("plain", "all"):
                for tensor in of_both(x, grad, **OPTIONS[name](device, shape)):
                    found.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
