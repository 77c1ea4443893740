"""Which tokens layers keep, and the way there and back, under the names that DeepSpeed has."""

import torch
from torch import Tensor

from deepspeed_ext.ops._kinds import check_kinds, check_whole
from deepspeed_ext.ops.random_ltd.mask_gather import mask_gather_bert
from deepspeed_ext.ops.random_ltd.token_gather import token_gather
from deepspeed_ext.ops.random_ltd.token_scatter import token_scatter
from deepspeed_ext.ops.random_ltd.token_sort import token_sort_


def sampled_ids(
    op: str, reserved_length: int, seq_length: int, batch_size: int, layers: int, device: object
) -> Tensor:
    """Return the ids of tokens that are drawn for each layer and sample.

    Args:
        op: who is asked, for the text of an error.
        reserved_length: how many tokens are drawn, each with the same chance.
        seq_length: of how many.
        batch_size: samples.
        layers: for each of which others are drawn.
        device: whose generator of torch draws.

    Returns:
        (layers, batch_size, reserved_length), int32, ascending.

    Raises:
        TypeError: a length or count is no whole number.
        ValueError: reserved_length is none that can be drawn, or a count is negative.
    """
    counts = dict(
        reserved_length=reserved_length,
        seq_length=seq_length,
        batch_size=batch_size,
        layers=layers,
    )
    for name, count in counts.items():
        if type(count) is not int:  # a compiler's numbers are
            check_whole(op, **{name: count})
        if count < 0:
            raise ValueError(f"{op}: {name} is {count}, expected 0 or more")
    if not 0 <= reserved_length <= seq_length:
        raise ValueError(
            f"{op}: reserved_length is {reserved_length}, expected 0 to {seq_length}, the"
            " seq_length"
        )
    chances = torch.rand(layers, batch_size, seq_length, device=torch.device(str(device)))
    ids = chances.topk(reserved_length, sorted=False).indices.to(torch.int32)
    return token_sort_(ids, seq_length)


def gpt_sample_tokens(
    reserved_length: int,
    seq_length: int,
    batch_size: int,
    layers: int = 1,
    device: torch.device | str = "cpu",
    attn_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Draw tokens for each layer and sample of a decoder, by torch's generator of the device.

    Args:
        reserved_length: how many tokens are drawn, each with the same chance.
        seq_length: of how many.
        batch_size: samples.
        layers: for each of which others are drawn.
        device: of the ids.
        attn_mask: (..., seq_length, seq_length), causal, or None.

    Returns:
        ids, (layers, batch_size, reserved_length), int32, ascending; and the part of the mask that
        belongs to so many tokens, a view of it, or None.
    """
    ids = sampled_ids("gpt_sample_tokens", reserved_length, seq_length, batch_size, layers, device)
    if attn_mask is None:
        return ids, None
    check_kinds("gpt_sample_tokens", attn_mask=(attn_mask, Tensor))
    if attn_mask.shape[-2:] != (seq_length, seq_length):
        raise ValueError(
            f"gpt_sample_tokens: attn_mask has shape {list(attn_mask.shape)}, expected its last"
            f" dimensions to be [{seq_length}, {seq_length}]"
        )
    return ids, attn_mask[..., :reserved_length, :reserved_length]


def bert_sample_tokens(
    reserved_length: int,
    seq_length: int,
    batch_size: int,
    layers: int = 1,
    device: torch.device | str = "cpu",
    attn_mask: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Draw tokens for each layer and sample of an encoder, by torch's generator of the device.

    Args:
        reserved_length: how many tokens are drawn, each with the same chance.
        seq_length: of how many.
        batch_size: samples.
        layers: for each of which others are drawn.
        device: of the ids.
        attn_mask: as ``mask_gather_bert`` takes it, or of one sample for all.

    Returns:
        ids, (layers, batch_size, reserved_length), int32, ascending; and for each layer the part of
        the mask that belongs to its tokens.

    Raises:
        ValueError: attn_mask is None; the tokens of an encoder differ by what they may see.
    """
    if attn_mask is None:
        raise ValueError("bert_sample_tokens: attn_mask is None, expected a mask")
    ids = sampled_ids("bert_sample_tokens", reserved_length, seq_length, batch_size, layers, device)
    check_kinds("bert_sample_tokens", attn_mask=(attn_mask, Tensor))
    if attn_mask.dim() != 4 or attn_mask.shape[-1] != seq_length:
        raise ValueError(
            f"bert_sample_tokens: attn_mask has shape {list(attn_mask.shape)}, expected [samples,"
            f" heads, tokens or 1, {seq_length}]"
        )
    mask = attn_mask.expand(batch_size, *attn_mask.shape[1:])
    return ids, list(mask_gather_bert(mask, ids))


class GatherTokens:
    """Tokens to those that a layer keeps, with the gradients of both."""

    @staticmethod
    def apply(
        activations: Tensor, sorted_indices: Tensor, batch_first: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the activations as they are, and the rows of some of them.

        The gradient of the rows is added to that of the activations: right also where another than
        ``ScatterTokens`` takes them.

        Args:
            activations: see ``token_gather``, as what follows.
            sorted_indices: its ids.
            batch_first: see there.
        """
        return activations, token_gather(activations, sorted_indices, batch_first)


class ScatterTokens:
    """Tokens of a layer back among all of them, with the gradients of both."""

    @staticmethod
    def apply(
        all_activations: Tensor,
        layer_activations: Tensor,
        sorted_indices: Tensor,
        batch_first: bool,
    ) -> Tensor:
        """Return all activations with those of the layer in their places, as a new tensor.

        What is replaced has the gradient 0.

        Args:
            all_activations: see ``token_scatter``, as what follows.
            layer_activations: its part.
            sorted_indices: its ids.
            batch_first: see there.
        """
        return token_scatter(all_activations, layer_activations, sorted_indices, batch_first)
