"""The ops as functions: each checked, documented, and with its reference in float64 beside it."""

from deepspeed_ext.ops.adam import adam_step_, adam_step_ref_

__all__ = ["adam_step_", "adam_step_ref_"]
