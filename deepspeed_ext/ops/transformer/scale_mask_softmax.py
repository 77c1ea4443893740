"""Softmax of scaled and masked scores as a module, as Megatron and Colossal-AI have it."""

import enum
from collections.abc import Callable

from torch import Tensor, nn

from deepspeed_ext.ops.softmax_and_loss.softmax import (
    scaled_masked_softmax,
    scaled_upper_triang_masked_softmax,
    softmax,
)


class AttnMaskType(enum.Enum):
    """What scores are masked by."""

    padding = 1
    causal = 2
    paddedcausal = 3


class FusedScaleMaskSoftmax(nn.Module):
    """Softmax of scores * scale without what a mask leaves out, by ours instead of theirs.

    Theirs takes its kernel for 16 to 2,048 keys of bfloat16 or float16 in certain numbers, and
    torch for others; here the op takes all. A row of which all is left out is zeros.

    Args:
        input_in_fp16: scores are float16; not heeded but for the next.
        input_in_bf16: scores are bfloat16, and so not float16.
        attn_mask_type: padding: the mask says what is left out. Otherwise keys after a query are,
            and with paddedcausal also what the mask says; with causal no mask is heeded.
        scaled_masked_softmax_fusion: False: mask_func applies the mask of padding, then softmax.
        mask_func: of scores and a mask; called only without fusion.
        softmax_in_fp32: True, if there is a scale; the op computes in float32 either way.
        scale: None for 1.

    Raises:
        ValueError: scores would be float16 and bfloat16, or a scale comes without softmax_in_fp32.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: AttnMaskType,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if input_in_fp16 and input_in_bf16:
            raise ValueError(f"{name}: input_in_bf16 is True, expected False, as is input_in_fp16")
        if scale is not None and not softmax_in_fp32:
            raise ValueError(f"{name}: softmax_in_fp32 is False, expected True with a scale")
        self.attn_mask_type = AttnMaskType(getattr(attn_mask_type, "value", attn_mask_type))
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func = mask_func
        self.scale = 1.0 if scale is None else float(scale)

    def forward(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """Return probabilities.

        Args:
            input: (batch, heads, queries, keys).
            mask: None, or bool or uint8, what can be broadcast to that shape: what is not 0 is left
                out.
        """
        if not self.scaled_masked_softmax_fusion and self.mask_func is not None:
            scores = input.float() * self.scale
            return softmax(scores if mask is None else self.mask_func(scores, mask)).to(input.dtype)
        if self.attn_mask_type is AttnMaskType.padding:
            return scaled_masked_softmax(input, mask, self.scale)
        if self.attn_mask_type is AttnMaskType.causal or mask is None:
            return scaled_upper_triang_masked_softmax(input, self.scale)
        return softmax(input, mask == 0, scale=self.scale, causal=True, offset=0)

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Tell whether the op is taken: of any sizes."""
        return bool(self.scaled_masked_softmax_fusion) or self.mask_func is None
