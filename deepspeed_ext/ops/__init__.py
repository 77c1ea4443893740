"""The ops as functions: each checked, documented, and with its reference in float64 beside it.

`__compatible_ops__` says for each op library by its name whether it can be used here, as it is or
after being compiled; `ds_report` says why not.
"""

from deepspeed_ext.op_builder import builders
from deepspeed_ext.ops._flatten import flatten, unflatten
from deepspeed_ext.ops.optimizers.adagrad import adagrad_step_, adagrad_step_ref_
from deepspeed_ext.ops.optimizers.adam import adam_step_, adam_step_ref_
from deepspeed_ext.ops.optimizers.clip import clip_grad_norm_, total_squared_norm
from deepspeed_ext.ops.optimizers.l2_norm import (
    L2Norm,
    l2_norm,
    l2_norm_ref,
    squared_norms,
    squared_norms_ref,
)
from deepspeed_ext.ops.optimizers.lamb import (
    lamb_apply_,
    lamb_apply_ref_,
    lamb_coefficients,
    lamb_moments_,
    lamb_moments_ref_,
)
from deepspeed_ext.ops.optimizers.lars import (
    lars_apply_,
    lars_apply_ref_,
    lars_coefficients,
    lars_norms,
    lars_norms_ref,
)
from deepspeed_ext.ops.optimizers.lion import lion_step_, lion_step_ref_
from deepspeed_ext.ops.optimizers.sgd import sgd_step_, sgd_step_ref_
from deepspeed_ext.ops.optimizers.state_formats import (
    decode_blocks,
    encode_blocks,
    join_float32,
    split_float32,
)
from deepspeed_ext.ops.transformer.rms_norm import rms_norm, rms_norm_ref
from deepspeed_ext.ops.transformer.swiglu import swiglu, swiglu_ref

__all__ = [
    "L2Norm",
    "adagrad_step_",
    "adagrad_step_ref_",
    "adam_step_",
    "adam_step_ref_",
    "clip_grad_norm_",
    "decode_blocks",
    "encode_blocks",
    "flatten",
    "join_float32",
    "l2_norm",
    "l2_norm_ref",
    "lamb_apply_",
    "lamb_apply_ref_",
    "lamb_coefficients",
    "lamb_moments_",
    "lamb_moments_ref_",
    "lars_apply_",
    "lars_apply_ref_",
    "lars_coefficients",
    "lars_norms",
    "lars_norms_ref",
    "lion_step_",
    "lion_step_ref_",
    "rms_norm",
    "rms_norm_ref",
    "sgd_step_",
    "sgd_step_ref_",
    "split_float32",
    "squared_norms",
    "squared_norms_ref",
    "swiglu",
    "swiglu_ref",
    "total_squared_norm",
    "unflatten",
]


def __getattr__(name: str) -> object:
    if name == "__compatible_ops__":  # worked out when asked for: import looks at nothing
        return {builder.NAME: builder().is_compatible() for builder in builders.BUILDERS.values()}
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
