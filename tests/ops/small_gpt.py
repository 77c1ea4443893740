"""A small GPT for the tests, of our ops or of torch's, which have the same parameters."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.ops import (
    bias_activation,
    cross_entropy,
    rms_norm,
    rope,
    rope_frequencies,
    softmax,
    swiglu,
)

HEADS, HEAD_WIDTH = 4, 16
WIDTH = HEADS * HEAD_WIDTH


class Ours:
    """What is between the matrices, of our ops."""

    @staticmethod
    def norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm(x, weight, residual=residual)

    @staticmethod
    def turn(q: Tensor, k: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(q.shape[1], device=q.device)
        return rope(q, k, positions, frequencies)

    @staticmethod
    def attention(scores: Tensor, scale: float) -> Tensor:
        return softmax(scores, scale=scale, causal=True)

    gate = staticmethod(swiglu)

    @staticmethod
    def activate(x: Tensor, bias: Tensor) -> Tensor:
        return bias_activation(x, bias)

    loss = staticmethod(cross_entropy)


class Torchs:
    """The same of torch's ops, as one writes it."""

    @staticmethod
    def norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, weight.shape, weight, 1e-6), total

    @staticmethod
    def turn(q: Tensor, k: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(q.shape[1], device=q.device)
        angles = (positions[:, None] * frequencies).float()[:, None]

        def turned(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        return turned(q), turned(k)

    @staticmethod
    def attention(scores: Tensor, scale: float) -> Tensor:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return (scores * scale).masked_fill(later, -math.inf).softmax(-1)

    @staticmethod
    def gate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    @staticmethod
    def activate(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias)

    loss = staticmethod(F.cross_entropy)


Ops = type[Ours] | type[Torchs]


class Block(nn.Module):
    """Takes what the last one adds, and the sum so far, which the norms add that to.

    Args:
        gated: whether swiglu is between the matrices of the second half, and scores of attention
            lie in memory; else gelu with a bias, and torch's attention.
    """

    def __init__(self, ops: Ops, gated: bool) -> None:
        super().__init__()
        self.ops = ops
        self.norms = nn.ParameterList(torch.ones(WIDTH) for _ in range(2))
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, (8 if gated else 4) * WIDTH, bias=False)
        self.bias = None if gated else nn.Parameter(torch.zeros(4 * WIDTH))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, total: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        x, total = self.ops.norm(x, total, self.norms[0])
        x, total = self.ops.norm(self.attend(x, frequencies), total, self.norms[1])
        x = self.up(x)
        x = self.ops.gate(x) if self.bias is None else self.ops.activate(x, self.bias)
        return self.down(x), total

    def attend(self, x: Tensor, frequencies: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.query_key_value(x).view(batch, length, -1, HEAD_WIDTH).split(HEADS, -2)
        q, k = self.ops.turn(q, k, frequencies)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        if self.bias is None:
            found = self.ops.attention(q @ k.transpose(-1, -2), HEAD_WIDTH**-0.5) @ v
        else:
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(batch, length, width))


class SmallGpt(nn.Module):
    """Gives the loss of each next token; one block of either kind."""

    frequencies: Tensor

    def __init__(self, ops: Ops, vocabulary: int, seed: int) -> None:
        super().__init__()
        self.ops = ops
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block(ops, gated) for gated in (True, False))
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.register_buffer("frequencies", rope_frequencies(HEAD_WIDTH), persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.05, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        total = self.embedding(tokens[:, :-1])
        x = torch.zeros_like(total)
        for block in self.blocks:
            x, total = block(x, total, self.frequencies)
        x, _ = self.ops.norm(x, total, self.norm)
        return self.ops.loss(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())
