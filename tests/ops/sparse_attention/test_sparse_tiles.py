"""Products and softmax of tiles: each element and gradient by dense matrices in float64."""

import copy
from typing import Any

import pytest
import torch
from samples import BF16, F16, F32, make
from torch import Tensor

from deepspeed_ext.ops.sparse_attention.matmul import MatMul
from deepspeed_ext.ops.sparse_attention.softmax import Softmax
from deepspeed_ext.ops.sparse_attention.tile_groups import TileIndex

INF, NAN = float("inf"), float("nan")
F64 = torch.float64
BLOCK = 16


def layout_of(kind: str) -> Tensor:
    """Return a layout of two heads, 7 by 13 blocks."""
    layout = torch.zeros(2, 7, 13, dtype=torch.int64)
    if kind == "drawn":
        layout = (torch.rand(2, 7, 13, generator=torch.Generator().manual_seed(1)) < 0.4).long()
        layout[0, 2] = layout[1, :, 5] = 0
    elif kind == "one":
        layout[1, 3, 4] = 1
    elif kind == "all":
        layout += 1
    elif kind == "global":
        layout[:, 0] = layout[:, :, 1] = 7  # not only 1 is there
    return layout


KINDS = ["drawn", "one", "all", "global", "none"]


def tiles_of(x: Tensor, layout: Tensor, block: int = BLOCK) -> Tensor:
    """Return the tiles of a dense matrix, one after the other."""
    found = [
        x[:, h, i * block : (i + 1) * block, j * block : (j + 1) * block]
        for h, i, j in layout.nonzero().tolist()
    ]
    return torch.stack(found, 1) if found else x.new_zeros(len(x), 0, block, block)


def where_of(layout: Tensor, block: int = BLOCK) -> Tensor:
    return (layout != 0).repeat_interleave(block, 1).repeat_interleave(block, 2)


def wide_of(values: Tensor) -> Tensor:
    return values.detach().double().requires_grad_()


MODES = [(mode, a, b) for mode in ("sdd", "dsd", "dds") for a in (0, 1) for b in (0, 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "trans_a", "trans_b"), MODES)
def test_products(kind: str, mode: str, trans_a: int, trans_b: int, device: str) -> None:
    layout = layout_of(kind)
    there = where_of(layout).to(device)
    rows, columns = there.shape[1:]
    sparse = make((3, 2, rows, columns), F64, 0, device) * there
    left, right = (rows, 5), (5, columns)
    if mode == "dsd":
        left, right = (rows, columns), ((rows, 5) if trans_a else (columns, 5))
    elif mode == "dds":
        left, right = (5, columns if trans_b else rows), (rows, columns)
    dense = [make((3, 2, *size), F64, seed, device) for seed, size in enumerate((left, right))]
    if mode == "dsd":
        dense[0] = sparse
    elif mode == "dds":
        dense[1] = sparse
    # Of a transposed dense matrix, what is given is the other way round.
    given = [
        d.mT.contiguous() if trans and not is_sparse else d
        for d, trans, is_sparse in zip(
            dense, (trans_a, trans_b), (mode == "dsd", mode == "dds"), strict=True
        )
    ]
    wide = [wide_of(each) for each in given]
    want = (wide[0].mT if trans_a else wide[0]) @ (wide[1].mT if trans_b else wide[1])
    mine = [
        wide_of(tiles_of(each, layout)) if is_sparse else wide_of(each)
        for each, is_sparse in zip(given, (mode == "dsd", mode == "dds"), strict=True)
    ]
    got = MatMul(layout, BLOCK, mode, bool(trans_a), bool(trans_b))(*mine)
    grad = make(tuple(want.shape), F64, 5, device) * (there if mode == "sdd" else 1)
    of_dense = torch.autograd.grad(want, wide, grad)
    assert_near(got, tiles_of(want, layout) if mode == "sdd" else want)
    of_tiles = torch.autograd.grad(got, mine, tiles_of(grad, layout) if mode == "sdd" else grad)
    for number, is_sparse in enumerate((mode == "dsd", mode == "dds")):
        expected = tiles_of(of_dense[number], layout) if is_sparse else of_dense[number]
        assert_near(of_tiles[number], expected)


def assert_near(got: Tensor, want: Tensor, error: float = 1e-13) -> None:
    torch.testing.assert_close(got.double(), want.detach().double(), rtol=error, atol=error * 100)


