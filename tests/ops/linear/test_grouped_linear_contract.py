"""grouped_linear: what torch may do with it, what it takes, and what it refuses."""

import re
from typing import Any

import pytest
import torch
from allocated import Taken, measured, share
from at_once import in_threads
from grouped_linear_cases import arguments, offsets_of
from samples import BF16, DTYPES, F16, F32, make
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from deepspeed_ext.ops import grouped_linear, swiglu

OP = torch.ops.deepspeed_ext.grouped_linear.default
OF_WEIGHT = torch.ops.deepspeed_ext.grouped_linear_backward.default
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def block(x: Tensor, up: Tensor, down: Tensor, offsets: Tensor, bias: Tensor) -> Tensor:
    return grouped_linear(swiglu(grouped_linear(x * 2, up, offsets)), down, offsets, bias).sin()


@pytest.mark.parametrize("dynamic", [False, True])
@each_dtype
def test_compiled(dtype: torch.dtype, dynamic: bool, device: str) -> None:
    """In one graph for any number of rows and any offsets, with the same gradients."""
    torch.compiler.reset()
    graphs: list[Any] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph

    backend = keep if dynamic else "aot_eager"
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend=backend)
    up, down = make((3, 38, 11), dtype, 1, device), make((3, 11, 19), dtype, 2, device)
    bias = make((3, 11), dtype, 3, device)
    for counts in ([4, 0, 6], [1, 7, 1], [20, 3, 60])[: 3 if dynamic else 2]:
        offsets = offsets_of(counts, device)
        x = make((int(offsets[-1]) + (0 if not dynamic else 2), 11), dtype, 0, device)
        found = []
        for function in (compiled, block):
            leaves = [tensor.detach().requires_grad_() for tensor in (x, up, down, bias)]
            result = function(*leaves[:3], offsets, leaves[3])
            found.append([result.detach(), *torch.autograd.grad(result.sum(), leaves)])
        for got, want in zip(*found, strict=True):
            if dynamic and dtype == F32:  # torch multiplies, as nobody knows that rows are few
                torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
            elif dynamic:  # and on CUDA rounds before it adds bias, which the sine makes more of
                assert got.shape == want.shape and got.dtype == dtype and got.isfinite().all()
            else:
                assert torch.equal(got, want)
    assert len(graphs) == (1 if dynamic else 0)


@pytest.mark.parametrize(("n", "k"), [(5, 7), (8, 16)])
@each_dtype
def test_opcheck(dtype: torch.dtype, n: int, k: int, device: str) -> None:
    for counts in ([3, 0, 4], [0, 0]):
        x, weight, offsets, bias = arguments(counts, n, k, dtype, device, behind=1)
        grad = make((x.shape[0], n), dtype, 5, device)
        for needs_grad in (False, True):
            for each in (x, weight, bias, grad):
                assert each is not None
                each.requires_grad_(needs_grad)
            for op, given in ((OP, (x, weight, offsets, bias)), (OP, (x, weight, offsets, None)),
                              (OF_WEIGHT, (grad, x, offsets))):  # fmt: skip
                assert set(torch.library.opcheck(op, given).values()) == {"SUCCESS"}


def test_meta() -> None:
    made = [None if t is None else t.to("meta") for t in arguments([3, 4], 5, 7, BF16, behind=1)]
    got = grouped_linear(*made)  # type: ignore[arg-type]
    assert got.is_meta and got.shape == (8, 5) and got.dtype == BF16


def test_flops_are_counted(device: str) -> None:
    """Of all rows, as nothing asks which belong to an expert; three times so with gradients."""
    x, weight, offsets, _ = arguments([3, 0, 4], 5, 7, F32, device, behind=1)
    with FlopCounterMode(display=False) as counter:
        out = grouped_linear(x.requires_grad_(), weight.requires_grad_(), offsets)
    assert counter.get_total_flops() == 2 * 8 * 5 * 7
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 8 * 5 * 7


