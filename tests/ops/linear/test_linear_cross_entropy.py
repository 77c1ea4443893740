"""linear_cross_entropy: its numbers and gradients, what it takes, what it refuses."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from allocated import Taken, measured
from samples import BF16, DTYPES, F16, F32, make
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from deepspeed_ext.ops import linear_cross_entropy, linear_cross_entropy_ref

CLASSES, N = 61, 24
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": dict(reduction="sum"),
    "each": dict(reduction="none"),
    "capped": dict(softcap=3.0),
    "all": dict(softcap=4.0, label_smoothing=0.2, z_loss=1e-2, ignore_index=3),
    "each of all": dict(softcap=4.0, label_smoothing=0.2, z_loss=1e-2, reduction="none"),
}


def arguments(
    rows: tuple[int, ...] = (5, 29), dtype: torch.dtype = F32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, weight, targets and bias; the third target is ignored."""
    shapes = ((*rows, N), (CLASSES, N), (CLASSES,))
    hidden, weight, bias = (make(shape, dtype, i, device) for i, shape in enumerate(shapes))
    count = hidden.shape[:-1].numel()
    targets = torch.arange(count) * 7919 % CLASSES
    targets[2:3] = -100
    return hidden, weight, targets.view(rows).to(device), bias


def run(
    function: Callable[..., Tensor], tensors: tuple[Tensor, ...], grad: Tensor, **options: Any
) -> list[Tensor]:
    """Return the loss and the gradients of hidden, weight and bias."""
    hidden, weight, targets, bias = tensors
    leaves = [t.detach().requires_grad_() for t in (hidden, weight, bias)]
    loss = function(leaves[0], leaves[1], targets, bias=leaves[2], **options)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, grad.to(loss))]


def grad_of(targets: Tensor, options: dict[str, Any]) -> Tensor:
    each = options.get("reduction") == "none"
    return make(tuple(targets.shape), F32, 9) if each else torch.tensor(-1.5)


@pytest.mark.parametrize("chunk", [None, 1, 40, 1000])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype: torch.dtype, name: str, chunk: int | None, device: str) -> None:
    """Off by some roundings of the largest: those of logits, of their gradients and of results."""
    tensors, options = arguments(dtype=dtype, device=device), OPTIONS[name]
    tensors[2][tensors[2] == -100] = options.get("ignore_index", -100)
    grad = grad_of(tensors[2], options)
    got = run(linear_cross_entropy, tensors, grad, chunk=chunk, **options)
    on_host = tuple(t.cpu() for t in tensors)
    want = run(linear_cross_entropy_ref, on_host, grad, **options)
    roundings = 4 if dtype == BF16 else 16
    for what, value, right in zip(("loss", "hidden", "weight", "bias"), got, want, strict=True):
        assert value.shape == right.shape
        assert value.dtype == (F32 if what == "loss" else dtype)
        off = (value.cpu().double() - right).abs().max()
        assert off <= roundings * torch.finfo(dtype).eps * right.abs().max(), what


def test_the_gradient_of_the_weight_is_added_up_in_float32(device: str) -> None:
    """Of 2,000 chunks in bfloat16: rounded once, where sums in bfloat16 would stand still."""
    hidden, weight = torch.ones(2000, 8), torch.zeros(2, 8)
    targets = torch.zeros(2000, dtype=torch.int64)
    tensors = tuple(
        t.to(device) for t in (hidden.to(BF16), weight.to(BF16), targets, weight[:, 0].to(BF16))
    )
    _, _, of_weight, of_bias = run(
        linear_cross_entropy, tensors, torch.ones(()), chunk=1, reduction="sum"
    )
    assert (of_weight.cpu() == torch.tensor([[-1000.0], [1000.0]]).to(BF16)).all()
    assert (of_bias.cpu() == torch.tensor([-1000.0, 1000.0]).to(BF16)).all()