@pytest.mark.parametrize(("mode", "trans_a", "trans_b"), MODES)
def test_gradients_of_gradients(mode: str, trans_a: int, trans_b: int) -> None:
    layout = torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 0, 1, 0, 0, 0, 0]])
    matmul = MatMul(layout, 1, mode, bool(trans_a), bool(trans_b))
    tiles = (1, 11, 1, 1)
    a, b = (1, 1, 2, 3), (1, 1, 3, 10)
    if mode == "dsd":
        a, b = tiles, (1, 1, 2 if trans_a else 10, 3)
    elif mode == "dds":
        a, b = (1, 1, 3, 10 if trans_b else 2), tiles
    shapes = [a, b]
    for number, turned in enumerate((trans_a, trans_b)):
        if turned and len(shapes[number]) == 4 and shapes[number] != tiles:
            shapes[number] = (1, 1, *shapes[number][:1:-1])
    values = [make(shape, F64, seed).requires_grad_() for seed, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(matmul, values, fast_mode=True)
    assert torch.autograd.gradgradcheck(matmul, values, fast_mode=True)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_dtypes_of_products(dtype: torch.dtype, device: str) -> None:
    """Each sum is one product of torch's, rounded once."""
    layout = layout_of("global")
    tiles = make((1, int((layout != 0).sum()), BLOCK, BLOCK), dtype, 0, device)
    dense = make((1, 2, 13 * BLOCK, 8), dtype, 1, device)
    got = MatMul(layout, BLOCK, "dsd")(tiles, dense)
    want = MatMul(layout, BLOCK, "dsd")(tiles.double(), dense.double())
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-3)
    assert torch.equal(got, MatMul(layout, BLOCK, "dsd")(tiles, dense))


def test_autocast_decides_the_dtype() -> None:
    layout = torch.ones(2, 3)
    a, b = make((32, 4), F32, 0).requires_grad_(), make((4, 48), F32, 1).requires_grad_()
    with torch.autocast("cpu", BF16):
        out = MatMul(layout, 16, "sdd")(a, b)
        assert out.dtype == BF16
        tiles = out.float()
        assert MatMul(layout, 16, "dsd")(tiles, b.mT).dtype == BF16
        assert MatMul(layout, 16, "sdd")(a.double(), b.double()).dtype == F64
    out.sum().backward()
    assert a.grad is not None and a.grad.dtype == F32


def test_a_layout_of_one_head_and_fewer_dimensions() -> None:
    layout = torch.tensor([[True, False], [True, True]])
    a, b = make((32, 5), F32, 0), make((5, 32), F32, 1)
    tiles = MatMul(layout, 16, "sdd")(a, b)
    assert tiles.shape == (3, 16, 16)
    assert_near(tiles, tiles_of((a.double() @ b.double())[None, None], layout[None])[0], 1e-6)
    three = MatMul(layout, 16, "dsd")(tiles, b.mT[None])
    assert three.shape == (1, 32, 5)


def test_what_is_beside_a_tile_has_no_part() -> None:
    """Rows of three and five tiles are padded; NaN in what pads them is nobody's."""
    layout = torch.zeros(1, 3, 9, dtype=torch.int64)
    layout[0, 0, :9] = layout[0, 1, :3] = layout[0, 2, 4:] = 1
    tiles, dense = make((1, 17, 8, 8), F32, 0), make((1, 1, 72, 4), F32, 1)
    matmul = MatMul(layout, 8, "dsd")
    clean = matmul(tiles, dense)
    tiles[:, 11] = INF  # the last of the second row
    got = matmul(tiles, dense)
    assert torch.equal(got[:, :, :8], clean[:, :, :8])
    assert torch.equal(got[:, :, 16:], clean[:, :, 16:]) and not got[:, :, 8:16].isfinite().any()
    dense[:, :, 24:32] = NAN  # the fourth block, which the first row sees
    got = matmul(tiles, dense)
    assert got[:, :, :8].isnan().all() and torch.equal(got[:, :, 16:], clean[:, :, 16:])


def test_the_layout_is_read_once() -> None:
    layout = torch.ones(1, 2, 2, dtype=torch.int64)
    matmul, softmax = MatMul(layout, 16, "sdd"), Softmax(layout, 16)
    layout.zero_()
    x = make((1, 1, 32, 32), F32, 0)
    tiles = matmul(x, x)
    assert tiles.shape == (1, 4, 16, 16) and softmax(tiles).shape == tiles.shape
    assert torch.equal(copy.deepcopy(matmul)(x, x), tiles)


