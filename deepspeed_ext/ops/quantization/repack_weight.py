"""Codes that others have packed into words of 32 bits, in the order that kernels read."""

import torch
from torch import Tensor

from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops._library import call_on_tensors, define
from deepspeed_ext.ops.quantization.formats import FORMATS, number_of
from deepspeed_ext.ops.quantization.quantize import LIBRARIES

_ROWS_ACROSS = (0, 2, 4, 6, 1, 3, 5, 7)  # in a word, from its lowest bits on

_op = define(
    "repack_weight_(Tensor words, Tensor? order, Tensor(a!) codes, *, int format, int length,"
    " bool biased, bool across) -> ()",
    LIBRARIES,
)


def repack_weight_(
    words: Tensor,
    codes: Tensor,
    order: Tensor | None = None,
    *,
    format: str,
    length: int,
    biased: bool = False,
    across: bool = False,
) -> None:
    """Write the codes of words, as GPTQ, AWQ and compressed-tensors pack them, as kernels read.

    Args:
        words: int32, of any strides, on the CPU or on CUDA. Along the rows, (n, words of a row):
            each has 8 consecutive elements of a row, of 8 bits 4, from its lowest bits on. Across
            them, (n / 8, length): each has an element of 8 rows, of these 0, 2, 4, 6, 1, 3, 5, 7.
        codes: (n, bytes of a row), uint8, contiguous: see ``PackedWeight``. All of it is written.
        order: (length,), int64: element i of a row of codes is element order[i] of one of words;
            None: element i. It has each number once, which CUDA does not check: there what lies
            beyond the length stands for 0.
        format: "int8", "int4" or "nf4".
        length: elements of a row.
        biased: of int8, whether 128 stands for 0, and not 0 as in two's complement.
        across: whether words are across the rows; of 4 bits only.

    See: csrc/quantization/repack.h draws both; ``repack_weight_ref_`` is the same in plain torch.
    """
    check_kinds("repack_weight_", words=(words, Tensor), codes=(codes, Tensor))
    call_on_tensors(
        _op,
        words,
        order,
        codes,
        format=number_of("repack_weight_", format),
        length=length,
        biased=biased,
        across=across,
    )
    torch.autograd.graph.increment_version(codes)


def repack_weight_ref_(
    words: Tensor,
    codes: Tensor,
    order: Tensor | None = None,
    *,
    format: str,
    length: int,
    biased: bool = False,
    across: bool = False,
) -> None:
    """Do what repack_weight_ does, in plain torch: its definition, for tests."""
    bits = FORMATS[number_of("repack_weight_ref_", format)].bits
    shifts = torch.arange(0, 32, bits, device=words.device)
    numbers = words[..., None] >> shifts & (1 << bits) - 1
    if across:
        in_rows = numbers[..., torch.tensor(_ROWS_ACROSS, device=words.device).argsort()]
        numbers = in_rows.transpose(1, 2).flatten(0, 1)
    else:
        numbers = numbers.flatten(1)[:, :length]
    numbers = numbers if order is None else numbers[:, order]
    padding = {"int8": 0, "int4": 8, "nf4": 7}[format]
    n, in_run = len(codes), 128 // bits
    padded = torch.full((n, codes.shape[1] * 8 // bits), padding, device=words.device)
    padded[:, :length] = numbers ^ (128 if biased and format == "int8" else 0)
    # Element 8 p + 2 w + h of a run is number p of half h of word w.
    runs = padded.view(n, padded.shape[1] // in_run, in_run // 8, 4, 2).permute(0, 1, 3, 4, 2)
    in_bytes = runs.reshape(n, codes.shape[1], 8 // bits)
    low, high = in_bytes[..., 0], in_bytes[..., -1] if bits == 4 else 0
    codes.copy_(low | high << 4)
