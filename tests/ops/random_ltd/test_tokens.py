"""token_gather, token_scatter, token_sort_ and masks of tokens: every bit, and the gradients."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import BF16, DTYPES, F16, F32, make
from torch import Tensor

from deepspeed_ext import ops
from deepspeed_ext.ops import (
    bert_sample_tokens,
    gpt_sample_tokens,
    mask_gather_bert,
    mask_gather_bert_ref,
    mask_gather_gpt,
    token_gather,
    token_gather_ref,
    token_scatter,
    token_scatter_,
    token_scatter_ref,
    token_sort_,
)

F64 = torch.float64
ANY_DTYPE = [
    *DTYPES, F64, torch.complex128, torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn,
    torch.uint16,
]  # fmt: skip
FIRST = pytest.mark.parametrize("batch_first", [True, False])


def drawn(samples: int, tokens: int, kept: int, seed: int = 0) -> Tensor:
    """Different tokens for each sample, in no order."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(tokens, generator=generator)[:kept] for _ in range(samples)]
    return torch.stack(rows).int() if rows else torch.zeros(0, kept, dtype=torch.int32)


def bytes_of(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Elements of any bits: NaN with payloads too; of bool, what bool may be."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    size = torch.empty(0, dtype=dtype).element_size()
    drawn = torch.randint(0, 256, (*shape, size), generator=generator, dtype=torch.uint8)
    return drawn.view(dtype)[..., 0]


def same_bits(got: Tensor, want: Tensor) -> bool:
    assert got.dtype == want.dtype and got.shape == want.shape
    one, other = (t.cpu().contiguous().view(torch.uint8) for t in (got[..., None], want[..., None]))
    return torch.equal(one, other)


def indexed(x: Tensor, ids: Tensor, batch_first: bool) -> Tensor:
    """Another way than that of the reference: a row at a time, of bytes."""
    x = x if batch_first else x.transpose(0, 1)
    rows = [[x[n, i] for i in row] for n, row in enumerate(ids.tolist())]
    out = torch.stack([torch.stack(each) for each in rows])
    return out if batch_first else out.transpose(0, 1)


@FIRST
@pytest.mark.parametrize("dtype", ANY_DTYPE, ids=str)
def test_any_dtype(dtype: torch.dtype, batch_first: bool, device: str) -> None:
    """Rows that divide by 16 bytes, and that do not; from an odd element; of any bits."""
    for n in (1, 3, 8, 16, 33):
        room = bytes_of(3, 7, n + 1, dtype=dtype).to(device)
        ids = drawn(3, 7, 4) if batch_first else drawn(7, 3, 2)
        for x in (room[..., 1:], room[..., :n].contiguous()):
            want = indexed(x.cpu(), ids, batch_first)
            got = token_gather(x, ids.to(device), batch_first)
            assert got.is_contiguous() and same_bits(got, want)
            part = bytes_of(*want.shape, dtype=dtype, seed=9).to(device)
            whole = token_scatter(x, part, ids.to(device), batch_first)
            in_place = token_scatter_(x.clone(), part, ids.to(device), batch_first)
            assert same_bits(whole, in_place)
            assert same_bits(token_gather(whole, ids.to(device), batch_first), part)
            named = torch.zeros(x.shape[:2] if batch_first else x.shape[1::-1], dtype=torch.bool)
            named = named.scatter(1, ids.long(), True)
            others = ~(named if batch_first else named.t())
            assert same_bits(whole.cpu()[others], x.cpu()[others])
            cleared = token_scatter(x, None, ids.to(device), batch_first)
            assert same_bits(cleared.cpu()[others], x.cpu()[others])
            assert not cleared.cpu()[~others].contiguous().view(torch.uint8).any()


@pytest.mark.parametrize(("tokens", "kept"), [(1, 1), (1, 0), (33, 33), (300, 70), (2100, 1500)])
@pytest.mark.parametrize("n", [1, 520])
def test_sizes(tokens: int, kept: int, n: int, device: str) -> None:
    """More tokens than a block has; none that is kept, and all."""
    x, ids = make((2, tokens, n), F32, 0, device), drawn(2, tokens, kept).to(device)
    part = make((2, kept, n), F32, 1, device)
    assert torch.equal(token_gather(x, ids), token_gather_ref(x, ids))
    assert torch.equal(token_scatter(x, part, ids), token_scatter_ref(x, part, ids))
    assert torch.equal(token_scatter_(x.clone(), part, ids), token_scatter_ref(x, part, ids))


@pytest.mark.parametrize("shape", [(0, 5, 4), (3, 5, 0), (2, 0, 3)])
def test_nothing(shape: tuple[int, ...], device: str) -> None:
    x = torch.empty(shape, device=device, requires_grad=True)
    ids = torch.empty(shape[0], 0, dtype=torch.int32, device=device)
    part = token_gather(x, ids)
    assert part.shape == (shape[0], 0, shape[2])
    out = token_scatter(x, part, ids)
    out.sum().backward()
    assert out.shape == shape and x.grad is not None and torch.equal(x.grad, torch.ones_like(x))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided rows": lambda t: t[:, :, 2:7],
    "every other token": lambda t: t[:, ::2],
    "samples and tokens swapped": lambda t: t.transpose(0, 1),
    "columns": lambda t: t.transpose(1, 2),
    "one row for all": lambda t: t[:1, :1].expand(6, 8, 9),
    "one element for all": lambda t: t[:1, :1, :1].expand(6, 8, 9),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, device: str) -> None:
    x = LAYOUTS[layout](make((6, 8, 9), F32, 0, device))
    ids = torch.stack([drawn(x.shape[0], x.shape[1], 2)] * 2, -1)[..., 0].to(device)  # strided
    part = LAYOUTS[layout](make((6, 8, 9), F32, 1, device))[:, :2]
    plain = x.contiguous()
    assert torch.equal(token_gather(x, ids), token_gather_ref(plain, ids))
    assert torch.equal(token_scatter(x, part, ids), token_scatter_ref(plain, part, ids))
    if 0 in x.stride() or x.stride(2) != 1:  # what cannot be written to
        return
    room = LAYOUTS[layout](make((6, 8, 9), F32, 0, device))
    assert torch.equal(token_scatter_(room, part, ids), token_scatter_ref(plain, part, ids))


