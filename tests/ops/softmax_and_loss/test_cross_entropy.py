"""cross_entropy: numbers, gradients, in place or not, and what it refuses."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from row_layouts import LAYOUTS
from samples import BF16, DTYPES, F16, F32, make
from tolerance import assert_within
from torch import Tensor

from deepspeed_ext.ops import cross_entropy, cross_entropy_ref

ROUNDING = torch.finfo(F32).eps / 2
LENGTHS = [1, 2, 7, 8, 31, 33, 129, 1000, 1032, 4100, 16384, 16392, 40_001, 131_080]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": dict(reduction="sum"),
    "each": dict(reduction="none"),
    "smooth": dict(label_smoothing=0.1),
    "all smooth": dict(label_smoothing=1.0, reduction="none"),
    "z-loss": dict(z_loss=1e-3),
    "all": dict(label_smoothing=0.2, z_loss=1e-2, ignore_index=0, reduction="sum"),
}


def targets(rows: int, n: int, device: str, ignored: int = -100) -> Tensor:
    """Some class for each row, the first and the last among them; the third row is ignored."""
    found = torch.arange(rows) * 7919 % n
    found[-1] = n - 1
    found[2:3] = ignored
    return found.to(device)


def of_both(logits: Tensor, target: Tensor, grad: Tensor, **options: Any) -> list[Tensor]:
    """Return the loss, and the gradient of the logits, which are not changed."""
    leaf = logits.detach().requires_grad_()
    loss = cross_entropy(leaf.clone() if options.get("inplace") else leaf, target, **options)
    return [loss.detach(), *torch.autograd.grad(loss, leaf, grad.to(loss))]


def assert_right(logits: Tensor, target: Tensor, **options: Any) -> None:
    """Compare loss and gradient with the reference, element by element.

    The power of a distance d is off by 2 + 2 |d| units, and a sum of n adds n / 32 + 16 roundings.
    """
    n, rows = logits.shape[-1], target.numel()
    each = options.get("reduction") == "none"
    grad = make(tuple(target.shape), F32, 3).abs() + 0.5 if each else torch.tensor(1.5)
    got = of_both(logits, target, grad.to(logits.device), **options)
    wide = logits.detach().cpu().double().requires_grad_()
    on_host = target.cpu()
    loss = cross_entropy_ref(wide, on_host, **options)
    (right,) = torch.autograd.grad(loss, wide, grad.double())
    size = wide.detach().abs().amax(-1) if n else wide.detach().sum(-1)
    relative = ROUNDING * (8 * size + n / 32 + 40)
    whole = size + wide.detach().logsumexp(-1).abs()
    error = relative + 8 * ROUNDING * whole + options.get("z_loss", 0) * whole**2 * relative
    counts = on_host != options.get("ignore_index", -100)
    error = error.where(counts, 0)
    divisor = 1
    if not each:
        divisor = int(counts.sum()) if options.get("reduction") != "sum" else 1
        error = error.sum() / divisor + 2 * ROUNDING * rows * loss.detach().abs()
    assert got[0].dtype == F32 and got[0].shape == loss.shape
    assert_within("loss", got[0].cpu(), loss.detach(), error)
    factor = (grad if each else grad.expand(target.shape)).double() / divisor
    p = wide.detach().softmax(-1)
    boost = 1 + 2 * options.get("z_loss", 0) * (whole + 1)
    hits = torch.zeros_like(p).scatter(-1, on_host.where(counts, 0)[..., None], 1)
    terms = p * (relative * boost)[..., None] + 8 * ROUNDING * (p + hits + 1 / n)
    off = factor[..., None] * terms
    if options.get("inplace"):  # rounded once more, before it is multiplied by the loss's
        stored = torch.finfo(logits.dtype)
        once = stored.eps * (right.abs() + stored.smallest_normal * grad.abs().max())
        off = off + once
    assert_within("gradient", got[1].cpu(), right, off)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype: torch.dtype, n: int, device: str) -> None:
    rows = 4 if n > 5000 else 37
    logits = make((rows, n), dtype, 0, device) * 3
    assert_right(logits, targets(rows, n, device))
    assert_right(logits, targets(rows, n, device), inplace=True)


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("n", [40, 201, 20_000])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_options(dtype: torch.dtype, name: str, n: int, inplace: bool, device: str) -> None:
    options, rows = OPTIONS[name], 6 if n > 5000 else 19
    target = targets(rows, n, device, options.get("ignore_index", -100))
    assert_right(make((rows, n), dtype, 0, device), target, inplace=inplace, **options)


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4, 8), (1, 1), (700, 40)])
def test_shapes(shape: tuple[int, ...], device: str) -> None:
    target = torch.ones(shape[:-1], dtype=torch.int64, device=device) * (shape[-1] - 1)
    for options in OPTIONS.values():
        assert_right(make(shape, F32, 0, device), target, **options)


def test_no_rows_and_none_that_counts(device: str) -> None:
    for rows in (0, 3):
        logits = make((rows, 8), F32, 0, device)
        target = torch.full((rows,), -100, device=device)
        for reduction in ("mean", "sum", "none"):
            for inplace in (False, True):
                shape = (rows,) if reduction == "none" else ()
                grad = torch.ones(shape, device=device)
                options = dict(reduction=reduction, inplace=inplace)
                loss, grad_x = of_both(logits, target, grad, **options)
                assert loss.shape == shape
                assert loss.isnan().all() if reduction == "mean" else (loss == 0).all()
                assert torch.equal(grad_x, torch.zeros_like(logits))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("far", [0.0, -1e5, 1e34, -2e38])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e4])
def test_huge_and_tiny(size: float, far: float, smoothing: float, device: str) -> None:
    """Digits are those of the differences, however far from 0, and with a logit far below."""
    logits = make((9, 300), F32, 0, device).clamp(-1, 1) * size + far
    logits[:, 7], logits[0, 0] = size + far, -1e9 + min(far, 0)
    options: dict[str, Any] = dict(reduction="none", label_smoothing=smoothing)
    target = torch.full((9,), 7, device=device)
    grad = torch.ones(9, device=device)
    got = of_both(logits, target, grad, **options)
    wide = logits.double().requires_grad_()
    want = cross_entropy_ref(wide, target, **options)
    torch.testing.assert_close(got[0].double(), want.detach(), rtol=1e-5, atol=1e-6)
    (right,) = torch.autograd.grad(want, wide, grad.double())
    torch.testing.assert_close(got[1].double(), right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -float("inf")])
@pytest.mark.parametrize("n", [40, 301, 17_000])
def test_only_the_row_of_what_is_not_finite(bad: float, n: int, device: str) -> None:
    logits, target = make((4, n), F32, 0, device), torch.tensor([0, 5, 6, n - 1], device=device)
    grad = torch.ones(4, device=device)
    clean = of_both(logits, target, grad, reduction="none")
    logits[2, 5] = bad
    loss, grad_x = of_both(logits, target, grad, reduction="none")
    rest = [0, 1, 3]
    assert torch.equal(loss[rest], clean[0][rest]) and torch.equal(grad_x[rest], clean[1][rest])
    if bad == -float("inf"):  # of no probability
        assert loss[2].isfinite() and grad_x[2, 5] == 0 and grad_x.isfinite().all()
        logits[2] = bad
        loss, grad_x = of_both(logits, target, grad, reduction="none")
    assert loss[2].isnan() and grad_x[2].isnan().all()


def test_a_target_out_of_range_on_cuda(cuda: str) -> None:
    logits = make((4, 40), F32, 0, cuda)
    for bad in (40, -1, 2**40):
        target = torch.tensor([1, bad, -100, 3], device=cuda)
        for inplace in (False, True):
            options = dict(reduction="none", inplace=inplace)
            loss, grad_x = of_both(logits, target, torch.ones(4, device=cuda), **options)
            assert loss.isnan().tolist() == [False, True, False, False]
            assert grad_x.isnan().all(-1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype, device: str) -> None:
    """The results are those of contiguous copies, bit for bit."""
    logits = LAYOUTS[layout](make((48, 200), dtype, 0, device))
    rows, n = logits.shape[:-1], logits.shape[-1]
    target = targets(rows.numel(), n, device).view(rows)
    strided = torch.stack([target, target], -1)[..., 0]
    grad = make(tuple(rows), F32, 1, device)
    expanded = grad.view(-1)[0].expand(rows)
    for of_rows in (grad, expanded):
        want = of_both(logits.contiguous(), target, of_rows.contiguous(), reduction="none")
        got = of_both(logits, strided, of_rows, reduction="none")
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_inplace_has_the_same_bits(dtype: torch.dtype, name: str, device: str) -> None:
    """Where the gradient of the loss is 1; the logits' memory then has the gradient."""
    for n in (40, 201, 20_000):
        logits, target = make((6, n), dtype, 0, device), targets(6, n, device)
        options = OPTIONS[name] | {"ignore_index": -100}
        one = torch.ones(6 if options.get("reduction") == "none" else (), device=device)
        want = of_both(logits, target, one, **options)
        leaf = logits.clone().requires_grad_()
        inner = leaf * 1
        loss = cross_entropy(inner, target, inplace=True, **options)
        (grad,) = torch.autograd.grad(loss, leaf, one)
        assert torch.equal(loss, want[0]) and torch.equal(grad, want[1])
        assert torch.equal(inner.detach(), want[1])
        room = torch.zeros(6, n + 3, dtype=dtype, device=device)
        room[:, 1:-2] = logits
        got = cross_entropy(room[:, 1:-2], target, inplace=True, **options)
        assert torch.equal(got, want[0]) and torch.equal(room[:, 1:-2], want[1])
        assert (room[:, [0, -1, -2]] == 0).all()


