"""Compile an op into the cache, and end as the programs around it do: with a BuildError."""

from pathlib import Path

from deepspeed_ext.op_builder import BuildError, OpSpec
from deepspeed_ext.op_builder.errors import Unavailable
from deepspeed_ext.op_builder.jit import compile_into_cache
from deepspeed_ext.op_builder.wanted import Wanted


def build(spec: OpSpec, csrc: Path) -> Path:
    """Return the path of the library."""
    try:
        return compile_into_cache(Wanted.of(spec, csrc))
    except Unavailable as missing:
        raise BuildError.of(spec.name, missing) from missing