def repeated(device: str) -> Tensor:
    """Tokens that several ids name, in no order."""
    return torch.tensor([[4, 1, 4, 4, 0], [2, 2, 3, 2, 3]], dtype=torch.int32, device=device)


@FIRST
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
def test_gradients(dtype: torch.dtype, batch_first: bool, device: str) -> None:
    """Those of a gather are added, in order, in float32; those of what is replaced are 0."""

    def swapped(t: Tensor) -> Tensor:
        return t if batch_first else t.transpose(0, 1)

    for n in (5, 264):
        leaf = swapped(make((2, 6, n), dtype, 0, device)).requires_grad_()
        ids = repeated(device)
        grad = make((2, 5, n), dtype, 1, device)
        got = torch.autograd.grad(token_gather(leaf, ids, batch_first), leaf, swapped(grad))[0]
        want = torch.zeros(2, 6, n, dtype=F64 if dtype == F64 else F32, device=device)
        for sample, row in enumerate(ids.tolist()):
            for i, token in enumerate(row):
                want[sample, token] += grad[sample, i].to(want.dtype)
        assert torch.equal(swapped(got), want.to(dtype))
        ids = ids[:, 2:4].clone() + torch.tensor([0, 1], dtype=torch.int32, device=device) * 0
        ids[:, 0] = 5
        part = swapped(make((2, 2, n), dtype, 2, device)).requires_grad_()
        out = token_scatter(leaf, part, ids, batch_first)
        grad = make((2, 6, n), dtype, 3, device)
        of_all, of_part = torch.autograd.grad(out, [leaf, part], swapped(grad))
        assert torch.equal(swapped(of_part), token_gather_ref(grad, ids))
        assert torch.equal(swapped(of_all), token_scatter_ref(grad, None, ids))


def test_gradients_of_gradients(device: str) -> None:
    ids = drawn(2, 6, 3).to(device)
    x = make((2, 6, 4), F64, 0, device).requires_grad_()
    part = make((2, 3, 4), F64, 1, device).requires_grad_()
    for function, given in (
        (lambda x: token_gather(x, repeated(device)).sin(), (x,)),
        (lambda x, part: token_scatter(x, part, ids).sin(), (x, part)),
    ):
        assert torch.autograd.gradcheck(function, given)
        assert torch.autograd.gradgradcheck(function, given)


class DeepSpeedsPair:
    """What DeepSpeed's two functions do to gradients: right as a pair alone."""

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, ids: Tensor) -> Any:
            ctx.save_for_backward(ids)
            return x.view_as(x), token_gather_ref(x, ids)

        @staticmethod
        def backward(ctx: Any, grad_all: Tensor, grad_part: Tensor) -> Any:
            return token_scatter_ref(grad_all, grad_part, *ctx.saved_tensors), None

    class Scatter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, part: Tensor, ids: Tensor) -> Tensor:
            ctx.save_for_backward(ids)
            return token_scatter_ref(x, part, ids)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad, token_gather_ref(grad, *ctx.saved_tensors), None