def test_as_torch_does(device: str) -> None:
    """The unfused form, in float32, also with one tensor as embedding and head."""
    hidden, weight, targets, bias = arguments(device=device)
    found = []
    for fused in (False, True):
        tied = weight.clone().requires_grad_()
        x = F.embedding(targets.clamp(min=0), tied) + hidden
        if fused:
            loss = linear_cross_entropy(x, tied, targets, bias=bias)
        else:
            logits = F.linear(x, tied, bias)
            loss = F.cross_entropy(logits.view(-1, CLASSES), targets.view(-1))
        found.append([loss.detach(), *torch.autograd.grad(loss, tied)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_a_second_backward_and_gradients_one_at_a_time(device: str) -> None:
    hidden, weight, targets, bias = arguments(dtype=BF16, device=device)
    for options in ({}, dict(reduction="none")):
        grad = grad_of(targets, options).to(device)
        want = run(linear_cross_entropy, (hidden, weight, targets, bias), grad, **options)
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        loss = linear_cross_entropy(leaves[0], leaves[1], targets, bias=leaves[2], **options)
        for _ in range(2):
            again = torch.autograd.grad(loss, leaves, grad, retain_graph=True)
            assert all(map(torch.equal, again, want[1:]))
        for i in range(3):
            given = [t.clone().requires_grad_(i == j) for j, t in enumerate((hidden, weight, bias))]
            loss = linear_cross_entropy(given[0], given[1], targets, bias=given[2], **options)
            (alone,) = torch.autograd.grad(loss, given[i], grad)
            torch.testing.assert_close(alone, want[1 + i])


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    ("wanted", "products"), [((), 1), ((0,), 2), ((1,), 2), ((2,), 1), ((0, 1, 2), 3)], ids=str
)
def test_no_work_for_gradients_that_nobody_wants(
    wanted: tuple[int, ...], products: int, reduction: str
) -> None:
    """One product each; with reduction="none" the first is made again in backward."""
    hidden, weight, targets, bias = arguments()
    given = [t.clone().requires_grad_(i in wanted) for i, t in enumerate((hidden, weight, bias))]
    with FlopCounterMode(display=False) as counter:
        loss = linear_cross_entropy(given[0], given[1], targets, bias=given[2], reduction=reduction)
        assert loss.requires_grad == bool(wanted)
        if wanted:
            loss.sum().backward()
    again = reduction == "none" and bool(wanted)
    assert counter.get_total_flops() == 2 * targets.numel() * CLASSES * N * (products + again)
    with torch.no_grad():
        assert not linear_cross_entropy(given[0], given[1], targets).requires_grad


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_hidden_states_of_no_elements(reduction: str, device: str) -> None:
    """The logits are the bias."""
    hidden, weight = (torch.zeros(shape, device=device) for shape in ((2, 3, 0), (5, 0)))
    leaves = [t.requires_grad_() for t in (hidden, weight, torch.randn(5, device=device))]
    targets = torch.tensor([[0, 4, 2], [1, 1, 3]], device=device)
    found = linear_cross_entropy(*leaves[:2], targets, bias=leaves[2], reduction=reduction)
    rows = leaves[2].expand(6, 5)
    want = F.cross_entropy(rows, targets.flatten(), reduction=reduction).reshape(found.shape)
    torch.testing.assert_close(found, want)
    grads = (torch.autograd.grad(loss.sum(), leaves[2])[0] for loss in (found, want))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_rows_and_none_that_counts(reduction: str, device: str) -> None:
    for rows in (0, 3):
        hidden, weight, targets, bias = arguments((rows,), device=device)
        targets.fill_(-100)
        grad = torch.ones((rows,) if reduction == "none" else (), device=device)
        loss, *grads = run(
            linear_cross_entropy, (hidden, weight, targets, bias), grad, reduction=reduction
        )
        assert loss.isnan().all() if reduction == "mean" else (loss == 0).all()
        assert all((each == 0).all() for each in grads)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_where_torch_has_it(bad: float, device: str) -> None:
    hidden, weight, targets, bias = arguments((9,), device=device)
    hidden[4, 3] = bad
    grad = torch.ones(9, device=device)
    found = []
    for function in (linear_cross_entropy, linear_cross_entropy_ref):
        tensors = hidden, weight, targets, bias
        found.append(run(function, tensors, grad, reduction="none", chunk=4))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got.isfinite(), want.isfinite())
    assert not found[0][0][4].isfinite() and found[0][0][3].isfinite()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast(reduction: str, device: str) -> None:
    """Products are in its dtype; the gradient of a float32 weight is not rounded to it."""
    hidden, weight, targets, bias = arguments(device=device)
    grad = torch.ones(targets.shape if reduction == "none" else ())
    tensors = (hidden.to(BF16), weight, targets, bias)
    with torch.autocast(device, BF16):
        got = run(linear_cross_entropy, tensors, grad, reduction=reduction)
        loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
    assert [t.dtype for t in got] == [F32, BF16, F32, F32]
    rounded = tuple(t.to(BF16) if t.is_floating_point() else t for t in tensors)
    want = run(linear_cross_entropy, rounded, grad, reduction=reduction)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert torch.equal(got[2].to(BF16), want[2]) and not torch.equal(got[2], want[2].float())
    torch.testing.assert_close(
        loss, linear_cross_entropy(rounded[0], rounded[1], targets, reduction=reduction)
    )


