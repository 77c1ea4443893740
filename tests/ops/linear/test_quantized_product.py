"""quantized_linear with more rows than a skinny GEMM has, where a kernel takes the codes."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activation_cases import ROUNDING
from quantized_linear_cases import INTEGERS, arguments, on_cpu, weight_of
from samples import BF16, F16, make
from tolerance import assert_within
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from deepspeed_ext.ops import (
    PackedWeight,
    quantized_linear,
    quantized_linear_ref,
    unpack_weight,
    unpack_weight_ref,
)
from deepspeed_ext.ops.linear import quantized_product

each_dtype = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
each_kind = pytest.mark.parametrize("kind", INTEGERS, ids=str)
# Columns, length, group: of tiles and lines, and not of whole ones; parts of lines, lines, rows.
SIZES = [(24, 64, 32), (130, 320, 64), (129, 576, 576), (260, 1088, 32), (40, 4096, 128)]
SIZES += [(1, 2048, 256), (256, 2368, 512), (3, 128, 128)]


@pytest.fixture(autouse=True)
def _of_a_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sizes be small, of which torch multiplies the floats otherwise."""
    if "cuda" not in request.fixturenames:
        return
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    monkeypatch.setattr(quantized_product, "_fills", lambda *_: True)


def op_of(weight: PackedWeight) -> Any:
    packet = torch.ops.deepspeed_ext.quantized_product
    return packet.w8 if weight.format == "int8" else packet.w4


