"""Engines of modules whose layers are QuantizedLinear: taken as they are, bit for bit."""

import copy
import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_cases import make
from family_cases import InDouble, cache_for, exact, model_of, run
from published_cases import METHODS, Published
from torch import Tensor, nn

from deepspeed_ext.inference.initialize import init_inference
from deepspeed_ext.inference.weights.linear import Linear, Stack
from deepspeed_ext.io import load, save
from deepspeed_ext.ops import record
from deepspeed_ext.quantization import (
    QuantizedLinear,
    load_int4_checkpoint,
    load_quantized,
    quantize_model,
    save_quantized,
)

TOKENS = [int(each) for each in torch.randint(97, (75,), generator=torch.manual_seed(1))]
FORMATS: dict[str, dict[str, Any]] = {
    "int8": dict(format="int8"),
    "int8 with offsets": dict(format="int8", symmetric=False, group_size=24),
    "int4": dict(format="int4", group_size=16),
    "int4, x as integers": dict(format="int4", group_size=16, input_format="int8"),
    "nf4": dict(format="nf4", group_size=32),
}
OF_LLAMA = (
    ("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("out", ("self_attn.o_proj",)),
    ("up", ("mlp.gate_proj", "mlp.up_proj")),
    ("down", ("mlp.down_proj",)),
)


def quantized(case: str, **options: Any) -> Any:
    model = copy.deepcopy(model_of(case))
    quantize_model(model, **options)
    return model


@torch.no_grad()
def assert_has_the_bits(engine: Any, model: Any) -> None:
    """Compare each product of an engine of a LLaMA with those of the module."""
    random = torch.Generator().manual_seed(0)
    for i, layer in enumerate(engine.decoder.weights.layers):
        block = model.model.layers[i]
        for ours, names in OF_LLAMA:
            theirs = [block.get_submodule(name) for name in names]
            for rows in (1, 3, 64, 70):
                x = torch.randn(rows, theirs[0].in_features, generator=random)
                got = getattr(layer, ours)(x)
                assert torch.equal(got, torch.cat([each(x) for each in theirs], -1)), (i, ours)


def floats_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model before it was quantized, with the weights of now."""
    state = {n: t for n, t in model.state_dict().items() if t.is_floating_point()}
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            for key in ("scales", "offsets"):
                state.pop(f"{name}.{key}", None)
            weight = layer.dequantize(torch.float32)
            is_turned = name.rpartition(".")[2].startswith("c_")
            state[f"{name}.weight"] = weight.t() if is_turned else weight
    return state


@torch.no_grad()
def assert_is_exact(engine: Any, case: str, model: Any) -> None:
    with InDouble():
        want = exact(case, floats_of(model))(torch.tensor([TOKENS]), use_cache=False).logits[0]
    for cuts in ((), (32, *range(70, 75))):
        got = engine.decoder.logits(run(engine.decoder, TOKENS, cuts)).double()
        assert float((got.log_softmax(-1) - want.log_softmax(-1)).abs().max()) < 2e-3


@pytest.mark.parametrize("format", FORMATS)
def test_each_format(format: str) -> None:
    model = quantized("llama", **FORMATS[format])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = init_inference(model)
    assert_has_the_bits(engine, model)
    if "integers" not in format:
        assert_is_exact(engine, "llama", model)
    assert engine.decoder.weights.embedding.dtype == torch.float32
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("case", ["gpt2", "bloom", "gpt_neox", "phi3", "opt-norms-after", "gemma2"])
def test_each_family(case: str) -> None:
    model = quantized(case, format="int8", group_size=24)
    assert_is_exact(init_inference(model), case, model)


def test_a_head_of_few_bits() -> None:
    model = quantized("llama", format="int8", skip=())
    assert isinstance(model.lm_head, QuantizedLinear)
    engine = init_inference(model)
    assert_is_exact(engine, "llama", model)
    x = torch.randn(3, 64)
    assert torch.equal(engine.decoder.weights.head(x), model.lm_head(x))
    with pytest.raises(ValueError, match="quantize_head is given, expected None, as the head come"):
        init_inference(model, quantize_head="int8")


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
@torch.no_grad()
def test_8_bit_floats(format: str) -> None:
    """Products of them are torch's, whose rounding may differ from one number of rows to others."""
    model = quantized("llama", format=format)
    layer = init_inference(model).decoder.weights.layers[1]
    theirs = model.model.layers[1].self_attn
    assert torch.equal(layer.qkv.weight.codes[:64], theirs.q_proj.codes)
    x = torch.randn(64, 64)
    want = torch.cat([theirs.q_proj(x), theirs.k_proj(x), theirs.v_proj(x)], -1)
    torch.testing.assert_close(layer.qkv(x), want)


def test_weights_that_differ_stay_apart() -> None:
    """In groups, in formats, or because some are floats."""
    model = copy.deepcopy(model_of("llama"))
    quantize_model(model, "int8", group_size=16, skip=["lm_head", "k_proj", "v_proj", "up_proj"])
    quantize_model(model, "int8", group_size=32, skip=["lm_head", "v_proj", "up_proj"])
    quantize_model(model, "int4", group_size=16, skip=["lm_head", "v_proj"])
    engine = init_inference(model)
    layer = engine.decoder.weights.layers[0]
    assert isinstance(layer.qkv.weight, Stack) and isinstance(layer.up.weight, Stack)
    assert isinstance(layer.qkv.weight.parts[2].weight, Tensor)
    assert_is_exact(engine, "llama", model)
    tokens = [engine.generate([TOKENS[:n]], max_new_tokens=8)[0].tokens for n in (3, 40)]
    both = engine.generate([TOKENS[:3], TOKENS[:40]], max_new_tokens=8)
    assert [each.tokens for each in both] == tokens
    packing = init_inference(model, pack_prefill=True)
    assert packing.generate([TOKENS[:3]], max_new_tokens=8)[0].tokens == tokens[0]
    rounding = init_inference(model, input_format="int8").decoder.weights.layers[0]
    assert [each.input_format for each in rounding.qkv.weight.parts] == ["int8", "int8", None]


@pytest.mark.parametrize(
    ("method", "shares_order"),
    [
        *((each, True) for each in ("gptq", "awq", "pack-4", "pack-4-zeros", "pack-8-zeros")),
        *((each, True) for each in ("gptq-act-order", "pack-8-act-order", "pack-4-rows")),
        *((each, False) for each in ("gptq-act-order", "pack-4-act-order")),
    ],
)
def test_a_module_and_its_folder_are_one(method: str, shares_order: bool, tmp_path: Path) -> None:
    """The engine's bits are those of the module, with act-order too."""
    from transformers import LlamaForCausalLM

    of = Published(tmp_path, "llama", METHODS[method], shares_order=shares_order)
    model: Any = load_int4_checkpoint(lambda: LlamaForCausalLM(of.config), tmp_path)
    engines = (
        init_inference(tmp_path, device="cpu", dtype="float32"),
        init_inference(model, dtype="float32"),
    )
    of_layer = [engine.decoder.weights.layers[0] for engine in engines]
    for each in of_layer:
        assert isinstance(each.qkv.weight, Stack) == (METHODS[method].mixed and not shares_order)
    for engine in engines:
        assert_has_the_bits(engine, model)
    states = [run(engine.decoder, TOKENS, (32, *range(70, 75))) for engine in engines]
    assert torch.equal(*states)


def test_steps_with_act_order_are_recorded(tmp_path: Path) -> None:
    Published(tmp_path, "llama", METHODS["gptq-act-order"])
    decoder: Any = init_inference(tmp_path, device="cpu", dtype="float32").decoder
    assert decoder.weights.layers[0].qkv.order is not None
    cache, slots = cache_for(decoder), torch.zeros(1, dtype=torch.int32)
    step = functools.partial(decoder.step, cache=cache, slots=slots)
    with torch.no_grad():
        cache.reserve(0, 1)
        _, recorded = record(step, decoder.embedded(torch.tensor([[1]]), cache, slots))
        assert recorded.problem is None
        cache.reserve(0, 1)
        x = decoder.embedded(torch.tensor([[2]]), cache, slots)
        assert torch.equal(recorded(x), step(x))


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_what_was_saved(case: str, tmp_path: Path) -> None:
    """A folder with a file of save_quantized is read as the module is."""
    model = quantized(case, format="int4", group_size=16)
    save_quantized(model, tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    loaded = load_quantized(lambda: type(model)(model.config), tmp_path / "model.safetensors")
    engines = [init_inference(each, device="cpu") for each in (model, loaded, tmp_path)]
    states = [run(engine.decoder, TOKENS, (32, *range(70, 75))) for engine in engines]
    assert all(torch.equal(state, states[0]) for state in states)
    assert {engine.decoder.weights.embedding.dtype for engine in engines} == {torch.float32}


def test_a_folder_of_what_was_loaded_from_gptq(tmp_path: Path) -> None:
    """The config still tells of GPTQ; the notes of the layers count."""
    from transformers import LlamaForCausalLM

    of = Published(tmp_path / "theirs", "llama", METHODS["gptq-act-order"])
    model: Any = load_int4_checkpoint(lambda: LlamaForCausalLM(of.config), tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    save_quantized(model, tmp_path / "ours/model.safetensors")
    shutil.copy(tmp_path / "theirs/config.json", tmp_path / "ours")
    engines = [
        init_inference(tmp_path / each, device="cpu", dtype="float32")
        for each in ("theirs", "ours")
    ]
    assert_has_the_bits(engines[1], model)
    assert torch.equal(*(run(engine.decoder, TOKENS, ()) for engine in engines))


def test_refuses_saved_files_that_do_not_fit(tmp_path: Path) -> None:
    model = quantized("llama", format="int4", group_size=16)
    model.config.save_pretrained(tmp_path)
    file, layer = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj"
    save_quantized(model, file)
    tensors = load(file)
    for change, text in (
        ({f"{layer}.scales": None}, f"{layer} has no scales, expected it beside _extra_state"),
        ({f"{layer}.codes": torch.zeros(3, 4)}, f"{layer} has a QuantizedLinear of which codes is"),
        ({f"{layer}._extra_state": torch.zeros(9, dtype=torch.uint8)}, "expected JSON"),
        ({f"{layer}._extra_state": torch.zeros(5000)}, "is no note of a quantized layer"),
    ):
        changed = {n: t for n, t in (tensors | change).items() if t is not None}
        save(changed, file)
        with pytest.raises(ValueError, match=text):
            init_inference(tmp_path, device="cpu")
    save_quantized(model, file)
    with pytest.raises(ValueError, match="quantize is 'int8', expected None, as the weights come"):
        init_inference(tmp_path, device="cpu", quantize="int8")


def test_buffers_of_a_saved_file_are_looked_at(tmp_path: Path) -> None:
    model = quantized("llama", format="int8")
    model.model.rotary_emb.inv_freq.mul_(2)
    save_quantized(model, tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="inv_freq has"):
        init_inference(tmp_path, device="cpu")


def test_an_encoder() -> None:
    model = make("bert")
    quantize_model(model, "int8", group_size=16)
    engine: Any = init_inference(model)
    ids = torch.tensor([TOKENS[:20]])
    with torch.no_grad():
        want = model(input_ids=ids)
    got = engine(input_ids=ids)
    torch.testing.assert_close(got.last_hidden_state, want.last_hidden_state, rtol=1e-4, atol=1e-4)
    assert isinstance(engine.encoder.weights.layers[0].qkv, Linear)


def test_the_dtype_is_that_of_the_layers() -> None:
    """Not that of their scales, which are most of the floats."""
    model = quantized("llama", format="int4", group_size=1).bfloat16()
    assert init_inference(model).decoder.weights.embedding.dtype == torch.bfloat16


def test_refuses() -> None:
    model = quantized("llama", format="nf4")
    for quantize in ("int8", "int4", "fp8"):
        with pytest.raises(ValueError, match=f"quantize is {quantize!r}, expected None, as the w"):
            init_inference(model, quantize=quantize)
    with pytest.raises(ValueError, match="input_format is 'int8', expected None, as the codes of"):
        init_inference(model, input_format="int8")

    class Louder(QuantizedLinear):
        pass

    model.model.layers[0].mlp.up_proj.__class__ = Louder
    with pytest.raises(
        TypeError, match=r"0\.mlp\.up_proj is a Louder, expected a QuantizedLinear its"
    ):
        init_inference(model)
    model = quantized("llama", format="int4")
    model.model.layers[2].mlp.up_proj.codes = torch.zeros(3, 128, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"2.mlp.up_proj has a QuantizedLinear of which codes is"):
        init_inference(model)
    model = quantized("llama", format="int4")
    model.model.layers[1].mlp.up_proj = QuantizedLinear(64, 64)
    with pytest.raises(
        ValueError, match=r"up_proj has a quantized weight of shape \[64, 64\], exp"
    ):
        init_inference(model)