@each_dtype
def test_autocast_casts_nothing(dtype: torch.dtype, device: str) -> None:
    made = arguments([30, 0, 4], 16, 24, dtype, device)
    want = grouped_linear(*made)
    with torch.autocast(device, BF16 if dtype == F16 else F16):
        got = grouped_linear(*made)
    assert got.dtype == dtype and torch.equal(got, want)


def test_two_threads(device: str) -> None:
    made = arguments([30, 0, 4], 16, 24, BF16, device)
    want = grouped_linear(*made)
    for found in in_threads(device, 20, *[lambda: grouped_linear(*made)] * 2):
        assert all(torch.equal(got, want) for got in found)


def test_inference_mode(device: str) -> None:
    made = arguments([30, 0, 4], 16, 24, BF16, device)
    want = grouped_linear(*made)
    with torch.inference_mode():
        assert torch.equal(grouped_linear(*made), want)


def beside_the_result(device: str, taken: Taken) -> list[float]:
    """Return what calls take beside their results, as shares of the weight."""
    found = []
    for n, k in ((256, 512), (255, 511)):
        x, weight, offsets, bias = arguments([3, 0, 200, 50] * 4, n, k, F32, device, behind=9)
        grouped_linear(x, weight, offsets, bias)
        result, extra = taken(grouped_linear, x, weight, offsets, bias)
        found.append(share(extra - result.untyped_storage().nbytes(), weight.nbytes))
    return found


def test_takes_no_memory_on_the_cpu() -> None:
    assert max(measured(beside_the_result, "cpu")) <= 0.01