def scores_of(x: Tensor, layout: Tensor, scale: float, masks: dict[str, Any]) -> Tensor:
    """Return softmax of dense scores in float64, and zeros where nothing takes part."""
    scores = x * scale
    left_out = ~where_of(layout).to(x.device)
    for name in ("rpe", "key_padding_mask", "attn_mask"):
        mask = masks.get(name)
        if mask is None:
            continue
        mask = mask[:, None, None] if name == "key_padding_mask" else mask
        if mask.dtype == torch.bool or masks.get(f"{name}_mode") == "mul":
            left_out = left_out | (mask == 0)
        else:
            scores = scores + mask.double()
    scores = scores.masked_fill(left_out, -INF)
    nothing = (scores == -INF).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)


def masks_of(kind: str, device: str) -> dict[str, Any]:
    keys, queries = 13 * BLOCK, 7 * BLOCK
    of_keys, all_pairs = make((3, keys), F32, 3, device), make((queries, keys), F32, 4, device)
    return {
        "none": {},
        "rpe": dict(rpe=make((2, queries, keys), F32, 5, device)),
        "added": dict(
            key_padding_mask=of_keys.masked_fill(of_keys > 1, -INF).to(BF16), attn_mask=all_pairs
        ),
        "kept": dict(
            key_padding_mask=(of_keys > -1).int(),
            key_padding_mask_mode="mul",
            attn_mask=(all_pairs > -1).half(),
            attn_mask_mode="mul",
        ),
        "bool": dict(key_padding_mask=of_keys > -1, attn_mask=all_pairs[:, :1] > -1),
        "both": dict(
            rpe=make((3, 1, queries, keys), F64, 5, device),
            key_padding_mask=of_keys[:1],
            attn_mask=all_pairs > -1,
        ),
    }[kind]


