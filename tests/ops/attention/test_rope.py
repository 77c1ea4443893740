"""rope: numbers against the reference, layouts, in place, gradients, builders of frequencies."""

import math
from typing import Any

import pytest
import torch
from allocated import on_cuda
from samples import BF16, DTYPES, F32, make
from tolerance import assert_within
from torch import Tensor

from deepspeed_ext.ops import (
    rope,
    rope_,
    rope_frequencies,
    rope_frequencies_llama3,
    rope_frequencies_ntk,
    rope_frequencies_yarn,
    rope_ref,
    rope_scale_yarn,
)

ROUNDING = torch.finfo(F32).eps / 2
FAR = [0, 1, 7, 4095, 1_000_000, 2**24 + 1, -1_000_001, 2**31 - 1, 5, 65_537, 131_071]


def assert_right(
    q: Tensor, k: Tensor | None, positions: Tensor, frequencies: Tensor, **options: Any
) -> None:
    """Compare with the reference.

    Cosine and sine are off by some roundings of 1, as what is left of an angle beyond quarter turns
    is below 1; the reference's angle by 2^-53 of itself, as is ours.
    """
    results = rope(q, k, positions, frequencies, **options)
    wide = [t if t is None else t.cpu() for t in (q, k, positions, frequencies)]
    want = rope_ref(*wide, **options)
    pairs = frequencies.numel()
    furthest = float(positions.double().abs().max()) if positions.numel() else 0.0
    fastest = float(frequencies.double().abs().max()) if pairs else 0.0
    error_of_angle = 6 * ROUNDING + furthest * fastest * 2.0**-51
    for x, got, expected in zip((q, k), _tuple(results), _tuple(want), strict=k is not None):
        assert got.shape == x.shape and got.dtype == x.dtype and got.is_contiguous()
        magnitude = x.cpu().double().abs()
        turns = magnitude[..., : 2 * pairs]
        both = turns.unflatten(-1, (pairs, 2) if options.get("interleaved") else (2, pairs))
        total = both.sum(-1 if options.get("interleaved") else -2, keepdim=True).expand_as(both)
        error = torch.zeros_like(magnitude)
        error[..., : 2 * pairs] = total.flatten(-2) * abs(options.get("scale", 1)) * error_of_angle
        assert_within("out", got.cpu(), expected, error)
        assert torch.equal(got[..., 2 * pairs :], x[..., 2 * pairs :])


