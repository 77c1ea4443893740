"""A block of attention with norm and residual, as Colossal-AI has it."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_ext.ops._dropout import draw_seeds
from deepspeed_ext.ops.elementwise.bias_dropout_residual import bias_dropout_residual
from deepspeed_ext.ops.norm.layer_norm import layer_norm
from deepspeed_ext.ops.transformer.attention import dropout_attention


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
                "MultiHeadAttention: pg is given, expected None; use"
                " torch.distributed.tensor.parallel"
            )
        if nhead <= 0 or hidden_size <= 0 or hidden_size % nhead != 0:
            raise ValueError(
                f"MultiHeadAttention: hidden_size is {hidden_size}, expected a multiple of nhead,"
                f" {nhead}"
            )
        if not 0 <= dropout <= 1:
            raise ValueError(
                f"MultiHeadAttention: dropout is {dropout}, expected a number from 0 to 1"
            )
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
        batch, length, hidden = hidden_states.shape
        mask = None
        if encoder_padding_mask is not None:
            mask = (encoder_padding_mask == 0).view(batch, 1, 1, length)
        seeds: tuple[Tensor | None, ...] = (None, None)
        if self.training and self.dropout > 0:
            seeds = draw_seeds(hidden_states.device, 2)
        x = self._norm(hidden_states) if self.norm_first else hidden_states
        joined = F.linear(x, self.in_proj_weight.view(-1, hidden), self.in_proj_bias.view(-1))
        q, k, v = (
            part.view(batch, length, self.nhead, -1).transpose(1, 2)
            for part in joined.split(hidden, -1)
        )
        p = self.dropout if self.training else 0.0
        out = dropout_attention(q, k, v, mask, p=p, seed=seeds[0])
        product = F.linear(out.transpose(1, 2).reshape(x.shape), self.out_proj_weight)
        total = bias_dropout_residual(product, self.out_proj_bias, hidden_states, p, seed=seeds[1])
        return total if self.norm_first else self._norm(total)

    def _norm(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.norm_weight, self.norm_bias)
