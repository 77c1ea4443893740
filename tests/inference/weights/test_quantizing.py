"""Engines with quantized weights: how far these are from the floats, and what they take."""

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_folder
import torch

from deepspeed_ext.inference.execution.memory_budget import MemoryBudget
from deepspeed_ext.inference.initialize import init_inference
from deepspeed_ext.inference.weights import float8
from deepspeed_ext.inference.weights.float8 import Float8Weight, float8_layer
from deepspeed_ext.inference.weights.linear import Linear
from deepspeed_ext.inference.weights.quantize_on_load import Quantizer, bytes_of
from deepspeed_ext.ops import PackedWeight, dequantize, quantize
from deepspeed_ext.ops.quantization.packed_weight import unpack_weight_ref
from deepspeed_ext.quantization.layout import make_layout
from deepspeed_ext.quantization.packing import dequantize_tensors, quantize_weight

NO_GPU = pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NO_GPU)]
PARTS = ("qkv", "out", "up", "down")
CONFIG = tiny_folder.CONFIG | dict(hidden_size=192, intermediate_size=320)  # groups that are cut


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_no_element_is_further_off_than_half_a_scale(
    kind: str, device: str, tmp_path: Path
) -> None:
    tiny_folder.write(tmp_path, CONFIG)
    floats = init_inference(tmp_path, device=device).decoder.weights
    engine = init_inference(tmp_path, quantize=kind, device=device)
    assert engine.report is not None
    for i, (layer, before) in enumerate(
        zip(engine.decoder.weights.layers, floats.layers, strict=True)
    ):
        for part in PARTS:
            weight, want = getattr(layer, part).weight, getattr(before, part).weight.double()
            assert isinstance(weight, PackedWeight) and weight.group_size == 128
            scales = weight.scales[:, : len(want)].t().double()
            allowed = scales.repeat_interleave(128, 1)[:, : want.shape[1]] / 2
            errors = (unpack_weight_ref(weight) - want).abs()
            assert bool((errors <= allowed * (1 + 2**-20)).all())
            told = engine.report.layers[f"layers.{i}.{part}"]
            assert told.largest_error == pytest.approx(float((errors / allowed).max()), rel=1e-3)
            assert told.rms_error == pytest.approx(float(errors.square().mean().sqrt()), rel=1e-3)
            assert told.bytes_before == want.numel() * 4
            assert told.bytes_after == weight.codes.nbytes + weight.scales.nbytes
    assert len(engine.report.layers) == 3 * len(PARTS)
    assert engine.report.bytes_after == bytes_of(engine.decoder.weights)
    assert engine.report.bytes_before == bytes_of(floats)
    assert engine.decoder.weights.embedding.dtype == torch.float32


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
@pytest.mark.parametrize("kv", [None, "int8", "fp8"])
def test_bytes_are_known_before(
    kind: str | None, kv: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[MemoryBudget] = []
    monkeypatch.setattr(
        "deepspeed_ext.inference.initialize.check_capacity",
        lambda device, quantize, batch, tokens, budget_of, *_: found.append(budget_of(quantize)),
    )
    tiny_folder.write(tmp_path, CONFIG)
    options: dict[str, Any] = dict(kv_dtype=kv, max_batch=3, max_tokens=100)
    engine = init_inference(tmp_path, dtype="bf16", quantize=kind, **options)
    assert found[0].weights == bytes_of(engine.decoder.weights)
    assert found[0].cache == engine.cache.nbytes
    per_token = 2 * 3 * 2 * (48 * (2 if kv is None else 1) + (0 if kv is None else 4))
    assert 0 <= found[0].cache - per_token * 3 * 128 < 100


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("quantize", [None, "int4"])
def test_the_head_may_be_of_few_bits(quantize: str | None, is_tied: bool, tmp_path: Path) -> None:
    """The embedding stays; the report tells both."""
    config = CONFIG | dict(tie_word_embeddings=is_tied)
    tensors = tiny.tensors(dict(config)) if is_tied else tiny_folder.tensors_of(config)
    tiny_folder.write(tmp_path, config, tensors=tensors)
    options: dict[str, Any] = dict(quantize=quantize, quantize_head="int8", input_format="int8")
    engine = init_inference(tmp_path, **options)
    weights, floats = engine.decoder.weights, init_inference(tmp_path).decoder.weights
    assert torch.equal(weights.embedding, floats.embedding)
    assert isinstance(weights.head.weight, PackedWeight) and weights.head.input_format == "int8"
    of_layers = {None: None, "int4": "int8"}[quantize]
    assert weights.layers[0].qkv.input_format == of_layers
    want = floats.head.weight.double()
    allowed = weights.head.weight.scales.t()[: len(want)].repeat_interleave(128, 1)[:, :192] / 2
    errors = (unpack_weight_ref(weights.head.weight) - want).abs()
    assert bool((errors <= allowed * (1 + 2**-20)).all())
    assert engine.report.layers["head"].largest_error <= 1.001
    assert len(engine.report.layers) == (13 if quantize else 1)
    assert engine.report.bytes_before == bytes_of(floats)
    assert engine.report.bytes_after == bytes_of(weights)
    assert len(engine.generate([1, 2], max_new_tokens=4, stop_tokens=())[0].tokens) == 4


def test_a_tied_head_counts_once(tmp_path: Path) -> None:
    config = CONFIG | dict(tie_word_embeddings=True)
    tensors = tiny.tensors(dict(config))
    tiny_folder.write(tmp_path, config, tensors=tensors)
    weights = init_inference(tmp_path).decoder.weights
    assert bytes_of(weights) == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(
    "options", [{"quantize": "int8"}, {"quantize": "int4", "input_format": "int8"}]
)
def test_quantized_weights_are_batch_invariant(options: dict[str, Any], tmp_path: Path) -> None:
    tiny_folder.write(tmp_path, CONFIG)
    engine = init_inference(tmp_path, kv_dtype="int8", max_batch=4, **options)
    prompts = [[1, 2, 3], [5, 6], [7, 8, 9, 10, 11]]
    prompts += [[(7 * i + n) % 97 for i in range(n)] for n in (63, 64, 65, 130, 1100)]
    wanted: dict[str, Any] = dict(max_new_tokens=12, stop_tokens=(), logprobs=3)
    together = engine.generate(prompts, **wanted)
    for prompt, completion in zip(prompts, together, strict=True):
        alone = engine.generate([prompt], **wanted)[0]
        assert alone.tokens == completion.tokens and len(alone.tokens) == 12
        assert alone.logprobs == completion.logprobs
        assert alone.top_logprobs == completion.top_logprobs
    if "input_format" in options:
        layer = engine.decoder.weights.layers[0]
        assert {getattr(layer, part).input_format for part in PARTS} == {"int8"}


def float8_weight(n: int, length: int, device: str) -> Float8Weight:
    torch.manual_seed(2)
    layout = make_layout("test", "fp8_e4m3", (n, length), None)
    tensors = quantize_weight(torch.randn(n, length, device=device), layout)
    return Float8Weight(tensors["codes"], tensors["scales"], layout)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 5, 64, 70])