def assert_right(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Compare with float64: elements of the weight are rounded, and sums in a few orders."""
    assert quantized_product._takes_codes(x, weight, bias)
    got = quantized_linear(x, weight, bias)
    far = None if bias is None else bias.cpu().double()
    want = quantized_linear_ref(x.cpu(), on_cpu(weight), far)
    unit = torch.finfo(x.dtype).eps / 2
    reach = F.linear(x.cpu().double().abs(), unpack_weight_ref(on_cpu(weight)).abs())
    error = unit * (reach + 2 * want.abs()) + (weight.length + 16) * 2 * ROUNDING * reach
    assert got.dtype == x.dtype and got.shape == want.shape
    assert_within("out", got.cpu(), want, error)
    return got


@pytest.mark.parametrize("rows", [65, 128, 129, 200, 256, 257, 384, 512])
@each_kind
@each_dtype
def test_numbers(dtype: torch.dtype, kind: tuple[str, bool], rows: int, cuda: str) -> None:
    for (n, k, group), bias in itertools.product(SIZES, (False, True)):
        x, weight, options = arguments(rows, n, k, dtype, kind, group, cuda, bias=bias)
        assert_right(x, weight, options["bias"])


@each_kind
@each_dtype
def test_elements_are_those_of_unpack_weight(
    dtype: torch.dtype, kind: tuple[str, bool], cuda: str
) -> None:
    """Rows of which one element is 1 find them, bit for bit."""
    for k, group in ((512, 32), (448, 64), (256, 128), (128, 128), (512, 512), (320, 320)):
        weight = weight_of(150, k, *kind, group, cuda)
        x = torch.eye(k, dtype=dtype, device=cuda)
        assert torch.equal(quantized_linear(x, weight), unpack_weight(weight, dtype).t())


@each_kind
def test_forms_are_those_of_torchs_product(kind: tuple[str, bool], cuda: str) -> None:
    for activation, gated in ((None, False), ("gelu", False), ("silu", True)):
        form: dict[str, Any] = dict(bias=True, residual=True, activation=activation, gated=gated)
        x, weight, options = arguments(100, 64, 256, BF16, kind, 64, cuda, **form)
        got = quantized_linear(x, weight, **options)
        wide: dict[str, Any] = {
            key: v.double() if isinstance(v, Tensor) else v for key, v in options.items()
        }
        want = quantized_linear_ref(x, weight, **wide)
        assert (got.double() - want).abs().max() <= 0.05 * want.abs().max()
        assert quantized_linear(
            x.view(4, 25, -1), weight, bias=options["bias"], activation=activation, gated=gated
        ).shape == (4, 25, 64)


@each_kind
@each_dtype
def test_anywhere_in_memory(dtype: torch.dtype, kind: tuple[str, bool], cuda: str) -> None:
    """What the copy engine does not take is copied, with the same results."""
    x, weight, options = arguments(70, 40, 320, dtype, kind, 64, cuda, bias=True)
    want = assert_right(x, weight, options["bias"])

    def moved(tensor: Tensor) -> Tensor:
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=cuda)
        return room[1:].view(tensor.shape).copy_(tensor)

    wider = torch.empty(70, 328, dtype=dtype, device=cuda)[:, :320].copy_(x)
    odd = torch.empty(70, 321, dtype=dtype, device=cuda)[:, :320].copy_(x)
    columns = x.t().contiguous().t()
    groups = torch.empty(7, 20, 320, dtype=dtype, device=cuda)[:, :10].copy_(x.view(7, 10, 320))
    for other in (moved(x), wider, odd, columns, groups):
        got = quantized_linear(other, weight, moved(options["bias"]))
        assert torch.equal(got.view(70, 40), want)
    alike = x[:1].expand(70, -1)
    assert torch.equal(
        quantized_linear(alike, weight), quantized_linear(alike.contiguous(), weight)
    )
    offsets = None if weight.offsets is None else moved(weight.offsets)
    weight = weight._replace(
        codes=moved(weight.codes), scales=moved(weight.scales), offsets=offsets
    )
    assert torch.equal(quantized_linear(x, weight, options["bias"]), want)


@each_kind
def test_what_is_not_finite_stays_in_its_row_and_column(kind: tuple[str, bool], cuda: str) -> None:
    x, weight, options = arguments(300, 140, 1088, BF16, kind, 64, cuda, bias=True)
    want = quantized_linear(x, weight, options["bias"])
    x[3, 5], x[299, -1], x[4, 0] = torch.nan, torch.inf, -torch.inf
    weight.scales[2, 7] = torch.nan
    got = quantized_linear(x, weight, options["bias"])
    assert not got[[3, 4, 299]].isfinite().any() and not got[:, 7].isfinite().any()
    rows = torch.ones(300, dtype=torch.bool, device=cuda)
    columns = torch.ones(140, dtype=torch.bool, device=cuda)
    rows[[3, 4, 299]], columns[7] = False, False
    assert torch.equal(got[rows][:, columns], want[rows][:, columns])


def test_the_same_again_elsewhere_and_in_a_graph(cuda: str) -> None:
    x, weight, _ = arguments(256, 512, 2048, BF16, ("int4", False), 128, cuda)
    want = assert_right(x, weight, None)
    for _ in range(20):
        assert torch.equal(quantized_linear(x, weight), want)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = quantized_linear(x, weight)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(other, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = quantized_linear(x, weight)
    x.copy_(make(tuple(x.shape), BF16, 7, cuda))
    graph.replay()
    assert torch.equal(out, quantized_linear(x, weight)) and not torch.equal(out, want)


@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=2)), ids=str)
def test_gradients(needs: tuple[bool, bool], cuda: str) -> None:
    x, weight, options = arguments(90, 48, 256, BF16, ("int8", True), 64, cuda, bias=True)
    bias = options["bias"]
    of = [each.requires_grad_(need) for each, need in zip((x, bias), needs, strict=True)]
    out = quantized_linear(x, weight, bias)
    assert out.requires_grad == any(needs)
    if not any(needs):
        return
    grad = make(tuple(out.shape), BF16, 5, cuda)
    out.backward(grad)
    floats = unpack_weight(weight, BF16)
    want = grad @ floats, grad.sum(0)
    for each, expected in zip(of, want, strict=True):
        assert each.grad is None or torch.equal(each.grad, expected)
        assert (each.grad is not None) == each.requires_grad


def test_compiled(cuda: str) -> None:
    x, weight, options = arguments(90, 48, 256, BF16, ("int4", False), 64, cuda, bias=True)
    compiled = torch.compile(quantized_linear, fullgraph=True, dynamic=False)
    assert torch.equal(
        compiled(x, weight, options["bias"]), quantized_linear(x, weight, options["bias"])
    )


@each_kind
def test_the_op(kind: tuple[str, bool], cuda: str) -> None:
    x, weight, options = arguments(90, 48, 256, BF16, kind, 64, cuda, bias=True)
    given = (x, weight.codes, weight.scales, weight.offsets, options["bias"])
    numbers = dict(format=0 if kind[0] == "int8" else 1, group_size=64)
    torch.library.opcheck(op_of(weight), given, numbers)
    with FlopCounterMode(display=False) as counter:
        quantized_linear(x, weight)
    assert counter.get_total_flops() == 2 * 90 * 48 * 256
    assert op_of(weight)(x[:0], *given[1:], **numbers).shape == (0, 48)
    wrong = [
        (dict(format=2 if kind[0] == "int4" else 9), "format|offsets|kernel"),
        (dict(group_size=48), "scales|kernel"),
    ]
    for change, words in wrong:
        with pytest.raises(Exception, match=words):
            op_of(weight)(*given, **(numbers | change))
    with pytest.raises(Exception, match="bias is float16, expected bfloat16"):
        op_of(weight)(*given[:4], options["bias"].half(), **numbers)


def test_weights_whose_blocks_leave_processors_idle_are_not_for_the_kernel() -> None:
    fills = quantized_product._fills
    assert fills(14_336, 256, 132) and fills(14_336, 512, 132) and fills(28_672, 100, 132)
    assert not fills(4096, 256, 132) and not fills(1, 65, 132)
    assert fills(4096, 512, 66) and not fills(17_024, 256, 132)  # one block more than there is room
