"""grouped_linear and grouped_quantized_linear of few rows: numbers, bits and gradients."""

import hashlib
import re
from typing import Any

import pytest
import torch
from grouped_linear_cases import offsets_of
from grouped_rows_cases import (
    FORMS,
    Tokens,
    assert_bits,
    assert_bits_of_codes,
    assert_right,
    codes_of,
    quantized,
    rows_of,
    tokens_of,
    weights,
)
from quantized_linear_cases import WEIGHTS
from samples import BF16, DTYPES, F32, make
from torch import Tensor

from deepspeed_ext.ops import (
    grouped_linear,
    grouped_linear_ref,
    grouped_quantized_linear,
    grouped_quantized_linear_ref,
    skinny_linear,
    unpack_weight,
)

OPS = torch.ops.deepspeed_ext
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Tokens, choices, experts, columns, length: around vectors, blocks, chunks, and what a call takes.
SIZES = [(1, 1, 1, 1, 1), (1, 8, 60, 37, 70), (13, 2, 5, 33, 15), (64, 8, 9, 70, 33)]
SIZES += [(9, 3, 4, 8, 4104), (2, 1, 3, 300, 64), (100, 5, 2, 5, 7)]
ENDS = {
    "one": [1],
    "all to one": [0, 0, 512, 512],
    "none": [0, 0, 0],
    "64 and 65": [64, 64, 129],
    "a row each": list(range(1, 200)),
    "behind": [3, 3, 20],
}


def digest(device: str = "cpu") -> str:
    """Return a digest of the bits of results."""
    found = hashlib.sha256()
    for dtype in DTYPES:
        for tokens, k, experts, n, length in SIZES[:-2]:
            given = tokens_of(tokens, min(k, experts), experts, length, dtype)
            given = Tokens(*(tensor.to(device) for tensor in given))
            weight, bias = (t.to(device) for t in weights(experts, n, length, dtype, True))
            form = dict(slots=given.slots, activation="silu", gated=True)
            result = grouped_linear(given.x, weight, given.offsets, bias, **form)
            found.update(result.cpu().view(torch.uint8).numpy().tobytes())
    if device == "cpu":  # that of codes is on CUDA by torch
        given = tokens_of(13, 2, 5, 70, BF16)
        for kind in WEIGHTS:
            packed, _ = codes_of(5, 33, 70, kind, 32)
            for input_format in (None, "int8") if kind[0] != "nf4" else (None,):
                result = quantized(given, packed, input_format=input_format)
                found.update(result.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("size", SIZES, ids=str)
@each_dtype
def test_numbers_and_bits(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    tokens, k, experts, n, length = size
    given = tokens_of(tokens, min(k, experts), experts, length, dtype)
    for form in FORMS:
        weight, bias = weights(experts, n, length, dtype, form["gated"])
        for there in (None, bias):
            got = assert_right(given, weight, there, **form)
            assert_bits(got, given.rows, weight, given.offsets, there, **form)


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@each_dtype
def test_shares_of_rows(dtype: torch.dtype, ends: list[int]) -> None:
    """Without slots; what is behind the last offset reaches nothing."""
    offsets = torch.tensor(ends, dtype=torch.int32)
    rows = make((min(512, ends[-1] + 5), 40), dtype, 0)
    weight, bias = weights(len(ends), 21, 40, dtype, False)
    x = rows.clone()
    x[ends[-1] :] = torch.nan
    for there in (None, bias):
        got = grouped_linear(x, weight, offsets, there)
        assert got.shape == (len(x), 21)
        assert_bits(got, rows, weight, offsets, there)
    assert grouped_linear(x[:0], weight, offsets * 0, bias).shape == (0, 21)


@pytest.mark.parametrize("kind", WEIGHTS, ids=str)
def test_codes(kind: tuple[str, bool]) -> None:
    for tokens, k, experts, n, length, group in (
        (1, 3, 9, 7, 300, 32),
        (13, 2, 5, 33, 70, 20),
        (40, 4, 6, 18, 260, 128),
        (5, 2, 3, 70, 1100, 1100),
    ):
        given = tokens_of(tokens, k, experts, length, BF16)
        for form in FORMS:
            columns = 2 * n if form["gated"] else n
            packed, each = codes_of(experts, columns, length, kind, group)
            bias = make((experts, columns), BF16, 2)
            for input_format in (None, "int8") if kind[0] != "nf4" else (None,):
                options = form | dict(input_format=input_format)
                got = quantized(given, packed, bias, **options)
                assert got.shape == (given.slots.numel(), n)
                assert_bits_of_codes(got, given.rows, each, given.offsets, bias, **options)


@each_dtype
def test_codes_as_the_reference_has_them(dtype: torch.dtype) -> None:
    given = tokens_of(13, 2, 5, 70, dtype)
    packed, _ = codes_of(5, 20, 70, ("int4", True), 32)
    for form in FORMS:
        got = quantized(given, packed, **form)
        options = dict(slots=given.slots, **form)
        want = grouped_quantized_linear_ref(given.x, packed, given.offsets, **options)
        bound = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), want, rtol=bound, atol=1e-5 + bound)