def test_products_of_8_bit_floats(rows: int, device: str) -> None:
    """With gates, a bias and a residual; the reference has the same codes of x and weight."""
    weight, dtype = float8_weight(72, 50, device), torch.bfloat16
    x = torch.randn(2, rows, 50, device=device, dtype=dtype)[:1]
    bias = torch.randn(72, device=device, dtype=dtype)
    residual = torch.randn(1, rows, 36, device=device, dtype=dtype)
    options: dict[str, Any] = dict(activation="silu", gated=True, residual=residual)
    out = Linear(weight, bias)(x, **options)
    codes, scales, _ = quantize(x[0], "fp8_e4m3")
    values = dequantize(codes, scales, format="fp8_e4m3", group_size=50, dtype=torch.float32)
    tensors = {"codes": weight.codes, "scales": weight.scales}
    floats = dequantize_tensors(weight.layout, tensors, torch.float32).double()
    sums = values.double() @ floats.t() + bias.double()
    gate, up = sums.chunk(2, -1)
    want = gate * torch.sigmoid(gate) * up + residual[0].double()
    # Sums are rounded to bfloat16, then with the bias again; silu's slope is 1.1 at most.
    terms = values.double().abs() @ floats.t().abs() + bias.double().abs()
    of_sums = terms * 2**-7
    of_gate, of_up = of_sums.chunk(2, -1)
    allowed = 1.1 * of_gate * (up.abs() + of_up) + gate.abs() * of_up
    allowed = allowed + (want.abs() + residual[0].double().abs()) * 2**-7
    assert out.shape == (1, rows, 36)
    assert bool(((out[0].double() - want).abs() <= allowed).all())


