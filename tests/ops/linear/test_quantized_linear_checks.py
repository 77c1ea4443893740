"""The self-checks of quantized_linear pass, and find an op that is wrong."""

from typing import Any

import pytest
from torch import Tensor

from deepspeed_ext import ops
from deepspeed_ext.ops.linear import self_checks

each_bits = pytest.mark.parametrize("bits", [4, 8])


@each_bits
def test_passes(bits: int, device: str) -> None:
    getattr(self_checks, f"quantized_linear_w{bits}")(device)


@pytest.mark.parametrize("name", ["quantized_linear", "unpack_weight"])
@each_bits
def test_finds(bits: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = getattr(ops, name)

    def changed(*arguments: Any, **options: Any) -> Tensor:
        found: Tensor = op(*arguments, **options)
        return found * 1.02

    monkeypatch.setattr(self_checks.ops, name, changed)
    with pytest.raises(RuntimeError, match=rf"^{name}: int\d .*on cpu has .*, expected "):
        getattr(self_checks, f"quantized_linear_w{bits}")("cpu")
