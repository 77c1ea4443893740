"""Norms between linear layers: what torch may do with them, graphs, and what they refuse."""

import re
from typing import Any

import pytest
import torch
from allocated import Taken, measured, share
from norms_around_cases import BF16, F32, LAYERS, Layer, layer_of, norm_of, options_of, undivided
from samples import make
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from deepspeed_ext.ops import NextNorm, Undivided, skinny_linear, skinny_linear_norm

OPS = torch.ops.deepspeed_ext
each_layer = pytest.mark.parametrize("name", LAYERS)
FORMAT_NUMBERS = dict(int8=0, int4=1, nf4=2)


def block(x: Tensor, first: Layer, second: Layer, norm: NextNorm) -> tuple[Tensor, Tensor]:
    total, normed = first.norm(x * 2, norm=norm, residual=x[:, : norm.weight.shape[0]])
    return total, second(normed, activation="silu", gated=True).sin()


@pytest.mark.parametrize("name", ["floats", "int4 with offsets", "int8 by integers"])
def test_compiled(name: str, device: str) -> None:
    """In one graph, with the same bits."""
    torch.compiler.reset()
    first, norm = layer_of(name, 24, 40, F32, device), norm_of(24, F32, device)
    second, x = layer_of(name, 32, 24, F32, device), make((5, 40), F32, 0, device)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for got, want in zip(
        compiled(x, first, second, norm), block(x, first, second, norm), strict=True
    ):
        assert torch.equal(got, want)


@each_layer
def test_meta(name: str) -> None:
    first, second = layer_of(name, 24, 40, BF16, "meta"), layer_of(name, 32, 24, BF16, "meta")
    x = torch.empty(5, 40, device="meta", dtype=BF16)
    out, normed = first.norm(x, norm=norm_of(24, BF16, "meta"))
    assert out.is_meta and out.shape == normed.x.shape == (5, 24) and normed.x.dtype == BF16
    assert normed.squares.shape == (5, 3) and normed.squares.dtype == F32
    assert second(normed).shape == (5, 32)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("rows", [0, 3])
@each_layer
def test_opcheck(name: str, rows: int, after: bool, device: str) -> None:
    dtype = BF16 if after else F32
    layer, x = layer_of(name, 24, 40, dtype, device), undivided(rows, 40, dtype, device)
    options = options_of(rows, 24, dtype, device, bias=True, residual=True)
    weight, norm = norm_of(24, dtype, device).weight, dict(eps=1e-5, weight_offset=0.5)
    others = (options["bias"], options["residual"], x.squares, weight if after else None)
    numbers: dict[str, Any] = dict(activation=4, gated=False) | norm
    op, given = OPS.skinny_linear_norm.default, (x.x, layer.weight, *others)
    if layer.kind is not None:
        packet = OPS.quantized_linear_norm
        op = packet.w8 if layer.kind[0] == "int8" else packet.w4
        given = (x.x, *layer.weight[:3], *others)
        numbers |= dict(format=FORMAT_NUMBERS[layer.kind[0]], integer=layer.kind[3] is not None)
        numbers |= dict(group_size=layer.weight.group_size)
    checked = torch.library.opcheck(op, given, numbers)
    assert set(checked.values()) == {"SUCCESS"}


@each_layer
def test_flops_are_counted(name: str, device: str) -> None:
    layer = layer_of(name, 32, 40, F32, device)
    with FlopCounterMode(display=False) as counter:
        layer.norm(undivided(5, 40, F32, device), norm=norm_of(32, F32, device))
    assert counter.get_total_flops() == 2 * 5 * 32 * 40


def beside_the_results(device: str, taken: Taken) -> list[float]:
    """Return what calls take beside their results and codes of x, as shares of the weight."""
    found = []
    for name, rows in (("floats", 1), ("floats", 64), ("int4", 64), ("nf4", 1)):
        layer, x = layer_of(name, 4096, 2048, BF16, device), undivided(rows, 2048, BF16, device)
        norm = norm_of(4096, BF16, device)
        layer.norm(x, norm=norm)
        (out, normed), extra = taken(layer.norm, x, norm=norm)
        extra -= out.nbytes + normed.x.nbytes + normed.squares.nbytes
        weight = layer.weight if layer.kind is None else layer.weight.codes
        found.append(share(extra, weight.nbytes))
    return found


def test_takes_no_memory(device: str) -> None:
    found = measured(beside_the_results, device)
    assert len(found) == 4 and max(found) <= 0.01


def chain(x: Tensor, layers: list[Layer], norm: NextNorm) -> Tensor:
    """Each layer reads the norm of the sum of all before it."""
    total, normed = layers[0].norm(x, norm=norm)
    for layer in layers[1:]:
        total, normed = layer.norm(normed, norm=norm, residual=total)
    return layers[0](normed)


@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.parametrize("n", [512, 2048])
@each_layer
def test_chains_in_a_graph(name: str, n: int, rows: int, cuda: str) -> None:
    """Kernels that begin before those before them have ended, which write what these divide by."""
    layers, norm = [layer_of(name, n, n, BF16, cuda, i) for i in range(6)], norm_of(n, BF16, cuda)
    x = make((rows, n), BF16, 5, cuda)

    def one_by_one(x: Tensor) -> Tensor:
        torch.cuda.synchronize()
        total, normed = layers[0].norm(x, norm=norm)
        for layer in layers[1:]:
            torch.cuda.synchronize()
            total, normed = layer.norm(normed, norm=norm, residual=total)
        torch.cuda.synchronize()
        return layers[0](normed)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        start = x.clone()
        chain(start, layers, norm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = chain(start, layers, norm)
    for value in (x, x * 2, x.flip(0)):
        start.copy_(value)
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, one_by_one(value))


