"""BertSparseSelfAttention: the self-attention of a BERT, by a pattern of blocks."""

from typing import Any

from torch import Tensor, nn

from deepspeed_ext.ops.sparse_attention.sparse_self_attention import SparseSelfAttention
from deepspeed_ext.ops.sparse_attention.sparsity_config import FixedSparsityConfig, SparsityConfig


class BertSparseSelfAttention(nn.Module):
    """Make queries, keys and values of hidden states, and let them attend.

    Args:
        config: of the model, with hidden_size and num_attention_heads.
        sparsity_config: the pattern; None for FixedSparsityConfig with the heads of config. Theirs
            has 4 heads then, whatever the model has.
        max_seq_length: tokens of the longest sequence, see SparseSelfAttention. An argument of
            ours: theirs takes 2,048 tokens at most.

    Raises:
        ValueError: hidden_size is no multiple of num_attention_heads, or the pattern has another
            number of heads.
    """

    def __init__(
        self,
        config: Any,
        sparsity_config: SparsityConfig | None = None,
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_attention_heads
        if size % heads:
            raise ValueError(
                f"BertSparseSelfAttention: config.hidden_size is {size}, expected a multiple of"
                f" config.num_attention_heads, {heads}"
            )
        if sparsity_config is None:
            sparsity_config = FixedSparsityConfig(num_heads=heads)
        if sparsity_config.num_heads != heads:
            raise ValueError(
                f"BertSparseSelfAttention: sparsity_config.num_heads is"
                f" {sparsity_config.num_heads}, expected {heads}, as config.num_attention_heads"
            )
        self.num_attention_heads, self.attention_head_size = heads, size // heads
        self.all_head_size = size
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size)
        self.value = nn.Linear(size, size)
        self.sparse_self_attention = SparseSelfAttention(
            sparsity_config, max_seq_length=max_seq_length
        )

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """Return (batch, tokens, size) as (batch, heads, tokens, head_dim)."""
        heads = self.num_attention_heads, self.attention_head_size
        out: Tensor = x.unflatten(-1, heads).transpose(1, 2)
        return out

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the context of each token, (batch, tokens, size).

        Args:
            hidden_states: (batch, tokens, size).
            attention_mask: None, or (batch, 1, 1, tokens) or (batch, tokens), of keys: floating, is
                added to scores; or bool, what is True is kept.
        """
        return self.attend(hidden_states, key_padding_mask=attention_mask)

    def attend(self, hidden_states: Tensor, **masks: Tensor | None) -> Tensor:
        """Do the same with any masks of SparseSelfAttention."""
        parts = (self.query, self.key, self.value)
        context: Tensor = self.sparse_self_attention(
            *(self.transpose_for_scores(part(hidden_states)) for part in parts), **masks
        )
        return context.transpose(1, 2).flatten(2)
