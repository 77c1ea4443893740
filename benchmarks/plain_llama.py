"""A Llama in plain torch as fast as torch makes it: the rival of the engine, one static cache.

One step is compiled whole, and on CUDA replayed as a graph; projections that read the same are one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Step = Callable[[Tensor, Tensor], Tensor]


class PlainLlama:
    """Continues prompts of one length, greedily.

    Args:
        tensors: of transformers' model.
        config: likewise.
        tokens: of a prompt and what follows it.
        batch: prompts at a time.
        compiled: whether the step is compiled.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], config: Any, tokens: int, batch: int, compiled: bool
    ) -> None:
        self.heads, self.kv = config.num_attention_heads, config.num_key_value_heads
        self.eps = config.rms_norm_eps
        self.embedding = tensors["model.embed_tokens.weight"]
        self.head = tensors.get("lm_head.weight", self.embedding)
        self.norm = tensors["model.norm.weight"]
        self.layers = [
            _layer(tensors, f"model.layers.{i}.") for i in range(config.num_hidden_layers)
        ]
        self.width = len(self.layers[0]["qkv"]) // (self.heads + 2 * self.kv)
        device, dtype = self.embedding.device, self.embedding.dtype
        shape = (len(self.layers), 2, batch, self.kv, tokens, self.width)
        self.cache = torch.zeros(shape, dtype=dtype, device=device)
        self.tokens = tokens
        at = torch.arange(tokens, device=device)
        base = 1e4 ** (-torch.arange(0, self.width, 2, device=device) / self.width)
        angles = (at[:, None] * base).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.token = torch.zeros((batch, 1), dtype=torch.int64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        step = torch.compile(self._step, fullgraph=True, dynamic=False) if compiled else self._step
        self.advance = self._captured(step) if compiled and device.type == "cuda" else step

    @torch.inference_mode()
    def generate(self, prompts: Tensor, count: int) -> Tensor:
        """Return so many tokens after each prompt, (batch, count)."""
        start = prompts.shape[1]
        at = torch.arange(start, device=prompts.device)
        self.token.copy_(self._step(prompts, at))
        found = [self.token.clone()]
        for i in range(start, start + count - 1):
            self.at.fill_(i)
            self.token.copy_(self.advance(self.token, self.at))
            found.append(self.token.clone())
        return torch.cat(found, 1)

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

    def _step(self, tokens: Tensor, at: Tensor) -> Tensor:
        """Return the likeliest next token of each row, (batch, 1)."""
        x = F.embedding(tokens, self.embedding)
        batch, n, _ = x.shape
        cos, sin = self.cos[at], self.sin[at]
        mask = torch.arange(self.tokens, device=at.device) <= at[:, None]
        for i, layer in enumerate(self.layers):
            qkv = F.linear(self._normed(x, layer["input"]), layer["qkv"])
            qkv = qkv.view(batch, n, -1, self.width).transpose(1, 2)
            q, k, v = qkv.split((self.heads, self.kv, self.kv), 1)
            q, k = (_turned(each, cos, sin) for each in (q, k))
            keys, values = self.cache[i]
            keys.index_copy_(2, at, k)
            values.index_copy_(2, at, v)
            if (
                n == 1
            ):  # queries that share keys as if they were tokens, so that these are read once
                q = q.reshape(batch, self.kv, -1, self.width)
                mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
                mixed = mixed.reshape(batch, self.heads, 1, self.width)
            else:
                mixed = F.scaled_dot_product_attention(
                    q, keys, values, attn_mask=mask, enable_gqa=self.kv != self.heads
                )
            x = x + F.linear(mixed.transpose(1, 2).reshape(batch, n, -1), layer["out"])
            gate, up = F.linear(self._normed(x, layer["post"]), layer["up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        return F.linear(self._normed(x[:, -1:], self.norm), self.head).argmax(-1)

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
