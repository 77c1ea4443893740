"""Keywords that have another name now: whoever gives an older one is told the new one."""

from typing import Any
from unittest.mock import Mock

import pytest
from torch import nn

from deepspeed_ext.quantization import (
    QuantizedLinear,
    load_int4_checkpoint,
    quantize_model,
    quantized_file_bytes,
)

TAKERS: dict[str, Any] = {
    "QuantizedLinear": lambda **older: QuantizedLinear(8, 4, **older),
    "QuantizedLinear.from_linear": lambda **older: QuantizedLinear.from_linear(
        nn.Linear(8, 4), **older
    ),
    "QuantizedLinear.from_packed": lambda **older: QuantizedLinear.from_packed(Mock(), **older),
    "quantize_model": lambda **older: quantize_model(nn.Sequential(nn.Linear(8, 4)), **older),
    "quantized_file_bytes": lambda **older: quantized_file_bytes(
        nn.Sequential(nn.Linear(8, 4)), **older
    ),
    "load_int4_checkpoint": lambda **older: load_int4_checkpoint(nn.Module, "nowhere", **older),
}


@pytest.mark.parametrize("name", TAKERS)
def test_refuses_the_older_name_of_input_format(name: str) -> None:
    op, now = name.partition(".")[0], "input_format; give input_format='int8'"
    with pytest.raises(TypeError, match=f"^{op}: activations is now {now}$"):
        TAKERS[name](activations="int8")
