"""The low-bit formats that floats are stored in; csrc/quantization/formats.h draws them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_SCALE = 2.0**-126  # so that 1 / scale is finite
MOST_SCALED = 2.0**128 - 2.0**108  # so that a code times a rounded scale is finite

# The levels of NF4: Dettmers, Pagnoni, Holtzman & Zettlemoyer, "QLoRA: Efficient Finetuning of
# Quantized LLMs", 2023, appendix E.
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@dataclass(frozen=True)
class Format:
    """One format.

    Args:
        name: what users call it.
        bits: of a code.
        largest: what the code of the largest element stands for, times the scale.
        asymmetric_largest: the same with an offset; 0 if there is no such form.
        float8: the dtype of its codes if they are floats.
    """

    name: str
    bits: int
    largest: float
    asymmetric_largest: float = 0
    float8: torch.dtype | None = None

    def code_dtype(self, symmetric: bool) -> torch.dtype:
        """Return the dtype of a tensor of codes."""
        if self.float8 is not None:
            return self.float8
        return torch.int8 if symmetric and self.bits == 8 else torch.uint8


FORMATS = (  # in the order of QuantFormat in formats.h
    Format("int8", 8, 127, 255),
    Format("int4", 4, 7, 15),
    Format("nf4", 4, 1),
    Format("fp8_e4m3", 8, 448, float8=torch.float8_e4m3fn),
    Format("fp8_e5m2", 8, 57344, float8=torch.float8_e5m2),
)
NAMES = tuple(each.name for each in FORMATS)


def number_of(op: str, name: str) -> int:
    """Return the number that kernels know a format by.

    Raises:
        ValueError: there is no format of this name.
    """
    if name not in NAMES:
        raise ValueError(f"{op}: format is {name!r}, expected one of {', '.join(NAMES)}")
    return NAMES.index(name)


def groups_of(length: int, group_size: int) -> int:
    """Return how many groups a row has, of which the last one may be shorter."""
    return math.ceil(length / group_size) if group_size else 0


def unpack_nibbles(codes: Tensor, length: int) -> Tensor:
    """Return codes of 4 bits, two in a byte, as a byte each: (..., length), uint8."""
    both = torch.stack((codes & 15, codes >> 4), -1)
    return both.flatten(-2)[..., :length]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Return the opposite of ``unpack_nibbles``, with a 0 behind an odd end."""
    even = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, (-1, 2))
    packed: Tensor = even[..., 0] | even[..., 1] << 4
    return packed
