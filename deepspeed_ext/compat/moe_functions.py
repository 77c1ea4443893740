"""Functions of Colossal-AI's module moe and of DeepSpeed's inference ops, in plain torch.

Rows of an expert lie in a buffer with room for `capacity` of them, and gaps where it has fewer;
``moe_permute`` and ``moe_unpermute`` do the same without gaps.
"""

import torch
from torch import Tensor


class MoeDispatch:
    """Tokens to the rows of their experts."""

    @staticmethod
    def apply(tokens: Tensor, mask: Tensor, dest_idx: Tensor, ec: int) -> Tensor:
        """Return the rows of all experts; 0 where no token goes.

        Args:
            tokens: (tokens, n). The gradient is that of all its copies.
            mask: (k, tokens), above 0 where a choice is kept.
            dest_idx: (k, tokens), expert x capacity + place there, each once among those kept.
            ec: experts x capacity.

        Returns:
            (ec, n), of the dtype of tokens.
        """
        rows = _rows_of(mask, dest_idx, ec)
        copies = tokens.expand(len(rows), *tokens.shape).flatten(0, 1)
        room = tokens.new_zeros(ec + 1, tokens.shape[1])
        return room.index_copy(0, rows.flatten(), copies)[:ec]


class MoeCombine:
    """Rows of experts back to their tokens."""

    @staticmethod
    def apply(
        expert_tokens: Tensor, logits: Tensor, mask: Tensor, dest_idx: Tensor, ec: int
    ) -> Tensor:
        """Return for each token the sum of its rows, each times the weight of its expert.

        Args:
            expert_tokens: (..., n), in all ec rows. Has a gradient, as logits have.
            logits: (tokens, experts), the weights, which is what Colossal-AI gives for them.
            mask: see ``MoeDispatch``.
            dest_idx: likewise.
            ec: likewise.

        Returns:
            (tokens, n), of the dtype of expert_tokens; added up in float32. 0 for a token of which
            no choice is kept.
        """
        rows, is_kept = _rows_of(mask, dest_idx, ec), mask > 0
        flat = expert_tokens.reshape(ec, expert_tokens.shape[-1]).float()
        found = torch.cat([flat, flat.new_zeros(1, flat.shape[1])])[rows]
        capacity = max(ec // max(logits.shape[1], 1), 1)
        experts = (dest_idx.long() // capacity).where(is_kept, 0)
        weights = logits.float().gather(1, experts.t()).t().where(is_kept, 0)
        return (found * weights[..., None]).sum(0).to(expert_tokens.dtype)


def moe_cumsum(inputs: Tensor) -> Tensor:
    """Return the sums of each column up to each row, less 1: the place of a token at an expert.

    Args:
        inputs: (tokens, experts), whole numbers, 1 where a token goes to an expert.
    """
    return inputs.cumsum(0, dtype=inputs.dtype) - 1


def einsum_sec_sm_ecm(Q: Tensor, W: Tensor) -> Tensor:
    """Return the rows of all experts, (experts, capacity, n).

    Args:
        Q: (tokens, experts, capacity), 1 where a token has that row.
        W: (tokens, n).
    """
    return torch.einsum("sec,sm->ecm", Q, W)


@torch.no_grad()
def moe_res_matmul(moe_res: Tensor, coef: Tensor, output: Tensor) -> Tensor:
    """Write moe_res x c + output x d into output, and return it; without a gradient.

    Args:
        moe_res: (..., n).
        coef: of 2 n elements, c and then d.
        output: as moe_res.
    """
    first, second = coef.reshape(2, moe_res.shape[-1]).float()
    return output.copy_(moe_res.float() * first + output.float() * second)


def _rows_of(mask: Tensor, dest_idx: Tensor, ec: int) -> Tensor:
    """Return the row of each choice; of those that are dropped, the one behind all rows."""
    return dest_idx.long().where(mask > 0, ec)