REFUSED: dict[str, Callable[[], dict[str, Any]]] = {
    "weight is float32, expected bfloat16": lambda: dict(hidden=torch.ones(2, 4).to(BF16)),
    "hidden is float64, expected float32, bfloat16 or float16":
        lambda: dict(hidden=torch.ones(2, 4).double(), weight=torch.ones(6, 4).double()),
    "hidden has shape [], expected one dimension at least": lambda: dict(hidden=torch.ones(())),
    "weight has shape [6, 3], expected [classes, 4], and one class at least":
        lambda: dict(weight=torch.ones(6, 3)),
    "weight has shape [0, 4], expected [classes, 4], and one class at least":
        lambda: dict(weight=torch.ones(0, 4)),
    "targets has shape [2, 1], expected [2]": lambda: dict(targets=torch.ones(2, 1).long()),
    "targets is int32, expected int64": lambda: dict(targets=torch.ones(2).int()),
    "targets has 6 as its element number 1, expected 0 to 5, or -100 for a row that is ignored":
        lambda: dict(targets=torch.tensor([0, 6])),
    "bias has shape [5], expected [6]": lambda: dict(bias=torch.ones(5)),
    "reduction is 'all', expected 'mean', 'sum' or 'none'": lambda: dict(reduction="all"),
    "label_smoothing is 1.5, expected a number from 0 to 1": lambda: dict(label_smoothing=1.5),
    "z_loss is -1.0, expected a finite float32, 0 or more": lambda: dict(z_loss=-1.0),
    "softcap is nan, expected a finite float32, 0 or more":
        lambda: dict(softcap=float("nan")),
    "chunk is 0, expected 1 row at least": lambda: dict(chunk=0),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    given = dict(hidden=torch.ones(2, 4), weight=torch.ones(6, 4), targets=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=f"^linear_cross_entropy: {re.escape(text)}$"):
        linear_cross_entropy(**(given | REFUSED[text]()))


def test_refuses_what_has_been_freed() -> None:
    hidden, weight, targets, _ = arguments()
    weight.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="weight has no memory, expected 1464 elements"):
        linear_cross_entropy(hidden, weight, targets)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_refuses_gradients_of_gradients(reduction: str) -> None:
    hidden, weight, targets, _ = arguments()
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, targets, reduction=reduction)
    text = "^linear_cross_entropy: backward is called with create_graph=True, expected False, "
    with pytest.raises(RuntimeError, match=text):
        torch.autograd.grad(loss.sum(), hidden, create_graph=True)


