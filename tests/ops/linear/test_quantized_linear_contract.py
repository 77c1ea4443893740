"""quantized_linear: what has the same bits, what torch may do with it, and what it refuses."""

import hashlib
import itertools
import re
from functools import partial
from typing import Any

import pytest
import torch
from allocated import Taken, measured, share
from at_once import in_threads
from quantized_linear_cases import EVERYTHING, INTEGERS, WEIGHTS, arguments, weight_of
from samples import BF16, DTYPES, F32, make
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from deepspeed_ext.ops import (
    NextNorm,
    PackedWeight,
    Undivided,
    quantized_linear,
    quantized_linear_norm,
    unpack_weight,
)
from deepspeed_ext.ops.quantization.packed_weight import row_bytes

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_kind = pytest.mark.parametrize("kind", WEIGHTS, ids=str)
FORMS = pytest.mark.parametrize("form", [{}, EVERYTHING], ids=["plain", "everything"])


def ways_of(kind: tuple[str, bool]) -> tuple[str | None, ...]:
    """Return the `input_format` that a format is for."""
    return (None, "int8") if kind in INTEGERS else (None,)


def op_of(kind: tuple[str, bool]) -> Any:
    packet = torch.ops.deepspeed_ext.quantized_linear
    return packet.w8 if kind[0] == "int8" else packet.w4


def digest(device: str = "cpu") -> str:
    """Return a digest of the bits of results."""
    found = hashlib.sha256()
    sizes = (
        (1, 130, 600, 32),
        (2, 20, 700, 128),
        (3, 66, 83, 83),
        (5, 70, 300, 20),
        (9, 9, 130, 64),
    )
    for kind, (rows, n, k, group) in itertools.product(WEIGHTS, sizes):
        for i, input_format in enumerate(ways_of(kind)):
            form = EVERYTHING if rows % 2 else {}
            dtype = DTYPES[(rows + i) % 3]
            x, weight, options = arguments(rows, n, k, dtype, kind, group, device, **form)
            result = quantized_linear(x, weight, **options, input_format=input_format)
            for tensor in (result, unpack_weight(weight, dtype)):
                found.update(tensor.cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@FORMS
@pytest.mark.parametrize(
    ("n", "k", "group"), [(40, 96, 32), (33, 1001, 100), (70, 4096, 128), (70, 5000, 48)]
)
@each_kind
def test_a_row_is_the_same_in_any_batch(
    kind: tuple[str, bool], n: int, k: int, group: int, form: dict[str, Any], device: str
) -> None:
    """Alone, at any place, at another address, among any number of rows that are not finite."""
    for input_format in ways_of(kind):
        x, weight, options = arguments(64, n, k, BF16, kind, group, device, **form)
        options["input_format"], residual = input_format, options.pop("residual")
        want = quantized_linear(x, weight, residual=residual, **options)
        for row in (0, 1, 15, 63):
            added = None if residual is None else residual[row : row + 1]
            got = quantized_linear(x[row : row + 1], weight, residual=added, **options)
            assert torch.equal(got[0], want[row])
        for rows in (2, 3, 4, 5, 8, 9, 16, 33, 63):
            room = torch.full((rows * k + 1,), torch.nan, dtype=BF16, device=device)
            there = room[1:].view(rows, k)
            place = rows * 2 // 3
            there[place] = x[5]
            added = None if residual is None else residual[5].expand(rows, n)
            got = quantized_linear(there, weight, residual=added, **options)
            assert torch.equal(got[place], want[5])


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@each_kind
def test_many_columns_of_a_row_are_the_same_in_any_batch(
    kind: tuple[str, bool], dtype: torch.dtype, cuda: str
) -> None:
    """So many that sums in another order, which rounding hides mostly, would be found."""
    for input_format in ways_of(kind):
        x, weight, _ = arguments(64, 8192, 4096, dtype, kind, 128, cuda)
        want = quantized_linear(x, weight, input_format=input_format)
        for begin, end in ((0, 1), (7, 12), (10, 26), (1, 33), (3, 64)):
            got = quantized_linear(x[begin:end], weight, input_format=input_format)
            assert torch.equal(got, want[begin:end])


@each_kind
def test_a_column_is_the_same_in_any_weight(kind: tuple[str, bool], device: str) -> None:
    for input_format, group in itertools.product(ways_of(kind), (32, 264, 24)):
        x, weight, _ = arguments(9, 300, 264, BF16, kind, group, device)
        want = quantized_linear(x, weight, input_format=input_format)
        for begin, end in ((0, 4), (8, 40), (296, 300), (100, 224)):
            part = slice(begin, end)
            cut = weight._replace(
                codes=weight.codes[part],
                scales=weight.scales[:, part].contiguous(),
                offsets=None if weight.offsets is None else weight.offsets[:, part].contiguous(),
            )
            got = quantized_linear(x, cut, input_format=input_format)
            assert torch.equal(got, want[:, part])


@pytest.mark.parametrize("input_format", [None, "int8"])
def test_two_threads(input_format: str | None, device: str) -> None:
    x, weight, options = arguments(9, 200, 264, BF16, ("int4", True), 32, device, **EVERYTHING)
    options["input_format"] = input_format
    want = quantized_linear(x, weight, **options)
    call = partial(quantized_linear, x, weight, **options)
    for found in in_threads(device, 20, call, call):
        assert all(torch.equal(got, want) for got in found)


def block(x: Tensor, first: PackedWeight, second: PackedWeight) -> Tensor:
    inner = quantized_linear(x * 2, first, activation="silu", gated=True)
    return quantized_linear(inner, second, residual=x, input_format="int8").sin()


@each_kind
def test_compiled_with_sizes_that_are_known(kind: tuple[str, bool], device: str) -> None:
    """The native op, in one graph, with the same bits and gradients."""
    torch.compiler.reset()
    first, second = (
        weight_of(80, 24, *kind, 8, device),
        weight_of(24, 40, "int8", False, 40, device),
    )
    compiled = torch.compile(block, fullgraph=True, dynamic=False, backend="aot_eager")
    found = []
    for function in (compiled, block):
        x = make((5, 24), F32, 0, device).requires_grad_()
        result = function(x, first, second)
        found.append([result.detach(), *torch.autograd.grad(result.sum(), x)])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def kept_graphs(function: Any, **options: Any) -> tuple[Any, list[Any]]:
    graphs: list[Any] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=keep, **options), graphs