def test_the_pair_gives_the_numbers_of_deepspeeds(device: str) -> None:
    x, ids = make((2, 9, 8), F32, 0, device), drawn(2, 9, 4).to(device)
    grad, found = make((2, 9, 8), F32, 1, device), []
    for ours in (True, False):
        leaf = x.clone().requires_grad_()
        if ours:
            whole, part = ops.GatherTokens.apply(leaf, ids, True)
            out = ops.ScatterTokens.apply(whole, part.sin(), ids, True)
        else:
            whole, part = DeepSpeedsPair.Gather.apply(leaf, ids)
            out = DeepSpeedsPair.Scatter.apply(whole, part.sin(), ids)
        found.append([out.detach(), torch.autograd.grad(out, leaf, grad)[0]])
    assert all(map(torch.equal, *found))


def test_each_of_the_pair_is_right_alone(device: str) -> None:
    """Beside torch's, with another use of what goes in; nothing that goes in is written to."""
    ids = drawn(2, 9, 4).to(device)
    found = []
    for gather, scatter in (
        (ops.GatherTokens.apply, ops.ScatterTokens.apply),
        (
            lambda x, i, b: (x, token_gather_ref(x, i)),
            lambda x, p, i, b: token_scatter_ref(x, p, i),
        ),
    ):
        x = make((2, 9, 8), F64, 0, device).requires_grad_()
        part = make((2, 4, 8), F64, 1, device).requires_grad_()
        whole, some = gather(x, ids, True)
        loss = (whole.square().sum() + some.pow(3).sum()) + scatter(x, part, ids, True).sin().sum()
        found.append(torch.autograd.grad(loss, [x, part]))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("tokens", [1, 9, 8191, 8192, 20_000])
def test_sorting(tokens: int, device: str) -> None:
    """Each row, also with ids that are there twice, and of more tokens than are counted at once."""
    for kept in (1, min(tokens, 5), tokens):
        ids = torch.stack([drawn(3, tokens, kept), drawn(3, tokens, kept, 1)]).to(device)
        if kept > 2:
            ids[0, 1, :3] = ids[0, 1, 2]
        want = ids.sort(-1).values
        got = token_sort_(ids, tokens)
        assert got is ids and torch.equal(got, want)
    empty = torch.empty(3, 0, dtype=torch.int32, device=device)
    assert token_sort_(empty, 0) is empty


def masks_of(mask: Tensor, ids: Tensor) -> Tensor:
    """The reference, of whole numbers with the same bits: torch's gather changes those of NaN."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    dtype = whole.get(mask.element_size(), mask.dtype)
    return mask_gather_bert_ref(mask.view(dtype), ids).view(mask.dtype)


@pytest.mark.parametrize("dtype", ANY_DTYPE, ids=str)
def test_masks_of_layers(dtype: torch.dtype, device: str) -> None:
    """Each layer's by its own ids; with heads, and one query for all, read as they lie."""
    ids = torch.stack([drawn(2, 7, 4), drawn(2, 7, 4, 5)]).to(device)
    for heads, queries in ((1, 7), (3, 7), (1, 1)):
        mask = bytes_of(2, heads, queries, 7, dtype=dtype).to(device)
        assert same_bits(mask_gather_bert(mask, ids), masks_of(mask, ids))
    one = bytes_of(1, 1, 7, 7, dtype=dtype).to(device)
    assert same_bits(
        mask_gather_bert(one.mT.expand(2, 3, 7, 7), ids),
        masks_of(one.mT.expand(2, 3, 7, 7), ids),
    )
    row = bytes_of(2, 1, 1, 7, dtype=dtype).to(device).expand(2, 1, 7, 7)
    assert same_bits(mask_gather_bert(row, ids), masks_of(row, ids))
    layers = mask_gather_bert(
        torch.arange(49, device=device).view(1, 1, 7, 7).expand(2, 1, 7, 7), ids
    )
    assert layers[1, 0, 0, 2, 3] == ids[1, 0, 2] * 7 + ids[1, 0, 3]


def test_masks_of_decoders(device: str) -> None:
    mask = make((2, 1, 9, 9), F32, 0, device)
    got = mask_gather_gpt(mask, 4)
    assert torch.equal(got, mask[:, :, :4, :4]) and got.is_contiguous()
    assert got.data_ptr() != mask.data_ptr()
    for length in (-1, 10):
        with pytest.raises(
            ValueError, match=f"^mask_gather_gpt: length is {length}, expected 0 to"
        ):
            mask_gather_gpt(mask, length)