@pytest.mark.parametrize(("n", "k"), [(16, 24), (17, 19)])
@each_dtype
def test_waits_for_nothing_and_the_stream_before_it(
    dtype: torch.dtype, n: int, k: int, cuda: str
) -> None:
    x, weight, offsets, bias = arguments([30, 0, 4], n, k, dtype, cuda, behind=3)
    assert bias is not None
    leaves = [t.requires_grad_() for t in (weight, bias)]
    want = grouped_linear(x, weight, offsets, bias)
    grads = torch.autograd.grad(want.sum(), leaves)
    late, of_late = torch.zeros_like(x), torch.zeros_like(offsets)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            late.copy_(x)
            of_late.copy_(offsets)
            got = grouped_linear(late, weight, of_late, bias)
            of_got = torch.autograd.grad(got.sum(), leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for each, right in zip((got, *of_got), (want, *grads), strict=True):
        assert torch.equal(each, right)


@pytest.mark.parametrize(("n", "k"), [(16, 24), (17, 19)])
@each_dtype
def test_a_graph_takes_other_offsets(dtype: torch.dtype, n: int, k: int, cuda: str) -> None:
    x, weight, offsets, bias = arguments([30, 0, 4], n, k, dtype, cuda, behind=3)
    assert bias is not None
    leaves = [t.requires_grad_() for t in (x, weight, bias)]

    def both() -> list[Tensor]:
        out = grouped_linear(x, weight, offsets, bias)
        return [out.detach(), *torch.autograd.grad(out.sum(), leaves)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = both()
    for counts in ([30, 0, 4], [0, 37, 0], [1, 2, 3], [0, 0, 0], [12, 13, 12]):
        offsets.copy_(offsets_of(counts))
        graph.replay()
        torch.cuda.synchronize()
        for each, right in zip(got, both(), strict=True):
            assert torch.equal(each, right)


ROWS, WEIGHT, ENDS = torch.ones(6, 4), torch.ones(3, 5, 4), torch.tensor([2, 2, 6]).int()
REFUSED: dict[str, tuple[Tensor, ...]] = {
    "x has shape [4], expected two dimensions": (ROWS[0], WEIGHT, ENDS),
    "x has shape [1, 6, 4], expected two dimensions": (ROWS[None], WEIGHT, ENDS),
    "x is float64, expected float32, bfloat16 or float16": (ROWS.double(), WEIGHT.double(), ENDS),
    "x is int64, expected float32, bfloat16 or float16": (ROWS.long(), WEIGHT, ENDS),
    "weight has shape [5, 4], expected three dimensions, the last one of 4":
        (ROWS, WEIGHT[0], ENDS),
    "weight has shape [3, 4, 5], expected three dimensions, the last one of 4":
        (ROWS, WEIGHT.mT, ENDS),
    "weight is bfloat16, expected float32": (ROWS, WEIGHT.bfloat16(), ENDS),
    "weight is on meta, expected cpu": (ROWS, WEIGHT.to("meta"), ENDS),
    "offsets has shape [2], expected [3]": (ROWS, WEIGHT, ENDS[1:]),
    "offsets has shape [3, 1], expected [3]": (ROWS, WEIGHT, ENDS[:, None]),
    "offsets is int64, expected int32": (ROWS, WEIGHT, ENDS.long()),
    "offsets is float32, expected int32": (ROWS, WEIGHT, ENDS.float()),
    "offsets[0] is -1, expected a number from 0 to 6": (ROWS, WEIGHT, ENDS - 3),
    "offsets[1] is 1, expected a number from 2 to 6":
        (ROWS, WEIGHT, torch.tensor([2, 1, 6]).int()),
    "offsets[2] is 7, expected a number from 3 to 6": (ROWS, WEIGHT, ENDS + 1),
    "bias has shape [5], expected [3, 5]": (ROWS, WEIGHT, ENDS, WEIGHT[0, :, 0]),
    "bias is float16, expected float32": (ROWS, WEIGHT, ENDS, WEIGHT[..., 0].half()),
    "x is torch.sparse_coo, expected torch.strided": (ROWS.to_sparse(), WEIGHT, ENDS),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=f"^grouped_linear: {re.escape(text)}$"):
        grouped_linear(*REFUSED[text])


@pytest.mark.parametrize("text", [t for t in REFUSED if "offsets[" not in t and " is on " not in t])
def test_refuses_on_cuda(text: str, cuda: str) -> None:
    with pytest.raises(ValueError, match=f"^grouped_linear: {re.escape(text)}$"):
        grouped_linear(*(tensor.to(cuda) for tensor in REFUSED[text]))


def test_refuses_two_devices(cuda: str) -> None:
    made = ROWS, WEIGHT, ENDS, WEIGHT[..., 0]
    for i, name in enumerate(("weight", "offsets", "bias"), 1):
        given = [t.cpu() if j == i else t.to(cuda) for j, t in enumerate(made)]
        with pytest.raises(ValueError, match=f"^grouped_linear: {name} is on cpu, expected cuda:0"):
            grouped_linear(*given)


def test_the_op_of_gradients_refuses() -> None:
    for text, given in {
        "grad has shape [5, 5], expected [6, 5]": (torch.ones(5, 5), ROWS, ENDS),
        "grad is bfloat16, expected float32": (torch.ones(6, 5).bfloat16(), ROWS, ENDS),
        "grad has shape [6], expected two dimensions": (torch.ones(6), ROWS, ENDS),
        "offsets is int64, expected int32": (torch.ones(6, 5), ROWS, ENDS.long()),
    }.items():
        with pytest.raises(ValueError, match=f"^grouped_linear: {re.escape(text)}$"):
            OF_WEIGHT(*given)


def test_freed_memory_is_refused() -> None:
    weight = WEIGHT.clone()
    weight.untyped_storage().resize_(0)
    text = "weight has no memory, expected 60 elements"
    with pytest.raises(ValueError, match=f"^grouped_linear: {text}$"):
        grouped_linear(ROWS, weight, ENDS)


@each_dtype
def test_as_torch_does(dtype: torch.dtype) -> None:
    x, weight, offsets, _ = arguments([30, 0, 4], 16, 24, dtype)
    want = torch.nn.functional.grouped_mm(x, weight.transpose(-2, -1), offs=offsets)
    torch.testing.assert_close(grouped_linear(x, weight, offsets), want)
