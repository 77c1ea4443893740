"""Attention of older libraries by its names and arguments; see ``older``."""

import math
from collections.abc import Sequence
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_ext import ops


def apply_rotary_pos_emb(
    mixed_query: Tensor,
    key_layer: Tensor,
    rotary_dim: int,
    offset: int,
    num_heads: int,
    rotate_half: bool,
    rotate_every_two: bool,
) -> list[Tensor]:
    """Return queries and keys, each head's first rotary_dim elements turned: ``ops.rope``.

    Args:
        mixed_query: (batch, tokens, heads x width).
        key_layer: of that shape.
        rotary_dim: even; a base of 10000.
        offset: the position of the first token.
        num_heads: heads.
        rotate_half: pairs are of an element and the one half of rotary_dim further on.
        rotate_every_two: pairs are neighbours. Without both nothing is turned.
    """
    if not (rotate_half or rotate_every_two):
        return [mixed_query, key_layer]
    q, k = (t.reshape(*t.shape[:2], num_heads, -1) for t in (mixed_query, key_layer))
    positions = torch.arange(offset, offset + q.shape[1], device=q.device)
    frequencies = ops.rope_frequencies(rotary_dim, base=10000.0).to(q.device)
    turned = ops.rope(q, k, positions, frequencies, interleaved=rotate_every_two)
    return [t.flatten(2) for t in turned]


