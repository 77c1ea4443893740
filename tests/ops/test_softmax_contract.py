"""softmax: the same bits everywhere, what it refuses, and what it promises to torch."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rms_norm_cases import BF16, DTYPES, F16, F32, make
from softmax_cases import OPTIONS, chosen, digest, of_both, slopes
from torch import Tensor

from deepspeed_ext.ops import softmax
from deepspeed_ext.ops.transformer import self_checks


def test_any_thread_count() -> None:
    before, found = torch.get_num_threads(), set()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.add(digest())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_every_run_on_cuda(cuda: str) -> None:
    assert len({digest(cuda) for _ in range(3)}) == 1


@pytest.mark.parametrize("n", [64, 1000, 1001, 4096, 16384, 16400, 20_001])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_in_any_batch(dtype: torch.dtype, n: int, device: str) -> None:
    """Alone, at another place, at another address, among rows that are not finite."""
    rows = 67
    x, grad = (make((rows, n), dtype, seed, device) for seed in range(2))
    x = x * 4
    mask = chosen(device, (rows, n))
    for options in ({}, dict(mask=mask, softcap=9.0)):
        want = of_both(x, grad, **options)
        for row in (0, 1, 33, 66):
            one = slice(row, row + 1)
            part = {k: v[one] if isinstance(v, Tensor) else v for k, v in options.items()}
            alone = of_both(x[one], grad[one], **part)
            for got, expected in zip(alone, want, strict=True):
                assert torch.equal(got[0], expected[row])

        def moved(tensor: Tensor, filler: float) -> Tensor:
            """The last 5 rows, one element further on, after a row of NaN."""
            room = torch.full((6 * n + 1,), filler, dtype=tensor.dtype, device=device)
            room[n + 1 :].view(5, n).copy_(tensor[-5:])
            return room[1:].view(6, n)

        if "mask" in options:
            options = options | {"mask": moved(mask, 1.0)}
        got = of_both(moved(x, float("nan")), moved(grad, float("nan")), **options)
        for value, expected in zip(got, want, strict=True):
            assert torch.equal(value[1:], expected[-5:])


def test_ways_to_say_the_same_have_the_same_bits(device: str) -> None:
    """Causality and a window are masks that nobody has to make."""
    x, grad = (make((2, 3, 90, 300), BF16, seed, device) for seed in range(2))
    ahead = torch.arange(300, device=device) - torch.arange(90, device=device)[:, None] - 210
    for options, mask in (
        (dict(causal=True), ahead <= 0),
        (dict(window=(50, 4)), (ahead >= -50) & (ahead <= 4)),
    ):
        added = torch.zeros(mask.shape, device=device).masked_fill(~mask, -torch.inf)
        want = of_both(x, grad, mask=mask)
        for same in (options, dict(mask=added), options | dict(mask=mask)):
            for got, expected in zip(of_both(x, grad, **same), want, strict=True):
                assert torch.equal(got, expected)


def test_columns_that_are_left_out_change_nothing_on_the_cpu() -> None:
    x = make((7, 300), F32, 0)
    mask = torch.arange(300) < 77
    assert torch.equal(softmax(x, mask)[:, :77], softmax(x[:, :77]))


def freed(tensor: Tensor) -> Tensor:
    """The tensor with its storage let go, as sharding wrappers do between forward passes."""
    tensor.untyped_storage().resize_(0)
    return tensor


BROADCAST = "expected one that can be broadcast to"
REFUSED: dict[str, Callable[[], dict[str, Any]]] = {
    "x has shape [], expected a dimension at least": lambda: dict(x=torch.ones(())),
    "x is float64, expected float32, bfloat16 or float16":
        lambda: dict(x=torch.ones(2, 4).double()),
    "x has no memory, expected 24 elements": lambda: dict(x=freed(torch.ones(2, 3, 4))),
    "x is torch.sparse_coo, expected torch.strided": lambda: dict(x=torch.ones(2, 4).to_sparse()),
    f"mask has shape [3], {BROADCAST} [2, 3, 4]": lambda: dict(mask=torch.ones(3)),
    f"mask has shape [2, 1], {BROADCAST} [2, 3, 4]": lambda: dict(mask=torch.ones(2, 1)),
    f"mask has shape [1, 2, 3, 4], {BROADCAST} [2, 3, 4]":
        lambda: dict(mask=torch.ones(1, 2, 3, 4)),
    "mask is int64, expected bool, uint8, float32, bfloat16 or float16":
        lambda: dict(mask=torch.ones(4).long()),
    "mask is on meta, expected cpu": lambda: dict(mask=torch.ones(4, device="meta")),
    "mask has no memory, expected 4 elements": lambda: dict(mask=freed(torch.ones(4))),
    "mask has over 6 dimensions that do not join, expected so many or fewer":
        lambda: dict(x=torch.ones(*[2] * 9), mask=torch.ones(2, 1, 2, 1, 2, 1, 2, 1, 2)),
    f"alibi_slopes has shape [3], {BROADCAST} [2]": lambda: dict(alibi_slopes=torch.ones(3)),
    "alibi_slopes is bfloat16, expected float32":
        lambda: dict(alibi_slopes=torch.ones(2).bfloat16()),
    "x has shape [4], expected two dimensions at least, as alibi_slopes needs queries and keys":
        lambda: dict(x=torch.ones(4), alibi_slopes=torch.ones(())),
    "scale is inf, expected a finite number": lambda: dict(scale=float("inf")),
    "softcap is -1, expected a finite number that is 0 or more": lambda: dict(softcap=-1.0),
    "softcap is nan, expected a finite number that is 0 or more":
        lambda: dict(softcap=float("nan")),
    "softcap is 1e-40, expected 0, or a number over 1e-30": lambda: dict(softcap=1e-40),
    "window is (-2, 0), expected counts of keys, or -1 for all": lambda: dict(window=(-2, 0)),
    "offset is 18014398509481984, expected one within 2^53": lambda: dict(offset=2**54),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    softmax(torch.ones(2, 4))  # loads the library, so that it is the one that refuses
    with pytest.raises(ValueError, match=rf"^softmax: {re.escape(text)}$"):
        softmax(**(dict(x=torch.ones(2, 3, 4)) | REFUSED[text]()))


def test_slopes_have_no_gradient() -> None:
    x, alibi_slopes = torch.ones(2, 3, 4), torch.ones(2).requires_grad_()
    with pytest.raises(RuntimeError, match=r"^softmax: alibi_slopes requires a gradient, "):
        softmax(x, alibi_slopes=alibi_slopes)
    with torch.no_grad():
        softmax(x, alibi_slopes=alibi_slopes)


def test_backward_wants_x_where_there_is_a_cap() -> None:
    tensor = torch.ones(2, 4)
    softmax(tensor.clone().requires_grad_()).sum().backward()
    options = dict(scale=1.0, before=-1, after=-1, offset=None)
    for x, softcap, text in (
        (None, 2.0, "x is None, expected a tensor, as softcap is 2"),
        (tensor, 0.0, "x is a tensor, expected None, as softcap is 0"),
    ):
        with pytest.raises(ValueError, match=f"^softmax_backward: {re.escape(text)}$"):
            torch.ops.deepspeed_ext.softmax_backward(tensor, tensor, x, softcap=softcap, **options)


def test_refuses_tensors_of_two_devices(cuda: str) -> None:
    for name, other in (("mask", torch.ones(4)), ("alibi_slopes", torch.ones(2))):
        with pytest.raises(ValueError, match=f"^softmax: {name} is on cpu, expected cuda:0$"):
            softmax(torch.ones(2, 3, 4, device=cuda), **{name: other})


@pytest.mark.parametrize("shape", [(2, 3, 40), (2, 0, 8), (41,)])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_opcheck(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    ops = torch.ops.deepspeed_ext
    options = dict(scale=0.5, softcap=2.0, before=-1, after=0, offset=None)
    x, grad = make(shape, dtype, 0, device), make(shape, dtype, 1, device)
    for mask in (None, make(shape[-1:], F32, 2, device), torch.ones(shape, device=device) > 0):
        for needs_grad in (False, True):
            leaf = x.clone().requires_grad_(needs_grad)
            heads = slopes(device, shape) if len(shape) > 2 else None
            check = torch.library.opcheck(
                ops.softmax.default, (leaf, mask, heads), options | {"mask_leaves_out": False}
            )
            assert set(check.values()) == {"SUCCESS"}
    out = x.softmax(-1)
    check = torch.library.opcheck(ops.softmax_backward.default, (grad, out, x), options)
    assert set(check.values()) == {"SUCCESS"}


@pytest.mark.parametrize("option", ["plain", "alibi", "additive mask", "all"])
def test_can_be_compiled(option: str, device: str) -> None:
    """In one graph with dynamic sizes, gradients too, and with the same bits."""

    def block(x: Tensor, options: dict[str, Any]) -> Tensor:
        return softmax(x * 2, **options).sin()

    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (40, 97):
        shape = (2, 3, 9, n)
        x, options = make(shape, F32, 0, device).requires_grad_(), OPTIONS[option](device, shape)
        found = []
        for function in (compiled, block):
            result = function(x, options)
            found.append([result, *torch.autograd.grad(result.sum(), x)])
        for got, want in zip(*found, strict=True):
            assert torch.equal(got, want)


def test_a_gradient_of_a_gradient_is_refused(device: str) -> None:
    x = make((3, 8), F32, 0, device).requires_grad_()
    (grad,) = torch.autograd.grad(softmax(x).square().sum(), x, create_graph=True)
    text = "softmax_backward: the gradient is wanted, expected no use of it, as the op has none"
    with pytest.raises(RuntimeError, match=f"^{text}"):
        grad.sum().backward()


def test_a_change_after_the_call_is_noticed(device: str) -> None:
    x = make((3, 8), F32, 0, device).requires_grad_()
    for options, changed in (({}, lambda inner, out: out), (dict(softcap=2.0), lambda i, out: i)):
        inner = x * 1
        out = softmax(inner, **options)
        changed(inner, out).detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_under_autocast_nothing_is_cast(device: str) -> None:
    with torch.autocast(device, dtype=BF16):
        assert softmax(make((3, 40), BF16, 0, device)).dtype == BF16
        assert softmax(make((3, 40), F32, 0, device)).dtype == F32


def test_on_meta_and_fake() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    out = softmax(torch.ones(2, 4, device="meta").half(), causal=True)
    assert out.dtype == F16 and out.is_meta
    with FakeTensorMode():
        assert softmax(torch.ones(2, 4), torch.ones(4) > 0).shape == (2, 4)


@pytest.mark.parametrize("n", [4096, 65536])
def test_no_memory_beyond_the_results(n: int, cuda: str) -> None:
    """No mask is expanded; backward allocates the gradient."""
    x = torch.ones(4, 2**24 // 4 // n, n, device=cuda, dtype=BF16).requires_grad_()
    mask = torch.ones(4, 1, n, device=cuda) > 0
    softmax(x, mask, causal=True).sum().backward()
    grad = torch.ones_like(x)
    torch.cuda.synchronize()
    before, bytes_of_x = torch.cuda.memory_allocated(), x.numel() * 2
    torch.cuda.reset_peak_memory_stats()
    out = softmax(x, mask, causal=True)
    assert torch.cuda.max_memory_allocated() - before <= 1.01 * bytes_of_x
    torch.autograd.grad(out, x, grad)
    assert torch.cuda.max_memory_allocated() - before <= 2.01 * bytes_of_x


@pytest.mark.parametrize("n", [4096, 65536])
def test_cuda_graph_and_stream(n: int, cuda: str) -> None:
    x = torch.ones(64, n, device=cuda, dtype=BF16)
    softmax(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = softmax(x, causal=True)
    x.copy_(make((64, n), BF16, 0, cuda))
    graph.replay()
    assert torch.equal(out, softmax(x, causal=True))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = softmax(x.mul_(2))
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(late, softmax(x))


def test_nothing_waits_for_cuda(cuda: str) -> None:
    x = torch.ones(64, 65536, device=cuda).requires_grad_()
    grad = torch.ones_like(x)
    softmax(x).backward(grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        softmax(x).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_self_check(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    self_checks.softmax(device)
    monkeypatch.setattr(self_checks.ops, "softmax", lambda *t, **o: softmax(*t, **o) * 1.01)
    with pytest.raises(RuntimeError, match=r"^softmax: 0 of results and gradients on "):
        self_checks.softmax(device)
