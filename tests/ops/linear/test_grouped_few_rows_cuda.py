"""Few rows of experts on CUDA: the bits of a layer of one expert alone."""

from typing import Any

import pytest
import torch
from grouped_rows_cases import (
    FORMS,
    Tokens,
    assert_bits,
    assert_bits_of_codes,
    codes_of,
    quantized,
    tokens_of,
    weights,
)
from samples import BF16, DTYPES, F32, make
from torch import Tensor

from deepspeed_ext.ops import PackedWeight, grouped_linear

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Tokens, choices, experts, columns, length: by the copy engine and piece by piece, in one share of
# an expert and in several, more shares than blocks.
SIZES = [(1, 8, 60, 37, 70), (1, 2, 8, 136, 512), (13, 2, 5, 33, 15), (64, 8, 33, 70, 128)]
SIZES += [(9, 3, 4, 8, 4160), (64, 1, 1, 40, 256), (32, 8, 128, 96, 192)]


def there(device: str, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]


def _moved(weight: PackedWeight, device: str) -> PackedWeight:
    return PackedWeight(*(t.to(device) if isinstance(t, Tensor) else t for t in weight))


@pytest.mark.parametrize("size", SIZES, ids=str)
@each_dtype
def test_bits_are_those_of_skinny_linear(
    dtype: torch.dtype, size: tuple[int, ...], cuda: str
) -> None:
    tokens, k, experts, n, length = size
    given = Tokens(*there(cuda, *tokens_of(tokens, min(k, experts), experts, length, dtype)))
    for form in FORMS:
        weight, bias = there(cuda, *weights(experts, n, length, dtype, form["gated"]))
        for beside in (None, bias):
            got = grouped_linear(given.x, weight, given.offsets, beside, slots=given.slots, **form)
            assert_bits(got, given.rows, weight, given.offsets, beside, **form)
        apart = torch.cat([weight, weight], 1)[:, : weight.shape[1]]
        got = grouped_linear(given.x, apart, given.offsets, slots=given.slots, **form)
        assert_bits(got, given.rows, weight, given.offsets, None, **form)


@each_dtype
def test_rows_of_nobody(dtype: torch.dtype, cuda: str) -> None:
    """They are zeros, whatever lies there; a share ends with its expert."""
    weight, _ = there(cuda, *weights(3, 600, 128, dtype, False))
    for ends in ([0, 0, 0], [3, 3, 20], [17, 17, 17], [0, 9, 40]):
        offsets = torch.tensor(ends, dtype=torch.int32, device=cuda)
        rows = make((44, 128), dtype, 0, cuda)
        rows[ends[-1] :] = torch.nan
        assert_bits(grouped_linear(rows, weight, offsets), rows, weight, offsets, None)


def test_offsets_that_are_none(cuda: str) -> None:
    """Nothing is read or written beyond the rows; results are undefined."""
    weight, _ = there(cuda, *weights(4, 24, 128, BF16, False))
    rows = make((30, 128), BF16, 0, cuda)
    for ends in ([40, 2, -5, 90], [2**31 - 1] * 4, [-(2**31)] * 4):
        offsets = torch.tensor(ends, dtype=torch.int32, device=cuda)
        grouped_linear(rows, weight, offsets)
    slots = torch.tensor([[5, 7, 2**40], [-9, 1, 1]], device=cuda)
    offsets = torch.tensor([2, 3, 4, 6], dtype=torch.int32, device=cuda)
    grouped_linear(rows[:2], weight, offsets, slots=slots)
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", [("int4", False), ("int4", True), ("int8", True), ("nf4", False)])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_bits_are_those_of_quantized_linear(
    dtype: torch.dtype, kind: tuple[str, bool], cuda: str
) -> None:
    for tokens, k, experts, n, length, group in (
        (1, 3, 9, 8, 512, 128),
        (13, 2, 5, 33, 70, 20),
        (40, 4, 10, 20, 256, 32),
        (32, 8, 40, 48, 768, 64),
    ):
        given = Tokens(*there(cuda, *tokens_of(tokens, k, experts, length, dtype)))
        for form in FORMS:
            columns = 2 * n if form["gated"] else n
            of_all, of_each = codes_of(experts, columns, length, kind, group)
            packed, *each = (_moved(weight, cuda) for weight in (of_all, *of_each))
            bias = make((experts, columns), dtype, 2, cuda)
            for input_format in (None, "int8") if kind[0] != "nf4" else (None,):
                options: dict[str, Any] = form | dict(input_format=input_format)
                got = quantized(given, packed, bias, **options)
                assert_bits_of_codes(got, given.rows, each, given.offsets, bias, **options)


def test_a_captured_call_follows_its_numbers(cuda: str) -> None:
    """Of a graph: the experts are those that the offsets say when it runs."""
    weight, _ = there(cuda, *weights(6, 40, 128, BF16, False))
    tokens = [Tokens(*there(cuda, *tokens_of(9, 2, 6, 128, BF16, seed))) for seed in (0, 1, 2)]
    x, slots, offsets = (tensor.clone() for tensor in tokens[0][:3])
    grouped_linear(x, weight, offsets, slots=slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = grouped_linear(x, weight, offsets, slots=slots)
    for given in tokens:
        for into, value in zip((x, slots, offsets), given, strict=False):
            into.copy_(value)
        graph.replay()
        assert_bits(got, given.rows, weight, given.offsets, None)
