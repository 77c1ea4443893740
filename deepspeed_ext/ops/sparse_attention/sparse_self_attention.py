"""SparseSelfAttention: attention by a pattern of blocks, as a module."""

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_ext.ops._kinds import check_flags, check_kinds, told_dtype
from deepspeed_ext.ops.attention.block_sparse_attention import block_sparse_attention
from deepspeed_ext.ops.sparse_attention.sparsity_config import FixedSparsityConfig, SparsityConfig

_MODES = ("add", "mul")
_MOST = 2048  # tokens, as in DeepSpeed


class SparseSelfAttention(nn.Module):
    """Let the tokens of a sequence attend to each other where a pattern of blocks says so.

    The buffer `master_layout` is the layout of the longest sequence, which a shorter one has the
    beginning of. It is in the state dict, as in DeepSpeed's, so that random blocks stay the same.

    A unidirectional pattern names whole blocks, those on the diagonal too: what keeps a token from
    those behind it is causal=True, or an attn_mask.

    From that of DeepSpeed 0.9.0 differs: any dtype of the op `block_sparse_attention`, on the CPU
    and on CUDA; sequences of any length up to max_seq_length; heads of k and v may be fewer; masks
    and rpe of any shape that can be broadcast; a mask or rpe that requires a gradient is refused,
    where theirs has none and says nothing; a token that sees nothing gets zeros, not NaN; no
    broadcast of the layout from process 0, which all processes draw alike; nothing is shared
    between objects.

    Args:
        sparsity_config: the pattern; None for FixedSparsityConfig(num_heads=4).
        key_padding_mask_mode: what a key_padding_mask does that is not bool: "add", a floating one
            is added to scores, and one of whole numbers is refused; "mul", keys where it is 0 are
            left out.
        attn_mask_mode: likewise.
        max_seq_length: tokens of the longest sequence, a multiple of the pattern's block.
        causal: no token sees one behind it, whatever the pattern is.

    Raises:
        TypeError: sparsity_config is no SparsityConfig and has no make_layout, or returns no
            tensor.
        ValueError: a mode is neither of the two, max_seq_length is no such number, or a pattern of
            your own returns a layout of another shape or dtype.
    """

    master_layout: Tensor

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = _MOST,
        *,
        causal: bool = False,
    ) -> None:
        super().__init__()
        if sparsity_config is None:
            sparsity_config = FixedSparsityConfig(num_heads=4)
        if isinstance(sparsity_config, type) or not hasattr(sparsity_config, "make_layout"):
            raise TypeError(
                f"SparseSelfAttention: sparsity_config is a {type(sparsity_config).__name__},"
                " expected a SparsityConfig"
            )
        check_flags("SparseSelfAttention", causal=causal)
        for name, mode in (
            ("key_padding_mask_mode", key_padding_mask_mode),
            ("attn_mask_mode", attn_mask_mode),
        ):
            if mode not in _MODES:
                raise ValueError(
                    f"SparseSelfAttention: {name} is {mode!r}, expected 'add' or 'mul'"
                )
        self.sparsity_config = sparsity_config
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        self.causal = bool(causal)
        layout = sparsity_config.make_layout(max_seq_length)
        _check_layout(layout, sparsity_config, max_seq_length)
        self.register_buffer("master_layout", layout)

    def get_layout(self, L: int) -> Tensor:
        """Return the layout of a sequence of L tokens, a part of master_layout, where that is.

        Raises:
            ValueError: L is more than max_seq_length.
        """
        blocks = -(-L // self.sparsity_config.block)
        if blocks > self.master_layout.shape[-1]:
            most = self.master_layout.shape[-1] * self.sparsity_config.block
            raise ValueError(
                f"SparseSelfAttention: query has {L} tokens, expected at most max_seq_length,"
                f" {most}"
            )
        return self.master_layout[:, :blocks, :blocks]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: (batch, heads, tokens, head_dim), with as many heads as the pattern.
            key: of as many tokens; also (batch, heads, head_dim, tokens), if its third size is not
                the number of tokens.
            value: of as many tokens.
            rpe: None, or biases, a shape that can be broadcast to (batch, heads, tokens, tokens).
            key_padding_mask: None, or (batch, tokens), or with dimensions of 1 between these, as
                models have it; of a bool mask what is True is kept, in both modes.
            attn_mask: None, or (tokens, tokens), or what can be broadcast as rpe; likewise.

        Returns:
            The shape and dtype of query.

        Raises:
            ValueError: key or value are of another length than query, query is longer than
                max_seq_length, or what the op refuses.
        """
        check_kinds("SparseSelfAttention", query=(query, Tensor), key=(key, Tensor))
        check_kinds("SparseSelfAttention", value=(value, Tensor))
        if query.dim() == key.dim() == 4 and key.shape[2] != query.shape[2]:
            key = key.mT if key.shape[3] == query.shape[2] else key
        for name, other in (("key", key), ("value", value)):
            if query.dim() != 4 or other.dim() != 4 or other.shape[2:] != query.shape[2:]:
                raise ValueError(
                    f"SparseSelfAttention: {name} has shape {list(other.shape)}, expected (batch,"
                    f" heads, tokens, head_dim) as query, {list(query.shape)}: attention to other"
                    " sequences has no layout"
                )
        if key_padding_mask is not None:
            while key_padding_mask.dim() > 2 and key_padding_mask.shape[1] == 1:
                key_padding_mask = key_padding_mask.squeeze(1)
        out: Tensor = block_sparse_attention(
            query,
            key,
            value,
            self.get_layout(query.shape[2]).to(query.device),  # of a module that was not moved
            self.sparsity_config.block,
            causal=self.causal,
            key_padding_mask=_as_op_takes(key_padding_mask, self.key_padding_mask_mode),
            attn_mask=_as_op_takes(attn_mask, self.attn_mask_mode),
            rpe=_as_op_takes(rpe, "add"),
        )
        return out

    def extra_repr(self) -> str:
        """Say which pattern it is."""
        return f"{type(self.sparsity_config).__name__}, block={self.sparsity_config.block}"


def _check_layout(layout: Any, pattern: SparsityConfig, tokens: int) -> None:
    """Refuse what a pattern of one's own returns, if it is no layout of so many tokens."""
    check_kinds("SparseSelfAttention", layout=(layout, Tensor))
    blocks = tokens // pattern.block
    shapes = [(heads, blocks, blocks) for heads in (pattern.num_heads, 1)]
    if tuple(layout.shape) not in shapes:
        raise ValueError(
            f"SparseSelfAttention: layout has shape {list(layout.shape)}, expected"
            f" {list(shapes[0])}, or 1 in place of the heads"
        )
    if layout.is_floating_point():
        raise ValueError(
            f"SparseSelfAttention: layout is {told_dtype(layout)}, expected bool, uint8, int32 or"
            " int64"
        )


def _as_op_takes(mask: Tensor | None, mode: str) -> Any:
    """Return a mask as bool for what is kept, or as what is added."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    if mode == "mul":
        _refuse_lost_gradient(mask)
        return mask != 0
    return mask.float() if mask.dtype == torch.float64 else mask


def _refuse_lost_gradient(mask: Tensor) -> None:
    if mask.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "SparseSelfAttention: a mask requires a gradient, expected none, as what is kept has no"
            " gradient; detach it"
        )