@pytest.mark.parametrize("options", [{}, dict(reduction="none", softcap=2.0)], ids=str)
def test_can_be_compiled(options: dict[str, Any], device: str) -> None:
    """Into one graph for all numbers of rows, with the same bits."""

    def block(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden * 2, weight, targets, bias=bias, **options)

    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 9, 70):
        hidden, weight, targets, bias = arguments((rows,), BF16, device)
        leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
        losses = [f(leaves[0], leaves[1], targets, leaves[2]) for f in (block, compiled)]
        assert torch.equal(*losses)
        grads = [torch.autograd.grad(loss.sum(), leaves) for loss in losses]
        assert all(map(torch.equal, *grads))


def test_opcheck(device: str) -> None:
    tensors = arguments((70,), F16, device)
    options: dict[str, Any] = dict(ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=0.0)
    options |= dict(chunk=0, dtype=F16, wants_hidden=True, wants_weight=True, wants_bias=True)
    raw = torch.ops.deepspeed_ext
    for reduction in (0, 1):
        leaves = tuple(t.clone().requires_grad_(t.is_floating_point()) for t in tensors)
        check = torch.library.opcheck(
            raw.linear_cross_entropy.default, leaves, options | dict(reduction=reduction)
        )
        assert set(check.values()) == {"SUCCESS"}
    grad = torch.ones(70, device=device)
    op = raw.linear_cross_entropy_backward.default
    assert set(torch.library.opcheck(op, (grad, *tensors), options).values()) == {"SUCCESS"}
    scaled = (grad, grad[0], grad[1])
    op = raw.linear_cross_entropy_scaled.default
    assert set(torch.library.opcheck(op, scaled, dict(dtype=BF16)).values()) == {"SUCCESS"}


ROWS, WIDTH, MANY = 4096, 64, 8192  # logits are 128 times as large as hidden states


def taken_by(device: str, taken: Taken) -> dict[str, float]:
    """Return what forward and backward have at most, in logits of all rows."""
    hidden, weight = (torch.ones(n, WIDTH, device=device) for n in (ROWS, MANY))
    targets = torch.zeros(ROWS, dtype=torch.int64, device=device)

    def both(h: Tensor, w: Tensor) -> Any:
        return torch.autograd.grad(linear_cross_entropy(h, w, targets), [
            t for t in (h, w) if t.requires_grad
        ])  # fmt: skip

    found = {}
    for name, wanted in (("warm", (1, 1)), ("hidden", (1, 0)), ("both", (1, 1))):
        pair = [
            t.clone().requires_grad_(bool(w)) for t, w in zip((hidden, weight), wanted, strict=True)
        ]
        found[name] = taken(both, *pair)[1] / (ROWS * MANY * 4)
    with torch.no_grad():
        found["none"] = taken(linear_cross_entropy, hidden, weight, targets)[1] / (ROWS * MANY * 4)
    return found


def test_memory(device: str) -> None:
    """Logits of 64 rows of 4,096, gradients of both, and before they are returned once more."""
    found = measured(taken_by, device)
    logits, of_hidden, of_weight = 64 / ROWS, WIDTH / MANY, WIDTH / ROWS
    assert found["none"] < 1.2 * logits
    assert found["hidden"] < 1.2 * (logits + 2 * of_hidden)
    assert found["both"] < 1.2 * (logits + 2 * of_hidden + 2 * of_weight)


def test_nothing_waits_for_cuda(cuda: str) -> None:
    """Nor in backward; and a call can be captured in a graph."""
    hidden, weight, targets, bias = arguments((300,), BF16, cuda)
    grad = torch.tensor(3.0, device=cuda)
    want = run(linear_cross_entropy, (hidden, weight, targets, bias), grad, softcap=5.0)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]

    def call() -> list[Tensor]:
        loss = linear_cross_entropy(leaves[0], leaves[1], targets, bias=leaves[2], softcap=5.0)
        return [loss, *torch.autograd.grad(loss, leaves, grad)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = call()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, want))