@pytest.mark.parametrize("input_format", [None, "int8"])
@pytest.mark.parametrize("rows", [5, 70])
def test_compiled_with_sizes_that_are_not_known(
    rows: int, input_format: str | None, device: str
) -> None:
    """Torch multiplies, in one graph for any number of rows; nothing is compiled again."""
    weight = weight_of(24, 24, "int8", False, 24, device)
    compiled, graphs = kept_graphs(quantized_linear, dynamic=True)
    for count in (rows, 9, 66):
        x = make((count, 24), F32, 0, device)
        got = compiled(x, weight, input_format=input_format)
        want = quantized_linear(x, weight, input_format=input_format)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1 and "quantized_linear" not in graphs[0].code


def test_compiled_with_many_rows(device: str) -> None:
    """In one graph, by integers on CUDA, with the same bits."""
    weight = weight_of(24, 24, "int8", False, 24, device)
    compiled, graphs = kept_graphs(quantized_linear)
    x = make((70, 24), F32, 0, device)
    got = compiled(x, weight, input_format="int8")
    assert torch.equal(got, quantized_linear(x, weight, input_format="int8"))
    assert len(graphs) == 1 and ("_int_mm" in graphs[0].code) == (device == "cuda")


def test_meta() -> None:
    for rows in (5, 70):
        for input_format in (None, "int8"):
            weight = weight_of(6, 40, "int8", False, 40, "meta")
            x = torch.empty(rows, 40, device="meta", dtype=BF16)
            got = quantized_linear(x, weight, input_format=input_format)
            assert got.is_meta and got.shape == (rows, 6) and got.dtype == BF16


def test_compiled_with_few_rows_of_unknown_number(device: str) -> None:
    """The native op, if torch is told that there are no more."""
    weight = weight_of(30, 24, "int8", True, 8, device)
    compiled, graphs = kept_graphs(quantized_linear)
    for count in (5, 64, 2):
        x = make((count, 24), F32, 0, device)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
        assert torch.equal(compiled(x, weight), quantized_linear(x, weight))
    assert len(graphs) == 1 and "quantized_linear" in graphs[0].code


FORMAT_NUMBERS = dict(int8=0, int4=1, nf4=2)


