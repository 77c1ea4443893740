"""rms_norm and layer_norm: the same bits everywhere, what they refuse and promise to torch."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from row_norm_cases import KINDS, LAYER, Kind, results_and_gradients
from samples import BF16, DTYPES, F16, F32, make
from torch import Tensor

each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


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


def of_rows(
    kind: Kind, arguments: dict[str, Tensor], grads: list[Tensor], change: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """Return what belongs to each row: results, and gradients but those of vectors."""
    changed = {name: change(t) if t.dim() > 1 else t for name, t in arguments.items()}
    found = results_and_gradients(kind.op, changed, [change(grad) for grad in grads])
    return {name: tensor for name, tensor in found.items() if tensor.dim() > 1}


@each_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_row_is_the_same_in_any_batch(kind: Kind, dtype: torch.dtype, device: str) -> None:
    """As shorter ones of all ops are, also where shared memory has no room for it."""
    rows, n = 7, 110_000
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
@pytest.mark.parametrize("n", [32_776, 65_536, 131_072])
def test_a_row_that_a_cluster_shares_is_the_same_everywhere(
    kind: Kind, n: int, device: str
) -> None:
    """Beside rows that are not finite, alone, unaligned, with and without gradients of vectors."""
    rows = 5 if device == "cpu" else 600 * 32_768 // n
    arguments = kind.arguments((rows, n), BF16, device)
    grads = [make((rows, n), BF16, 8, device)]
    want = results_and_gradients(kind.op, arguments, grads)
    again = results_and_gradients(kind.op, arguments, grads)
    for name, tensor in want.items():
        assert torch.equal(again[name], tensor), name

    def check(x: Tensor, grad: Tensor, at: slice, of: slice) -> None:
        got = results_and_gradients(kind.op, arguments | {"x": x}, [grad])
        vectors = {name: arguments[name] for name in kind.vectors}
        leaf = x.detach().requires_grad_()
        (frozen,) = torch.autograd.grad(kind.op(leaf, **vectors), leaf, grad)
        assert torch.equal(frozen[at], want["x"][of])
        for name in ("out", "x"):
            assert torch.equal(got[name][at], want[name][of]), name

    x, grad = arguments["x"], grads[0]
    for row in (0, rows - 1):
        one = slice(row, row + 1)
        check(x[one], grad[one], slice(None), one)
    bad = x.clone()
    bad[0, 3], bad[2, n - 1], bad[3] = float("nan"), float("inf"), -float("inf")
    check(bad, grad, slice(1, 2), slice(1, 2))
    check(bad, grad, slice(4, None), slice(4, None))
    assert not kind.op(bad)[0].isfinite().any()

    def moved(tensor: Tensor) -> Tensor:
        room = torch.full((5 * n + 1,), float("nan"), dtype=BF16, device=device)
        room[1:].view(5, n).copy_(tensor[:5])
        return room[1:].view(5, n)

    check(moved(x), moved(grad), slice(None), slice(5))


@each_kind
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("n", [4096, 32_776, 131_072])
def test_zeros_have_the_same_sign_everywhere(
    kind: Kind, n: int, offset: float, device: str
) -> None:
    """Of weights that are -0, and of gradients that are: alone, beside others, unaligned."""
    rows = 5 if device == "cpu" else 600 * 32_768 // n
    arguments = kind.arguments((rows, n), BF16, device)
    arguments["weight"][::3] = -0.0
    grad = make((rows, n), BF16, 8, device)
    grad[1], grad[2], grad[3, ::2] = 0.0, -0.0, -0.0

    def bits(of: slice, moved: bool) -> dict[str, Tensor]:
        found = {}
        for name, tensor in {"x": arguments["x"], "grad": grad}.items():
            room = torch.empty(tensor[of].numel() + moved, dtype=BF16, device=device)
            found[name] = room[int(moved) :].view(-1, n).copy_(tensor[of])
        given = arguments | {"x": found["x"]}
        got = results_and_gradients(kind.op, given, [found["grad"]], weight_offset=offset)
        return {name: got[name].view(torch.int16) for name in ("out", "x")}

    want = bits(slice(None), moved=False)
    for of in (slice(0, 5), slice(1, 2), slice(2, 3), slice(3, 4)):
        for moved in (False, True):
            for name, got in bits(of, moved).items():
                assert torch.equal(got, want[name][of]), name


@each_kind
@pytest.mark.parametrize("n", [9, 4096, 16_392])
def test_a_weight_of_minus_zero(kind: Kind, n: int, device: str) -> None:
    """Times what it is, as in torch: an offset of 0 is none."""
    x, weight = make((3, n), BF16, 0, device), torch.full((n,), -0.0, device=device)
    for dtype in DTYPES:
        got = kind.op(x, weight.to(dtype))
        assert torch.equal(got.signbit().cpu(), kind.ref(x.cpu(), weight.cpu()).signbit())
        assert not got.any()


@each_kind
@pytest.mark.parametrize("n", [16_392, 131_072])
def test_gradients_in_clusters_in_a_cuda_graph(kind: Kind, n: int, cuda: str) -> None:
    """With the bits of those outside, each time it is replayed, whichever are wanted."""
    arguments = kind.arguments((600 * 32_768 // n, n), BF16, cuda)
    grad = make(tuple(arguments["x"].shape), BF16, 8, cuda)
    for names in (("x", *kind.vectors), ("x",), ("x", "weight"), ("weight",)):
        leaves = {name: t.clone().requires_grad_(name in names) for name, t in arguments.items()}

        def gradients(
            leaves: dict[str, Tensor] = leaves, names: tuple[str, ...] = names
        ) -> tuple[Tensor, ...]:
            return torch.autograd.grad(kind.op(**leaves), [leaves[name] for name in names], grad)

        want = gradients()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = gradients()
        for _ in range(3):
            for tensor in got:
                tensor.fill_(float("nan"))
            graph.replay()
            for name, one, other in zip(names, got, want, strict=True):
                assert torch.equal(one, other), name


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
    "weight_offset is inf, expected a finite float32": lambda: dict(weight_offset=float("inf")),
    "weight_offset is -1e+39, expected a finite float32": lambda: dict(weight_offset=-1e39),
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
@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (BF16, F32, F16)], ids=str)
def test_opcheck(kind: Kind, dtypes: tuple[torch.dtype, ...], device: str) -> None:
    """Of the forms that no call with gradients comes to; see test_functional_torch for others."""
    ops = torch.ops.deepspeed_ext
    op, backward = getattr(ops, kind.name).residual, getattr(ops, f"{kind.name}_backward").default
    x, residual, grad = (make((3, 40), dtype, 0, device) for dtype in dtypes)
    weight, bias = (make((40,), dtypes[1], seed, device) for seed in (1, 2))
    options = {"eps": 1e-6, "weight_offset": 0.0}
    for called, args, more in (
        (op, (x, residual, bias, weight, bias), dict(needs_sum=False)),
        (backward, (grad, None, x, weight, bias, None), dict(needs_grad_weight=False)),
        (backward, (grad, residual, x, None, None, bias), dict(needs_grad_weight=False)),
    ):
        check = torch.library.opcheck(called, args, options | more)
        assert set(check.values()) == {"SUCCESS"}
