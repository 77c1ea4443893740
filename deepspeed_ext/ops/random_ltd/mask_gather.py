"""The parts of attention masks that belong to some tokens."""

import torch
from torch import Tensor

from deepspeed_ext.ops._kinds import check_kinds, check_whole
from deepspeed_ext.ops._library import define


def _fake(mask: Tensor, ids: Tensor) -> Tensor:
    layers, samples, kept = ids.shape
    is_one = mask.shape[2] == 1 and mask.shape[3] != 1
    return mask.new_empty((layers, samples, mask.shape[1], 1 if is_one else kept, kept))


_op = define(
    "mask_gather_bert(Tensor mask, Tensor ids) -> Tensor",
    {"cpu": "cpu_random_ltd", "cuda": "fused_random_ltd"},
    fake=_fake,
)


def mask_gather_bert(mask: Tensor, ids: Tensor) -> Tensor:
    """Return for each layer the part of a mask that belongs to the tokens that it keeps.

    Args:
        mask: (samples, heads, tokens, tokens), or (samples, heads, 1, tokens) for all queries
            alike, of any dtype, on the CPU or on CUDA, read as it lies; no gradient passes through.
        ids: (layers, samples, kept), int32, numbers of tokens; it is an error on the CPU if one is
            none. On CUDA, where nobody waits for them, what belongs to it is 0 then.

    Returns:
        (layers, samples, heads, kept, kept), or with 1 in place of the first kept.

    See: ``mask_gather_bert_ref`` is the same in plain torch.
    """
    found: Tensor = _op(mask, ids)
    return found


def mask_gather_gpt(mask: Tensor, length: int) -> Tensor:
    """Return the part of a causal mask that belongs to so many tokens: which these are is all one.

    Args:
        mask: (..., tokens, tokens), of any dtype on any device.
        length: how many tokens are kept, 0 to tokens.

    Returns:
        (..., length, length), a copy.
    """
    check_kinds("mask_gather_gpt", mask=(mask, Tensor))
    if type(length) is not int:  # a compiler's numbers are
        check_whole("mask_gather_gpt", length=length)
    if mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        raise ValueError(
            f"mask_gather_gpt: mask has shape {list(mask.shape)}, expected (..., tokens, tokens)"
        )
    if not 0 <= length <= min(mask.shape[-2:]):
        raise ValueError(
            f"mask_gather_gpt: length is {length}, expected 0 to the tokens of a mask of shape"
            f" {list(mask.shape)}"
        )
    return mask[..., :length, :length].clone(memory_format=torch.contiguous_format)


def mask_gather_bert_ref(mask: Tensor, ids: Tensor) -> Tensor:
    """Do what mask_gather_bert does, in plain torch: its definition, for tests."""
    long, heads = ids.long(), mask.shape[1]
    layers, samples, kept = long.shape
    rows = mask.expand(layers, *mask.shape)
    if mask.shape[2] == mask.shape[3]:
        queries = long[:, :, None, :, None].expand(layers, samples, heads, kept, mask.shape[3])
        rows = rows.gather(3, queries)
    keys = long[:, :, None, None, :].expand(layers, samples, heads, rows.shape[3], kept)
    return rows.gather(4, keys)