def test_drawing(device: str) -> None:
    """As many different tokens as are asked for, each as often as others, of all layers apart."""
    torch.manual_seed(0)
    ids, mask = gpt_sample_tokens(4, 12, 500, 3, device, make((500, 1, 12, 12), F32, 0, device))
    assert ids.shape == (3, 500, 4) and ids.dtype == torch.int32 and ids.device.type == device
    assert mask is not None and mask.shape == (500, 1, 4, 4)
    assert (ids.diff() > 0).all() and ids.min() == 0 and ids.max() == 11
    counts = ids.flatten().bincount(minlength=12)
    assert (counts - 500).abs().max() < 5 * (1500 / 3 * 2 / 3) ** 0.5
    assert not torch.equal(ids[0], ids[1])
    assert gpt_sample_tokens(12, 12, 2)[0].tolist() == [[[*range(12)]] * 2]
    given = torch.rand(1, 1, 12, 12, device=device) < 0.5
    ids, masks = bert_sample_tokens(4, 12, 5, 3, device, given)
    want = mask_gather_bert_ref(given.expand(5, 1, 12, 12), ids)
    assert len(masks) == 3 and all(map(torch.equal, masks, want))
    with pytest.raises(ValueError, match=r"^bert_sample_tokens: attn_mask is None, expected a mas"):
        bert_sample_tokens(4, 12, 5)
    with pytest.raises(
        ValueError, match=r"^gpt_sample_tokens: reserved_length is 13, expected 0 to"
    ):
        gpt_sample_tokens(13, 12, 5)


def test_ids_on_cuda_that_are_no_tokens(cuda: str) -> None:
    """They name nothing, and nothing beyond the tokens is touched."""
    x = make((2, 5, 8), F32, 0, cuda).requires_grad_()
    ids = torch.tensor([[1, -1, 5], [2**31 - 1, -(2**31), 4]], dtype=torch.int32, device=cuda)
    part = token_gather(x, ids)
    assert torch.equal(part[0, 0], x[0, 1]) and torch.equal(part[1, 2], x[1, 4])
    assert not part[0, 1:].any() and not part[1, :2].any()
    (grad,) = torch.autograd.grad(part.sum(), x)
    assert grad.sum() == 16 and grad[0, 1].all() and grad[1, 4].all()
    room = torch.zeros(2, 7, 8, device=cuda)
    ones = torch.ones(2, 3, 8, device=cuda)
    token_scatter_(room[:, 1:-1], ones, ids)
    assert room.sum() == 16 and room[0, 2].all() and room[1, 5].all()
    assert torch.equal(token_scatter(torch.zeros_like(x), ones, ids), room[:, 1:-1])
    assert token_sort_(ids.clone(), 5).tolist() == [[1, 5, 5], [4, 5, 5]]
    long = ids.repeat(1, 3000)
    assert token_sort_(long, 20_000)[1].tolist() == [4] * 3000 + [20_000] * 6000
    masks = mask_gather_bert(torch.ones(2, 1, 5, 5, device=cuda), ids[None])
    assert masks.sum() == 2
    torch.cuda.synchronize()


