"""Whole layers of transformers for training, as DeepSpeed and Colossal-AI have them."""

from deepspeed_ext.ops.transformer.config import (
    DeepSpeedTransformerConfig as DeepSpeedTransformerConfig,
)
from deepspeed_ext.ops.transformer.layer import (
    DeepSpeedTransformerLayer as DeepSpeedTransformerLayer,
)
from deepspeed_ext.ops.transformer.layer_norm import LayerNorm as LayerNorm
from deepspeed_ext.ops.transformer.multi_head_attention import (
    MultiHeadAttention as MultiHeadAttention,
)
from deepspeed_ext.ops.transformer.scale_mask_softmax import (
    AttnMaskType as AttnMaskType,
    FusedScaleMaskSoftmax as FusedScaleMaskSoftmax,
)
