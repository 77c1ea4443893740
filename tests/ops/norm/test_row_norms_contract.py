"""rms_norm and layer_norm: the same bits everywhere, what they refuse and promise to torch."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rms_norm_cases import BF16, DTYPES, F16, F32, make
from row_norm_cases import KINDS, LAYER, Kind, digest, results_and_gradients
from torch import Tensor

from deepspeed_ext.ops import self_checks

each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def test_any_thread_count() -> None:
    before, found = torch.get_num_threads(), set()
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            found.add(digest())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


@each_kind
def test_sums_over_few_rows_whichever_way(kind: Kind) -> None:
    """Down the columns where partial sums for all threads would be much beside the rows."""
    before, rows, found = torch.get_num_threads(), 3000, []
    arguments = kind.arguments((rows, 70), BF16, "cpu", BF16)
    grads = [make((rows, 70), BF16, seed) for seed in (8, 9)]
    try:
        for count in (1, 16):
            torch.set_num_threads(count)
            found.append(results_and_gradients(kind.op, arguments, grads))
    finally:
        torch.set_num_threads(before)
    for name, few in found[0].items():
        assert torch.equal(few, found[1][name]), name


def test_every_run_on_cuda(cuda: str) -> None:
    assert len({digest(cuda) for _ in range(5)}) == 1


def of_rows(
    kind: Kind, arguments: dict[str, Tensor], grads: list[Tensor], change: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """Return what belongs to each row: results, and gradients but those of vectors."""
    changed = {name: change(t) if t.dim() > 1 else t for name, t in arguments.items()}
    found = results_and_gradients(kind.op, changed, [change(grad) for grad in grads])
    return {name: tensor for name, tensor in found.items() if tensor.dim() > 1}


@each_kind
@pytest.mark.parametrize("n", [64, 1000, 1001, 4096, 5000, 16384, 20_000, 110_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_in_any_batch(
    kind: Kind, dtype: torch.dtype, n: int, device: str
) -> None:
    """Alone, at another place, at another address, among rows that are not finite."""
    rows = 67 if n < 100_000 else 7
    arguments = kind.arguments((rows, n), dtype, device, dtype)
    grads = [make((rows, n), dtype, seed, device) for seed in (8, 9)]
    want = of_rows(kind, arguments, grads, lambda t: t)
    for row in {0, 1, rows // 2, rows - 1}:
        alone = of_rows(kind, arguments, grads, lambda t, row=row: t[row : row + 1])
        for name, got in alone.items():
            assert torch.equal(got[0], want[name][row])

    def moved(tensor: Tensor) -> Tensor:
        """The last 5 rows, one element further on, after a row of NaN."""
        room = torch.full((6 * n + 1,), float("nan"), dtype=dtype, device=device)
        room[n + 1 :].view(5, n).copy_(tensor[-5:])
        return room[1:].view(6, n)

    for name, got in of_rows(kind, arguments, grads, moved).items():
        assert torch.equal(got[1:], want[name][-5:])


@each_kind
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_heads_of_one_projection_are_read_as_they_lie(
    kind: Kind, dtype: torch.dtype, device: str
) -> None:
    """Rows at two distances: no copy, and the bits of one, forward and backward."""
    tokens, heads, dim = 70, 6, 64
    qkv = make((tokens, 3, heads, dim), dtype, 0, device)
    grad = make((tokens, 3, heads, dim), dtype, 1, device)
    vectors = {name: make((dim,), dtype, 2, device) for name in kind.vectors}
    for which in range(3):
        x = qkv[:, which]
        assert not x.is_contiguous()
        want = results_and_gradients(
            kind.op, {"x": x.contiguous(), **vectors}, [grad[:, which].contiguous()]
        )
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profile:
            got = results_and_gradients(kind.op, {"x": x, **vectors}, [grad[:, which]])
        for name, tensor in got.items():
            assert torch.equal(tensor, want[name])
        called = {event.key for event in profile.key_averages()}
        assert any(kind.name in key for key in called)
        assert "aten::copy_" not in called


def test_what_lies_in_three_ways_is_copied() -> None:
    """The copy that the test above looks for would be seen."""
    x = make((3, 4, 5, 96), F32, 0)[:, :2, :3, :64]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        got = LAYER.op(x)
    assert "aten::copy_" in {event.key for event in profile.key_averages()}
    assert torch.equal(got, LAYER.op(x.contiguous()))


def freed(tensor: Tensor) -> Tensor:
    """The tensor with its storage let go, as sharding wrappers do between forward passes."""
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED: dict[str, Callable[[], dict[str, Any]]] = {
    "x has shape [], expected a dimension at least": lambda: dict(x=torch.ones(())),
    "x is float64, expected float32, bfloat16 or float16":
        lambda: dict(x=torch.ones(2, 4).double()),
    "x has no memory, expected 8 elements": lambda: dict(x=freed(torch.ones(2, 4))),
    "x is torch.sparse_coo, expected torch.strided": lambda: dict(x=torch.ones(2, 4).to_sparse()),
    "weight has shape [3], expected [4]": lambda: dict(weight=torch.ones(3)),
    "weight has shape [1, 4], expected [4]": lambda: dict(weight=torch.ones(1, 4)),
    "weight is int64, expected float32, bfloat16 or float16":
        lambda: dict(weight=torch.ones(4).long()),
    "weight is on meta, expected cpu": lambda: dict(weight=torch.ones(4, device="meta")),
    "bias has shape [5], expected [4]": lambda: dict(bias=torch.ones(5)),
    "residual has shape [4], expected [2, 4]": lambda: dict(residual=torch.ones(4)),
    "residual is float64, expected float32, bfloat16 or float16":
        lambda: dict(residual=torch.ones(2, 4).double()),
    "x_bias has shape [2, 4], expected [4]":
        lambda: dict(residual=torch.ones(2, 4), x_bias=torch.ones(2, 4)),
    "x_bias is given, expected a residual beside it": lambda: dict(x_bias=torch.ones(4)),
    "eps is -1, expected a number that is 0 or more": lambda: dict(eps=-1.0),
    "eps is nan, expected a number that is 0 or more": lambda: dict(eps=float("nan")),
    "weight_offset is inf, expected a finite number": lambda: dict(weight_offset=float("inf")),
}  # fmt: skip


@each_kind
@pytest.mark.parametrize("text", REFUSED)
def test_refuses(kind: Kind, text: str) -> None:
    kind.op(torch.ones(2, 4))  # loads the library, so that it is the one that refuses
    arguments = dict(x=torch.ones(2, 4), weight=torch.ones(4)) | REFUSED[text]()
    if "bias" in arguments and "bias" not in kind.vectors:
        return
    name = rf"{kind.name}(\.residual)?"
    with pytest.raises(ValueError, match=rf"^{name}: {re.escape(text)}$"):
        kind.op(**arguments)


@each_kind
def test_a_gradient_without_the_sum_is_refused(kind: Kind) -> None:
    op = getattr(torch.ops.deepspeed_ext, kind.name).residual
    x = torch.ones(2, 4, requires_grad=True)
    text = "needs_sum is False, expected True where a gradient is wanted"
    with pytest.raises(RuntimeError, match=f"^{kind.name}: {text}$"):
        op(x, x, None, None, None, eps=1e-6, weight_offset=0.0, needs_sum=False)


@each_kind
def test_refuses_tensors_of_two_devices(kind: Kind, cuda: str) -> None:
    for name, shape in (("weight", (4,)), ("residual", (2, 4))):
        for first, second in (("cpu", "cuda:0"), ("cuda:0", "cpu")):
            x, other = torch.ones(2, 4, device=first), torch.ones(shape, device=second)
            text = f"{kind.name}: {name} is on {second}, expected {first}"
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                kind.op(x, **{name: other})


@each_kind
@pytest.mark.parametrize("shape", [(3, 40), (2, 0, 8), (41,)])
@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (BF16, F32, F16)], ids=str)
def test_opcheck(
    kind: Kind, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: str
) -> None:
    ops = torch.ops.deepspeed_ext
    op, backward = getattr(ops, kind.name), getattr(ops, f"{kind.name}_backward")
    x, residual, grad = (make(shape, dtype, 0, device) for dtype in dtypes)
    weight, bias = (make(shape[-1:], dtypes[1], seed, device) for seed in (1, 2))
    options = {"eps": 1e-6, "weight_offset": 0.0}

    def passes(op: Any, args: tuple[Tensor | None, ...], **more: bool) -> None:
        check = torch.library.opcheck(op, args, options | more)
        assert set(check.values()) == {"SUCCESS"}

    for needs_grad in (False, True):
        given = (t.clone().requires_grad_(needs_grad) for t in (x, weight, bias, residual))
        a, w, b, r = given
        passes(op.default, (a, w, b))
        passes(op.default, (a, None, None))
        passes(op.residual, (a, r, b, w, b), needs_sum=True)
        passes(op.residual, (a, r, None, None, None), needs_sum=True)
    passes(op.residual, (x, residual, bias, weight, bias), needs_sum=False)
    for needs_grad_weight in (False, True):
        passes(backward.default, (grad, None, x, weight, bias, None),
               needs_grad_weight=needs_grad_weight)  # fmt: skip
        passes(backward.default, (grad, residual, x, None, None, bias),
               needs_grad_weight=needs_grad_weight)  # fmt: skip


@each_kind
@pytest.mark.parametrize("form", ["alone", "first", "last"])
def test_can_be_compiled(kind: Kind, form: str, device: str) -> None:
    """In one graph with dynamic sizes, gradients too, and with the same bits."""

    def block(x: Tensor, *vectors: Tensor) -> Tensor:
        options = dict(zip(kind.vectors, vectors, strict=False))
        if form == "alone":
            return kind.op(x * 2, **options).sin()
        options |= dict(residual=x.sin(), x_bias=vectors[-1])
        if form == "last":
            return kind.op(x * 2, **options, return_sum=False).sin()
        out, total = kind.op(x * 2, **options)
        return out * total

    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (40, 97):
        count = len(kind.vectors) + (form != "alone")
        vectors = [make((n,), F32, 3 + i, device).requires_grad_() for i in range(count)]
        leaves = [make((5, n), F32, 0, device).requires_grad_(), *vectors]
        found = []
        for function in (compiled, block):
            result = function(*leaves)
            found.append([result, *torch.autograd.grad(result.sum(), leaves)])
        for got, want in zip(*found, strict=True):
            assert torch.equal(got, want)


@each_kind
def test_a_gradient_of_a_gradient_is_refused(kind: Kind, device: str) -> None:
    x = make((3, 8), F32, 0, device).requires_grad_()
    (grad,) = torch.autograd.grad(kind.op(x).square().sum(), x, create_graph=True)
    name = f"{kind.name}_backward"
    text = f"{name}: the gradient of grad_out is wanted, expected no use of it, as the op has none"
    with pytest.raises(RuntimeError, match=f"^{text}"):
        grad.sum().backward()


@each_kind
def test_a_change_after_the_call_is_noticed(kind: Kind, device: str) -> None:
    x = make((3, 8), F32, 0, device).requires_grad_()
    inner = x * 1
    out = kind.op(inner)
    inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@each_kind
def test_under_autocast_nothing_is_cast(kind: Kind, device: str) -> None:
    x, weight = make((3, 40), BF16, 0, device), make((40,), F32, 1, device)
    want = kind.op(x, weight)
    with torch.autocast(device, dtype=BF16):
        assert torch.equal(kind.op(x, weight), want)
        assert kind.op(x.float(), weight).dtype == F32


@each_kind
def test_on_meta_and_fake(kind: Kind) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.ones(2, 4, device="meta")
    both = kind.op(x, residual=x.half())
    assert [t.dtype for t in both] == [F32, F16] and all(t.is_meta for t in both)
    assert kind.op(x, residual=x, return_sum=False).shape == (2, 4)
    with FakeTensorMode():
        assert kind.op(torch.ones(2, 4)).shape == (2, 4)


@each_kind
def test_no_memory_beyond_the_results(kind: Kind, cuda: str) -> None:
    """Forward allocates its results; backward the gradients, and some partial sums."""
    arguments = kind.arguments((4096, 4096), BF16, cuda)
    leaves = [tensor.requires_grad_() for tensor in arguments.values()]
    grad = torch.ones_like(arguments["x"])
    torch.autograd.grad(kind.op(**arguments), leaves, grad)
    torch.cuda.synchronize()
    before, bytes_of_x = torch.cuda.memory_allocated(), grad.numel() * 2
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        kind.op(**arguments, residual=grad, return_sum=False)
    assert torch.cuda.max_memory_allocated() - before <= bytes_of_x + 4096
    out = kind.op(**arguments)
    assert torch.cuda.max_memory_allocated() - before <= bytes_of_x + 4096
    torch.autograd.grad(out, leaves, grad)
    sums = 512 * 4096 * 4 * len(kind.vectors)  # of as many blocks as run at once
    assert torch.cuda.max_memory_allocated() - before <= 2 * bytes_of_x + sums + 65536


@each_kind
@pytest.mark.parametrize("n", [4096, 40_000])
def test_cuda_graph_and_stream(kind: Kind, n: int, cuda: str) -> None:
    x = torch.ones(64, n, device=cuda, dtype=BF16)
    kind.op(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kind.op(x, residual=x)
    x.copy_(make((64, n), BF16, 0, cuda))
    graph.replay()
    for got, want in zip(out, kind.op(x, residual=x), strict=True):
        assert torch.equal(got, want)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = kind.op(x.mul_(2))
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(late, kind.op(x))


@each_kind
@pytest.mark.parametrize("n", [4096, 40_000])
def test_nothing_waits_for_cuda(kind: Kind, n: int, cuda: str) -> None:
    arguments = kind.arguments((64, n), BF16, cuda, BF16)
    grads = [make((64, n), BF16, seed, cuda) for seed in (8, 9)]
    results_and_gradients(kind.op, arguments, grads)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results_and_gradients(kind.op, arguments, grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_kind
def test_self_check_passes(kind: Kind, device: str) -> None:
    getattr(self_checks, kind.name)(device)


@each_kind
def test_self_check_finds_a_wrong_op(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    op = kind.op

    def wrong(*args: Tensor, **options: Any) -> tuple[Tensor, ...]:
        out, total = op(*args, **options)
        return out + (out - out.detach()) * 0.01, total

    monkeypatch.setattr(self_checks.ops, kind.name, wrong)
    text = rf"^{kind.name}: 2 of results .* on cpu has .*, expected "
    with pytest.raises(RuntimeError, match=text):
        getattr(self_checks, kind.name)("cpu")
