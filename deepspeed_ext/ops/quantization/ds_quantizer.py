"""Fake quantization in place, as older libraries call it."""

import torch
from torch import Tensor

from deepspeed_ext.dtypes import DTYPES
from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops._library import refuse_tangents
from deepspeed_ext.ops.quantization.fake_quantize import fake_quantize_

_FORMATS = {8: "int8", 4: "int4"}


def ds_quantizer(
    input: Tensor, groups: int = 1, bit_num: int = 8, sr: bool = False, asym: bool = False
) -> Tensor:
    """Round a tensor in place to what low-bit integers stand for, and return it.

    Autograd is not told, as of any change by an optimizer. Where ``deepspeed.ops.quantizer`` has
    2^bits + 1 levels with `asym`, or rounds results to integers, this has the levels of
    ``fake_quantize``, so the error is at most half of a scale.

    Args:
        input: contiguous, float32, bfloat16 or float16, on the CPU or on CUDA.
        groups: of equal size that the flat tensor is cut into; each has a scale of its own.
        bit_num: 8 or 4.
        sr: whether to round stochastically, with a seed from the default generator of the CPU.
        asym: whether groups have an offset, their least element.

    See: ``fake_quantize``, which makes a new tensor and has a gradient.
    """
    check_kinds("ds_quantizer", input=(input, Tensor))
    if bit_num not in _FORMATS:
        raise ValueError(f"ds_quantizer: bit_num is {bit_num}, expected 8 or 4")
    if input.dtype not in DTYPES:
        named = str(input.dtype).removeprefix("torch.")
        raise ValueError(f"ds_quantizer: input is {named}, expected float32, bfloat16 or float16")
    if groups < 1 or input.numel() % groups != 0:
        raise ValueError(
            f"ds_quantizer: groups is {groups}, expected a number that divides the"
            f" {input.numel()} elements of input"
        )
    if not input.is_contiguous():
        raise ValueError(
            f"ds_quantizer: input has strides {list(input.stride())} for shape"
            f" {list(input.shape)}, expected a contiguous tensor"
        )
    refuse_tangents("ds_quantizer", {"input": input})
    seed = int(torch.randint(2**62, (), device="cpu").item()) if sr else None
    rows = input.detach().view(groups, -1) if input.numel() else input.detach().view(1, 0)
    fake_quantize_(rows, _FORMATS[bit_num], symmetric=not asym, seed=seed)
    return input
