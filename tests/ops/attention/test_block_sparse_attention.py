"""block_sparse_attention beside its reference in float64, gradients too."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from allocated import Taken, measured
from samples import BF16, F16, F32, make
from sparse_cases import OPTIONS, Sparse, layout_of
from torch import Tensor

from deepspeed_ext.ops import block_sparse_attention, block_sparse_attention_ref

BLOCKS = [16, 32, 64, 128]

NO_BOUND = dict(rtol=0, atol=0)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("tokens", [1, 15, 130, 257])
def test_every_block_and_odd_lengths(block: int, tokens: int, device: str) -> None:
    Sparse((2, 4, tokens, 24), 2, block, device=device).assert_right()
    options = OPTIONS["all"](1, 3, tokens, device)
    Sparse((1, 3, tokens, 24), 1, block, device=device, options=options).assert_right()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("block", [16, 128])
def test_every_option(name: str, block: int, device: str) -> None:
    options = OPTIONS[name](3, 2, 150, device)
    Sparse((3, 2, 150, 20), 2, block, device=device, options=options).assert_right()


@pytest.mark.parametrize("width", [1, 2, 7, 16, 63, 64, 65, 128, 200, 256])
def test_every_width(width: int, device: str) -> None:
    for block in (32, 128):
        Sparse((1, 2, 131, width), 1, block, device=device).assert_right()


@pytest.mark.parametrize(
    "dtypes", [(BF16,) * 3, (F16,) * 3, (BF16, F32, F16), (F32, BF16, BF16)], ids=str
)
def test_every_dtype(dtypes: Any, device: str) -> None:
    for name in ("plain", "all"):
        options = OPTIONS[name](2, 4, 100, device)
        Sparse((2, 4, 100, 40), 2, 32, None, dtypes, device, options).assert_right()


def layouts() -> dict[str, Tensor]:
    """Of four heads of five blocks."""
    nothing = torch.zeros(4, 5, 5, dtype=torch.int64)
    one, apart = nothing.clone(), nothing.clone()
    one[:, 3, 1] = 7
    apart[2] = 1
    window = torch.ones(1, 5, 5, dtype=torch.bool).tril(1).triu(-1)
    holes = torch.ones(4, 5, 5, dtype=torch.int32)
    holes[:, 2] = holes[:, :, 4] = 0  # rows that see nothing, columns that nobody sees
    return {
        "all": torch.ones(1, 5, 5, dtype=torch.uint8),
        "none": nothing,
        "one": one,
        "one head apart": apart,
        "window": window,
        "holes": holes,
        "by columns": layout_of(4, 5).mT,
        "every other": torch.ones(4, 10, 10, dtype=torch.int64)[:, ::2, ::2],
    }


@pytest.mark.parametrize("name", layouts())
def test_every_layout(name: str, device: str) -> None:
    for options in ({}, dict(causal=True)):
        call = Sparse((2, 4, 73, 18), 2, 16, layouts()[name], device=device, options=options)
        call.assert_right()
        if name == "none":
            assert not any(t.any() for t in call.run())


def test_all_blocks_are_attention(device: str) -> None:
    q, k, v = (make((2, 3, 200, 32), F32, i, device) for i in range(3))
    layout = torch.ones(1, 13, 13, dtype=torch.bool, device=device)
    for causal in (False, True):
        want = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        got = block_sparse_attention(q, k, v, layout, 16, causal=causal)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ["plain", "causal", "mask", "keys added"])
def test_what_is_left_out_does_not_matter(name: str, dtype: torch.dtype, device: str) -> None:
    """NaN and infinity reach only those who see them: rows by keys, keys by rows."""
    options = OPTIONS[name](1, 2, 150, device)
    call = Sparse((1, 2, 150, 24), 1, 32, None, (dtype,) * 3, device, options)
    want, seen = call.run(), call.weights()[0] > 0
    # Tensor cores leave what shares a unit with a bad token to another kernel.
    bound = dict(rtol=3e-2, atol=1e-2) if (device, dtype) == ("cuda", BF16) else NO_BOUND
    same = partial(torch.testing.assert_close, **bound)
    for bad in (math.nan, math.inf):
        for number in range(4):
            spoiled = Sparse((1, 2, 150, 24), 1, 32, None, (dtype,) * 3, device, options)
            tensor = [*spoiled.qkv, spoiled.grad][number]
            tensor[..., 70, 3] = bad
            out, grad_q, grad_k, grad_v = spoiled.run()
            of_row = number in (0, 3)
            # Rows that are spoiled, or see a key that is; keys that see a row that is.
            rows = torch.zeros_like(seen[:, 0])
            rows |= (torch.arange(150) == 70) if of_row else seen[:, :, 70]
            keys = (seen & rows[:, :, None]).any(1).any(0)
            clean = ~rows.to(device)
            same(grad_q[0][clean], want[1][0][clean])
            if number != 3:
                same(out[0][clean], want[0][0][clean])
            for got, expected in ((grad_k, want[2]), (grad_v, want[3])):
                same(got[0, 0][~keys.to(device)], expected[0, 0][~keys.to(device)])
            if bad is math.nan and number != 3:
                assert out[0][rows.to(device)].isnan().any(-1).all()


def test_a_nan_in_what_nobody_sees(device: str) -> None:
    """A row that sees nothing, a key that nobody sees."""
    layout = layouts()["holes"]
    call = Sparse((2, 4, 73, 18), 2, 16, layout, device=device)
    want = call.run()
    call.qkv[0][:, :, 32:48] = math.nan
    call.grad[:, :, 32:48] = math.inf
    call.qkv[1][:, :, 64:] = math.nan
    call.qkv[2][:, :, 64:] = -math.inf
    for got, expected in zip(call.run(), want, strict=True):
        assert torch.equal(got, expected)


def test_large_scores(device: str) -> None:
    """Nothing overflows, and a weight that is 0 beside one of 1 has no part."""
    call = Sparse((1, 2, 70, 16), 2, 16, device=device)
    call.qkv[0] *= 1e4
    call.qkv[1] *= 1e4
    out, *grads = call.run()
    want = call.reference()[0]
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-4, atol=1e-4)
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.mT.contiguous().mT,
        lambda t: torch.stack([t, t], -1)[..., 0],
        lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
        lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    ],
)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_any_strides(change: Any, dtype: torch.dtype, device: str) -> None:
    options = OPTIONS["all"](2, 2, 90, device)
    call = Sparse((2, 2, 90, 24), 2, 32, None, (dtype,) * 3, device, options)
    want = call.run()
    call.qkv, call.grad = [change(t) for t in call.qkv], change(call.grad)
    assert all(map(torch.equal, call.run(), want))


def test_gradients_that_are_expanded(device: str) -> None:
    call = Sparse((2, 2, 50, 8), 2, 16, device=device)
    call.grad = torch.ones((), device=device).expand(call.shape)
    got = call.run()
    call.grad = torch.ones(call.shape, device=device)
    assert all(map(torch.equal, got, call.run()))


def test_each_gradient_alone(device: str) -> None:
    call = Sparse((2, 4, 50, 8), 2, 16, device=device)
    _, *want = call.run()
    for i in range(3):
        given = [t.detach().requires_grad_(i == n) for n, t in enumerate(call.qkv)]
        out = block_sparse_attention(*given, call.layout, 16)
        (got,) = torch.autograd.grad(out, given[i], call.grad)
        assert torch.equal(got, want[i])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_token_is_the_same_in_any_batch(dtype: torch.dtype, device: str) -> None:
    options, dtypes = OPTIONS["all"](3, 4, 150, device), (dtype,) * 3
    call = Sparse((3, 4, 150, 24), 2, 32, None, dtypes, device, options)
    want = call.run()
    for row in range(3):
        one = slice(row, row + 1)
        masks = ("rpe", "key_padding_mask")  # those of a batch
        options = {k: v[one] if k in masks else v for k, v in call.options.items()}
        alone = Sparse((1, 4, 150, 24), 2, 32, call.layout, dtypes, device, options)
        alone.qkv, alone.grad = [t[one] for t in call.qkv], call.grad[one]
        for got, expected in zip(alone.run(), want, strict=True):
            assert torch.equal(got, expected[one])


def of_window(tokens: int, device: str, taken: Taken) -> list[float]:
    """Return what both directions take beside results, as shares of q."""
    q = torch.ones(1, 1, tokens, 64, dtype=BF16, device=device)
    n = tokens // 128
    layout = torch.ones(1, n, n, dtype=torch.bool, device=device).tril(1).triu(-1)
    found = []
    for grad in (False, True):
        given = [q.clone().requires_grad_(grad) for _ in range(3)]

        def call(given: list[Tensor] = given, grad: bool = grad) -> list[Tensor]:
            out = block_sparse_attention(*given, layout, 128)
            return [out, *(torch.autograd.grad(out, given, q) if grad else ())]

        call()
        results, extra = taken(call)
        found.append((extra - sum(t.nbytes for t in results)) / q.nbytes)
    return found


def small_window(device: str, taken: Taken) -> list[float]:
    return of_window(4096, device, taken)


def long_window(device: str, taken: Taken) -> list[float]:
    return of_window(65536, device, taken)


def test_memory_is_bounded() -> None:
    """Logarithms and deltas, a float of each token, and lists: scores would be 64 times q."""
    assert max(measured(small_window, "cpu")) < 0.2


@pytest.mark.long
def test_memory_of_many_tokens_is_bounded() -> None:
    assert max(measured(long_window, "cpu")) < 0.2


def test_the_reference_has_gradients() -> None:
    call = Sparse((1, 2, 20, 3), 1, 16)
    given = [t.double().requires_grad_() for t in call.qkv]

    def function(*given: Tensor) -> Tensor:
        return block_sparse_attention_ref(*given, call.layout, 16, causal=True)

    assert torch.autograd.gradcheck(function, given)
