"""Layers of up to 16 rows with more columns than processors, on CUDA: the bits of other kernels."""

from typing import Any

import pytest
import torch
from quantized_linear_cases import EVERYTHING, INTEGERS, arguments, assert_right
from samples import BF16, F32, make

from deepspeed_ext.ops import NextNorm, Undivided, quantized_linear, quantized_linear_norm

each_kind = pytest.mark.parametrize("kind", INTEGERS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
# Columns, length, group: a warp has one tile or several, scales come in one box or two, blocks are
# as many as processors or more; split-K parts of whole lines and not, and of none; other groups.
SIZES = [
    *((4100, 1024, 128), (3000, 1088, 128), (14336, 1280, 128), (18000, 512, 128)),
    *((40000, 256, 128), (4096, 14336, 128), (2304, 4096, 512), (3000, 1088, 32)),
]
FORMS: tuple[dict[str, Any], ...] = ({}, {"gated": True, "activation": "silu"}, EVERYTHING)
ROWS = [(0, 1), (3, 5), (0, 8), (7, 16), (0, 16)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@each_dtype
@each_kind
def test_rows_have_the_bits_that_they_have_beside_more(
    kind: tuple[str, bool], dtype: torch.dtype, size: tuple[int, int, int], cuda: str
) -> None:
    n, k, group = size
    for form in FORMS:
        x, weight, options = arguments(33, n, k, dtype, kind, group, cuda, **form)
        want, residual = quantized_linear(x, weight, **options), options.pop("residual")
        for begin, end in ROWS:
            added = None if residual is None else residual[begin:end]
            got = quantized_linear(x[begin:end], weight, residual=added, **options)
            assert torch.equal(got, want[begin:end])


@each_kind
def test_they_are_multiplied_there(kind: tuple[str, bool], cuda: str) -> None:
    """Whoever asks for other kernels by mistake would find the right bits, too."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    for rows, n, k in [(1, 4096, 4096), (16, 2304, 1024)]:
        x, weight, options = arguments(rows, n, k, BF16, kind, 128, cuda)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            quantized_linear(x, weight, **options)
            torch.cuda.synchronize()
        assert any("rings" in event.name for event in profile.events() or ())


@each_kind
def test_rows_that_no_engine_copies_have_the_same_bits(kind: tuple[str, bool], cuda: str) -> None:
    x, weight, options = arguments(16, 3000, 1024, BF16, kind, 128, cuda, bias=True)
    assert_right(x, weight, options)
    apart = torch.empty(16 * 1024 + 1, dtype=BF16, device=cuda)[1:].view(16, 1024).copy_(x)
    for rows in (1, 8, 16):
        want = quantized_linear(apart[:rows], weight, **options)
        assert torch.equal(quantized_linear(x[:rows], weight, **options), want)


@each_kind
def test_norms_around(kind: tuple[str, bool], cuda: str) -> None:
    x, weight, options = arguments(33, 4096, 2048, BF16, kind, 128, cuda, bias=True)
    before = Undivided(x, make((33, 256), F32, 4, cuda).square(), 1e-6)
    norm = NextNorm(make((4096,), BF16, 5, cuda))
    want, after = quantized_linear_norm(before, weight, options["bias"], norm=norm)
    for begin, end in ROWS:
        part = Undivided(x[begin:end], before.squares[begin:end], 1e-6)
        got, begun = quantized_linear_norm(part, weight, options["bias"], norm=norm)
        assert torch.equal(got, want[begin:end])
        assert torch.equal(begun.x, after.x[begin:end])
        assert torch.equal(begun.squares, after.squares[begin:end])


@pytest.mark.parametrize("rows", [1, 8, 9, 16])
def test_layers_of_a_graph_read_what_those_before_them_wrote(rows: int, cuda: str) -> None:
    x, weight, _ = arguments(rows, 4096, 4096, BF16, ("int4", False), 128, cuda)
    norm = NextNorm(make((4096,), BF16, 5, cuda))

    def layers(wait: bool) -> torch.Tensor:
        out, begun = quantized_linear_norm(x, weight, norm=norm)
        for _ in range(7):
            if wait:
                torch.cuda.synchronize()
            out, begun = quantized_linear_norm(begun, weight, norm=norm, residual=x)
        return out

    want, stream = layers(wait=True), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = layers(wait=False)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want)
