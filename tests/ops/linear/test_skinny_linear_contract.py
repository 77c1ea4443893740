"""skinny_linear: what has the same bits, what torch may do with it, and what it refuses."""

import hashlib
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from allocated import Taken, measured, share
from at_once import in_threads
from samples import BF16, DTYPES, F32, make
from skinny_linear_cases import EVERYTHING, arguments
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from deepspeed_ext.ops import skinny_linear

OP = torch.ops.deepspeed_ext.skinny_linear.default
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
FORMS = pytest.mark.parametrize("form", [{}, EVERYTHING], ids=["plain", "everything"])


def digest(device: str = "cpu") -> str:
    """Return a digest of the bits of results."""
    found = hashlib.sha256()
    for dtype in DTYPES:
        for rows, n, k in (
            (1, 300, 5000),
            (3, 131, 83),
            (8, 140, 4104),
            (13, 64, 96),
            (64, 70, 33),
        ):
            for form in ({}, EVERYTHING):
                x, weight, options = arguments(rows, n, k, dtype, device, **form)
                result = skinny_linear(x, weight, **options)
                found.update(result.cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@FORMS
@pytest.mark.parametrize(("n", "k"), [(40, 96), (33, 1001), (600, 4096), (70, 5000)])
@each_dtype
def test_a_row_is_the_same_in_any_batch(
    dtype: torch.dtype, n: int, k: int, form: dict[str, Any], device: str
) -> None:
    """Alone, at any place, at another address, among any number of rows that are not finite."""
    x, weight, options = arguments(64, n, k, dtype, device, **form)
    residual = options.pop("residual")
    want = skinny_linear(x, weight, residual=residual, **options)
    for row in (0, 1, 7, 8, 15, 16, 31, 32, 63):
        added = None if residual is None else residual[row : row + 1]
        got = skinny_linear(x[row : row + 1], weight, residual=added, **options)
        assert torch.equal(got[0], want[row])
    for rows in (2, 3, 4, 5, 8, 9, 16, 17, 33, 63):
        room = torch.full((rows * k + 1,), torch.nan, dtype=dtype, device=device)
        there = room[1:].view(rows, k)
        place = rows * 2 // 3
        there[place] = x[5]
        added = None if residual is None else residual[5].expand(rows, n)
        got = skinny_linear(there, weight, residual=added, **options)
        assert torch.equal(got[place], want[5])


@each_dtype
def test_a_column_is_the_same_in_any_weight(dtype: torch.dtype, device: str) -> None:
    x, weight, _ = arguments(9, 3000, 264, dtype, device)
    want = skinny_linear(x, weight)
    for begin, end in ((0, 1), (7, 40), (2999, 3000), (1000, 2024)):
        assert torch.equal(skinny_linear(x, weight[begin:end]), want[:, begin:end])


def test_two_threads(device: str) -> None:
    x, weight, options = arguments(9, 500, 264, BF16, device, **EVERYTHING)
    want = skinny_linear(x, weight, **options)
    call = partial(skinny_linear, x, weight, **options)
    for found in in_threads(device, 20, call, call):
        assert all(torch.equal(got, want) for got in found)


def block(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    inner = skinny_linear(x * 2, first, activation="silu", gated=True)
    return skinny_linear(inner, second, residual=x).sin()


def test_compiled_with_sizes_that_are_known(device: str) -> None:
    """The native op, in one graph, with the same bits and gradients."""
    torch.compiler.reset()
    made = (
        make((5, 24), F32, 0, device),
        make((80, 24), F32, 1, device),
        make((24, 40), F32, 2, device),
    )
    compiled = torch.compile(block, fullgraph=True, dynamic=False, backend="aot_eager")
    found = []
    for function in (compiled, block):
        leaves = [tensor.detach().requires_grad_() for tensor in made]
        result = function(*leaves)
        found.append([result.detach(), *torch.autograd.grad(result.sum(), leaves)])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("rows", [5, 70])
def test_compiled_with_sizes_that_are_not_known(rows: int, device: str) -> None:
    """Torch multiplies, in one graph for any number of rows; nothing is compiled again."""
    torch.compiler.reset()
    weights = make((80, 24), F32, 1, device) / 5, make((24, 40), F32, 2, device) / 6
    graphs: list[Any] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=keep)
    for count in (rows, 9, 66):
        x = make((count, 24), F32, 0, device)
        torch.testing.assert_close(compiled(x, *weights), block(x, *weights), rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1 and "skinny_linear" not in graphs[0].code


def test_compiled_with_few_rows_of_unknown_number(device: str) -> None:
    """The native op, if torch is told that there are no more."""
    torch.compiler.reset()
    weight, graphs = make((30, 24), F32, 1, device), []

    def keep(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(skinny_linear, fullgraph=True, backend=keep)
    for count in (5, 64, 2):
        x = make((count, 24), F32, 0, device)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
        assert torch.equal(compiled(x, weight), skinny_linear(x, weight))
    assert len(graphs) == 1 and "skinny_linear" in graphs[0].code


@pytest.mark.parametrize(("rows", "k"), [(3, 41), (0, 8)])
@FORMS
def test_opcheck(form: dict[str, Any], rows: int, k: int, device: str) -> None:
    for dtype in (F32, BF16):
        x, weight, options = arguments(rows, 6, k, dtype, device, **form)
        number = None if options["activation"] is None else 4
        for needs_grad in (False, True):
            tensors = (x, weight, options["bias"], options["residual"])
            given = tuple(
                t if t is None else t.detach().requires_grad_(needs_grad) for t in tensors
            )
            checked = torch.library.opcheck(
                OP, given, dict(activation=number, gated=options["gated"])
            )
            assert set(checked.values()) == {"SUCCESS"}


def test_meta() -> None:
    weight = torch.empty(6, 40, device="meta", dtype=BF16)
    for rows in (5, 70):
        got = skinny_linear(torch.empty(rows, 40, device="meta", dtype=BF16), weight)
        assert got.is_meta and got.shape == (rows, 6)


def test_flops_are_counted(device: str) -> None:
    x, weight, _ = arguments(5, 30, 40, F32, device)
    with FlopCounterMode(display=False) as counter:
        skinny_linear(x.view(1, 5, 40), weight)
    assert counter.get_total_flops() == 2 * 5 * 30 * 40


def sizes_of_memory() -> list[tuple[int, int, int]]:
    return [(1, 4096, 1024), (8, 2048, 4104), (64, 4096, 2048), (64, 4096, 999)]


def beside_the_result(device: str, taken: Taken) -> list[float]:
    """Return what calls take beside their results, as shares of the weight."""
    found = []
    for rows, n, k in sizes_of_memory():
        for form in ({}, EVERYTHING):
            x, weight, options = arguments(rows, n // 2, k, BF16, device, **form)
            skinny_linear(x, weight, **options)
            result, extra = taken(skinny_linear, x, weight, **options)
            extra -= result.untyped_storage().nbytes()
            found.append(share(extra, weight.nbytes))
    return found


def test_takes_no_memory(device: str) -> None:
    found = measured(beside_the_result, device)
    assert len(found) == 2 * len(sizes_of_memory()) and max(found) <= 0.01


def chain(x: Tensor, weights: list[Tensor]) -> Tensor:
    for weight in weights:
        x = skinny_linear(x, weight, activation="gelu_tanh", residual=x)
    return x


@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.parametrize("n", [512, 2048])
@each_dtype
def test_chains_in_a_graph(dtype: torch.dtype, n: int, rows: int, cuda: str) -> None:
    """Kernels that begin before those before them have ended: also where other kernels write the
    weights in between, and memory is used again."""
    weights = [arguments(1, n, n, dtype, cuda)[1] for _ in range(8)]
    others = [weight.flip(0) for weight in weights]
    x, room = make((rows, n), dtype, 5, cuda), torch.empty(n, n, dtype=dtype, device=cuda)

    def through_one_room(x: Tensor) -> Tensor:
        for weight in others:
            room.copy_(weight)
            x = skinny_linear(x, room, activation="gelu_tanh", residual=x)
        return x

    torch.cuda.synchronize()
    want = []
    for weight in weights:
        want.append(skinny_linear(want[-1] if want else x, weight, residual=want[-1] if want else x,
                                  activation="gelu_tanh"))  # fmt: skip
        torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        start = x.clone()
        chain(start, weights), through_one_room(start)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got, of_room = chain(start, weights), through_one_room(start)
    for value in (x, x * 2, x):
        start.copy_(value)
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(of_room, chain(value, others))
    assert torch.equal(got, want[-1])
    assert torch.equal(chain(x, weights), want[-1])
    assert torch.equal(through_one_room(x), chain(x, others))


def test_waits_for_nothing_and_the_stream_before_it(cuda: str) -> None:
    x, weight, options = arguments(9, 500, 264, BF16, cuda, **EVERYTHING)
    want = skinny_linear(x, weight, **options)
    late = torch.zeros_like(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            late.copy_(x)
            got = skinny_linear(late, weight, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.equal(got, want)


ONES = torch.ones(2, 3, 4)
REFUSED: dict[str, tuple[Tensor, ...]] = {
    "x has shape [], expected a dimension at least": (torch.ones(()), torch.ones(5, 4)),
    "x is float64, expected float32, bfloat16 or float16": (ONES.double(), torch.ones(5, 4)),
    "weight has shape [4], expected two dimensions, the last one of 4": (ONES, torch.ones(4)),
    "weight has shape [5, 3], expected two dimensions, the last one of 4": (ONES, torch.ones(5, 3)),
    "weight has strides [1, 5], expected 1 along the last dimension; call .contiguous() once, not"
    " in each call": (ONES, torch.ones(4, 5).t()),
    "weight is bfloat16, expected float32": (ONES, torch.ones(5, 4).bfloat16()),
    "weight is int64, expected float32, bfloat16 or float16": (ONES, torch.ones(5, 4).long()),
    "weight is on meta, expected cpu": (ONES, torch.ones(5, 4, device="meta")),
    "bias has shape [4], expected [5]": (ONES, torch.ones(5, 4), torch.ones(4)),
    "bias is float16, expected float32": (ONES, torch.ones(5, 4), torch.ones(5).half()),
    "residual has shape [6, 5], expected [2, 3, 5]":
        (ONES, torch.ones(5, 4), torch.ones(5), torch.ones(6, 5)),
    "residual is bfloat16, expected float32":
        (ONES, torch.ones(5, 4), torch.ones(5), torch.ones(2, 3, 5).bfloat16()),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    skinny_linear(ONES, torch.ones(5, 4))  # loads the library, so that it is the one that refuses
    x, weight, bias, residual = (*REFUSED[text], None, None)[:4]
    with pytest.raises(ValueError, match=f"^skinny_linear: {re.escape(text)}$"):
        skinny_linear(x, weight, bias, residual=residual)


def test_refuses_forms_that_do_not_fit() -> None:
    for x in (ONES, torch.ones(65, 4)):
        with pytest.raises(
            ValueError, match=r"^skinny_linear: gated is True, expected an activation bes"
        ):
            skinny_linear(x, torch.ones(6, 4), gated=True)
        text = "activation is 'swish', expected one of gelu, gelu_tanh, gelu_quick, relu, silu"
        with pytest.raises(ValueError, match=f"^skinny_linear: {text}$"):
            skinny_linear(x, torch.ones(6, 4), activation="swish")
    text = "weight has 5 rows, expected an even number, as gated is True"
    with pytest.raises(ValueError, match=f"^skinny_linear: {re.escape(text)}$"):
        skinny_linear(ONES, torch.ones(5, 4), gated=True, activation="silu")
    text = "residual has shape [5], expected [65, 5]"
    with pytest.raises(ValueError, match=f"^skinny_linear: {re.escape(text)}$"):
        skinny_linear(torch.ones(65, 4), torch.ones(5, 4), residual=torch.ones(5))


def test_the_op_refuses_more_rows() -> None:
    options = dict(activation=None, gated=False)
    text = "x has shape [5, 13, 4], expected at most 64 rows"
    with pytest.raises(ValueError, match=f"^skinny_linear: {re.escape(text)}$"):
        OP(torch.ones(5, 13, 4), torch.ones(5, 4), None, None, **options)
    with pytest.raises(
        ValueError, match=r"^skinny_linear: activation is 5, expected a number from 0 to 4$"
    ):
        OP(ONES, torch.ones(5, 4), None, None, activation=5, gated=False)


def test_freed_memory_is_refused() -> None:
    weight = torch.ones(5, 4)
    weight.untyped_storage().resize_(0)
    with pytest.raises(
        ValueError, match=r"^skinny_linear: weight has no memory, expected 20 elements$"
    ):
        skinny_linear(ONES, weight)


def test_as_torch_does(device: str) -> None:
    x, weight, options = arguments(7, 300, 700, F32, device, bias=True)
    got = skinny_linear(x, weight, options["bias"])
    torch.testing.assert_close(
        got, F.linear(x.double(), weight.double(), options["bias"].double()).float()
    )