def _tuple(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


def heads(
    tokens: int, count: int, width: int, dtype: torch.dtype, seed: int, device: str
) -> Tensor:
    return make((2, tokens, count, width), dtype, seed, device)


@pytest.mark.parametrize(
    ("width", "pairs"), [(2, 1), (16, 8), (128, 64), (64, 16), (80, 17), (34, 17), (30, 0), (7, 3)]
)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype: torch.dtype, interleaved: bool, width: int, pairs: int, device: str) -> None:
    q, k = (heads(11, n, width, dtype, n, device) for n in (5, 2))
    positions = torch.tensor(FAR, device=device)
    frequencies = 10000.0 ** -torch.linspace(0, 1, pairs, dtype=torch.float64).to(device)
    assert_right(q, k, positions, frequencies, interleaved=interleaved)
    assert_right(q, None, positions, frequencies, interleaved=interleaved, scale=-1.5)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_many_pairs_and_tokens(interleaved: bool, device: str) -> None:
    """More than one table of angles has, more than a thread and a block take."""
    for width, tokens, counts in [(530, 37, (3, 1)), (112, 5, (61, 12)), (2210, 3, (2, 1))]:
        frequencies = rope_frequencies(width // 16 * 16, base=100.0).to(device)
        q, k = (heads(tokens, n, width, F32, n, device) for n in counts)
        positions = torch.arange(tokens, device=device, dtype=torch.int32) * 1001
        assert_right(q, k, positions, frequencies, interleaved=interleaved)
    q, k = (heads(4097, 1, 16, BF16, n, device) for n in (0, 1))  # some of both batches in a block
    positions = make((2, 4097), F32, 3, device).mul(1e4).long()
    assert_right(q, k, positions, rope_frequencies(16).to(device), interleaved=interleaved)
    frequencies = rope_frequencies(32).to(device)
    q, k = (heads(900, n, 32, BF16, n, device) for n in (8, 2))
    positions = make((2, 900), F32, 3, device).mul(1e4).long()
    assert_right(q, k, positions, frequencies, interleaved=interleaved)


def test_a_float_angle_would_be_off(device: str) -> None:
    """At position 1,000,000 by 0.03 rad: this is what the tolerance of these tests sees."""
    q = torch.ones(1, 1, 64, device=device)
    frequencies = rope_frequencies(64).to(device)
    positions = torch.tensor([1_000_003], device=device)
    want = rope_ref(q.cpu(), None, positions.cpu(), frequencies.cpu())
    naive = rope_ref(q.cpu(), None, positions.cpu(), frequencies.float().cpu())
    assert (naive - want).abs().max() > 1e-3
    assert (rope(q, None, positions, frequencies).cpu() - want).abs().max() < 1e-6


@pytest.mark.parametrize("mixture", [(F32, BF16), (BF16, F32)], ids=str)
def test_mixtures(mixture: tuple[torch.dtype, ...], device: str) -> None:
    q, k = (heads(11, 3, 32, dtype, i, device) for i, dtype in enumerate(mixture))
    positions = torch.tensor(FAR, device=device)
    for frequencies in (rope_frequencies(32), rope_frequencies(32).float()):
        assert_right(q, k, positions, frequencies.to(device))


@pytest.mark.parametrize("shape", [(5, 3, 8), (2, 3, 5, 4, 8), (0, 5, 3, 8), (2, 0, 3, 8)])
def test_shapes(shape: tuple[int, ...], device: str) -> None:
    q = make(shape, F32, 0, device)
    positions = torch.arange(shape[-3], device=device)
    frequencies = rope_frequencies(8).to(device)
    assert_right(q, q[..., :1, :], positions, frequencies)
    leading = positions.expand(shape[:-2])
    assert torch.equal(rope(q, None, positions, frequencies), rope(q, None, leading, frequencies))
    assert rope(q[..., :0], None, positions, frequencies[:0]).shape == (*shape[:-1], 0)
    assert_right(q[..., :0, :], q, positions, frequencies)


LAYOUTS = {
    "contiguous": lambda t: t,
    "a slice of one projection": lambda t: t[..., 8:40],
    "from an odd element": lambda t: t[..., 1:33],
    "every other head": lambda t: t[:, :, ::2],
    "every other token": lambda t: t[:, ::2],
    "every other element": lambda t: t[..., ::2],
    "one head for all": lambda t: t[:, :, :1].expand_as(t),
    "one element for all": lambda t: t[0, 0, 0, 0].expand_as(t),
    "batches swapped": lambda t: t.view(2, 3, 4, 6, 48).transpose(0, 1),
    "heads before tokens in memory": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
}


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype, interleaved: bool, device: str) -> None:
    """Results are those of contiguous copies, bit for bit, with heads before tokens or behind."""
    q, k = (LAYOUTS[layout](make((2, 12, 6, 48), dtype, i, device)) for i in range(2))
    positions = (make(q.shape[:-2], F32, 5, device) * 1000).int()
    frequencies = rope_frequencies(q.shape[-1] // 4 * 2).to(device)
    want = rope(q.contiguous(), k.contiguous(), positions, frequencies, interleaved=interleaved)
    for got, expected in zip(
        rope(q, k, positions, frequencies, interleaved=interleaved), want, strict=True
    ):
        assert torch.equal(got, expected) and got.is_contiguous()
    turned = [t.transpose(-2, -3) for t in (q, k)]
    options = dict(interleaved=interleaved, heads_first=True)
    for got, expected in zip(rope(*turned, positions, frequencies, **options), want, strict=True):
        assert torch.equal(got, expected.transpose(-2, -3)) and got.is_contiguous()


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_in_place(dtype: torch.dtype, interleaved: bool, heads_first: bool, device: str) -> None:
    """In slices of one projection, of which nothing else changes."""
    room = make((2, 11, 8, 48), dtype, 0, device)
    room = room.transpose(1, 2) if heads_first else room
    before = room.clone()
    q, k = (
        room.narrow(-3 if heads_first else -2, 0, 5),
        room.narrow(-3 if heads_first else -2, 6, 2),
    )
    positions = torch.tensor(FAR, device=device)
    frequencies = rope_frequencies(32).to(device)
    options = dict(interleaved=interleaved, heads_first=heads_first)
    want = rope(q, k, positions, frequencies, **options)
    version = room._version
    rope_(q, k, positions, frequencies, **options)
    assert room._version > version
    assert torch.equal(q, want[0]) and torch.equal(k, want[1])
    other = room.narrow(-3 if heads_first else -2, 5, 1)
    assert torch.equal(other, before.narrow(-3 if heads_first else -2, 5, 1))
    alone = before.clone()
    rope_(alone, None, positions, frequencies, **options)
    assert torch.equal(alone, rope(before, None, positions, frequencies, **options))


def test_what_is_not_finite(device: str) -> None:
    q = torch.ones(3, 2, 8, device=device)
    q[1, 0, 0], q[2, 0, 1] = float("inf"), float("nan")
    frequencies = rope_frequencies(8).to(device)
    got = rope(q, None, torch.tensor([5, 6, 7], device=device), frequencies)
    want = rope_ref(q.cpu(), None, torch.tensor([5, 6, 7]), frequencies.cpu()).float()
    torch.testing.assert_close(got.cpu(), want, equal_nan=True)
    for bad in (float("inf"), float("nan")):
        frequencies[2] = bad
        got = rope(torch.ones(1, 1, 8, device=device), None, torch.tensor([1], device=device),
                   frequencies)  # fmt: skip
        assert got[0, 0].isnan().tolist() == [False, False, True, False] * 2


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_gradients(interleaved: bool, device: str) -> None:
    """Against the reference's, of either result, of both, expanded and not contiguous."""
    q, k = (heads(11, n, 40, F32, n, device).requires_grad_() for n in (3, 2))
    positions = torch.tensor(FAR[:5] * 2 + [3], device=device)
    frequencies = rope_frequencies(32).to(device)
    options = dict(interleaved=interleaved, scale=0.7)
    grads = [make((2, 3, 11, 40), F32, 7, device).transpose(1, 2), make((40,), F32, 8, device)]
    grads[1] = grads[1].expand(2, 11, 2, 40)
    wide = [t.detach().cpu().double().requires_grad_() for t in (q, k)]
    want = torch.autograd.grad(
        rope_ref(*wide, positions.cpu(), frequencies.cpu(), **options),
        wide,
        [g.cpu().double() for g in grads],
    )
    results = rope(q, k, positions, frequencies, **options)
    got = torch.autograd.grad(results, (q, k), grads, retain_graph=True)
    for value, expected in zip(got, want, strict=True):
        torch.testing.assert_close(value.cpu().double(), expected, atol=5e-6, rtol=0)
    for i, leaf in enumerate((q, k)):
        (one,) = torch.autograd.grad(results[i], leaf, grads[i], retain_graph=True)
        assert torch.equal(one, got[i])
    (single,) = torch.autograd.grad(rope(q, None, positions, frequencies, **options), q, grads[0])
    assert torch.equal(single, got[0])


def test_a_gradient_of_a_gradient(device: str) -> None:
    q = make((4, 2, 8), F32, 0, device).requires_grad_()
    positions, frequencies = torch.arange(4, device=device), rope_frequencies(8).to(device)
    out = rope(q, None, positions, frequencies)
    (grad,) = torch.autograd.grad(out.pow(3).sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), q)
    wide = q.detach().cpu().double().requires_grad_()
    out = rope_ref(wide, None, positions.cpu(), frequencies.cpu())
    (grad,) = torch.autograd.grad(out.pow(3).sum(), wide, create_graph=True)
    (want,) = torch.autograd.grad(grad.sum(), wide)
    torch.testing.assert_close(second.cpu().double(), want, atol=1e-4, rtol=1e-5)


