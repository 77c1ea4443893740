"""The model that offloaded steps are measured with, its data, and what times steps in a row."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

_HEAD_WIDTH = 128
_CHUNK = 2048  # tokens whose logits are there at a time


@dataclass(frozen=True)
class Size:
    """Of model and batch; as it stands 2.26 B parameters and 16,384 tokens.

    A block has 4 width^2 parameters for attention and 12 width^2 for a gated feed-forward layer of
    4 width: 20 blocks of width 2,560 are 2.097 B, embedding and head of 32,000 words 0.164 B.
    """

    layers: int = 20
    width: int = 2560
    vocabulary: int = 32_000
    batch: int = 8
    length: int = 2048


class Block(nn.Module):
    """Causal attention and a gated feed-forward layer; without positions, which take no time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // _HEAD_WIDTH)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        query, key, value = (
            project(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        added: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return added


class Decoder(nn.Module):
    """Returns the loss. Blocks and logits are computed again in backward, not kept."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        chunks = zip(
            self.norm(x).flatten(0, 1).split(_CHUNK), targets.flatten().split(_CHUNK), strict=True
        )
        sums = [checkpoint(self._loss, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.stack(sums).sum() / targets.numel()

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), targets, reduction="sum")


def make_model(size: Size, device: str, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """Return the model with the same random weights each time."""
    torch.manual_seed(0)
    with torch.device(device):
        return Decoder(size).to(dtype)


def make_data(size: Size, device: str) -> tuple[Tensor, Tensor]:
    """Return tokens and what follows them: noise, which takes as long as text."""
    shape = (2, size.batch, size.length)
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(size.vocabulary, shape, generator=generator).to(device)
    return tokens, targets


class Clock:
    """Notes moments of the device, without waiting for it, or of the host where that computes."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self._marks: list[torch.cuda.Event] = []
        self._moments: list[float] = []

    def mark(self) -> None:
        """Note the moment at which all that was asked for so far is done."""
        if not self._is_cuda:
            self._moments.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Return how long it was from each moment to the next."""
        if self._is_cuda:
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(self._marks)]
        return [end - begin for begin, end in pairwise(self._moments)]


@dataclass(frozen=True)
class Steps:
    """How long steps in a row took, each from its beginning to that of the next one."""

    whole: list[float]
    forward: list[float]


def time_steps(
    device: str,
    forward: Callable[[], Tensor],
    finish: Callable[[], object],
    steps: int,
    warm_up: int,
    accumulate: int,
    advance: Callable[[], object],
) -> Steps:
    """Take steps in a row, without a pause between them.

    A step that hides behind the next forward is to be seen in the next one's time, and no other.

    Args:
        device: "cpu" or "cuda".
        forward: returns the loss.
        finish: steps and drops the gradients.
        steps: how many are timed.
        warm_up: how many are taken before.
        accumulate: how many times forward and backward make one step.
        advance: is called for each.
    """
    clock = Clock(device)
    for _ in range(warm_up + steps):
        clock.mark()
        for i in range(accumulate):
            loss = forward()
            if i == 0:
                clock.mark()
            loss.backward()
        finish()
        advance()
    clock.mark()
    both = clock.seconds()[2 * warm_up :]
    forwards, rests = both[::2], both[1::2]
    return Steps([a + b for a, b in zip(forwards, rests, strict=True)], forwards)
