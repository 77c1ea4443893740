"""A decoder: from tokens that a cache has room for to the logits of the next ones."""

import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed_ext.inference.architecture import Architecture
from deepspeed_ext.inference.kv_cache import KVCache
from deepspeed_ext.inference.weights import Layer, NormWeights, Weights
from deepspeed_ext.ops import (
    PagedKV,
    decode_attention,
    layer_norm,
    prefill_attention,
    rms_norm,
    rope_append_,
)


class Decoder:
    """All layers of a model, over a cache.

    It holds no state but the weights: what differs from request to request is in the cache.

    Args:
        architecture: of the model.
        weights: of the model.
    """

    def __init__(self, architecture: Architecture, weights: Weights) -> None:
        self.of, self.weights = architecture, weights
        device = weights.embedding.device
        frequencies: dict[bytes, Tensor] = {}  # on the device, once each
        self._rotations: list[tuple[Tensor | None, float]] = []
        for rotation in architecture.rotations:
            if rotation is None:
                self._rotations.append((None, 1.0))
                continue
            key = rotation.frequencies.numpy().tobytes()
            on_device = frequencies.setdefault(key, rotation.frequencies.to(device))
            self._rotations.append((on_device, rotation.scale))

    def hidden(
        self, tokens: Tensor, cache: KVCache, slots: Tensor, counts: Tensor | None = None
    ) -> Tensor:
        """Return the last hidden states of new tokens, whose keys and values go to the cache.

        Args:
            tokens: (batch, n), int64: the last n of their slots.
            cache: has room for them: see `KVCache.reserve`.
            slots: (batch,), int32, -1 for none.
            counts: (batch,), int32: how many of them there are; None: all.

        Returns:
            (batch, n, hidden), before the last norm.
        """
        x = F.embedding(tokens, self.weights.embedding)
        if self.of.embedding_scale != 1:
            x = x * torch.tensor(self.of.embedding_scale, dtype=x.dtype, device=x.device)
        for i, layer in enumerate(self.weights.layers):
            x = self._block(i, layer, x, cache.layer(i), slots, counts)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits that belong to last hidden states.

        Args:
            hidden: (..., hidden).

        Returns:
            (..., vocabulary).
        """
        assert self.weights.head is not None
        out = self.weights.head(self._normed(hidden, self.weights.final_norm))
        softcap = self.of.logit_softcap
        return softcap * torch.tanh(out / softcap) if softcap > 0 else out

    def _block(
        self, i: int, layer: Layer, x: Tensor, kv: PagedKV, slots: Tensor, counts: Tensor | None
    ) -> Tensor:
        h = self._normed(x, layer.attention_norm)
        mixed = self._attention(i, layer, h, kv, slots, counts)
        x = layer.out(mixed, residual=x)
        h = self._normed(x, layer.mlp_norm)
        wide = layer.up(h, activation=self.of.activation, gated=self.of.gated)
        return layer.down(wide, residual=x)

    def _attention(
        self, i: int, layer: Layer, h: Tensor, kv: PagedKV, slots: Tensor, counts: Tensor | None
    ) -> Tensor:
        of = self.of
        batch, n, _ = h.shape
        qkv = layer.qkv(h).view(batch, n, of.heads + 2 * of.kv_heads, of.head_dim)
        q, k, v = qkv.split((of.heads, of.kv_heads, of.kv_heads), 2)
        frequencies, scale = self._rotations[i]
        rope_append_(
            q,
            k,
            v,
            kv,
            frequencies,
            slots=slots,
            counts=counts,
            q_weight=layer.q_norm,
            k_weight=layer.k_norm,
            eps=of.eps,
            weight_offset=of.norm_offset,
            interleaved=of.interleaved,
            scale=scale,
        )
        attend = decode_attention if n == 1 else prefill_attention
        mixed = attend(
            q,
            kv,
            slots=slots,
            counts=counts,
            scale=of.attention_scale,
            window=of.windows[i],
            softcap=of.softcap,
        )
        assert isinstance(mixed, Tensor)
        return mixed.view(batch, n, of.heads * of.head_dim)

    def _normed(self, x: Tensor, norm: NormWeights | None) -> Tensor:
        if norm is None:
            return x
        of = self.of
        if of.norm == "rms":
            return rms_norm(x, norm.weight, eps=of.eps, weight_offset=of.norm_offset)
        return layer_norm(x, norm.weight, norm.bias, eps=of.eps, weight_offset=of.norm_offset)
