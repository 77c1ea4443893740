"""pack_weight: each rule of its arguments, and the sentence that says so."""

import re
from typing import Any

import pytest
import torch

from deepspeed_ext.ops import PackedWeight, pack_weight

INT8 = torch.zeros(6, 40, dtype=torch.int8)
UINT8 = torch.zeros(6, 40, dtype=torch.uint8)
INT4 = torch.zeros(6, 20, dtype=torch.uint8)
SCALES = torch.ones(6, 3)


def pack(codes: torch.Tensor = INT8, scales: torch.Tensor = SCALES, **options: Any) -> PackedWeight:
    return pack_weight(codes, scales, **dict(format="int8", group_size=16) | options)


def test_what_fits() -> None:
    for weight in (
        pack(),
        pack(length=40),
        pack(UINT8, offsets=SCALES),
        pack(INT4, format="int4"),
        pack(INT4, format="int4", offsets=SCALES, length=39),
        pack(INT4, format="nf4"),
    ):
        assert weight.shape == (6, weight.length) and weight.scales.shape == (3, 8)


REFUSED: dict[str, dict[str, Any]] = {
    "format is 'int3', expected one of int8, int4, nf4, fp8_e4m3, fp8_e5m2": dict(format="int3"),
    "format is 'fp8_e4m3', expected int8, int4 or nf4": dict(format="fp8_e4m3"),
    "codes is torch.int8 with shape [], expected torch.int8 with two dimensions":
        dict(codes=INT8[0, 0]),
    "codes is torch.int8 with shape [240], expected torch.int8 with two dimensions":
        dict(codes=INT8.flatten()),
    "codes is torch.uint8 with shape [6, 40], expected torch.int8 with two dimensions":
        dict(codes=UINT8),
    "codes is torch.int8 with shape [6, 40], expected torch.uint8 with two dimensions":
        dict(offsets=SCALES),
    "codes has shape [6, 40], expected 41 bytes in each row for length 41": dict(length=41),
    "codes has shape [6, 20], expected 19 bytes in each row for length 38":
        dict(codes=INT4, format="int4", length=38),
    "group_size is 0, expected 1 to 40, the length": dict(group_size=0),
    "group_size is 41, expected 1 to 40, the length": dict(group_size=41),
    "group_size is None, expected 1 to 40, the length": dict(group_size=None),
    "group_size is 16.0, expected 1 to 40, the length": dict(group_size=16.0),
    "group_size is 2.5, expected 1 to 40, the length": dict(group_size=2.5),
    "scales has shape [3, 6], expected [6, 3]": dict(scales=SCALES.t()),
    "scales has shape [6, 3], expected [6, 2]": dict(group_size=20),
    "scales is on meta, expected cpu": dict(scales=SCALES.to("meta")),
    "offsets has shape [6], expected [6, 3]": dict(codes=UINT8, offsets=SCALES[:, 0]),
    "offsets is on meta, expected cpu": dict(codes=UINT8, offsets=SCALES.to("meta")),
    "offsets is a tensor, expected None, as nf4 is symmetric":
        dict(codes=INT4, format="nf4", offsets=SCALES),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=f"^pack_weight: {re.escape(text)}$"):
        pack(**REFUSED[text])
