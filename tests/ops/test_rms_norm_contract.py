"""rms_norm: the same bits everywhere, what it refuses, and what it promises to torch."""

import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from rms_norm_cases import BF16, DTYPES, F16, F32, digest, make
from torch import Tensor

from deepspeed_ext.ops import rms_norm
from deepspeed_ext.ops.transformer import self_checks

expected = cache(digest)  # the bits of the widest ISA


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"], indirect=True)
def test_every_isa(isa: str) -> None:
    environment = os.environ | {"DSX_FORCE_ISA": isa}
    done = warm_python.run(Path(__file__).with_name("rms_norm_cases.py"), env=environment)
    assert done.stdout.strip() == expected(), done.stderr


def test_any_thread_count() -> None:
    before, found = torch.get_num_threads(), set()
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            found.add(digest())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_every_run_on_cuda(cuda: str) -> None:
    assert len({digest(cuda) for _ in range(5)}) == 1


def all_of(x: Tensor, weight: Tensor, residual: Tensor, grads: list[Tensor]) -> list[Tensor]:
    """Return what belongs to each row: results, and gradients but that of weight."""
    leaves = [x.detach().requires_grad_(), residual.detach().requires_grad_()]
    results = rms_norm(leaves[0], weight, residual=leaves[1])
    return [*results, *torch.autograd.grad(results, leaves, grads)]


@pytest.mark.parametrize("n", [64, 1000, 1001, 4096, 5000, 16384, 20_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_in_any_batch(dtype: torch.dtype, n: int, device: str) -> None:
    """Alone, at another place, at another address, among rows that are not finite."""
    rows = 67
    x, residual, *grads = (make((rows, n), dtype, seed, device) for seed in range(4))
    weight = make((n,), dtype, 4, device)
    want = all_of(x, weight, residual, grads)
    for row in (0, 1, 33, 66):
        one = slice(row, row + 1)
        alone = all_of(x[one], weight, residual[one], [grad[one] for grad in grads])
        for got, expected in zip(alone, want, strict=True):
            assert torch.equal(got[0], expected[row])

    def moved(tensor: Tensor) -> Tensor:
        """The last 5 rows, one element further on, after a row of NaN."""
        room = torch.full((6 * n + 1,), float("nan"), dtype=dtype, device=device)
        room[n + 1 :].view(5, n).copy_(tensor[-5:])
        return room[1:].view(6, n)

    got = all_of(moved(x), weight, moved(residual), [moved(g) for g in grads])
    for value, expected in zip(got, want, strict=True):
        assert torch.equal(value[1:], expected[-5:])


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
    "residual has shape [4], expected [2, 4]": lambda: dict(residual=torch.ones(4)),
    "residual is float64, expected float32, bfloat16 or float16":
        lambda: dict(residual=torch.ones(2, 4).double()),
    "eps is -1, expected a number that is 0 or more": lambda: dict(eps=-1.0),
    "eps is nan, expected a number that is 0 or more": lambda: dict(eps=float("nan")),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    rms_norm(torch.ones(2, 4))  # loads the library, so that it is the one that refuses
    arguments = dict(x=torch.ones(2, 4), weight=torch.ones(4)) | REFUSED[text]()
    name = r"rms_norm(\.residual)?"
    with pytest.raises(ValueError, match=rf"^{name}: {re.escape(text)}$"):
        rms_norm(**arguments)


def test_refuses_tensors_of_two_devices(cuda: str) -> None:
    for name, shape in (("weight", (4,)), ("residual", (2, 4))):
        for first, second in (("cpu", "cuda:0"), ("cuda:0", "cpu")):
            x, other = torch.ones(2, 4, device=first), torch.ones(shape, device=second)
            text = f"rms_norm: {name} is on {second}, expected {first}"
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                rms_norm(x, **{name: other})


@pytest.mark.parametrize("shape", [(3, 40), (2, 0, 8), (41,)])
@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (BF16, F32, F16)], ids=str)
def test_opcheck(dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: str) -> None:
    ops = torch.ops.deepspeed_ext
    x, residual, grad = (make(shape, dtype, 0, device) for dtype in dtypes)
    weight = make(shape[-1:], dtypes[1], 1, device)
    for needs_grad in (False, True):
        a, w, r = (t.clone().requires_grad_(needs_grad) for t in (x, weight, residual))
        calls = [
            (ops.rms_norm.default, (a, w), {}),
            (ops.rms_norm.default, (a, None), {}),
            (ops.rms_norm.residual, (a, r, w), {}),
            (ops.rms_norm.residual, (a, r, None), {}),
        ]
        for op, args, options in calls:
            check = torch.library.opcheck(op, args, options | {"eps": 1e-6})
            assert set(check.values()) == {"SUCCESS"}
    for needs_grad_weight in (False, True):
        for args in ((grad, None, x, weight), (grad, residual, x, None)):
            options = dict(eps=1e-6, needs_grad_weight=needs_grad_weight)
            check = torch.library.opcheck(ops.rms_norm_backward.default, args, options)
            assert set(check.values()) == {"SUCCESS"}