ROWS, WEIGHT = undivided(6, 16, F32), torch.ones(8, 16)
NORM = NextNorm(torch.ones(8))
BAD_ROWS: dict[str, Undivided] = {
    "x has shape [6, 12], expected a multiple of 8 columns beside squares":
        ROWS._replace(x=torch.ones(6, 12)),
    "x has shape [6, 0], expected a multiple of 8 columns beside squares":
        ROWS._replace(x=torch.ones(6, 0)),
    "squares has shape [6, 16], expected [6, 2]": ROWS._replace(squares=torch.ones(6, 16)),
    "squares has shape [5, 2], expected [6, 2]": ROWS._replace(squares=torch.ones(5, 2)),
    "squares is bfloat16, expected float32": ROWS._replace(squares=torch.ones(6, 2).bfloat16()),
    "eps is -1, expected a number that is 0 or more": ROWS._replace(eps=-1.0),
    "eps is nan, expected a number that is 0 or more": ROWS._replace(eps=float("nan")),
    "x is float16, expected float32 or bfloat16 beside a norm, as what is not divided yet may be"
    " too large": ROWS._replace(x=torch.ones(6, 16).half()),
}  # fmt: skip
BAD_NORMS: dict[str, tuple[Tensor, NextNorm]] = {
    "norm_weight has shape [16], expected [8]": (WEIGHT, NextNorm(torch.ones(16))),
    "norm_weight is bfloat16, expected float32": (WEIGHT, NextNorm(torch.ones(8).bfloat16())),
    "norm_weight is on meta, expected cpu": (WEIGHT, NextNorm(torch.ones(8, device="meta"))),
    "weight_offset is inf, expected a finite float32": (WEIGHT, NORM._replace(weight_offset=1e999)),
    "weight has 12 rows, expected a multiple of 8 beside a norm after it":
        (torch.ones(12, 16), NextNorm(torch.ones(12))),
}  # fmt: skip


@pytest.mark.parametrize("text", BAD_ROWS)
def test_refuses_rows(text: str) -> None:
    x = BAD_ROWS[text]
    skinny_linear(ROWS, WEIGHT)  # loads the library, so that it is the one that refuses
    weight = torch.ones(8, x.x.shape[-1], dtype=x.x.dtype)
    with pytest.raises(ValueError, match=f"^skinny_linear: {re.escape(text)}$"):
        skinny_linear(x, weight)
    norm = NORM._replace(weight=NORM.weight.to(weight.dtype))
    with pytest.raises(ValueError, match=f"^skinny_linear_norm: {re.escape(text)}$"):
        skinny_linear_norm(x, weight, norm=norm)


@pytest.mark.parametrize("text", BAD_NORMS)
def test_refuses_norms(text: str) -> None:
    weight, norm = BAD_NORMS[text]
    skinny_linear_norm(ROWS, WEIGHT, norm=NORM)
    with pytest.raises(ValueError, match=f"^skinny_linear_norm: {re.escape(text)}$"):
        skinny_linear_norm(torch.ones(3, 16), weight, norm=norm)


@each_layer
def test_both_ops_refuse(name: str) -> None:
    op = "skinny_linear" if LAYERS[name] is None else "quantized_linear"
    rows = "weight" if LAYERS[name] is None else "codes"
    layer = layer_of(name, 12, 16, F32)
    text = f"{op}_norm: {rows} has 12 rows, expected a multiple of 8 beside a norm after it"
    with pytest.raises(ValueError, match=f"^{text}$"):
        layer.norm(torch.ones(3, 16), norm=NextNorm(torch.ones(12)))
    with pytest.raises(
        ValueError, match=rf"^{op}: x has shape \[65, 16\], expected at most 64 row"
    ):
        layer(undivided(65, 16, F32))
    text = rf"^{op}_norm: x has shape \[65, 16\], expected at most 64 rows$"
    with pytest.raises(ValueError, match=text):
        layer.norm(torch.ones(65, 16), norm=NORM)
    with pytest.raises(ValueError, match=rf"^{op}: squares has shape \[2\], expected \[6, 2\]$"):
        layer(ROWS._replace(squares=torch.ones(2)))


def test_the_op_refuses_gates_before_a_norm() -> None:
    numbers: dict[str, Any] = dict(activation=4, gated=True, eps=0.0, weight_offset=0.0)
    text = "skinny_linear_norm: gated is True, expected False beside a norm after it"
    with pytest.raises(ValueError, match=f"^{text}$"):
        OPS.skinny_linear_norm(ROWS.x, torch.ones(16, 16), None, None, None, NORM.weight, **numbers)


def test_another_device_is_refused() -> None:
    x = ROWS._replace(squares=torch.ones(6, 2, device="meta"))
    with pytest.raises(ValueError, match=r"^skinny_linear_norm: squares is on meta, expected cpu"):
        skinny_linear(x, WEIGHT)


@each_layer
def test_a_gradient_is_refused(name: str) -> None:
    layer, x = layer_of(name, 8, 16, F32), torch.ones(3, 16, requires_grad=True)
    out, normed = layer.norm(x, norm=NORM)
    for result in (out, normed.x, layer_of(name, 4, 8, F32)(normed)):
        with pytest.raises(
            RuntimeError, match=r"_norm: the gradient of \w+ is wanted, expected no"
        ):
            result.sum().backward()
