"""Inputs of block_sparse_attention for the tests, its bounds, and a digest of its results."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from samples import BF16, DTYPES, F16, F32, make
from tolerance import assert_within
from torch import Tensor

from deepspeed_ext.ops import block_sparse_attention, block_sparse_attention_ref

ROUNDING = torch.finfo(F32).eps / 2
Shape = tuple[int, int, int, int]

# Every option, alone and together: functions of (batch, heads, tokens) and a device.
OPTIONS: dict[str, Callable[[int, int, int, str], dict[str, Any]]] = {
    "plain": lambda b, h, s, device: {},
    "causal": lambda b, h, s, device: dict(causal=True, scale=-0.3),
    "keys kept": lambda b, h, s, device: dict(key_padding_mask=chosen((b, s), device)),
    "keys added": lambda b, h, s, device: dict(
        key_padding_mask=left_out(chosen((b, s), device)).to(BF16)
    ),
    "mask": lambda b, h, s, device: dict(attn_mask=chosen((s, s), device)),
    "mask by columns": lambda b, h, s, device: dict(attn_mask=chosen((b, 1, s, s), device).mT),
    "mask added": lambda b, h, s, device: dict(
        attn_mask=left_out(chosen((h, s, s), device)) + make((h, s, s), F32, 11, device),
    ),
    "one row for all": lambda b, h, s, device: dict(attn_mask=chosen((b, 1, 1, s), device)),
    "one column for all": lambda b, h, s, device: dict(attn_mask=chosen((h, s, 1), device)),
    "rpe": lambda b, h, s, device: dict(rpe=make((h, s, s), F16, 12, device)),
    "all": lambda b, h, s, device: dict(
        causal=True,
        scale=0.2,
        key_padding_mask=chosen((b, s), device),
        attn_mask=left_out(chosen((s, s), device)).to(F16),
        rpe=make((b, h, s, s), F32, 13, device).mT,
    ),
}


def chosen(shape: tuple[int, ...], device: str) -> Tensor:
    """A boolean mask."""
    return (make(shape, F32, 5) > -0.7).to(device)


def left_out(kept: Tensor) -> Tensor:
    """The same as one that is added."""
    return torch.zeros(kept.shape, device=kept.device).masked_fill(~kept, -torch.inf)


def layout_of(heads: int, blocks: int, density: float = 0.4, seed: int = 3) -> Tensor:
    """A layout with random blocks."""
    drawn = torch.rand((heads, blocks, blocks), generator=torch.Generator().manual_seed(seed))
    return (drawn < density).long()


@dataclass
class Sparse:
    """One call.

    Args:
        shape: of q: (batch, heads, tokens, head_dim).
        kv_heads: of k and v.
        block: tokens in a block.
        layout: None for random blocks, another layout for each head.
        options: those of the op.
    """

    shape: Shape
    kv_heads: int
    block: int
    layout: Tensor | None = None
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (F32, F32, F32)
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the tensors."""
        batch, heads, tokens, width = self.shape
        if self.layout is None:
            self.layout = layout_of(heads, -(-tokens // self.block))
        self.layout = self.layout.to(self.device)
        of_kv = (batch, self.kv_heads, tokens, width)
        shapes = (self.shape, of_kv, of_kv)
        self.qkv = [
            make(shape, dtype, seed, self.device)
            for seed, (shape, dtype) in enumerate(zip(shapes, self.dtypes, strict=True))
        ]
        self.grad = make(self.shape, self.dtypes[0], 9, self.device)

    def run(self) -> list[Tensor]:
        """Return the result, and the gradients of q, k and v."""
        leaves = [t.detach().requires_grad_() for t in self.qkv]
        out = block_sparse_attention(*leaves, self.layout, self.block, **self.options)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.grad)]

    def on_host(self) -> dict[str, Any]:
        return {k: v.cpu() if isinstance(v, Tensor) else v for k, v in self.options.items()}

    def reference(self) -> list[Tensor]:
        """Return the same in float64."""
        leaves = [t.detach().cpu().double().requires_grad_() for t in self.qkv]
        layout = self.layout.cpu()
        out = block_sparse_attention_ref(*leaves, layout, self.block, **self.on_host())
        return [out.detach(), *torch.autograd.grad(out, leaves, self.grad.cpu().double())]

    def weights(self) -> Tensor:
        """Return what each token has of each other: the result of values that are ones of one."""
        batch, _, tokens, _ = self.shape
        q, k = (t.cpu().double() for t in self.qkv[:2])
        ones = torch.eye(tokens, dtype=torch.float64).expand(batch, self.kv_heads, -1, -1)
        options = {"scale": self.scale()} | self.on_host()
        return block_sparse_attention_ref(q, k, ones, self.layout.cpu(), self.block, **options)

    def scale(self) -> float:
        return float(self.options.get("scale") or self.shape[-1] ** -0.5)

    def errors(self) -> list[Tensor]:
        """Bound what float32 does to each of the results, and 16 bits to what is kept of them.

        A sum of n terms is off by n roundings of its absolute terms; a weight by twice what its
        score and the largest are off by. What a gradient of a score is made of counts by its size.
        """
        group = self.shape[1] // self.kv_heads
        q, k, v = (t.cpu().double() for t in self.qkv)
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        grad, weights = self.grad.cpu().double(), self.weights()
        tokens, width = self.shape[2:]
        size = (q.abs() @ k.abs().mT * abs(self.scale())).amax((-1, -2), keepdim=True)
        for name in ("rpe", "attn_mask", "key_padding_mask"):
            mask = self.on_host().get(name)
            if mask is not None and mask.is_floating_point():
                size = size + 4 * mask.double().nan_to_num(neginf=0).abs().max()
        off = ROUNDING * (2 * (width + 8) * size + tokens + 64)  # of a weight, relative
        out = weights @ v.abs() * off
        back = grad.abs() @ v.abs().mT  # of the gradients of weights
        kept = torch.finfo(self.dtypes[0]).eps * (grad.abs() * (weights @ v.abs())).sum(-1, True)
        most = (weights * back).sum(-1, True)
        score = weights * (off * 2 * (back + most) + ROUNDING * width * (back + most) + kept)
        whole = weights * (back + most)
        off_q = (score + ROUNDING * tokens * whole) @ k.abs() * abs(self.scale())
        off_k = (score + ROUNDING * tokens * whole).mT @ q.abs() * abs(self.scale())
        off_v = (weights * (off + ROUNDING * tokens)).mT @ grad.abs()
        rounding, least = self.rounding_of_weights()
        if rounding:
            of_weight, of_score = rounding * weights + least, rounding * whole + least
            out = out + of_weight @ v.abs()
            off_q = off_q + of_score @ k.abs() * abs(self.scale())
            off_k = off_k + of_score.mT @ q.abs() * abs(self.scale())
            off_v = off_v + of_weight.mT @ grad.abs()
        of_heads = (self.shape[0], self.kv_heads, group, tokens, width)
        off_k, off_v = (t.view(of_heads).sum(2) for t in (off_k, off_v))
        return [each + 1e-30 for each in (out, off_q, off_k, off_v)]

    def rounding_of_weights(self) -> tuple[float, float]:
        """Return how far tensor cores round weights and gradients of scores, and the least step."""
        dtype = self.dtypes[0]
        if self.device != "cuda" or dtype == F32 or len({*self.dtypes}) > 1:
            return 0, 0
        info = torch.finfo(dtype)
        return info.eps / 2, info.smallest_normal * info.eps

    def assert_right(self) -> None:
        """Compare result and gradients with the reference, element by element."""
        named = ("out", "grad q", "grad k", "grad v")
        for name, got, want, error in zip(
            named, self.run(), self.reference(), self.errors(), strict=True
        ):
            assert got.is_contiguous() and got.isfinite().all()
            assert_within(name, got.cpu(), want, error)


def bits_of(tensors: list[Tensor]) -> bytes:
    return b"".join(t.cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)


def digest(device: str = "cpu") -> str:
    """Return a digest of the bits of results and gradients."""
    found = hashlib.sha256()
    for dtype in DTYPES:
        for block, tokens, width in ((16, 70, 24), (64, 150, 33), (128, 260, 64)):
            for name in ("plain", "all"):
                options = OPTIONS[name](2, 4, tokens, device)
                call = Sparse((2, 4, tokens, width), 2, block, None, (dtype,) * 3, device, options)
                found.update(bits_of(call.run()))
    return found.hexdigest()