def test_reference_has_the_right_gradient() -> None:
    q, k = (make((3, 2, 6), F32, i).double().requires_grad_() for i in range(2))
    positions, frequencies = torch.arange(3), rope_frequencies(4)
    for interleaved in (False, True):
        assert torch.autograd.gradcheck(
            lambda a, b, i=interleaved: rope_ref(a, b, positions, frequencies, interleaved=i),
            (q, k),
        )


def test_no_copies_of_slices(cuda: str) -> None:
    room = torch.ones(4, 512, 48, 128, device=cuda, dtype=BF16)
    q, k = room[:, :, :32].transpose(1, 2), room[:, :, 32:40].transpose(1, 2)
    positions, frequencies = torch.arange(512, device=cuda), rope_frequencies(128).to(cuda)
    rope(q, k, positions, frequencies, heads_first=True)
    out, taken = on_cuda(rope, q, k, positions, frequencies, heads_first=True)
    assert taken == sum(t.nbytes for t in out)
    _, taken = on_cuda(rope_, q, k, positions, frequencies, heads_first=True)
    assert taken == 0


# The rules of frequencies


def test_plain_and_linear() -> None:
    want = [10000.0 ** (-2 * j / 128) for j in range(64)]
    torch.testing.assert_close(rope_frequencies(128), torch.tensor(want, dtype=torch.float64))
    got = rope_frequencies(128, base=500.0, factor=4.0) * 4
    torch.testing.assert_close(got, rope_frequencies(128, base=500.0))