def softmax_context(
    query_key_value: Tensor,
    attn_mask: Tensor,
    rotary_dim: int,
    rotate_half: bool,
    rotate_every_two: bool,
    heads: int,
    norm_factor: float,
    triangular_masking: bool,
    local_attention: bool,
    window_size: int,
    no_masking: bool,
    layer_id: int = 0,
    num_layers: int = 1,
    alibi: Tensor | None = None,
    *,
    past: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Return attention of new tokens to those before and themselves, and all keys and values.

    DeepSpeed's keeps keys and values of layers in the process; here the caller does:

        out, *past = softmax_context(prompt, ...)
        out, *past = softmax_context(token, ..., past=past)

    Args:
        query_key_value: (batch, tokens, 3 x heads x width): q, k and v.
        attn_mask: added to scores, as (batch, 1, tokens or 1, all tokens); of one element: none.
        rotary_dim, rotate_half, rotate_every_two: see ``apply_rotary_pos_emb``; below 1: none.
        heads: heads.
        norm_factor: scores are multiplied by its square.
        triangular_masking: nobody sees a token after itself.
        local_attention: nobody sees more than the last window_size tokens.
        window_size: see there.
        no_masking: attn_mask is left out.
        layer_id, num_layers: taken for code that gives them.
        alibi: added to scores, (batch x heads or heads, 1, all tokens); of one element: none.
        past: what the last call returned behind the first, of this layer. None: these are the first
            tokens; if there is one only, past=() says so.

    Returns:
        (batch, tokens, heads x width), and keys and values, (batch, heads, all tokens, width).

    Raises:
        ValueError: there is one token and no past, which DeepSpeed's would have kept.
    """
    batch, tokens, _ = query_key_value.shape
    if past is None and tokens == 1:
        raise ValueError(
            "softmax_context: past is None beside one token, expected the keys and values that the"
            " last call returned, or () if there are none"
        )
    q, k, v = query_key_value.view(batch, tokens, 3, -1).unbind(2)
    seen = past[0].shape[2] if past else 0
    if rotary_dim > 0:
        turn = rotary_dim, seen, heads, rotate_half, rotate_every_two
        q, k = apply_rotary_pos_emb(q, k, *turn)
    q, k, v = (t.view(batch, tokens, heads, -1).transpose(1, 2) for t in (q, k, v))
    if past:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    scores = (q.float() @ k.float().mT) * norm_factor**2
    if alibi is not None and alibi.numel() > 1:
        scores = scores + alibi.float().view(-1, heads, 1, alibi.shape[-1])
    mask = None if no_masking or attn_mask.numel() <= 1 else attn_mask
    window = (window_size - 1, -1) if local_attention else (-1, -1)
    chances = ops.softmax(scores, mask, causal=triangular_masking, window=window)
    out = chances.to(v.dtype) @ v
    return [out.transpose(1, 2).flatten(2), k, v]


def padded_width(width: int) -> int:
    """Return the width that heads are filled up to."""
    return next((each for each in (32, 64, 128) if width <= each), width)


def _filled(tensor: Tensor, tokens: int, name: str) -> Tensor:
    """Return (batch, heads, tokens, width) with zeros behind tokens and behind each head."""
    if tensor.shape[2] > tokens:
        raise ValueError(f"{name}: key has {tensor.shape[2]} tokens, expected {tokens} at the most")
    more = padded_width(tensor.shape[3]) - tensor.shape[3]
    return F.pad(tensor, (0, more, 0, tokens - tensor.shape[2]))


def add_padding(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return (batch, heads, tokens, width) with a width of 32, 64 or 128, keys and values of 128
    tokens; what is new is 0."""
    made = [_filled(query, query.shape[2], "add_padding")]
    return [*made, *(_filled(t, 128, "add_padding") for t in (key, value))]


def pad_transform(
    query: Tensor, key: Tensor, value: Tensor, heads: int, add_padding: bool
) -> list[Tensor]:
    """Return (batch, tokens, heads x width) as (batch, heads, tokens, width); padded as by
    ``add_padding`` if that is asked for."""
    found = [
        t.view(*t.shape[:2], heads, -1).transpose(1, 2).contiguous() for t in (query, key, value)
    ]
    if not add_padding:
        return found
    lengths = (query.shape[1], 128, 128)
    return [_filled(t, n, "pad_transform") for t, n in zip(found, lengths, strict=True)]


class AttnMaskType(Enum):
    """What ColoAttention leaves out."""

    padding = 1
    causal = 2
    paddedcausal = 3


class ColoAttention(nn.Module):
    """Attention between heads, with padding that costs nothing on CUDA.

    There, in 16 bits, tokens that are padding are taken out before torch's attention of variable
    length, and results put back among zeros; elsewhere, with a bias, dropout or a causal mask, a
    mask for torch's scaled_dot_product_attention does it.

    Args:
        embed_dim: heads x width.
        num_heads: heads.
        dropout: chance that a probability is 0, in training.
        scale: of scores; None: 1 / sqrt(width).

    Raises:
        ValueError: embed_dim is no multiple of num_heads.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, scale: float | None = None
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(
                f"ColoAttention: embed_dim is {embed_dim}, expected a multiple of {num_heads}, the"
                " num_heads"
            )
        self.scale = 1 / math.sqrt(embed_dim // num_heads) if scale is None else scale
        self.dropout = dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return the values that queries attend to, (batch, tokens, heads x width).

        Args:
            query: (batch, tokens, heads, width).
            key, value: (batch, keys, heads, width).
            attn_mask: (batch, keys), not 0 where a token is none of padding; of queries too, if
                there are as many: their results are 0 where they are padding.
            attn_mask_type: what is left out; None: nothing.
            bias: added to scores, of a shape that can be broadcast to (batch, heads, tokens, keys).

        Raises:
            ValueError: padding is to be left out and there is no attn_mask.
        """
        kind = attn_mask_type
        is_padded = kind in (AttnMaskType.padding, AttnMaskType.paddedcausal)
        is_causal = kind in (AttnMaskType.causal, AttnMaskType.paddedcausal)
        if is_padded and attn_mask is None:
            raise ValueError("ColoAttention: attn_mask is None, expected one beside that mask type")
        dropout = self.dropout if self.training else 0.0
        keys = attn_mask.bool() if is_padded and attn_mask is not None else None
        is_plain = not (is_causal or dropout or bias is not None)
        has_kernel = query.is_cuda and query.dtype.itemsize == 2
        if keys is not None and is_plain and has_kernel and query.shape[1] == key.shape[1]:
            return self._of_tokens(query, key, value, keys)
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        mask = self._mask(query, key, keys, is_causal, bias)
        out = F.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=is_causal and mask is None, scale=self.scale
        )
        out = out.transpose(1, 2)
        if keys is not None and query.shape[1] == key.shape[1]:
            out = out.where(keys[..., None, None], 0)
        return out.flatten(2)

    def _mask(
        self, query: Tensor, key: Tensor, keys: Tensor | None, is_causal: bool, bias: Tensor | None
    ) -> Tensor | None:
        """Return what is added to scores, or says which are there; None where torch needs none."""
        if keys is None and bias is None:
            return None
        kept = query.new_ones(1, 1, query.shape[1], key.shape[1], dtype=torch.bool)
        kept = kept.tril() if is_causal else kept
        kept = kept if keys is None else kept & keys[:, None, None]
        return kept if bias is None else bias.to(query.dtype).masked_fill(~kept, -math.inf)

    def _of_tokens(self, query: Tensor, key: Tensor, value: Tensor, kept: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        lengths = kept.sum(-1, dtype=torch.int32)
        ends = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        longest, rows = query.shape[1], kept.flatten().nonzero()[:, 0]
        scaled = query * (self.scale * query.shape[-1] ** 0.5)  # older torch takes no scale
        q, k, v = (t.flatten(0, 1)[rows] for t in (scaled, key, value))
        found = varlen_attn(q, k, v, ends, ends, longest, longest)
        assert isinstance(found, Tensor)
        out = query.new_zeros(kept.numel(), *query.shape[2:]).index_copy(0, rows, found)
        return out.view(query.shape).flatten(2)