@pytest.mark.parametrize(("rows", "k"), [(3, 41), (0, 8)])
@each_kind
def test_opcheck(kind: tuple[str, bool], rows: int, k: int, device: str) -> None:
    form = EVERYTHING if rows % 2 else {}
    for dtype in (F32, BF16):
        x, weight, options = arguments(rows, 6, k, dtype, kind, 4, device, **form)
        keywords = dict(
            format=FORMAT_NUMBERS[kind[0]],
            group_size=4,
            activation=None if options["activation"] is None else 4,
            gated=options["gated"],
        )
        for needs_grad, input_format in itertools.product((False, True), ways_of(kind)):
            leaves = (
                t if t is None else t.detach().requires_grad_(needs_grad)
                for t in (x, options["bias"], options["residual"])
            )
            first, *others = leaves
            given = (first, *weight[:3], *others)
            keywords["integer"] = input_format is not None
            checked = torch.library.opcheck(op_of(kind), given, keywords)
            assert set(checked.values()) == {"SUCCESS"}


@each_kind
def test_opcheck_of_unpack_weight(kind: tuple[str, bool], device: str) -> None:
    weight = weight_of(5, 41, *kind, 7, device)
    packet = torch.ops.deepspeed_ext.unpack_weight
    options = dict(format=FORMAT_NUMBERS[kind[0]], group_size=7, length=41, dtype=1)
    op = packet.w8 if kind[0] == "int8" else packet.w4
    checked = torch.library.opcheck(op, weight[:3], options)
    assert set(checked.values()) == {"SUCCESS"}


def test_flops_are_counted(device: str) -> None:
    for kind in WEIGHTS:
        x, weight, _ = arguments(5, 30, 40, F32, kind, 8, device)
        with FlopCounterMode(display=False) as counter:
            quantized_linear(x.view(1, 5, 40), weight)
        assert counter.get_total_flops() == 2 * 5 * 30 * 40


def works_of_memory() -> list[tuple[int, int, int, tuple[str, bool], int, str | None]]:
    """Return rows, n, k, kind, group and input_format."""
    sizes = [(1, 4096, 1024, 128), (64, 4096, 2048, 32), (64, 4096, 999, 20)]
    kinds = [("int4", True, None), ("int8", False, None), ("int4", False, "int8")]
    return [
        (rows, n, k, (format, offsets), group, input_format)
        for rows, n, k, group in sizes
        for format, offsets, input_format in kinds
    ]