@pytest.mark.parametrize("device", DEVICES)
def test_8_bit_floats_are_batch_invariant(device: str) -> None:
    weight = float8_weight(96, 128, device)
    x = torch.randn(64, 128, device=device, dtype=torch.bfloat16)
    together = float8_layer(x, weight, activation="gelu")
    for i in (0, 17, 63):
        assert torch.equal(float8_layer(x[i : i + 1], weight, activation="gelu")[0], together[i])


def test_few_rows_are_multiplied_as_64(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, libraries go other ways for other shapes."""
    shapes: list[torch.Size] = []
    multiply = float8.float8_linear

    def noted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.append(x.shape)
        return multiply(x, *rest)

    monkeypatch.setattr(float8, "float8_linear", noted)
    weight = float8_weight(16, 32, "cpu")
    for rows in (1, 64, 65):
        assert float8_layer(torch.ones(1, rows, 32), weight).shape == (1, rows, 16)
    assert shapes == [(64, 32), (64, 32), (65, 32)]


@NO_GPU
def test_8_bit_floats_on_cuda(tmp_path: Path) -> None:
    tiny_folder.write(tmp_path, CONFIG)
    engine = init_inference(tmp_path, dtype="bf16", quantize="fp8", device="cuda")
    assert isinstance(engine.decoder.weights.layers[0].qkv.weight, Float8Weight)
    assert max(layer.largest_error for layer in engine.report.layers.values()) <= 1.001
    one, two = ([c.tokens for c in engine.generate(p)] for p in ([[1, 2]], [[3], [1, 2]]))
    assert one[0] == two[1]


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_refuses_what_is_not_finite(kind: str, value: float, tmp_path: Path) -> None:
    tensors = tiny_folder.tensors_of()
    tensors["model.layers.1.mlp.up_proj.weight"][95, 63] = value
    tiny_folder.write(tmp_path, tensors=tensors)
    text = r"^init_inference: layers.1.up has weights that are not finite, expected numbers, as c"
    with pytest.raises(ValueError, match=text):
        init_inference(tmp_path, quantize=kind)


def test_refuses(tmp_path: Path) -> None:
    tiny_folder.write(tmp_path)
    text = r"^init_inference: cpu has no products of 8-bit floats, expected 8.9 or newer for"
    with pytest.raises(ValueError, match=text):
        init_inference(tmp_path, quantize="fp8", device="cpu")
    with pytest.raises(
        ValueError, match=r"^init_inference: quantize is 'int3', expected None or one of int8, int4"
    ):
        init_inference(tmp_path, quantize="int3")
    with pytest.raises(ValueError, match=r"^init_inference: quantize is \[1\], expected None or"):
        init_inference(tmp_path, quantize=[1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^init_inference: quantize_head is 'q', expected None"):
        init_inference(tmp_path, quantize_head="q")
    text = "^init_inference: input_format is 'int8', expected None without quantize"
    with pytest.raises(ValueError, match=text):
        init_inference(tmp_path, input_format="int8")
    with pytest.raises(
        ValueError, match=r"^init_inference: input_format is 'int4', expected None or"
    ):
        Quantizer("int4", "int4", torch.device("cpu"))