@pytest.mark.parametrize("options", [{}, dict(reduction="sum"), dict(z_loss=0.03)], ids=str)
def test_inplace_keeps_what_a_loss_scale_is_for(options: dict[str, Any], device: str) -> None:
    """The float16 gradients of a mean, which vanish unless they are multiplied before rounding."""
    logits, target = make((4096, 64), F16, 0, device), torch.arange(4096, device=device) % 64
    logits[7, 5] = 60_000  # z-loss makes its gradients a thousand times as large
    for ignored in (0, 4090):
        target[:ignored] = -100
        for scale in (65_536.0 if not options else 8.0, 1.0, 3.7e-3):
            both = [
                of_both(logits, target, torch.tensor(scale), inplace=inplace, **options)[1].double()
                for inplace in (True, False)
            ]
            rounded = 2.0**-24 if scale >= 1 else 2.0**-10 * both[1].abs() + 2.0**-24
            assert ((both[0] - both[1]).abs() <= rounded).all()
            if scale > 8:
                assert torch.equal(*both) and ((both[0] == 0).sum(-1) > 0).sum() <= ignored + 1


def test_inplace_is_for_once(device: str) -> None:
    leaf, target = make((5, 40), F32, 0, device).requires_grad_(), targets(5, 40, device)
    loss = cross_entropy(leaf * 1, target, inplace=True)
    torch.autograd.grad(loss, leaf, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"^cross_entropy: backward is called a second time, "):
        torch.autograd.grad(loss, leaf)
    with pytest.raises(ValueError, match=r"^cross_entropy: logits is a leaf that requires a grad"):
        cross_entropy(leaf, target, inplace=True)
    before = leaf.detach().clone()
    for view in (leaf.view(5, 40), leaf[:], leaf[:, :].view(-1, 40), leaf.t().t()):
        with pytest.raises(ValueError, match=r"^cross_entropy: logits is a view of a leaf that "):
            cross_entropy(view, target, inplace=True)
    assert torch.equal(leaf, before)
    cross_entropy((leaf * 1).view(-1, 40), target, inplace=True)
    inner = leaf * 1
    other = inner.square().sum()
    cross_entropy(inner, target, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "to itself": lambda logits: logits.zero_(),
    "to a view": lambda logits: logits[1:2, 3:].mul_(2),
    "to what it is a view of": lambda logits: logits._base.zero_(),
    "detached": lambda logits: logits.detach().zero_(),
    "of a list": lambda logits: torch._foreach_mul_([logits], 2.0),
    "of a result": lambda logits: torch.add(logits, 1, out=logits),
    "by this op": lambda logits: cross_entropy(
        logits.detach(), targets(5, 40, logits.device), inplace=True
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_inplace_sees_later_writes(name: str, device: str) -> None:
    """As torch does where it has saved a tensor; views of the logits, and those of others, too."""
    leaf, target = make((5, 60), F32, 0, device).requires_grad_(), targets(5, 40, device)
    logits = (leaf * 1)[:, 10:50]
    loss = cross_entropy(logits, target, inplace=True)
    with torch.no_grad():
        WRITES[name](logits)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["to itself", "to a view", "detached", "of a list"])
def test_inplace_takes_later_writes_when_compiled(name: str, device: str) -> None:
    """The compiler orders them, and copies where it must."""

    def block(x: Tensor, target: Tensor) -> Tensor:
        logits = x * 2
        loss = cross_entropy(logits, target, inplace=True)
        with torch.no_grad():
            WRITES[name](logits)
        return loss

    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    x, target = make((5, 40), F32, 0, device).requires_grad_(), targets(5, 40, device)
    (got,) = torch.autograd.grad(compiled(x, target), x)
    (want,) = torch.autograd.grad(cross_entropy(x * 2, target), x)
    assert torch.equal(got, want)


def test_inplace_with_a_mask_of_losses(device: str) -> None:
    """A loss that is multiplied by 0 has the gradient 0, one of rows or all of them."""
    target = torch.arange(6, device=device)
    for mask in ([0.0] * 6, [0.0, 1.0, 0.5, 0.0, 1.0, 0.0], [1.0] * 6):
        grads = []
        for inplace in (True, False):
            leaf = make((6, 41), F32, 0, device).requires_grad_()
            loss = cross_entropy(leaf * 1, target, reduction="none", inplace=inplace)
            (loss * torch.tensor(mask, device=device)).sum().backward()
            grads.append(leaf.grad)
        assert torch.equal(*grads)
        assert (grads[0].abs().sum(-1) == 0).tolist() == [factor == 0 for factor in mask]


def test_inplace_within_other_things_of_torch(device: str) -> None:
    """Saved on the host, checkpointed, without a gradient in the end, within a transform."""
    from torch.utils.checkpoint import checkpoint

    target, x = targets(5, 40, device), make((5, 40), F32, 0, device)
    (want,) = torch.autograd.grad(cross_entropy(leaf := x.clone().requires_grad_(), target), leaf)

    def block(x: Tensor) -> Tensor:
        return cross_entropy(x * 1, target, inplace=True)

    with torch.autograd.graph.save_on_cpu():
        loss = block(leaf)
    assert torch.equal(*torch.autograd.grad(loss, leaf), want)
    for reentrant in (True, False):
        loss = checkpoint(block, leaf, use_reentrant=reentrant)
        leaf.grad = None
        loss.backward()
        assert leaf.grad is not None and torch.equal(leaf.grad, want)
    for transform in (torch.func.grad(block), torch.func.vmap(lambda row: block(row[None]))):
        with pytest.raises(RuntimeError, match=r"^cross_entropy: logits is within a transform of "):
            transform(x)


def test_inplace_refuses_gradients_of_gradients(device: str) -> None:
    """Of logits that are not there any more."""
    leaf, target = make((5, 40), F32, 0, device).requires_grad_(), targets(5, 40, device)
    loss = cross_entropy(leaf * 1, target, inplace=True)
    with pytest.raises(RuntimeError, match=r"^cross_entropy: backward is called with create_graph"):
        torch.autograd.grad(loss, leaf, create_graph=True)
    torch.autograd.grad(loss, leaf)


def digest(device: str = "cpu") -> str:
    """Return a digest of the bits of losses and gradients."""
    found = hashlib.sha256()
    for dtype in DTYPES:
        for n in (1, 33, 1000, 20_000):
            for options in (OPTIONS["each"], OPTIONS["all"]):
                rows = 41 if n < 1000 else 5
                logits, target = make((rows, n), dtype, 0, device), targets(rows, n, device)
                grad = torch.full((rows,) if options.get("reduction") == "none" else (), 0.7)
                options = options | {"ignore_index": -100}
                for tensor in of_both(logits, target, grad.to(device), **options):
                    found.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