@pytest.mark.parametrize("masks", ["none", "rpe", "added", "kept", "bool", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_softmax(kind: str, masks: str, device: str) -> None:
    layout, options = layout_of(kind), masks_of(masks, device)
    dense = make((3, 2, 7 * BLOCK, 13 * BLOCK), F32, 0, device)
    grad = make(tuple(dense.shape), F32, 1, device)
    wide = wide_of(dense)
    want = scores_of(wide, layout, 0.4, options)
    x = tiles_of(dense, layout).requires_grad_()
    before = x.detach().clone()
    got = Softmax(layout, BLOCK)(x, scale=0.4, **options)
    assert_near(got, tiles_of(want, layout), 2e-6)
    of_tiles = tiles_of(grad, layout)
    kept = of_tiles.clone()
    (grad_x,) = torch.autograd.grad(got, x, of_tiles)
    (of_wide,) = torch.autograd.grad(want, wide, grad.double())
    assert_near(grad_x, tiles_of(of_wide, layout), 2e-6)
    assert torch.equal(x, before) and torch.equal(of_tiles, kept)  # nothing is overwritten


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_dtypes_of_softmax(dtype: torch.dtype, device: str) -> None:
    layout = layout_of("drawn")
    x = tiles_of(make((2, 2, 7 * BLOCK, 13 * BLOCK), dtype, 0, device), layout)
    got, wide = Softmax(layout, BLOCK)(x), Softmax(layout, BLOCK)(x.float())
    assert got.dtype == dtype and torch.equal(got, wide.to(dtype))


def test_a_row_of_which_nothing_takes_part(device: str) -> None:
    layout = torch.ones(1, 2, 2)
    x = make((1, 4, 16, 16), F32, 0, device).requires_grad_()
    mask = torch.ones(32, 32, device=device)
    mask[3] = 0
    out = Softmax(layout, 16)(x, attn_mask=mask, attn_mask_mode="mul")
    out.sum().backward()
    assert (out[0, :2, 3] == 0).all() and out.isfinite().all()
    assert x.grad is not None and (x.grad[0, :2, 3] == 0).all()


def test_gradients_of_any_strides() -> None:
    layout = layout_of("drawn")
    x = tiles_of(make((2, 2, 7 * BLOCK, 13 * BLOCK), F32, 0), layout).requires_grad_()
    out = Softmax(layout, BLOCK)(x)
    for grad in (torch.ones(()).expand_as(out), make((BLOCK, BLOCK, 2, 1), F32, 1).permute(
        2, 3, 0, 1).expand_as(out)):  # fmt: skip
        (got,) = torch.autograd.grad(out, x, grad, retain_graph=True)
        (want,) = torch.autograd.grad(out, x, grad.contiguous(), retain_graph=True)
        assert torch.equal(got, want)


def test_groups_are_few_and_hardly_padded() -> None:
    """Of 300 lines with 1 to 300 tiles: 8 groups, and 4 for each doubling beyond."""
    index = TileIndex("MatMul", torch.ones(300, 300).tril(), 16)
    for groups in (index.on(torch.device("cpu")).by_row, index.on(torch.device("cpu")).by_column):
        assert len(groups) <= 29
        assert sum(group.tiles.numel() for group in groups) < index.count * 1.15
        lines = torch.cat([group.lines for group in groups])
        assert torch.equal(lines.sort().values, torch.arange(300))


WRONG_PRODUCTS: list[tuple[str, tuple[Any, Any], str]] = [
    ("sdd", (torch.ones(1, 2, 32, 4), torch.ones(1, 2, 5, 48)), "b has shape [1, 2, 5, 48], expe"),
    ("sdd", (torch.ones(1, 2, 31, 4), torch.ones(1, 2, 4, 48)), "a has shape [1, 2, 31, 4], exp"),
    ("sdd", (torch.ones(1, 1, 32, 4), torch.ones(1, 1, 4, 48)), "a has shape [1, 1, 32, 4], exp"),
    ("sdd", (torch.ones(3, 2, 32, 4), torch.ones(1, 2, 4, 48)), "b has shape [1, 2, 4, 48], exp"),
    ("sdd", (torch.ones(32), torch.ones(1, 2, 4, 48)), "a has 1 dimensions, expected 2 to 4"),
    ("dsd", (torch.ones(16, 16), torch.ones(1, 2, 48, 4)), "a has 2 dimensions, expected 3 to 4"),
    ("dsd", (torch.ones(1, 11, 16, 16), torch.ones(1, 2, 48, 4)), "a has shape [1, 11, 16, 16], "),
    ("dsd", (torch.ones(1, 12, 16, 16), torch.ones(1, 2, 32, 4)), "b has shape [1, 2, 32, 4], e"),
    ("dds", (torch.ones(1, 2, 4, 48), torch.ones(1, 12, 16, 16)), "a has shape [1, 2, 4, 48], e"),
    ("sdd", (torch.ones(1, 2, 32, 4), torch.ones(1, 2, 4, 48).half()), "b is torch.float16, exp"),
    ("sdd", (torch.ones(1, 2, 32, 4), 1), "b is 1, expected a tensor"),
]


@pytest.mark.parametrize(("mode", "values", "text"), WRONG_PRODUCTS)
def test_products_that_do_not_fit(mode: str, values: tuple[Any, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        MatMul(torch.ones(2, 2, 3), 16, mode)(*values)
    assert str(caught.value).startswith(f"MatMul: {text}")


def test_objects_that_are_not_made() -> None:
    with pytest.raises(ValueError, match=r"^MatMul: mode is 'ddd', expected 'sdd', 'dsd', 'dds'$"):
        MatMul(torch.ones(2, 2), 16, "ddd")
    for layout, text in (([[1]], "is a list, expected a tensor"), (torch.ones(3), r"has shape \[")):
        with pytest.raises((ValueError, TypeError), match=f"^Softmax: layout {text}"):
            Softmax(layout, 16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^Softmax: block is 0, expected at least 1$"):
        Softmax(torch.ones(2, 2), 0)
    with pytest.raises(TypeError, match=r"^MatMul: block is 16\.0, expected a whole number$"):
        MatMul(torch.ones(2, 2), 16.0, "sdd")  # type: ignore[arg-type]


WRONG_MASKS: list[tuple[dict[str, Any], str]] = [
    (dict(key_padding_mask_mode="or"), "key_padding_mask_mode is 'or', expected 'add' or 'mul'"),
    (dict(key_padding_mask=torch.ones(1, 31)), "key_padding_mask has shape [1, 31], expected [2,"),
    (dict(attn_mask=torch.ones(16, 32)), "attn_mask has shape [16, 32], expected [2, 1, 32, 32]"),
    (dict(rpe=torch.ones(3, 1, 32, 32)), "rpe has shape [3, 1, 32, 32], expected [2, 1, 32, 32]"),
    (dict(attn_mask=torch.ones(32, 32).long()), "attn_mask is torch.int64, expected bool or flo"),
    (dict(attn_mask=[1]), "attn_mask is [1], expected a tensor"),
    (dict(rpe=torch.ones(32, 32, requires_grad=True)), "rpe requires a gradient, expected none"),
    (dict(scale="1"), ""),
]


@pytest.mark.parametrize(("options", "text"), WRONG_MASKS)
def test_masks_that_do_not_fit(options: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        Softmax(torch.ones(2, 2), 16)(torch.ones(2, 4, 16, 16), **options)
    assert str(caught.value).startswith(f"Softmax: {text}" if text else "softmax: scale is '1'")
    with pytest.raises(ValueError, match=r"^Softmax: x has shape \[2, 3, 16, 16\], expected \(bat"):
        Softmax(torch.ones(2, 2), 16)(torch.ones(2, 3, 16, 16))
