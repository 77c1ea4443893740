"""Ids of tokens in ascending order."""

import torch
from torch import Tensor

from deepspeed_ext.ops._library import define

_op = define(
    "token_sort_(Tensor(a!) ids, SymInt original_tokens) -> ()",
    {"cpu": "cpu_random_ltd", "cuda": "fused_random_ltd"},
)


def token_sort_(ids: Tensor, original_tokens: int) -> Tensor:
    """Sort the ids of each row in place, in ascending order, and return them.

    Args:
        ids: (..., kept), int32, contiguous, on the CPU or on CUDA: numbers of tokens, 0 to
            original_tokens - 1; it is an error on the CPU if they are not. On CUDA, where nobody
            waits for them, those that are not come last, each as original_tokens.
        original_tokens: how many tokens there are.

    See: ``token_sort_ref_``.
    """
    _op(ids, original_tokens)
    torch.autograd.graph.increment_version(ids)
    return ids


def token_sort_ref_(ids: Tensor, original_tokens: int) -> Tensor:
    """Do what token_sort_ does, in plain torch: its definition, for tests."""
    return ids.copy_(ids.sort(-1).values)
