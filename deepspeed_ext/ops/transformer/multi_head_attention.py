"""A block of attention with norm and residual, as Colossal-AI has it."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_ext.ops._dropout import draw_seeds
from deepspeed_ext.ops._kinds import check_flags, check_kinds, check_reals, check_whole
from deepspeed_ext.ops.elementwise.bias_dropout_residual import bias_dropout_residual
from deepspeed_ext.ops.norm.layer_norm import layer_norm
from deepspeed_ext.ops.transformer.attention import dropout_attention, heads_of

_NAME = "MultiHeadAttention"


class MultiHeadAttention(nn.Module):
    """Attention of a sequence to itself, dropout, sum and norm.

    Args:
        hidden_size: the last dimension of what the block takes.
        nhead: heads, by which hidden_size is divisible.
        batch_size: not heeded, as any batch is taken.
        max_seq_len: likewise of lengths.
        dropout: of probabilities and of the output.
        norm_first: the norm comes before the attention, not behind the sum.
        fp16: not heeded: the block computes in the dtype of its parameters, and returns that.
        pg: None; parallel over tensors is not here.

    Attributes:
        in_proj_weight: (3, hidden, hidden), of q, k and v; in_proj_bias: (3, hidden).
        out_proj_weight: (hidden, hidden); out_proj_bias: (hidden,).
        norm_weight: (hidden,); norm_bias: (hidden,).

    Raises:
        ValueError: hidden_size is no multiple of nhead, dropout is no rate, or there is a pg.
    """

    def __init__(
        self,
        hidden_size: int,
        nhead: int,
        batch_size: int,
        max_seq_len: int,
        dropout: float = 0.0,
        norm_first: bool = False,
        fp16: bool = True,
        pg: object = None,
    ) -> None:
        super().__init__()
        if pg is not None:
            raise ValueError(
                f"{_NAME}: pg is given, expected None; use torch.distributed.tensor.parallel"
            )
        check_whole(_NAME, hidden_size=hidden_size, nhead=nhead)
        check_reals(_NAME, dropout=dropout)
        check_flags(_NAME, norm_first=norm_first)
        if nhead <= 0 or hidden_size <= 0 or hidden_size % nhead != 0:
            raise ValueError(
                f"{_NAME}: hidden_size is {hidden_size}, expected a multiple of nhead, {nhead}"
            )
        if not 0 <= dropout <= 1:
            raise ValueError(f"{_NAME}: dropout is {dropout}, expected a number from 0 to 1")
        hidden_size, nhead = int(hidden_size), int(nhead)
        self.nhead, self.dropout, self.norm_first = nhead, float(dropout), norm_first
        self.in_proj_weight = nn.Parameter(torch.empty(3, hidden_size, hidden_size))
        self.in_proj_bias = nn.Parameter(torch.empty(3, hidden_size))
        self.out_proj_weight = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.out_proj_bias = nn.Parameter(torch.empty(hidden_size))
        self.norm_weight = nn.Parameter(torch.empty(hidden_size))
        self.norm_bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights."""
        flat = self.in_proj_weight.view(-1, self.in_proj_weight.shape[-1])
        nn.init.xavier_uniform_(flat, 1 / math.sqrt(2))
        nn.init.xavier_uniform_(self.out_proj_weight)
        bound = 1 / math.sqrt(flat.shape[1])
        nn.init.uniform_(self.in_proj_bias, -bound, bound)
        nn.init.zeros_(self.out_proj_bias)
        nn.init.ones_(self.norm_weight)
        nn.init.zeros_(self.norm_bias)

    def forward(self, hidden_states: Tensor, encoder_padding_mask: Tensor | None = None) -> Tensor:
        """Return the block's output.

        Args:
            hidden_states: (batch, length, hidden), of the parameters' dtype.
            encoder_padding_mask: None, or (batch, length), what is not 0 where a token is padding;
                of one sequence also (length,).
        """
        check_kinds(_NAME, hidden_states=(hidden_states, Tensor))
        seeds: tuple[Tensor | None, ...] = (None, None)
        if self.training and self.dropout > 0:
            seeds = draw_seeds(hidden_states.device, 2)
        x = self._norm(hidden_states) if self.norm_first else hidden_states
        weight = self.in_proj_weight.flatten(0, 1)
        q, k, v = heads_of(_NAME, x, weight, self.in_proj_bias.view(-1), self.nhead)
        mask = _seen(encoder_padding_mask, *x.shape[:2])
        p = self.dropout if self.training else 0.0
        out = dropout_attention(q, k, v, mask, p=p, seed=seeds[0])
        product = F.linear(out.transpose(1, 2).reshape(x.shape), self.out_proj_weight)
        total = bias_dropout_residual(product, self.out_proj_bias, hidden_states, p, seed=seeds[1])
        return total if self.norm_first else self._norm(total)

    def _norm(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.norm_weight, self.norm_bias)


def _seen(padding: Tensor | None, batch: int, length: int) -> Tensor | None:
    """Return which keys are seen, (batch, 1, 1, length), or None for all."""
    if padding is None:
        return None
    check_kinds(_NAME, encoder_padding_mask=(padding, Tensor))
    shape = padding.shape if padding.dim() > 1 else (1, *padding.shape)
    if shape[0] != batch or shape[-1] != length or padding.numel() != batch * length:
        raise ValueError(
            f"{_NAME}: encoder_padding_mask has shape {list(padding.shape)}, expected"
            f" [{batch}, {length}]"
        )
    return (padding == 0).view(batch, 1, 1, length)