X, IDS = torch.ones(2, 5, 3), torch.tensor([[0, 4], [3, 1]], dtype=torch.int32)
TWICE = torch.tensor([[0, 4], [3, 3]], dtype=torch.int32)
FAR = torch.tensor([[0, 4], [5, 1]], dtype=torch.int32)
PART = torch.ones(2, 2, 3)
WRONG: dict[str, Callable[[], Any]] = {
    "token_gather: ids has 5 as its element number 2, expected 0 to 4, the tokens": lambda: (
        token_gather(X, FAR)
    ),
    "token_gather: ids has -1 as its element number 0, expected 0 to 4, the tokens": lambda: (
        token_gather(X, IDS - 1)
    ),
    "token_gather: ids is int64, expected int32": lambda: token_gather(X, IDS.long()),
    "token_gather: x has shape [5, 3], expected three dimensions": lambda: token_gather(X[0], IDS),
    "token_gather: ids has shape [2], expected two dimensions, the first of 2, the"
    " samples": lambda: token_gather(X, IDS[0]),
    "token_gather: ids has shape [2, 2], expected two dimensions, the first of 5, the"
    " samples": lambda: token_gather(X, IDS, False),
    "token_scatter: ids has 3 as its element number 3, expected a token that no other id of the"
    " sample is": lambda: token_scatter(X, PART, TWICE),
    "token_scatter_: ids has 3 as its element number 3, expected a token that no other id of the"
    " sample is": lambda: token_scatter_(X.clone(), PART, TWICE),
    "token_scatter: part has shape [2, 5, 3], expected [2, 2, 3] beside those ids": lambda: (
        token_scatter(X, X, IDS)
    ),
    "token_scatter: part is float64, expected float32": lambda: token_scatter(
        X, PART.double(), IDS
    ),
    "token_scatter_: ids has 5 as its element number 2, expected 0 to 4, the tokens": lambda: (
        token_scatter_(X.clone(), PART, FAR)
    ),
    "token_scatter_: all_tokens has strides [15, 1, 5], expected 1 as the last of them": lambda: (
        token_scatter_(torch.ones(2, 3, 5).mT, PART, IDS)
    ),
    "token_scatter_: all_tokens has strides [0, 3, 1] for shape [2, 5, 3], expected no element to"
    " be another one": lambda: token_scatter_(X[:1].expand(2, 5, 3), PART, IDS),
    "token_scatter_: part is overlapping all_tokens, expected separate memory": lambda: (
        token_scatter_(X, X[:, :2], IDS)
    ),
    "token_gather_backward: grad is complex64, expected float32, bfloat16, float16 or"
    " float64": lambda: (
        token_gather(X.to(torch.complex64).requires_grad_(), IDS).abs().sum().backward()
    ),
    "token_sort_: ids has 4 as its element number 1, expected 0 to 3, the tokens": lambda: (
        token_sort_(IDS.clone(), 4)
    ),
    "token_sort_: ids has strides [1, 2], expected to be contiguous": lambda: token_sort_(
        IDS.t(), 5
    ),
    "token_sort_: original_tokens is -1, expected 0 to 2147483647": lambda: token_sort_(
        IDS.clone(), -1
    ),
    "mask_gather_bert: ids has 5 as its element number 2, expected 0 to 4, the tokens": lambda: (
        mask_gather_bert(torch.ones(2, 1, 5, 5), FAR[None])
    ),
    "mask_gather_bert: mask has shape [2, 1, 4, 5], expected [samples, heads, tokens, tokens], or"
    " 1 in place of the first tokens": lambda: mask_gather_bert(torch.ones(2, 1, 4, 5), IDS[None]),
    "mask_gather_gpt: length is True, expected a whole number": lambda: mask_gather_gpt(X, True),
    "mask_gather_gpt: mask has shape [2, 5, 3], expected (..., tokens, tokens)": lambda: (
        mask_gather_gpt(X, 3)
    ),
    "gpt_sample_tokens: reserved_length is 2.0, expected a whole number": lambda: gpt_sample_tokens(
        2.0, 5, 2
    ),  # type: ignore[arg-type]
    "gpt_sample_tokens: batch_size is -2, expected 0 or more": lambda: gpt_sample_tokens(2, 5, -2),
    "gpt_sample_tokens: attn_mask has shape [4, 4], expected its last dimensions to be"
    " [5, 5]": lambda: gpt_sample_tokens(2, 5, 2, attn_mask=torch.ones(4, 4)),
    "bert_sample_tokens: attn_mask has shape [5, 5], expected [samples, heads, tokens or 1,"
    " 5]": lambda: bert_sample_tokens(2, 5, 2, attn_mask=torch.ones(5, 5)),
    "mask_gather_bert: ids has shape [2, 2], expected [layers, 2, kept]": lambda: mask_gather_bert(
        torch.ones(2, 1, 5, 5), IDS
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_refused(text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(text)}$"):
        WRONG[text]()


def test_a_refused_call_writes_nothing() -> None:
    whole, ids = X.clone(), IDS.clone()
    for call in (
        lambda: token_scatter_(whole, PART * 2, FAR),
        lambda: token_scatter_(whole, PART * 2, TWICE),
        lambda: token_sort_(ids, 4),
    ):
        with pytest.raises(ValueError, match="expected"):
            call()
    assert torch.equal(whole, X) and torch.equal(ids, IDS)


def test_large(device: str) -> None:
    """Of more bytes than go through the cache."""
    x, ids = make((3, 900, 2048), F32, 0, device), drawn(3, 900, 800).to(device)
    part = token_gather(x, ids)
    assert torch.equal(part, token_gather_ref(x, ids))
    assert torch.equal(token_scatter(x, -part, ids), token_scatter_ref(x, -part, ids))
    assert torch.equal(token_scatter_(x.clone(), -part, ids), token_scatter_ref(x, -part, ids))
