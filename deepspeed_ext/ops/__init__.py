"""The ops as functions: each checked, documented, and with its reference in float64 beside it.

`__compatible_ops__` says for each op library by its name whether it can be used here, as it is or
after being compiled; `ds_report` says why not.
"""

from deepspeed_ext.op_builder import builders
from deepspeed_ext.ops.adam import adam_step_, adam_step_ref_

__all__ = ["adam_step_", "adam_step_ref_"]


def __getattr__(name: str) -> object:
    if name == "__compatible_ops__":  # worked out when asked for: import looks at nothing
        return {builder.NAME: builder().is_compatible() for builder in builders.BUILDERS.values()}
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
