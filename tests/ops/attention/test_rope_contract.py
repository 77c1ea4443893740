"""rope: a token alone, what it refuses, and what it promises to torch in place."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import BF16, DTYPES, F16, F32, make
from torch import Tensor

from deepspeed_ext.ops import rope, rope_, rope_frequencies


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_is_the_same_in_any_batch(
    dtype: torch.dtype, interleaved: bool, device: str
) -> None:
    """Alone, elsewhere, one element further on, with other heads beside it."""
    q = make((67, 6, 80), dtype, 0, device)
    positions = torch.arange(67, device=device) * 1001
    frequencies = rope_frequencies(64).to(device)
    want = rope(q, None, positions, frequencies, interleaved=interleaved)
    for token in (0, 33, 66):
        at = positions[token : token + 1]
        alone = rope(q[token : token + 1, 2:3], None, at, frequencies, interleaved=interleaved)
        assert torch.equal(alone[0, 0], want[token, 2])
    room = torch.full((5 * 6 * 80 + 1,), float("nan"), dtype=dtype, device=device)[1:]
    moved = room.view(5, 6, 80)
    moved.copy_(q[-5:])
    got = rope(moved, moved, positions[-5:], frequencies, interleaved=interleaved)
    assert torch.equal(got[0], want[-5:]) and torch.equal(got[1], want[-5:])


def freed(tensor: Tensor) -> Tensor:
    """The tensor with its storage let go, as sharding wrappers do between forward passes."""
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED: dict[str, Callable[[], dict[str, Any]]] = {
    "q has shape [2, 8], expected 3 dimensions at least": lambda: dict(q=torch.ones(2, 8)),
    "q is float64, expected float32, bfloat16 or float16":
        lambda: dict(q=torch.ones(2, 4, 3, 8).double()),
    "q has no memory, expected 192 elements": lambda: dict(q=freed(torch.ones(2, 4, 3, 8))),
    "k has shape [2, 4, 1, 9], expected that of q, [2, 4, 3, 8], but for the number of heads":
        lambda: dict(k=torch.ones(2, 4, 1, 9)),
    "k has shape [4, 3, 8], expected that of q, [2, 4, 3, 8], but for the number of heads":
        lambda: dict(k=torch.ones(4, 3, 8)),
    "k has shape [1, 4, 3, 8], expected that of q, [2, 4, 3, 8], but for the number of heads":
        lambda: dict(k=torch.ones(1, 4, 3, 8)),
    "k is on meta, expected cpu": lambda: dict(k=torch.ones(2, 4, 1, 8, device="meta")),
    "positions has shape [3], expected [4] or [2, 4]": lambda: dict(positions=torch.arange(3)),
    "positions has shape [1, 4], expected [4] or [2, 4]":
        lambda: dict(positions=torch.arange(4).view(1, 4)),
    "positions has shape [], expected [4] or [2, 4]": lambda: dict(positions=torch.tensor(1)),
    "positions is float32, expected int64 or int32": lambda: dict(positions=torch.ones(4)),
    "frequencies has shape [5], expected one dimension of at most 4, half of q's last one":
        lambda: dict(frequencies=torch.ones(5).double()),
    "frequencies has shape [1, 4], expected one dimension of at most 4, half of q's last one":
        lambda: dict(frequencies=torch.ones(1, 4).double()),
    "frequencies is bfloat16, expected float64 or float32":
        lambda: dict(frequencies=torch.ones(4).bfloat16()),
    "scale is inf, expected a finite float32": lambda: dict(scale=float("inf")),
    "scale is 1e+39, expected a finite float32": lambda: dict(scale=1e39),
}  # fmt: skip


def arguments() -> dict[str, Any]:
    """What rope takes."""
    q, k = torch.ones(2, 4, 3, 8), torch.ones(2, 4, 1, 8)
    return dict(q=q, k=k, positions=torch.arange(4), frequencies=rope_frequencies(8))


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    rope(**arguments())  # loads the library, so that it is the one that refuses
    given = arguments() | REFUSED[text]()
    with pytest.raises(ValueError, match=rf"^rope(\.pair)?: {re.escape(text)}$"):
        rope(**given)
    before = [t.clone() for t in given.values() if isinstance(t, Tensor) and t.device.type == "cpu"
              and t.untyped_storage().size() > 0]  # fmt: skip
    with pytest.raises(ValueError, match=f"^rope_: {re.escape(text)}$"):
        rope_(**given)
    after = [t for t in given.values() if isinstance(t, Tensor) and t.device.type == "cpu"
             and t.untyped_storage().size() > 0]  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


IN_PLACE: dict[str, Callable[[], dict[str, Any]]] = {
    "q has strides [96, 24, 0, 1] for shape [2, 4, 3, 8], expected no element to be another one":
        lambda: dict(q=torch.ones(2, 4, 3, 8)[:, :, :1].expand(2, 4, 3, 8)),
    "k has strides [1, 1, 1, 1] for shape [2, 4, 3, 8], expected no element to be another one":
        lambda: dict(k=torch.ones(99).as_strided((2, 4, 3, 8), (1, 1, 1, 1))),
    "q has strides [192, 48, 16, 2], expected 1 for the last dimension and one distance between"
    " batches": lambda: dict(q=torch.ones(2, 4, 3, 16)[..., ::2]),
}  # fmt: skip


@pytest.mark.parametrize("text", IN_PLACE)
def test_refuses_in_place(text: str) -> None:
    rope_(**arguments())
    with pytest.raises(ValueError, match=f"^rope_: {re.escape(text)}$"):
        rope_(**(arguments() | IN_PLACE[text]()))


def test_refuses_what_would_be_turned_twice() -> None:
    given = arguments()
    buffer = torch.rand(2, 4, 8, 8)
    whole, tokens = buffer[:, :, :3], buffer.view(-1)[8 : 8 + 2 * 4 * 3 * 8].view(2, 4, 3, 8)
    for q, k in (
        (given["q"], given["q"]),
        (whole, buffer[:, :, 2:5]),  # one head of three
        (buffer[:, :, 2:5], whole),
        (whole, tokens),  # of other strides
        (whole, buffer[:, :, :1]),
    ):
        before = buffer.clone()
        with pytest.raises(ValueError, match=r"^rope_: k is overlapping q, expected separate m"):
            rope_(**(given | dict(q=q, k=k)))
        assert torch.equal(buffer, before)


def test_slices_of_one_buffer_are_separate() -> None:
    """As q and k of a fused projection are, in either order of tokens and heads."""
    given = arguments()
    buffer = torch.rand(2, 4, 8, 8)
    for heads_first in (False, True):
        mine = buffer.clone()
        q, k = mine[:, :, :3], mine[:, :, 3:6]
        if heads_first:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        options = given | dict(q=q, k=k, heads_first=heads_first)
        want = rope(**(options | dict(q=q.clone(), k=k.clone())))
        rope_(**options)
        assert torch.equal(q, want[0]) and torch.equal(k, want[1])
        assert torch.equal(mine[:, :, 6:], buffer[:, :, 6:])


@pytest.mark.parametrize("name", ["positions", "frequencies"])
def test_refuses_what_would_be_read_as_it_is_written(name: str) -> None:
    given = arguments()
    inside = given["q"].view(-1).view(given[name].dtype)[: given[name].numel()]
    text = f"{name} is overlapping q, expected separate memory"
    with pytest.raises(ValueError, match=f"^rope_: {text}$"):
        rope_(**(given | {name: inside.view(given[name].shape)}))


def test_writes_are_counted(device: str) -> None:
    """Of k too, so that what was saved of it before is not used; compiled too."""

    def function(q: Tensor, k: Tensor) -> None:
        rope_(q, k, torch.arange(4, device=device), torch.ones(4, device=device))

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for each in (function, compiled):
        q, k = (make((2, 4, 3, 8), F32, i, device) for i in range(2))
        factor = torch.ones(8, device=device, requires_grad=True)
        products = [q * factor, k * factor]
        each(q, k)
        for product in products:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()


def test_no_gradient_is_lost() -> None:
    given = arguments()
    leaf = torch.ones(2, 4, 3, 8, requires_grad=True)
    for name in ("q", "k"):
        with pytest.raises(RuntimeError, match=f"^rope_: {name} requires a gradient, "):
            rope_(**(given | {name: leaf * 1}))
    with torch.no_grad():
        rope_(**(given | dict(q=leaf.detach())))
    given["frequencies"].requires_grad_()
    for function in (rope, rope_):
        text = f"^{function.__name__}: frequencies requires a gradient, expected none, "
        with pytest.raises(RuntimeError, match=text):
            function(**given)


def test_refuses_tensors_of_two_devices(cuda: str) -> None:
    given = arguments()
    rope(**given)
    for name in ("k", "positions", "frequencies"):
        for first, second in (("cpu", "cuda:0"), ("cuda:0", "cpu")):
            moved = {n: t.to(second if n == name else first) for n, t in given.items()}
            text = f"rope: {name} is on {second}, expected {first}"
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                rope(**moved)


@pytest.mark.parametrize("shape", [(3, 5, 2, 16), (5, 0, 16)])
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F16)], ids=str)
def test_opcheck_in_place(
    dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: str
) -> None:
    op = torch.ops.deepspeed_ext.rope_.default
    q, k = (make(shape, dtype, 0, device) for dtype in dtypes)
    positions = torch.arange(shape[-3], device=device)
    frequencies = rope_frequencies(8).to(device)
    options = dict(interleaved=True, heads_first=False, scale=1.0)
    for second in (k, None):
        values = (q.clone(), second, positions, frequencies)
        checked = torch.library.opcheck(op, values, options)
        assert set(checked.values()) == {"SUCCESS"}


def test_can_be_compiled_in_place(device: str) -> None:
    frequencies = rope_frequencies(16).to(device)

    def block(x: Tensor, positions: Tensor) -> Tensor:
        x = x * 2
        q, k, v = x.split([4, 2, 1], -2)
        rope_(q, k, positions, frequencies)
        return q.sum(-2) + k.sum(-2) + v.sum(-2)

    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (5, 9):
        x, positions = make((2, n, 7, 20), F32, 0, device), torch.arange(n, device=device)
        assert torch.equal(compiled(x, positions), block(x, positions))