def beside_the_result(device: str, taken: Taken) -> list[float]:
    """Return what calls take beside their results and codes of x, as shares of the operands."""
    found = []
    for rows, n, k, kind, group, input_format in works_of_memory():
        x, weight, options = arguments(rows, n // 2, k, BF16, kind, group, device, **EVERYTHING)
        options["input_format"] = input_format
        quantized_linear(x, weight, **options)
        result, extra = taken(quantized_linear, x, weight, **options)
        extra -= result.untyped_storage().nbytes() + (x.nbytes // 2 if input_format else 0)
        operands = sum(t.nbytes for t in (x, *weight[:3]) if t is not None)
        found.append(share(extra, operands))
    return found


def test_takes_no_memory(device: str) -> None:
    found = measured(beside_the_result, device)
    assert len(found) == len(works_of_memory()) and max(found) <= 0.01


ONES = torch.ones(2, 3, 40)
W4 = weight_of(6, 40, "int4", True, 16)
W8 = weight_of(6, 40, "int8", False, 16)
NF4 = weight_of(6, 40, "nf4", False, 16)
REFUSED: dict[str, tuple[Any, ...]] = {
    "x has shape [], expected [..., 40]": (torch.ones(()), W4),
    "x has shape [2, 41], expected [..., 40]": (torch.ones(2, 41), W4),
    "x has shape [2, 39], expected [..., 40]": (torch.ones(2, 39), W8),
    "x has shape [70, 128], expected [..., 40]": (torch.ones(70, 128), NF4),
    "x is float64, expected float32, bfloat16 or float16": (ONES.double(), W4),
    "codes is int8, expected uint8": (ONES, W8._replace(codes=W8.codes.view(torch.int8))),
    "codes has shape [6, 64], expected two dimensions, the last one of 128 bytes for length 40":
        (ONES, W8._replace(codes=W8.codes[:, :64].contiguous())),
    "codes has shape [768], expected two dimensions, the last one of 128 bytes for length 40":
        (ONES, W8._replace(codes=W8.codes.flatten())),
    "codes has shape [6, 128], expected two dimensions, the last one of 256 bytes for length 300":
        (torch.ones(300), W4._replace(length=300)),
    "codes has strides [1, 6], expected a contiguous tensor":
        (ONES, W4._replace(codes=W4.codes.t().contiguous().t())),
    "codes is on meta, expected cpu": (ONES, W4._replace(codes=W4.codes.to("meta"))),
    "scales is on meta, expected cpu": (ONES, W4._replace(scales=W4.scales.to("meta"))),
    "scales is bfloat16, expected float32": (ONES, W4._replace(scales=W4.scales.bfloat16())),
    "scales has shape [3, 6], expected [3, 8]":
        (ONES, W4._replace(scales=W4.scales[:, :6].contiguous())),
    "scales has shape [3, 8], expected [2, 8]": (ONES, W4._replace(group_size=20)),
    "scales has strides [1, 3], expected a contiguous tensor":
        (ONES, W4._replace(scales=W4.scales.t().contiguous().t())),
    "offsets has shape [8, 3], expected [3, 8]": (ONES, W4._replace(offsets=W4.offsets.t())),
    "offsets is a tensor, expected None, as nf4 is symmetric":
        (ONES, NF4._replace(offsets=NF4.scales)),
    "group_size is 41, expected 1 to 40, the length": (ONES, W4._replace(group_size=41)),
    "group_size is 0, expected 1 to 40, the length": (ONES, W4._replace(group_size=0)),
    "bias has shape [4], expected [6]": (ONES, W4, torch.ones(4)),
    "bias is float16, expected float32": (ONES, W4, torch.ones(6).half()),
    "residual has shape [6, 6], expected [2, 3, 6]": (ONES, W4, None, torch.ones(6, 6)),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    for weight in (W4, W8):  # loads the libraries, so that they are the ones that refuse
        quantized_linear(ONES, weight)
    x, weight, bias, residual = (*REFUSED[text], None, None)[:4]
    # Of a tensor on meta the fake says it, which knows overloads.
    with pytest.raises(ValueError, match=rf"^quantized_linear(\.w4)?: {re.escape(text)}$"):
        quantized_linear(x, weight, bias, residual=residual)


@pytest.mark.parametrize("rows", [1, 64, 65])
@each_kind
def test_refuses_rows_of_other_lengths(kind: tuple[str, bool], rows: int, device: str) -> None:
    """Also where the bytes of a row of codes are as many."""
    weight = weight_of(8, 1000, *kind, 100, device)
    norm = NextNorm(torch.ones(8, device=device))
    bits = 8 if kind[0] == "int8" else 4
    lengths = [k for k in range(800, 1100) if row_bytes(k, bits) == row_bytes(1000, bits)]
    assert len(lengths) > 100
    for k, input_format in itertools.product({*lengths, 8, 1032} - {1000}, ways_of(kind)):
        text = re.escape(f"x has shape [{rows}, {k}], expected [..., 1000]")
        x = torch.ones(rows, k, device=device)
        with pytest.raises(ValueError, match=f"^quantized_linear: {text}$"):
            quantized_linear(x.requires_grad_(), weight, input_format=input_format)
        for given in (x.detach(), Undivided(x, torch.ones(rows, k // 8, device=device), 1e-6)):
            with pytest.raises(ValueError, match=f"^quantized_linear_norm: {text}$"):
                quantized_linear_norm(given, weight, norm=norm, input_format=input_format)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_refuses_other_lengths(dynamic: bool, device: str) -> None:
    """After rows of the right one, too."""
    weight = weight_of(8, 40, "int8", False, 40, device)
    torch.compiler.reset()
    compiled = torch.compile(quantized_linear, dynamic=dynamic, backend="eager")
    for rows in (2, 70):
        assert compiled(torch.ones(rows, 40, device=device), weight).shape == (rows, 8)
        text = re.escape(f"x has shape [{rows}, 128], expected [..., 40]")
        with pytest.raises(ValueError, match=f"^quantized_linear: {text}$"):
            compiled(torch.ones(rows, 128, device=device), weight)


def test_refuses_other_devices(cuda: str) -> None:
    for name in ("codes", "scales", "offsets"):
        weight = W4._replace(**{name: getattr(W4, name).to(cuda)})
        text = f"{name} is on cuda:0, expected cpu"
        with pytest.raises(ValueError, match=f"^quantized_linear: {text}$"):
            quantized_linear(ONES, weight)


def test_unpack_weight_refuses() -> None:
    text = "unpack_weight: codes has shape [6, 128], expected two dimensions, the last one of 256"
    with pytest.raises(ValueError, match=f"^{re.escape(text)} bytes for length 300$"):
        unpack_weight(W4._replace(length=300))
    text = "unpack_weight: scales has shape [3, 8], expected [2, 8]"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        unpack_weight(W4._replace(group_size=20))
    with pytest.raises(ValueError, match=r"^unpack_weight: length is -1, expected 0 or more$"):
        unpack_weight(W4._replace(length=-1))
    options = dict(format=1, group_size=16, length=40, dtype=3)
    op = torch.ops.deepspeed_ext.unpack_weight.w4
    with pytest.raises(ValueError, match=r"^unpack_weight: dtype is 3, expected a number from 0 t"):
        op(*W4[:3], **options)


def test_refuses_forms_that_do_not_fit() -> None:
    for x in (ONES, torch.ones(65, 40)):
        text = "gated is True, expected an activation beside it"
        with pytest.raises(ValueError, match=f"^quantized_linear: {text}$"):
            quantized_linear(x, W4, gated=True)
        text = "activation is 'swish', expected one of gelu, gelu_tanh, gelu_quick, relu, silu"
        with pytest.raises(ValueError, match=f"^quantized_linear: {text}$"):
            quantized_linear(x, W4, activation="swish")
        text = "input_format is 'int4', expected None or 'int8'"
        with pytest.raises(ValueError, match=f"^quantized_linear: {text}$"):
            quantized_linear(x, W4, input_format="int4")
        text = "input_format is 'int8', expected None with nf4, whose levels are no integers"
        with pytest.raises(ValueError, match=f"^quantized_linear: {text}$"):
            quantized_linear(x, NF4, input_format="int8")
    odd = weight_of(5, 40, "int4", False, 16)
    text = "codes has 5 rows, expected an even number, as gated is True"
    with pytest.raises(ValueError, match=f"^quantized_linear: {re.escape(text)}$"):
        quantized_linear(ONES, odd, gated=True, activation="silu")
    with pytest.raises(ValueError, match=r"^quantized_linear: format is 'int3', expected one of"):
        quantized_linear(ONES, W4._replace(format="int3"))


def test_refuses_the_older_name_of_input_format() -> None:
    text = "activations is now input_format; give input_format='int8'$"
    calls: dict[str, Any] = {
        "quantized_linear": quantized_linear,
        "quantized_linear_norm": quantized_linear_norm,
    }
    for name, call in calls.items():
        given: dict[str, Any] = {} if call is quantized_linear else {"norm": None}
        with pytest.raises(TypeError, match=f"^{name}: {text}"):
            call(ONES, W4, **given, activations="int8")
        with pytest.raises(TypeError, match=f"^{name}: inputs is no argument$"):
            call(ONES, W4, **given, inputs="int8")


def test_the_ops_refuse() -> None:
    options: dict[str, Any] = dict(group_size=16, activation=None, gated=False, integer=False)
    ops = torch.ops.deepspeed_ext.quantized_linear
    text = "x has shape [5, 13, 40], expected at most 64 rows"
    with pytest.raises(ValueError, match=f"^quantized_linear: {re.escape(text)}$"):
        ops.w4(torch.ones(5, 13, 40), *W4[:3], None, None, format=1, **options)
    for format in (-1, 0, 3, 4, 5):
        text = f"format is {format}, expected 1 or 2, which have 4 bits"
        with pytest.raises(ValueError, match=f"^quantized_linear: {text}$"):
            ops.w4(ONES, *W4[:3], None, None, format=format, **options)
    for format in (-1, 1, 2, 3, 5):
        text = f"format is {format}, expected 0, which has 8 bits"
        with pytest.raises(ValueError, match=f"^quantized_linear: {text}$"):
            ops.w8(ONES, *W8[:3], None, None, format=format, **options)
    text = "input_format is 'int8', expected None with nf4, whose levels are no integers"
    with pytest.raises(ValueError, match=f"^quantized_linear: {text}$"):
        ops.w4(ONES, *NF4[:3], None, None, format=2, **options | dict(integer=True))


def test_freed_memory_is_refused() -> None:
    for name, count in (("codes", 768), ("scales", 24), ("offsets", 24)):
        gone = getattr(W4, name).clone()
        gone.untyped_storage().resize_(0)
        text = f"^quantized_linear: {name} has no memory, expected {count} elements$"
        with pytest.raises(ValueError, match=text):
            quantized_linear(ONES, W4._replace(**{name: gone}))