def test_a_row_is_the_same_alone() -> None:
    """As 1 of 512 rows, whatever the others are; at another place of its expert too."""
    given = tokens_of(64, 8, 16, 96, BF16)
    weight, bias = weights(16, 40, 96, BF16, True)
    packed, _ = codes_of(16, 80, 96, ("int8", False), 32)
    form: dict[str, Any] = dict(activation="silu", gated=True)
    ways = [
        lambda x, slots, ends: grouped_linear(x, weight, ends, bias, slots=slots, **form),
        lambda x, slots, ends: quantized(Tokens(x, slots, ends, x), packed, bias, **form),
    ]
    for way in ways:
        want = way(given.x, given.slots, given.offsets)
        for token in (0, 17, 63):
            places = given.slots[token][given.slots[token] >= 0]
            experts = torch.searchsorted(given.offsets, places, right=True)
            order = experts.argsort()
            counts = torch.bincount(experts, minlength=16)
            alone = way(
                given.x[token : token + 1], order.argsort()[None], offsets_of(counts.tolist())
            )
            assert torch.equal(alone, want[places[order]])
        x = torch.full_like(given.x, torch.nan)
        x[17] = given.x[17]
        places = given.slots[17][given.slots[17] >= 0]
        assert torch.equal(way(x, given.slots, given.offsets)[places], want[places])


@each_dtype
def test_layouts(dtype: torch.dtype) -> None:
    """Weights at odd addresses, further apart, expanded; those that torch has to multiply."""
    given = tokens_of(13, 2, 5, 33, dtype)
    weight, bias = weights(5, 12, 33, dtype, False)
    want = grouped_linear(given.x, weight, given.offsets, bias, slots=given.slots)
    odd = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(weight.shape)
    apart = torch.cat([weight, weight], 1).repeat(1, 1, 2)[:, :12, :33]
    for other in (odd, apart):
        got = grouped_linear(given.x, other, given.offsets, bias, slots=given.slots)
        assert torch.equal(got, want)
    same = grouped_linear(given.x, weight[:1].expand(5, 12, 33), given.offsets, slots=given.slots)
    assert torch.equal(same[: len(given.rows)][:64], skinny_linear(given.rows[:64], weight[0]))
    for change in (lambda t: t.mT.contiguous().mT, lambda t: torch.stack([t, t], -1)[..., 0]):
        got = grouped_linear(given.x, change(weight), given.offsets, bias, slots=given.slots)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    x = torch.cat([given.x, given.x], 1)[:, 5:38].copy_(given.x).unflatten(0, (13, 1))
    slots = given.slots.unflatten(0, (13, 1))
    assert torch.equal(grouped_linear(x, weight, given.offsets, bias, slots=slots), want)


@pytest.mark.parametrize("tokens", [13, 300])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradients(form: dict[str, Any], tokens: int) -> None:
    """Those of the reference, of few rows and of more than the kernel takes."""
    given = tokens_of(tokens, 2, 5, 24, F32)
    weight, bias = weights(5, 10, 24, F32, form["gated"])
    grad = make((given.slots.numel(), 10), F32, 9)
    for slots, x in ((given.slots, given.x), (None, given.x)):
        offsets = given.offsets if slots is not None else given.offsets // 2
        passed = grad if slots is not None else grad[: len(x)]
        found = []
        for function, dtype in ((grouped_linear, F32), (grouped_linear_ref, torch.float64)):
            leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, weight, bias)]
            out = function(*leaves[:2], offsets, leaves[2], slots=slots, **form)
            found.append([out, *torch.autograd.grad(out, leaves, passed.to(dtype))])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=5e-5)


