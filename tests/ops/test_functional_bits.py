"""Functional ops: the same bits with every instruction set.

One process for each, with all of their digests, as importing the tests takes most of the time.
"""

import os
from functools import cache

import pytest
import row_norm_cases
import softmax_cases
import test_bias_activation
import test_cross_entropy
import test_gated_activation
import test_rope_contract
import warm_python

MODULES = (
    row_norm_cases,
    test_bias_activation,
    test_gated_activation,
    test_rope_contract,
    softmax_cases,
    test_cross_entropy,
)


@cache
def digests() -> str:
    """Return a line for each op, here with the widest instruction set."""
    return "\n".join(f"{module.__name__} {module.digest()}" for module in MODULES)


@pytest.mark.parametrize("isa", ["scalar", "sse2", "neon", "avx2", "avx512"], indirect=True)
def test_every_isa(isa: str) -> None:
    done = warm_python.run(__file__, env=os.environ | {"DSX_FORCE_ISA": isa})
    assert done.stdout.strip() == digests(), done.stderr


if __name__ == "__main__":
    print(digests())
