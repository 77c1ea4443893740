"""moe_permute and moe_unpermute: values, bits and gradients, beside the references."""

import pytest
import torch
from route_cases import random_like, wide
from row_layouts import LAYOUTS
from samples import BF16, DTYPES, F16, F32, make
from tolerance import assert_within
from torch import Tensor

from deepspeed_ext.ops import (
    Routing,
    moe_assign,
    moe_permute,
    moe_permute_ref,
    moe_unpermute,
    moe_unpermute_ref,
)

ROUNDING = torch.finfo(F32).eps / 2
LENGTHS = [1, 2, 7, 8, 31, 48, 129, 1032, 2100, 7168, 16_384, 16_388, 30_001]


def routed(tokens: int, experts: int, k: int, device: str, capacity: int | None = None) -> Routing:
    """Choices that differ from token to token, one of them of no expert."""
    scores = make((tokens, experts), F32, 3)
    chosen = scores.topk(k).indices
    if tokens > 2:
        chosen[2, -1] = experts
    weights = make((tokens, k), F32, 4).to(device)
    return moe_assign(chosen.to(device), weights, experts, capacity=capacity)


def on_host(routing: Routing) -> Routing:
    return Routing(*(t.cpu() if isinstance(t, Tensor) else t for t in routing))


def errors_of(terms: Tensor, k: int) -> Tensor:
    """Bound what k sums of float32 are off by, from the magnitudes of their terms."""
    return ROUNDING * (k + 2) * terms


def assert_right(x: Tensor, routing: Routing, weights: Tensor | None = None) -> None:
    """Compare both ops and their gradients with the references, element by element."""
    host, k, n = on_host(routing), routing.slots.shape[-1], x.shape[-1]
    leaf, right = x.detach().requires_grad_(), wide(x)
    rows = moe_permute(leaf, routing)
    want = moe_permute_ref(right, host)
    assert rows.dtype == x.dtype and rows.shape == want.shape == (routing.rows, n)
    assert torch.equal(rows.detach().cpu().double(), want.detach())
    (grad,) = random_like([want])
    grad = grad.to(x.dtype).double()
    (got,) = torch.autograd.grad(rows, leaf, grad.to(rows))
    (expected,) = torch.autograd.grad(want, right, grad)
    (size,) = torch.autograd.grad(moe_permute_ref(right, host), right, grad.abs())
    assert got.dtype == x.dtype
    assert_within("gradient of x", got.cpu(), expected, errors_of(size, k))

    y = make((routing.rows, n), F32, 5).to(rows)
    weights = routing.weights if weights is None else weights
    leaves = [y.requires_grad_(), weights.detach().requires_grad_()]
    doubles = [wide(t) for t in leaves]
    out, want = (
        moe_unpermute(leaves[0], routing, leaves[1]),
        moe_unpermute_ref(doubles[0], host, doubles[1]),
    )
    size = moe_unpermute_ref(doubles[0].abs(), host, doubles[1].abs()).detach()
    assert out.dtype == y.dtype and out.shape == x.shape
    assert_within("sum", out.detach().cpu(), want.detach(), errors_of(size, k))
    grad = make(tuple(out.shape), F32, 6).to(out.dtype)
    got_y, got_weights = torch.autograd.grad(out, leaves, grad.to(out))
    want_y, want_weights = torch.autograd.grad(want, doubles, grad.double())
    assert_within("gradient of y", got_y.cpu(), want_y, errors_of(want_y.abs(), 1))
    products = grad.cpu().double().abs()[..., None, :] * _gathered(doubles[0].detach().abs(), host)
    bound = ROUNDING * (n / 32 + 40) * products.sum(-1)
    assert got_weights.dtype == weights.dtype
    assert_within("gradient of weights", got_weights.cpu(), want_weights, bound)


