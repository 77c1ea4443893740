"""A Llama in plain torch as fast as torch makes it: the rival of the engine, one static cache.

One step is compiled whole, and on CUDA replayed as a graph; of prompts, a layer is compiled.
Projections that read the same are one.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Step = Callable[[Tensor, Tensor], Tensor]


class Parts(NamedTuple):
    """The weights; of a layer by name, those that read the same as one."""

    embedding: Tensor
    head: Tensor
    norm: Tensor
    layers: Sequence[Mapping[str, Tensor]]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], layers: int) -> "Parts":
        """Return those of transformers' model."""
        embedding = tensors["model.embed_tokens.weight"]
        return cls(
            embedding,
            tensors.get("lm_head.weight", embedding),
            tensors["model.norm.weight"],
            [_layer(tensors, f"model.layers.{i}.") for i in range(layers)],
        )


class PlainLlama:
    """Continues prompts, greedily: those of a batch are padded, and begin and end together.

    Padding is behind a prompt, where attention to what comes before does without a mask; steps pass
    over it by one.

    Args:
        parts: its weights.
        config: of transformers' model.
        tokens: of a prompt with its padding, and what follows it.
        batch: prompts at a time.
        compiled: whether the step is compiled.
    """

    def __init__(self, parts: Parts, config: Any, tokens: int, batch: int, compiled: bool) -> None:
        self.heads, self.kv = config.num_attention_heads, config.num_key_value_heads
        self.eps = config.rms_norm_eps
        self.embedding, self.head, self.norm, self.layers = parts
        self.width = len(self.layers[0]["qkv"]) // (self.heads + 2 * self.kv)
        device, dtype = self.embedding.device, self.embedding.dtype
        # Tensors of their own: of parts of one, compilers copy all of it wherever one is written.
        shape = (batch, self.kv, tokens, self.width)
        self.cache = [
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)] for _ in self.layers
        ]
        self.tokens = tokens
        at = torch.arange(tokens, device=device)
        base = 1e4 ** (-torch.arange(0, self.width, 2, device=device) / self.width)
        angles = (at[:, None] * base).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.token = torch.zeros((batch, 1), dtype=torch.int64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.lengths = torch.zeros((batch, 1), dtype=torch.int64, device=device)
        self.padded = torch.zeros(1, dtype=torch.int64, device=device)
        self.block = torch.compile(self._block, fullgraph=True) if compiled else self._block
        self._compiled = compiled

    @torch.inference_mode()
    def generate(self, prompts: Tensor, count: int, lengths: Tensor | None = None) -> Tensor:
        """Return so many tokens after each prompt, (batch, count).

        Args:
            prompts: (batch, padded), int64.
            count: of new tokens.
            lengths: (batch,), int64: of the prompts; None: there is no padding.
        """
        start = prompts.shape[1]
        self.padded.fill_(start)
        self.lengths.copy_(self.padded if lengths is None else lengths[:, None])
        self.token.copy_(self._first(prompts))
        found = [self.token.clone()]
        for i in range(start, start + count - 1):
            self.at.fill_(i)
            self.token.copy_(self.advance(self.token, self.at))
            found.append(self.token.clone())
        return torch.cat(found, 1)

    @cached_property
    def advance(self) -> Step:
        """One step, compiled and captured when it is first asked for."""
        if not self._compiled:
            return self._step
        step = torch.compile(self._step, fullgraph=True, dynamic=False)
        return self._captured(step) if self.token.is_cuda else step

    def _captured(self, step: Step) -> Step:
        """Return the same as a graph that is replayed."""
        with torch.inference_mode():
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                for _ in range(3):
                    step(self.token, self.at)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = step(self.token, self.at)

        def replay(token: Tensor, at: Tensor) -> Tensor:
            graph.replay()
            return out

        return replay

    def _first(self, prompts: Tensor) -> Tensor:
        """Take prompts in, and return the likeliest token after each, (batch, 1)."""
        x = F.embedding(prompts, self.embedding)
        at = torch.arange(prompts.shape[1], device=prompts.device)
        cos, sin = self.cos[at], self.sin[at]
        for layer, (keys, values) in zip(self.layers, self.cache, strict=True):
            x = self.block(x, layer, cos, sin, keys, values, at, None)
        last = (self.lengths - 1)[:, :, None].expand(-1, -1, x.shape[-1])
        return self._likeliest(x.gather(1, last))

    def _step(self, token: Tensor, at: Tensor) -> Tensor:
        """Return the likeliest token after one that goes to a place of the cache, (batch, 1)."""
        x = F.embedding(token, self.embedding)
        place = (at - self.padded + self.lengths)[:, None]
        cos, sin = self.cos[place], self.sin[place]
        others = torch.arange(self.tokens, device=at.device)
        mask = (others <= at) & ((others < self.lengths) | (others >= self.padded))
        for layer, (keys, values) in zip(self.layers, self.cache, strict=True):
            x = self._block(x, layer, cos, sin, keys, values, at, mask[:, None, None])
        return self._likeliest(x)

    def _block(
        self,
        x: Tensor,
        layer: Mapping[str, Tensor],
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        at: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """Return hidden states after a layer: of prompts, or with a mask of one token of each."""
        batch, n, _ = x.shape
        qkv = F.linear(self._normed(x, layer["input"]), layer["qkv"])
        qkv = qkv.view(batch, n, -1, self.width).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv, self.kv), 1)
        q, k = (_turned(each, cos, sin) for each in (q, k))
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        if mask is None:
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.kv != self.heads
            )
        else:  # queries that share keys as if they were tokens, so that these are read once
            q = q.reshape(batch, self.kv, -1, self.width)
            mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            mixed = mixed.reshape(batch, self.heads, 1, self.width)
        x = x + F.linear(mixed.transpose(1, 2).reshape(batch, n, -1), layer["out"])
        gate, up = F.linear(self._normed(x, layer["post"]), layer["up"]).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer["down"])

    def _likeliest(self, x: Tensor) -> Tensor:
        return F.linear(self._normed(x, self.norm), self.head).argmax(-1)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _layer(tensors: Mapping[str, Tensor], at: str) -> dict[str, Tensor]:
    of = {name.removeprefix(at): tensor for name, tensor in tensors.items() if name.startswith(at)}
    return {
        "qkv": torch.cat([of[f"self_attn.{name}_proj.weight"] for name in "qkv"]),
        "out": of["self_attn.o_proj.weight"],
        "up": torch.cat([of["mlp.gate_proj.weight"], of["mlp.up_proj.weight"]]),
        "down": of["mlp.down_proj.weight"],
        "input": of["input_layernorm.weight"],
        "post": of["post_attention_layernorm.weight"],
    }
