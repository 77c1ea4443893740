"""A byte-level GPT in plain torch: predicts the next byte of a text from the bytes before it."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.moe import MoE

VOCABULARY = 256  # every value of a byte
HEAD_WIDTH = 32
_ROTATION_BASE = 1000.0  # the slowest pair turns once in 2 pi * 1000 bytes: more than any context


class Attention(nn.Module):
    """Causal self-attention; positions are told apart by rotating queries and keys.

    See: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.heads, HEAD_WIDTH)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, HEAD_WIDTH]
        mixed = F.scaled_dot_product_attention(
            _rotate(query, rotation), _rotate(key, rotation), value, is_causal=True
        )
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return result


class Expert(nn.Module):
    """The two-layer network of one expert."""

    expert_form = ("up", F.gelu, "down")

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.gelu(self.up(x)))
        return x


class Block(nn.Module):
    """One layer: attention between positions, then a two-layer network at each position.

    With experts there are many such networks, of which each position goes through a few; what the
    last forward has made of them is kept: l_aux, which is least when all have as much to do, and
    counts, (experts,), how many choices each is.
    """

    l_aux: Tensor
    counts: Tensor

    def __init__(self, width: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp_norm = nn.LayerNorm(width)
        if experts:  # with room for all: no position's experts depend on other positions
            self.moe = MoE(width, Expert(width), experts, k=top_k, drop_tokens=False)
        else:
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)
        self.has_experts = experts > 0

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        normed = self.mlp_norm(x)
        if self.has_experts:
            added, self.l_aux, self.counts = self.moe(normed)
        else:
            added = self.down(F.gelu(self.up(normed)))
        x = x + added
        return x


class GPT(nn.Module):
    """The whole model.

    Args:
        width: numbers per position, a multiple of HEAD_WIDTH.
        layers: how many blocks.
        context: the longest text it can look at, in bytes.
        experts: of each block; 0: it has a single network.
        top_k: how many of them a position goes through.
    """

    rotation: Tensor

    def __init__(
        self, width: int, layers: int, context: int, experts: int = 0, top_k: int = 0
    ) -> None:
        super().__init__()
        self.context, self.experts, self.top_k = context, experts, top_k
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, experts, top_k) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("rotation", _rotation(context), persistent=False)
        self._initialize(layers)

    @property
    def config(self) -> dict[str, Any]:
        """What the table in gpt_engine.py reads."""
        return {
            "model_type": "example_gpt_of_experts" if self.experts else "example_gpt",
            "num_hidden_layers": len(self.blocks),
            "hidden_size": self.embedding.embedding_dim,
            "num_attention_heads": self.embedding.embedding_dim // HEAD_WIDTH,
            "vocab_size": VOCABULARY,
            "rope_theta": _ROTATION_BASE,
            "sliding_window": self.context,
            "intermediate_size": 4 * self.embedding.embedding_dim,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": self.top_k > 1,  # as MoE does
        }

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next byte, (batch, length, VOCABULARY), for (batch, length)."""
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotation[:, : tokens.shape[1]])
        x = self.head(self.norm(x))
        return x

    def _initialize(self, layers: int) -> None:
        """Set the first weights as GPT-2 does: what adds to the residual sum starts smaller."""
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() >= 2:  # 3: of all experts, which are drawn apart
                adds_to_sum = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers if adds_to_sum else 1))


def _rotation(context: int) -> Tensor:
    """Return the cosines and sines, (2, context, HEAD_WIDTH / 2), of every position's rotation."""
    pairs = HEAD_WIDTH // 2
    speeds = _ROTATION_BASE ** (-torch.arange(pairs) / pairs)
    angles = torch.arange(context)[:, None] * speeds
    return torch.stack((angles.cos(), angles.sin()))


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the pairs (i, i + HEAD_WIDTH / 2) of the last dimension."""
    cosines, sines = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, first * sines + second * cosines), dim=-1)


@torch.no_grad()
def generate(model: GPT, prompt: bytes, length: int, temperature: float, seed: int) -> bytes:
    """Continue a text.

    Args:
        model: on any device; gives the probabilities.
        prompt: what the text starts with; not empty.
        length: how many bytes to add.
        temperature: below 1 the likely bytes become likelier.
        seed: of the draws.

    Returns:
        The prompt and what was added to it.
    """
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    text = bytearray(prompt)
    for _ in range(length):
        tokens = torch.tensor([list(text[-model.context :])], device=device)
        logits = model(tokens)[0, -1].float().cpu()
        probabilities = torch.softmax(logits / temperature, dim=0)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text)