def _gathered(y: Tensor, routing: Routing) -> Tensor:
    return torch.cat([y, y.new_zeros(1, y.shape[-1])])[routing.slots]


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype: torch.dtype, n: int, device: str) -> None:
    tokens = 5 if n > 10_000 else 41
    for k, experts, capacity in ((2, 8, None), (2, 8, tokens // 4), (8, 12, None), (1, 3, 4)):
        x = make((tokens, n), dtype, 0, device)
        assert_right(x, routed(tokens, experts, k, device, capacity))


@pytest.mark.parametrize("k", [1, 3, 8, 9, 20])
@pytest.mark.parametrize("dtypes", [(F32, BF16), (BF16, F32), (F16, BF16)], ids=str)
def test_other_weights(dtypes: tuple[torch.dtype, torch.dtype], k: int, device: str) -> None:
    routing = routed(30, 24, k, device, 15)
    weights = make((30, k), dtypes[1], 8, device)
    assert_right(make((30, 72), dtypes[0], 0, device), routing, weights)


@pytest.mark.parametrize("capacity", [None, 0])
@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0, 0), (4, 5, 24), (2, 1, 3, 9), (7,)])
def test_shapes(shape: tuple[int, ...], capacity: int | None, device: str) -> None:
    """Leading dimensions, one token without any, no tokens, and tokens without elements."""
    tokens = torch.Size(shape[:-1])
    chosen = (torch.arange(tokens.numel() * 2) % 3).view(*tokens, 2).to(device)
    weights = make((*tokens, 2), F32, 1, device)
    routing = moe_assign(chosen, weights, 4, capacity=capacity)
    x = make(shape, F32, 0, device)
    if len(shape) > 1:
        assert_right(x, routing)
    rows = moe_permute(x, routing)
    assert moe_unpermute(rows, routing).shape == x.shape


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype, device: str) -> None:
    """The results are those of contiguous copies, bit for bit, gradients too."""
    x = LAYOUTS[layout](make((48, 200), dtype, 0, device))
    count = x.shape[:-1].numel()
    chosen = (torch.arange(count * 3) * 7919 % 11).view(*x.shape[:-1], 3).to(device)
    weights = make(tuple(chosen.shape), F32, 1, device)
    routing = moe_assign(chosen, weights, 11, capacity=count // 5)
    strided = routing._replace(
        slots=torch.stack([routing.slots, routing.slots], -1)[..., 0],
        offsets=torch.stack([routing.offsets] * 2, -1)[..., 1],
        weights=weights.mT.contiguous().mT,
    )
    rows = moe_permute(x.contiguous(), routing)
    assert torch.equal(moe_permute(x, strided), rows)
    want = _unpermuted(rows, routing, x.contiguous())
    got = _unpermuted(rows, strided, x)
    assert all(map(torch.equal, got, want))
    room = torch.zeros(routing.rows, rows.shape[-1] + 3, dtype=dtype, device=device)
    room[:, 1:-2] = rows
    assert all(map(torch.equal, _unpermuted(room[:, 1:-2], routing, x), want))


def _unpermuted(y: Tensor, routing: Routing, grad: Tensor) -> list[Tensor]:
    leaves = [y.detach().requires_grad_(), routing.weights.detach().requires_grad_()]
    out = moe_unpermute(leaves[0], routing, leaves[1])
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("n", [40, 7168])
def test_expanded_gradients(n: int, device: str) -> None:
    """Those of sum() are one number for all."""
    routing = routed(20, 8, 3, device, 6)
    x = make((20, n), BF16, 0, device).requires_grad_()
    (got,) = torch.autograd.grad(moe_permute(x, routing).sum(), x)
    kept = (routing.slots >= 0).sum(-1, keepdim=True)
    assert torch.equal(got, kept.to(BF16).expand_as(got))
    y = make((routing.rows, n), BF16, 1, device)
    one = torch.ones((), dtype=BF16, device=device)
    grads = [_unpermuted(y, routing, g) for g in (one.expand(20, n), torch.ones_like(x))]
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -float("inf")])
@pytest.mark.parametrize("n", [16, 1000, 7168])
def test_a_dropped_choice_adds_nothing(bad: float, n: int, device: str) -> None:
    """Whatever its weight is; and what is not finite stays in its token."""
    routing = routed(20, 4, 2, device)
    routing = moe_assign(routing.experts, routing.weights, 5, capacity=5)  # the last one has room
    dropped = routing.slots < 0
    assert dropped.any(-1).any() and dropped.all(-1).any()
    weights = routing.weights.where(~dropped, bad)
    y = make((routing.rows, n), F32, 1, device)
    grad = make((20, n), F32, 2, device)
    want = _unpermuted(y, routing, grad)
    got = _unpermuted(y, routing._replace(weights=weights), grad)
    assert all(map(torch.equal, got, want))
    assert (got[0][dropped.all(-1)] == 0).all() and (got[2][dropped] == 0).all()
    end = int(routing.offsets[-1])
    assert end < routing.rows and (got[1][end:] == 0).all()
    y[end:] = bad  # what is nobody's is not read
    assert torch.equal(_unpermuted(y, routing, grad)[0], want[0])
    y[0] = bad
    others = (routing.slots != 0).all(-1)
    out = _unpermuted(y, routing, grad)[0]
    assert torch.equal(out[others], want[0][others]) and not out[~others].isfinite().any()
    x = make((20, n), F32, 0, device)
    x[0] = bad
    rows = moe_permute(x, routing)
    assert (~rows.isfinite()).all(-1).sum() == (routing.slots[0] >= 0).sum()
    assert (rows[end:] == 0).all()


def test_slots_on_cuda_that_are_no_rows(cuda: str) -> None:
    """They are dropped, and nothing beyond the rows is touched."""
    routing = routed(20, 4, 2, cuda)
    bad = routing.slots.clone()
    bad[3, 0], bad[4, 1], bad[5, 0] = 40, -7, 2**40
    routing = routing._replace(slots=bad)
    rows = moe_permute(make((20, 64), F32, 0, cuda), routing)
    assert rows.shape == (40, 64)
    out = moe_unpermute(torch.ones_like(rows), routing, torch.ones_like(routing.weights))
    assert out[[3, 4, 5, 6], 0].tolist() == [1, 1, 1, 2]
    far = routing._replace(offsets=torch.full_like(routing.offsets, -5))
    assert moe_permute(make((20, 64), F32, 0, cuda), far).shape == (40, 64)
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("n", [4096, 4101])
def test_large(n: int, dtype: torch.dtype, device: str) -> None:
    """Of more bytes than go through the cache, also from an odd address."""
    routing = routed(500, 16, 8, device)
    room = make((500 * n + 1,), dtype, 0, device)
    for x in (room[:-1].view(500, n), room[1:].view(500, n)):
        rows = moe_permute(x, routing)
        place = routing.slots.flatten()
        token = torch.arange(500, device=device).repeat_interleave(8)
        assert torch.equal(rows[place[place >= 0]], x[token[place >= 0]])
        assert (rows[int(routing.offsets[-1]) :] == 0).all()
        weights = routing.weights.detach().requires_grad_()
        leaf = rows.detach().requires_grad_()
        grads = torch.autograd.grad(moe_unpermute(leaf, routing, weights), [leaf, weights], x)
        scaled = (x[token].float() * routing.weights.flatten()[:, None]).to(dtype)
        assert torch.equal(grads[0][place[place >= 0]], scaled[place >= 0])
        squares = x.double().square().sum(-1, keepdim=True).where(routing.slots >= 0, 0)
        torch.testing.assert_close(grads[1].double(), squares, rtol=1e-5, atol=0)