def test_ntk() -> None:
    plain = rope_frequencies(128)
    options = dict(max_position_embeddings=4096, factor=2.0)
    for length in (1, 4096):
        assert torch.equal(rope_frequencies_ntk(128, length=length, **options), plain)
    got = rope_frequencies_ntk(128, length=8192, **options)
    torch.testing.assert_close(got, rope_frequencies(128, base=10000.0 * 3 ** (128 / 126)))
    assert got[-1] / plain[-1] == pytest.approx(1 / 3)  # the slowest is interpolated


def test_yarn() -> None:
    plain = rope_frequencies(128)
    got = rope_frequencies_yarn(128, factor=16.0, original_max_position_embeddings=4096)
    turns = 4096 * plain / (2 * math.pi)
    ratio = got / plain
    assert torch.equal(ratio[turns > 36], torch.ones_like(ratio[turns > 36]))
    torch.testing.assert_close(ratio[turns < 0.9], torch.full_like(ratio[turns < 0.9], 1 / 16))
    assert (ratio.diff() <= 0).all() and ((ratio > 1 / 16) & (ratio < 1)).sum() > 20
    # Pairs 20 and 46, by hand: 128 ln(4096 / (n 2 pi)) / (2 ln 10000) for n = 32 and 1, rounded.
    assert ratio[20] == 1 and ratio[21] < 1
    assert ratio[45] > 1 / 16 and ratio[46].item() == pytest.approx(1 / 16)
    assert rope_scale_yarn(16.0) == pytest.approx(1 + 0.1 * math.log(16))
    assert rope_scale_yarn(40.0, mscale=0.7, mscale_all_dim=0.7) == 1


def test_llama3() -> None:
    plain = rope_frequencies(128, base=500000.0)
    got = rope_frequencies_llama3(128)
    wavelength = 2 * math.pi / plain
    for j in range(64):
        if wavelength[j] < 8192 / 4:
            assert got[j] == plain[j]
        elif wavelength[j] > 8192:
            assert got[j].item() == pytest.approx(plain[j].item() / 8, rel=1e-14)
        else:
            smooth = (8192 / wavelength[j] - 1) / 3
            want = (1 - smooth) * plain[j] / 8 + smooth * plain[j]
            assert got[j].item() == pytest.approx(want.item(), rel=1e-14)


REFUSED = {
    "width is 7, expected an even number above 0": lambda: rope_frequencies(7),
    "base is 0, expected a number above 0": lambda: rope_frequencies(8, base=0),
    "factor is nan, expected a number above 0": lambda: rope_frequencies(8, factor=math.nan),
    "factor is 0.5, expected a number that is 1 or more": lambda: rope_scale_yarn(0.5),
    "length is 0, expected a number above 0": lambda: rope_frequencies_ntk(
        8, length=0, max_position_embeddings=1, factor=2
    ),
    "beta_slow is 40, expected between 0 and 32.0": lambda: rope_frequencies_yarn(
        8, factor=2, original_max_position_embeddings=9, beta_slow=40
    ),
    "low_freq_factor is 4, expected between 0 and 4": lambda: rope_frequencies_llama3(
        8, low_freq_factor=4, high_freq_factor=4
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refuses_rules(text: str) -> None:
    with pytest.raises(ValueError, match=f"^rope_frequencies: {text}$"):
        REFUSED[text]()