@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
def test_can_be_compiled(with_residual: bool, device: str) -> None:
    """In one graph with dynamic sizes, gradients too, and with the same bits."""

    def block(x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None:
            return rms_norm(x * 2, weight).sin()
        out, total = rms_norm(x * 2, weight, residual=residual)
        return out * total

    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (40, 97):
        x, residual = (make((5, n), F32, i, device).requires_grad_() for i in range(2))
        weight = make((n,), F32, 3, device).requires_grad_()
        leaves = (x, weight, residual) if with_residual else (x, weight)
        found = []
        for function in (compiled, block):
            result = function(x, weight, residual if with_residual else None)
            found.append([result, *torch.autograd.grad(result.sum(), leaves)])
        for got, want in zip(*found, strict=True):
            assert torch.equal(got, want)


def test_a_gradient_of_a_gradient_is_refused(device: str) -> None:
    x = make((3, 8), F32, 0, device).requires_grad_()
    (grad,) = torch.autograd.grad(rms_norm(x).square().sum(), x, create_graph=True)
    text = "rms_norm_backward: the gradient is wanted, expected no use of it, as the op has none"
    with pytest.raises(RuntimeError, match=f"^{text}"):
        grad.sum().backward()


def test_a_change_after_the_call_is_noticed(device: str) -> None:
    x = make((3, 8), F32, 0, device).requires_grad_()
    inner = x * 1
    out = rms_norm(inner)
    inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_under_autocast_nothing_is_cast(device: str) -> None:
    x, weight = make((3, 40), BF16, 0, device), make((40,), F32, 1, device)
    with torch.autocast(device, dtype=BF16):
        assert torch.equal(rms_norm(x, weight), rms_norm(x, weight))
        assert rms_norm(x.float(), weight).dtype == F32


def test_on_meta_and_fake() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    meta = rms_norm(
        torch.ones(2, 4, device="meta"), residual=torch.ones(2, 4, device="meta").half()
    )
    assert [t.dtype for t in meta] == [F32, F16] and all(t.is_meta for t in meta)
    with FakeTensorMode():
        assert rms_norm(torch.ones(2, 4)).shape == (2, 4)


def test_no_memory_beyond_the_results(cuda: str) -> None:
    """Forward allocates its result; backward the gradient, and some partial sums."""
    x = torch.ones(4096, 4096, device=cuda, dtype=BF16).requires_grad_()
    weight = torch.ones(4096, device=cuda, dtype=BF16).requires_grad_()
    rms_norm(x, weight).sum().backward()
    grad = torch.ones_like(x)
    torch.cuda.synchronize()
    before, bytes_of_x = torch.cuda.memory_allocated(), x.numel() * 2
    torch.cuda.reset_peak_memory_stats()
    out = rms_norm(x, weight)
    assert torch.cuda.max_memory_allocated() - before <= bytes_of_x + 4096
    torch.autograd.grad(out, (x, weight), grad)
    assert torch.cuda.max_memory_allocated() - before <= 2.4 * bytes_of_x


def test_cuda_graph_and_stream(cuda: str) -> None:
    x = torch.ones(64, 4096, device=cuda, dtype=BF16)
    rms_norm(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rms_norm(x, residual=x)
    x.copy_(make((64, 4096), BF16, 0, cuda))
    graph.replay()
    for got, want in zip(out, rms_norm(x, residual=x), strict=True):
        assert torch.equal(got, want)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = rms_norm(x.mul_(2))
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(late, rms_norm(x))


def test_nothing_waits_for_cuda(cuda: str) -> None:
    x = torch.ones(64, 4096, device=cuda).requires_grad_()
    grad = torch.ones_like(x)
    rms_norm(x).backward(grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rms_norm(x).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_self_check_passes(device: str) -> None:
    self_checks.rms_norm(device)


def test_self_check_finds_a_wrong_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Tensor, **options: Any) -> tuple[Tensor, ...]:
        out, total = rms_norm(*args, **options)
        return out + (out - out.detach()) * 0.01, total

    monkeypatch.setattr(self_checks.ops, "rms_norm", wrong)
    with pytest.raises(RuntimeError, match=r"^rms_norm: 2 of results .* on cpu has .*, expected "):
        self_checks.rms_norm("cpu")
