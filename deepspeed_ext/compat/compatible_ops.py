"""deepspeed.ops.__compatible_ops__: which ops would load here."""

from typing import Any

from deepspeed_ext.op_builder.builders import BUILDERS


def __getattr__(name: str) -> Any:
    if name != "__compatible_ops__":
        raise AttributeError(f"{__name__} has no {name!r}")
    return {builder.NAME: builder().is_compatible() for builder in BUILDERS.values()}