@pytest.mark.parametrize("tokens", [13, 300])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradients_of_codes(form: dict[str, Any], tokens: int) -> None:
    """Those of the floats that the codes stand for."""
    given = tokens_of(tokens, 2, 5, 40, F32)
    columns = 20 if form["gated"] else 10
    packed, _ = codes_of(5, columns, 40, ("int4", False), 16)
    floats = unpack_weight(packed).view(5, columns, 40)
    bias, grad = make((5, columns), F32, 2), make((given.slots.numel(), 10), F32, 9)
    found = []
    for function, weight in ((grouped_quantized_linear, packed), (grouped_linear, floats)):
        leaves = [t.clone().requires_grad_() for t in (given.x, bias)]
        out = function(leaves[0], weight, given.offsets, leaves[1], slots=given.slots, **form)
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    wanted = packed._replace(scales=packed.scales.requires_grad_())
    text = "^grouped_quantized_linear: scales requires a gradient, expected none"
    with pytest.raises(RuntimeError, match=text):
        quantized(given, wanted)


@pytest.mark.parametrize("form", FORMS[::2], ids=str)
def test_opcheck(form: dict[str, Any]) -> None:
    given = tokens_of(5, 2, 3, 8, F32)
    weight, bias = weights(3, 6, 8, F32, form["gated"])
    packed, _ = codes_of(3, weight.shape[1], 8, ("int8", True), 8)
    options = form | dict(activation={None: None, "silu": 4}[form["activation"]])
    of_codes = options | dict(format=0, group_size=8, integer=False)
    products = dict(format=0, group_size=8, length=8, transposed=False)
    for needs in (False, True):
        x, w, b = (t.detach().requires_grad_(needs) for t in (given.x, weight, bias))
        slots, offsets = (given.slots, given.offsets) if needs else (None, given.offsets // 2)
        for op, args, keywords in (
            (OPS.grouped_linear.few, (x, w, offsets, b, slots), options),
            (OPS.grouped_quantized_linear.w8, (x, *packed[:3], offsets, b, slots), of_codes),
            (OPS.grouped_quantized_products.default, (x, *packed[:3], given.offsets // 2, b),
             products),
        ):  # fmt: skip
            checked = torch.library.opcheck(op, args, keywords)
            assert set(checked.values()) == {"SUCCESS"}


def test_compiled() -> None:
    """In one graph, with the kernel where rows are known to be few."""
    given = tokens_of(5, 2, 3, 24, BF16)
    weight, bias = weights(3, 10, 24, BF16, True)
    packed, _ = codes_of(3, 20, 24, ("int4", False), 24)

    def block(x: Tensor, slots: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        form = dict(slots=slots, activation="silu", gated=True)
        return (
            grouped_linear(x * 2, weight, offsets, bias, **form),
            grouped_quantized_linear(x * 2, packed, offsets, bias, **form),
        )

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph

    for dynamic in (False, True):
        torch.compiler.reset()
        graphs.clear()
        compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend=keep)
        for got, want in zip(compiled(*given[:3]), block(*given[:3]), strict=True):
            if not dynamic:
                assert torch.equal(got, want)
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        assert len(graphs) == 1 and ("grouped_linear.few" in graphs[0].code) == (not dynamic)


X, W, ENDS_OF_3 = torch.ones(3, 4), torch.ones(3, 6, 4), offsets_of([2, 0, 3])
SLOTS = torch.tensor([[0, 2], [1, 3], [4, -1]])
REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "slots has 5 as its element number 4, expected a row before 5, the last of the offsets, or -1":
        ((X, W, ENDS_OF_3), dict(slots=SLOTS + (SLOTS == 4))),
    "slots has -2 as its element number 5, expected a row before 5, the last of the offsets, or -1":
        ((X, W, ENDS_OF_3), dict(slots=SLOTS - (SLOTS == -1).long())),
    "slots has 3 as its element number 4, expected a row that no other element is":
        ((X, W, ENDS_OF_3), dict(slots=SLOTS - (SLOTS == 4).long())),
    "slots has 4 rows, expected 5, the last of the offsets":
        ((X, W, ENDS_OF_3), dict(slots=SLOTS.where(SLOTS < 4, -1))),
    "offsets[1] is 1, expected a number from 2 to 6":
        ((X, W, ENDS_OF_3 - torch.tensor([0, 1, 0]).int()), dict(slots=SLOTS)),
    "offsets[2] is 7, expected a number from 2 to 6":
        ((X, W, ENDS_OF_3 + torch.tensor([0, 0, 2]).int()), dict(slots=SLOTS)),
    "slots is int32, expected int64": ((X, W, ENDS_OF_3), dict(slots=SLOTS.int())),
    "slots has shape [2, 2], expected the choices of each token beside x with shape [3, 4]":
        ((X, W, ENDS_OF_3), dict(slots=SLOTS[:2])),
    "slots has shape [6], expected the choices of each token beside x with shape [3, 4]":
        ((X, W, ENDS_OF_3), dict(slots=SLOTS.flatten())),
    "bias has shape [3, 5], expected [3, 6]":
        ((X, W, ENDS_OF_3, torch.ones(3, 5)), dict(slots=SLOTS)),
    "gated is True, expected an activation beside it":
        ((X, W, ENDS_OF_3), dict(slots=SLOTS, gated=True)),
    "activation is 'swish', expected one of gelu, gelu_tanh, gelu_quick, relu, silu":
        ((X, W, ENDS_OF_3), dict(slots=SLOTS, activation="swish")),
    "weight has 5 rows for each expert, expected an even number, as gated is True":
        ((X, W[:, :5], ENDS_OF_3), dict(slots=SLOTS, activation="silu", gated=True)),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    args, options = REFUSED[text]
    with pytest.raises(ValueError, match=f"^grouped_linear: {re.escape(text)}$"):
        grouped_linear(*args, **options)


def test_refuses_codes() -> None:
    packed, _ = codes_of(3, 6, 4, ("int4", False), 4)
    for text, call in {
        "codes has 18 rows, expected as many for each of 4 experts":
            lambda: grouped_quantized_linear(X, packed, offsets_of([1, 1, 1, 0])),
        "offsets[0] is -1, expected a number from 0 to 3":
            lambda: grouped_quantized_linear(X, packed, ENDS_OF_3 - 3),
        "x has shape [3, 3], expected [..., 4]":
            lambda: grouped_quantized_linear(X[:, :3], packed, ENDS_OF_3),
        "input_format is 'int4', expected None or 'int8'":
            lambda: grouped_quantized_linear(X, packed, ENDS_OF_3, input_format="int4"),
        "slots has 3 as its element number 4, expected a row that no other element is":
            lambda: grouped_quantized_linear(
                X, packed, ENDS_OF_3, slots=SLOTS - (SLOTS == 4).long()
            ),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"^grouped_quantized_linear: {re.escape(text)}$"):
            call()


def test_more_rows_than_the_kernel_takes_are_torchs() -> None:
    given = tokens_of(257, 2, 5, 24, F32)
    weight, bias = weights(5, 10, 24, F32, True)
    form: dict[str, Any] = dict(activation="silu", gated=True)
    assert_right(given, weight, bias, **form)
    with pytest.raises(ValueError, match=r"^grouped_linear: slots has 514 elements, expected"):
        OPS.grouped_linear.few(
            given.x, weight, given.offsets, bias, given.slots, activation=4, gated=True
        )
    packed, _ = codes_of(5, 20, 24, ("int8", False), 8)
    for input_format in (None, "int8"):
        options = form | dict(slots=given.slots, input_format=input_format)
        got = grouped_quantized_linear(given.x, packed, given.offsets, bias, **options)
        want = grouped_quantized_linear_ref(given.x, packed, given.offsets, bias, **options)
        torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.02)
    assert torch.equal(rows_of(given.x, given.slots, len(given.rows)), given.rows)
