# The public names of ops stand here alone: type checkers read this file, and __init__.py reads it
# when it is imported.

from deepspeed_ext.ops._flatten import (
    flatten as flatten,
    unflatten as unflatten,
)
from deepspeed_ext.ops.attention.append_and_attend import (
    append_and_attend_ as append_and_attend_,
    append_and_attend_ref_ as append_and_attend_ref_,
)
from deepspeed_ext.ops.attention.block_sparse_attention import (
    block_sparse_attention as block_sparse_attention,
    block_sparse_attention_ref as block_sparse_attention_ref,
)
from deepspeed_ext.ops.attention.decode_attention import (
    decode_attention as decode_attention,
    decode_attention_ref as decode_attention_ref,
)
from deepspeed_ext.ops.attention.paged_kv import (
    PagedKV as PagedKV,
)
from deepspeed_ext.ops.attention.prefill_attention import (
    prefill_attention as prefill_attention,
    prefill_attention_ref as prefill_attention_ref,
)
from deepspeed_ext.ops.attention.rope import (
    rope as rope,
    rope_ as rope_,
    rope_ref as rope_ref,
)
from deepspeed_ext.ops.attention.rope_append import (
    rope_append_ as rope_append_,
    rope_append_ref_ as rope_append_ref_,
)
from deepspeed_ext.ops.attention.rope_frequencies import (
    rope_frequencies as rope_frequencies,
    rope_frequencies_llama3 as rope_frequencies_llama3,
    rope_frequencies_ntk as rope_frequencies_ntk,
    rope_frequencies_yarn as rope_frequencies_yarn,
    rope_scale_yarn as rope_scale_yarn,
)
from deepspeed_ext.ops.elementwise.bias_activation import (
    bias_activation as bias_activation,
    bias_activation_ref as bias_activation_ref,
)
from deepspeed_ext.ops.elementwise.bias_dropout_residual import (
    bias_dropout_residual as bias_dropout_residual,
    bias_dropout_residual_ref as bias_dropout_residual_ref,
)
from deepspeed_ext.ops.elementwise.dropout_activation import (
    dropout_activation as dropout_activation,
    dropout_activation_ref as dropout_activation_ref,
)
from deepspeed_ext.ops.elementwise.gated_activation import (
    gated_activation as gated_activation,
    gated_activation_ref as gated_activation_ref,
    swiglu as swiglu,
    swiglu_ref as swiglu_ref,
)
from deepspeed_ext.ops.elementwise.nhwc_bias_add import (
    nhwc_bias_add as nhwc_bias_add,
    nhwc_bias_add_ref as nhwc_bias_add_ref,
)
from deepspeed_ext.ops.linear.grouped_linear import (
    grouped_linear as grouped_linear,
    grouped_linear_ref as grouped_linear_ref,
)
from deepspeed_ext.ops.linear.grouped_quantized_linear import (
    grouped_quantized_linear as grouped_quantized_linear,
    grouped_quantized_linear_ref as grouped_quantized_linear_ref,
)
from deepspeed_ext.ops.linear.linear_cross_entropy import (
    linear_cross_entropy as linear_cross_entropy,
    linear_cross_entropy_ref as linear_cross_entropy_ref,
)
from deepspeed_ext.ops.linear.norms_around import (
    NextNorm as NextNorm,
    Undivided as Undivided,
)
from deepspeed_ext.ops.linear.quantized_linear import (
    quantized_linear as quantized_linear,
    quantized_linear_norm as quantized_linear_norm,
    quantized_linear_norm_ref as quantized_linear_norm_ref,
    quantized_linear_ref as quantized_linear_ref,
)
from deepspeed_ext.ops.linear.skinny_linear import (
    skinny_linear as skinny_linear,
    skinny_linear_norm as skinny_linear_norm,
    skinny_linear_norm_ref as skinny_linear_norm_ref,
    skinny_linear_ref as skinny_linear_ref,
)
from deepspeed_ext.ops.moe.assign import (
    moe_assign as moe_assign,
    moe_assign_ref as moe_assign_ref,
)
from deepspeed_ext.ops.moe.permute import (
    moe_permute as moe_permute,
    moe_permute_ref as moe_permute_ref,
    moe_unpermute as moe_unpermute,
    moe_unpermute_ref as moe_unpermute_ref,
)
from deepspeed_ext.ops.moe.route import (
    moe_route as moe_route,
    moe_route_ref as moe_route_ref,
)
from deepspeed_ext.ops.moe.routing import (
    Routing as Routing,
    moe_load_balancing_loss as moe_load_balancing_loss,
    moe_z_loss as moe_z_loss,
)
from deepspeed_ext.ops.norm.layer_norm import (
    FusedLayerNorm as FusedLayerNorm,
    layer_norm as layer_norm,
    layer_norm_ref as layer_norm_ref,
)
from deepspeed_ext.ops.norm.rms_norm import (
    FusedRMSNorm as FusedRMSNorm,
    rms_norm as rms_norm,
    rms_norm_ref as rms_norm_ref,
)
from deepspeed_ext.ops.optimizers.adagrad import (
    adagrad_step_ as adagrad_step_,
    adagrad_step_ref_ as adagrad_step_ref_,
)
from deepspeed_ext.ops.optimizers.adam import (
    adam_step_ as adam_step_,
    adam_step_ref_ as adam_step_ref_,
)
from deepspeed_ext.ops.optimizers.clip import (
    clip_grad_norm_ as clip_grad_norm_,
    total_squared_norm as total_squared_norm,
)
from deepspeed_ext.ops.optimizers.fingerprint import (
    fingerprints as fingerprints,
    fingerprints_ref as fingerprints_ref,
)
from deepspeed_ext.ops.optimizers.l2_norm import (
    L2Norm as L2Norm,
    l2_norm as l2_norm,
    l2_norm_ref as l2_norm_ref,
    squared_norms as squared_norms,
    squared_norms_ref as squared_norms_ref,
)
from deepspeed_ext.ops.optimizers.lamb import (
    lamb_apply_ as lamb_apply_,
    lamb_apply_ref_ as lamb_apply_ref_,
    lamb_coefficients as lamb_coefficients,
    lamb_moments_ as lamb_moments_,
    lamb_moments_ref_ as lamb_moments_ref_,
)
from deepspeed_ext.ops.optimizers.lars import (
    lars_apply_ as lars_apply_,
    lars_apply_ref_ as lars_apply_ref_,
    lars_coefficients as lars_coefficients,
    lars_norms as lars_norms,
    lars_norms_ref as lars_norms_ref,
)
from deepspeed_ext.ops.optimizers.lion import (
    lion_step_ as lion_step_,
    lion_step_ref_ as lion_step_ref_,
)
from deepspeed_ext.ops.optimizers.rmsprop import (
    rmsprop_step_ as rmsprop_step_,
    rmsprop_step_ref_ as rmsprop_step_ref_,
)
from deepspeed_ext.ops.optimizers.sgd import (
    sgd_step_ as sgd_step_,
    sgd_step_ref_ as sgd_step_ref_,
)
from deepspeed_ext.ops.optimizers.state_formats import (
    decode_blocks as decode_blocks,
    encode_blocks as encode_blocks,
    join_float32 as join_float32,
    split_float32 as split_float32,
)
from deepspeed_ext.ops.quantization.dequantize import (
    dequantize as dequantize,
    dequantize_ref as dequantize_ref,
)
from deepspeed_ext.ops.quantization.ds_quantizer import (
    ds_quantizer as ds_quantizer,
)
from deepspeed_ext.ops.quantization.fake_quantize import (
    fake_quantize as fake_quantize,
    fake_quantize_ref as fake_quantize_ref,
)
from deepspeed_ext.ops.quantization.packed_weight import (
    PackedWeight as PackedWeight,
    pack_weight as pack_weight,
    unpack_weight as unpack_weight,
    unpack_weight_ref as unpack_weight_ref,
)
from deepspeed_ext.ops.quantization.quantize import (
    Quantized as Quantized,
    quantize as quantize,
    quantize_ref as quantize_ref,
)
from deepspeed_ext.ops.quantization.quantize_packed import (
    quantize_packed_ as quantize_packed_,
    quantize_packed_ref_ as quantize_packed_ref_,
)
from deepspeed_ext.ops.quantization.repack_weight import (
    repack_weight_ as repack_weight_,
    repack_weight_ref_ as repack_weight_ref_,
)
from deepspeed_ext.ops.random_ltd.dropping_utils import (
    GatherTokens as GatherTokens,
    ScatterTokens as ScatterTokens,
    bert_sample_tokens as bert_sample_tokens,
    gpt_sample_tokens as gpt_sample_tokens,
)
from deepspeed_ext.ops.random_ltd.mask_gather import (
    mask_gather_bert as mask_gather_bert,
    mask_gather_bert_ref as mask_gather_bert_ref,
    mask_gather_gpt as mask_gather_gpt,
)
from deepspeed_ext.ops.random_ltd.token_gather import (
    token_gather as token_gather,
    token_gather_ref as token_gather_ref,
)
from deepspeed_ext.ops.random_ltd.token_scatter import (
    token_scatter as token_scatter,
    token_scatter_ as token_scatter_,
    token_scatter_ref as token_scatter_ref,
    token_scatter_ref_ as token_scatter_ref_,
)
from deepspeed_ext.ops.random_ltd.token_sort import (
    token_sort_ as token_sort_,
    token_sort_ref_ as token_sort_ref_,
)
from deepspeed_ext.ops.replay import (
    Recorded as Recorded,
    record as record,
)
from deepspeed_ext.ops.softmax_and_loss.cross_entropy import (
    cross_entropy as cross_entropy,
    cross_entropy_ref as cross_entropy_ref,
)
from deepspeed_ext.ops.softmax_and_loss.softmax import (
    scaled_masked_softmax as scaled_masked_softmax,
    scaled_masked_softmax_ref as scaled_masked_softmax_ref,
    scaled_upper_triang_masked_softmax as scaled_upper_triang_masked_softmax,
    scaled_upper_triang_masked_softmax_ref as scaled_upper_triang_masked_softmax_ref,
    softmax as softmax,
    softmax_ref as softmax_ref,
)
from deepspeed_ext.ops.transformer.attention import (
    dropout_attention as dropout_attention,
    dropout_attention_ref as dropout_attention_ref,
)
from deepspeed_ext.ops.transformer.config import (
    DeepSpeedTransformerConfig as DeepSpeedTransformerConfig,
)
from deepspeed_ext.ops.transformer.layer import (
    DeepSpeedTransformerLayer as DeepSpeedTransformerLayer,
)
from deepspeed_ext.ops.transformer.multi_head_attention import (
    MultiHeadAttention as MultiHeadAttention,
)
from deepspeed_ext.ops.transformer.scale_mask_softmax import (
    AttnMaskType as AttnMaskType,
    FusedScaleMaskSoftmax as FusedScaleMaskSoftmax,
)

__all__: list[str]
__compatible_ops__: dict[str, bool]
