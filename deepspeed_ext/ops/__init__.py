"""The ops as functions: each checked, documented, and with its reference in float64 beside it.

Importing this package imports nothing else. A function, its module and the op in torch's registry,
`torch.ops.deepspeed_ext.<name>`, come with the first use of the function's name. Code that takes an
op out of the registry, or loads a program that was exported with some in it, registers all by
`from deepspeed_ext.ops import *`. Nothing is compiled by any of this; see `_library`.

`__compatible_ops__` says for each op library by its name whether it can be used here, as it is or
after being compiled; `ds_report` says why not.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# For each module below this package the public names that it has.
_NAMES = {
    "_flatten": ("flatten", "unflatten"),
    "_norms_around": ("NextNorm", "Undivided"),
    "optimizers.adagrad": ("adagrad_step_", "adagrad_step_ref_"),
    "optimizers.adam": ("adam_step_", "adam_step_ref_"),
    "optimizers.clip": ("clip_grad_norm_", "total_squared_norm"),
    "optimizers.fingerprint": ("fingerprints", "fingerprints_ref"),
    "optimizers.l2_norm": (
        "L2Norm",
        "l2_norm",
        "l2_norm_ref",
        "squared_norms",
        "squared_norms_ref",
    ),
    "optimizers.lamb": (
        "lamb_apply_",
        "lamb_apply_ref_",
        "lamb_coefficients",
        "lamb_moments_",
        "lamb_moments_ref_",
    ),
    "optimizers.lars": (
        "lars_apply_",
        "lars_apply_ref_",
        "lars_coefficients",
        "lars_norms",
        "lars_norms_ref",
    ),
    "optimizers.lion": ("lion_step_", "lion_step_ref_"),
    "optimizers.rmsprop": ("rmsprop_step_", "rmsprop_step_ref_"),
    "optimizers.sgd": ("sgd_step_", "sgd_step_ref_"),
    "optimizers.state_formats": (
        "decode_blocks",
        "encode_blocks",
        "join_float32",
        "split_float32",
    ),
    "quantization.packed_weight": (
        "PackedWeight",
        "pack_weight",
        "unpack_weight",
        "unpack_weight_ref",
    ),
    "quantization.quantized_linear": (
        "quantized_linear",
        "quantized_linear_norm",
        "quantized_linear_norm_ref",
        "quantized_linear_ref",
    ),
    "quantization.dequantize": ("dequantize", "dequantize_ref"),
    "quantization.ds_quantizer": ("ds_quantizer",),
    "quantization.fake_quantize": ("fake_quantize", "fake_quantize_ref"),
    "quantization.quantize": ("Quantized", "quantize", "quantize_ref"),
    "quantization.quantize_packed": ("quantize_packed_", "quantize_packed_ref_"),
    "replay": ("Recorded", "record"),
    "transformer.append_and_attend": ("append_and_attend_", "append_and_attend_ref_"),
    "transformer.bias_activation": ("bias_activation", "bias_activation_ref"),
    "transformer.cross_entropy": ("cross_entropy", "cross_entropy_ref"),
    "transformer.decode_attention": ("decode_attention", "decode_attention_ref"),
    "transformer.gated_activation": (
        "gated_activation",
        "gated_activation_ref",
        "swiglu",
        "swiglu_ref",
    ),
    "transformer.layer_norm": ("FusedLayerNorm", "layer_norm", "layer_norm_ref"),
    "transformer.nhwc_bias_add": ("nhwc_bias_add", "nhwc_bias_add_ref"),
    "transformer.paged_kv": ("PagedKV",),
    "transformer.prefill_attention": ("prefill_attention", "prefill_attention_ref"),
    "transformer.rms_norm": ("FusedRMSNorm", "rms_norm", "rms_norm_ref"),
    "transformer.rope": ("rope", "rope_", "rope_ref"),
    "transformer.rope_append": ("rope_append_", "rope_append_ref_"),
    "transformer.rope_frequencies": (
        "rope_frequencies",
        "rope_frequencies_llama3",
        "rope_frequencies_ntk",
        "rope_frequencies_yarn",
        "rope_scale_yarn",
    ),
    "transformer.skinny_linear": (
        "skinny_linear",
        "skinny_linear_norm",
        "skinny_linear_norm_ref",
        "skinny_linear_ref",
    ),
    "transformer.softmax": (
        "scaled_masked_softmax",
        "scaled_masked_softmax_ref",
        "scaled_upper_triang_masked_softmax",
        "scaled_upper_triang_masked_softmax_ref",
        "softmax",
        "softmax_ref",
    ),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:  # the same for type checkers
    from deepspeed_ext.ops._flatten import flatten as flatten
    from deepspeed_ext.ops._flatten import unflatten as unflatten
    from deepspeed_ext.ops._norms_around import NextNorm as NextNorm
    from deepspeed_ext.ops._norms_around import Undivided as Undivided
    from deepspeed_ext.ops.optimizers.adagrad import adagrad_step_ as adagrad_step_
    from deepspeed_ext.ops.optimizers.adagrad import adagrad_step_ref_ as adagrad_step_ref_
    from deepspeed_ext.ops.optimizers.adam import adam_step_ as adam_step_
    from deepspeed_ext.ops.optimizers.adam import adam_step_ref_ as adam_step_ref_
    from deepspeed_ext.ops.optimizers.clip import clip_grad_norm_ as clip_grad_norm_
    from deepspeed_ext.ops.optimizers.clip import total_squared_norm as total_squared_norm
    from deepspeed_ext.ops.optimizers.fingerprint import fingerprints as fingerprints
    from deepspeed_ext.ops.optimizers.fingerprint import fingerprints_ref as fingerprints_ref
    from deepspeed_ext.ops.optimizers.l2_norm import L2Norm as L2Norm
    from deepspeed_ext.ops.optimizers.l2_norm import l2_norm as l2_norm
    from deepspeed_ext.ops.optimizers.l2_norm import l2_norm_ref as l2_norm_ref
    from deepspeed_ext.ops.optimizers.l2_norm import squared_norms as squared_norms
    from deepspeed_ext.ops.optimizers.l2_norm import squared_norms_ref as squared_norms_ref
    from deepspeed_ext.ops.optimizers.lamb import lamb_apply_ as lamb_apply_
    from deepspeed_ext.ops.optimizers.lamb import lamb_apply_ref_ as lamb_apply_ref_
    from deepspeed_ext.ops.optimizers.lamb import lamb_coefficients as lamb_coefficients
    from deepspeed_ext.ops.optimizers.lamb import lamb_moments_ as lamb_moments_
    from deepspeed_ext.ops.optimizers.lamb import lamb_moments_ref_ as lamb_moments_ref_
    from deepspeed_ext.ops.optimizers.lars import lars_apply_ as lars_apply_
    from deepspeed_ext.ops.optimizers.lars import lars_apply_ref_ as lars_apply_ref_
    from deepspeed_ext.ops.optimizers.lars import lars_coefficients as lars_coefficients
    from deepspeed_ext.ops.optimizers.lars import lars_norms as lars_norms
    from deepspeed_ext.ops.optimizers.lars import lars_norms_ref as lars_norms_ref
    from deepspeed_ext.ops.optimizers.lion import lion_step_ as lion_step_
    from deepspeed_ext.ops.optimizers.lion import lion_step_ref_ as lion_step_ref_
    from deepspeed_ext.ops.optimizers.rmsprop import rmsprop_step_ as rmsprop_step_
    from deepspeed_ext.ops.optimizers.rmsprop import rmsprop_step_ref_ as rmsprop_step_ref_
    from deepspeed_ext.ops.optimizers.sgd import sgd_step_ as sgd_step_
    from deepspeed_ext.ops.optimizers.sgd import sgd_step_ref_ as sgd_step_ref_
    from deepspeed_ext.ops.optimizers.state_formats import decode_blocks as decode_blocks
    from deepspeed_ext.ops.optimizers.state_formats import encode_blocks as encode_blocks
    from deepspeed_ext.ops.optimizers.state_formats import join_float32 as join_float32
    from deepspeed_ext.ops.optimizers.state_formats import split_float32 as split_float32
    from deepspeed_ext.ops.quantization.dequantize import dequantize as dequantize
    from deepspeed_ext.ops.quantization.dequantize import dequantize_ref as dequantize_ref
    from deepspeed_ext.ops.quantization.ds_quantizer import ds_quantizer as ds_quantizer
    from deepspeed_ext.ops.quantization.fake_quantize import fake_quantize as fake_quantize
    from deepspeed_ext.ops.quantization.fake_quantize import fake_quantize_ref as fake_quantize_ref
    from deepspeed_ext.ops.quantization.packed_weight import PackedWeight as PackedWeight
    from deepspeed_ext.ops.quantization.packed_weight import pack_weight as pack_weight
    from deepspeed_ext.ops.quantization.packed_weight import unpack_weight as unpack_weight
    from deepspeed_ext.ops.quantization.packed_weight import unpack_weight_ref as unpack_weight_ref
    from deepspeed_ext.ops.quantization.quantize import Quantized as Quantized
    from deepspeed_ext.ops.quantization.quantize import quantize as quantize
    from deepspeed_ext.ops.quantization.quantize import quantize_ref as quantize_ref
    from deepspeed_ext.ops.quantization.quantize_packed import quantize_packed_ as quantize_packed_
    from deepspeed_ext.ops.quantization.quantize_packed import (
        quantize_packed_ref_ as quantize_packed_ref_,
    )
    from deepspeed_ext.ops.quantization.quantized_linear import quantized_linear as quantized_linear
    from deepspeed_ext.ops.quantization.quantized_linear import (
        quantized_linear_norm as quantized_linear_norm,
    )
    from deepspeed_ext.ops.quantization.quantized_linear import (
        quantized_linear_norm_ref as quantized_linear_norm_ref,
    )
    from deepspeed_ext.ops.quantization.quantized_linear import (
        quantized_linear_ref as quantized_linear_ref,
    )
    from deepspeed_ext.ops.replay import Recorded as Recorded
    from deepspeed_ext.ops.replay import record as record
    from deepspeed_ext.ops.transformer.append_and_attend import (
        append_and_attend_ as append_and_attend_,
    )
    from deepspeed_ext.ops.transformer.append_and_attend import (
        append_and_attend_ref_ as append_and_attend_ref_,
    )
    from deepspeed_ext.ops.transformer.bias_activation import bias_activation as bias_activation
    from deepspeed_ext.ops.transformer.bias_activation import (
        bias_activation_ref as bias_activation_ref,
    )
    from deepspeed_ext.ops.transformer.cross_entropy import cross_entropy as cross_entropy
    from deepspeed_ext.ops.transformer.cross_entropy import cross_entropy_ref as cross_entropy_ref
    from deepspeed_ext.ops.transformer.decode_attention import decode_attention as decode_attention
    from deepspeed_ext.ops.transformer.decode_attention import (
        decode_attention_ref as decode_attention_ref,
    )
    from deepspeed_ext.ops.transformer.gated_activation import gated_activation as gated_activation
    from deepspeed_ext.ops.transformer.gated_activation import (
        gated_activation_ref as gated_activation_ref,
    )
    from deepspeed_ext.ops.transformer.gated_activation import swiglu as swiglu
    from deepspeed_ext.ops.transformer.gated_activation import swiglu_ref as swiglu_ref
    from deepspeed_ext.ops.transformer.layer_norm import FusedLayerNorm as FusedLayerNorm
    from deepspeed_ext.ops.transformer.layer_norm import layer_norm as layer_norm
    from deepspeed_ext.ops.transformer.layer_norm import layer_norm_ref as layer_norm_ref
    from deepspeed_ext.ops.transformer.nhwc_bias_add import nhwc_bias_add as nhwc_bias_add
    from deepspeed_ext.ops.transformer.nhwc_bias_add import nhwc_bias_add_ref as nhwc_bias_add_ref
    from deepspeed_ext.ops.transformer.paged_kv import PagedKV as PagedKV
    from deepspeed_ext.ops.transformer.prefill_attention import (
        prefill_attention as prefill_attention,
    )
    from deepspeed_ext.ops.transformer.prefill_attention import (
        prefill_attention_ref as prefill_attention_ref,
    )
    from deepspeed_ext.ops.transformer.rms_norm import FusedRMSNorm as FusedRMSNorm
    from deepspeed_ext.ops.transformer.rms_norm import rms_norm as rms_norm
    from deepspeed_ext.ops.transformer.rms_norm import rms_norm_ref as rms_norm_ref
    from deepspeed_ext.ops.transformer.rope import rope as rope
    from deepspeed_ext.ops.transformer.rope import rope_ as rope_
    from deepspeed_ext.ops.transformer.rope import rope_ref as rope_ref
    from deepspeed_ext.ops.transformer.rope_append import rope_append_ as rope_append_
    from deepspeed_ext.ops.transformer.rope_append import rope_append_ref_ as rope_append_ref_
    from deepspeed_ext.ops.transformer.rope_frequencies import rope_frequencies as rope_frequencies
    from deepspeed_ext.ops.transformer.rope_frequencies import (
        rope_frequencies_llama3 as rope_frequencies_llama3,
    )
    from deepspeed_ext.ops.transformer.rope_frequencies import (
        rope_frequencies_ntk as rope_frequencies_ntk,
    )
    from deepspeed_ext.ops.transformer.rope_frequencies import (
        rope_frequencies_yarn as rope_frequencies_yarn,
    )
    from deepspeed_ext.ops.transformer.rope_frequencies import rope_scale_yarn as rope_scale_yarn
    from deepspeed_ext.ops.transformer.skinny_linear import skinny_linear as skinny_linear
    from deepspeed_ext.ops.transformer.skinny_linear import skinny_linear_norm as skinny_linear_norm
    from deepspeed_ext.ops.transformer.skinny_linear import (
        skinny_linear_norm_ref as skinny_linear_norm_ref,
    )
    from deepspeed_ext.ops.transformer.skinny_linear import skinny_linear_ref as skinny_linear_ref
    from deepspeed_ext.ops.transformer.softmax import scaled_masked_softmax as scaled_masked_softmax
    from deepspeed_ext.ops.transformer.softmax import (
        scaled_masked_softmax_ref as scaled_masked_softmax_ref,
    )
    from deepspeed_ext.ops.transformer.softmax import (
        scaled_upper_triang_masked_softmax as scaled_upper_triang_masked_softmax,
    )
    from deepspeed_ext.ops.transformer.softmax import (
        scaled_upper_triang_masked_softmax_ref as scaled_upper_triang_masked_softmax_ref,
    )
    from deepspeed_ext.ops.transformer.softmax import softmax as softmax
    from deepspeed_ext.ops.transformer.softmax import softmax_ref as softmax_ref


def __getattr__(name: str) -> object:
    if name == "__compatible_ops__":  # worked out when asked for
        from deepspeed_ext.op_builder import builders

        return {builder.NAME: builder().is_compatible() for builder in builders.BUILDERS.values()}
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # so that the next use finds it at once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
