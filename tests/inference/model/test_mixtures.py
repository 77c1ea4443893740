"""Engines of mixtures of experts, in each form that folders have, in floats and quantized."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import (
    EXPERTS,
    MIXTURES,
    InDouble,
    cache_for,
    config_of,
    decoder_of,
    exact,
    filled,
    made,
    model_of,
    run,
)
from published_cases import METHODS, Published
from test_families import Launches
from torch import Tensor, nn

from deepspeed_ext import init_inference
from deepspeed_ext.inference import InferenceEngine, Key
from deepspeed_ext.inference.model.policies import policy_of
from deepspeed_ext.inference.model.policies.mixtures import QWEN3_MOE
from deepspeed_ext.inference.weights.loader import Layer, Weights
from deepspeed_ext.inference.weights.quantize_on_load import bytes_of
from deepspeed_ext.io import load, save
from deepspeed_ext.ops import PackedWeight
from deepspeed_ext.ops.quantization.packed_weight import unpack_weight_ref

EACH = pytest.mark.parametrize("case", MIXTURES)
TOKENS = [int(each) for each in torch.randint(97, (75,), generator=torch.manual_seed(1))]
FILE = "model.safetensors"


def engine_of(model: Any, **options: Any) -> InferenceEngine:
    made = init_inference(model, device="cpu", max_tokens=128, **options)
    assert isinstance(made, InferenceEngine)
    return made


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of weights, in their order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in tensors_in(each)]
    names = getattr(value, "__dataclass_fields__", ())
    return [tensor for name in names for tensor in tensors_in(getattr(value, name))]


def assert_same_weights(a: Weights, b: Weights) -> None:
    both = tensors_in(a), tensors_in(b)
    assert len(both[0]) == len(both[1]) > 20
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))


@EACH
@pytest.mark.parametrize("quantize", [None, "int4"])
def test_all_forms_are_one_model(case: str, quantize: str | None, tmp_path: Path) -> None:
    """A module, a folder with a tensor for each expert, and one with all experts in one tensor."""
    model = model_of(case)
    model.save_pretrained(tmp_path / "single")
    names = load(tmp_path / "single" / FILE).keys()
    assert (case == "gpt_oss") != any(".experts.3." in name for name in names)
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "config.json").write_text((tmp_path / "single" / "config.json").read_text())
    save({n: t.contiguous() for n, t in model.state_dict().items()}, whole / FILE, durable=False)
    first, *others = (
        engine_of(each, quantize=quantize) for each in (model, whole, tmp_path / "single")
    )
    for other in others:
        assert_same_weights(first.decoder.weights, other.decoder.weights)


_STATED = (  # of a layer what the engine has, under the names of what the model has
    ("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("out", ("self_attn.o_proj",)),
    ("up", ("mlp.gate_proj", "mlp.up_proj")),
    ("down", ("mlp.down_proj",)),
    ("shared.up", ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")),
    ("shared.down", ("mlp.shared_expert.down_proj",)),
)


def stated(layer: Layer, state: dict[str, Tensor], at: str, is_gpt_oss: bool) -> None:
    """Put what codes stand for in the place of weights."""
    for path, names in _STATED:
        of: Any = layer.experts if path.startswith("shared") else layer
        for part in path.split("."):
            of = getattr(of, part, None)
        if of is not None:
            floats = unpack_weight_ref(of.weight)
            sizes = [len(state[f"{at}{name}.weight"]) for name in names]
            for name, part in zip(names, floats.split(sizes), strict=True):
                state[f"{at}{name}.weight"] = part
    if layer.experts is not None:
        for name in ("up", "down"):
            weight = getattr(layer.experts, name).weight
            assert isinstance(weight, PackedWeight)
            floats = unpack_weight_ref(weight).view(EXPERTS, -1, weight.length)
            if is_gpt_oss and name == "up":
                floats = floats.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            floats = floats.transpose(1, 2) if is_gpt_oss else floats
            state[f"{at}mlp.experts.{'gate_up' if name == 'up' else name}_proj"] = floats


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("case", ["qwen2_moe", "gpt_oss"])
def test_quantized_as_the_codes_say(case: str, kind: str) -> None:
    """Log-probabilities are those of the weights that codes stand for, in float64."""
    model = model_of(case)
    engine = engine_of(model, quantize=kind)
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    layers = engine.decoder.weights.layers
    for i, layer in enumerate(layers):
        stated(layer, state, f"model.layers.{i}.", case == "gpt_oss")
    with InDouble(), torch.no_grad():
        want = exact(case, state)(torch.tensor([TOKENS]), use_cache=False).logits[0]
    for cuts in ((), (32, *range(70, 75))):
        got = engine.decoder.logits(run(engine.decoder, TOKENS, cuts)).double()
        assert float((got.log_softmax(-1) - want.log_softmax(-1)).abs().max()) < 2e-3
    assert engine.report is not None
    told = engine.report.layers["layers.1.experts.down"]
    assert told.largest_error <= 1.001 and told.shape[0] == EXPERTS * 64
    assert engine.report.bytes_after == bytes_of(engine.decoder.weights)


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"quantize": "int4"}], ids=str)
@pytest.mark.parametrize("case", ["qwen2_moe", "gpt_oss"])
def test_batch_invariant(case: str, options: dict[str, Any]) -> None:
    engine = engine_of(model_of(case), max_batch=5, **options)
    prompts = [[(7 * i + n) % 97 for i in range(n)] for n in (1, 2, 30, 64, 70)]
    wanted: dict[str, Any] = dict(max_new_tokens=6, stop_tokens=(), logprobs=2)
    together = engine.generate(prompts, **wanted)
    for prompt, completion in zip(prompts, together, strict=True):
        alone = engine.generate([prompt], **wanted)[0]
        assert alone.tokens == completion.tokens
        assert alone.top_logprobs == completion.top_logprobs
    both = engine.score(prompts[2:])
    assert both[1].logprobs == engine.score(prompts[3])[0].logprobs


def test_experts_that_nobody_chose_are_not_read() -> None:
    """Else NaN of theirs would be there, times 0."""
    model = filled(made(config_of("mixtral"), "mixtral"))
    tokens = torch.tensor([TOKENS[:5]])
    with torch.no_grad():
        chosen = model(tokens, output_router_logits=True).router_logits
        for i, logits in enumerate(chosen):
            left = set(range(EXPERTS)) - set(logits.topk(2).indices.flatten().tolist())
            experts = model.model.layers[i].mlp.experts
            for tensor in (experts.gate_up_proj, experts.down_proj) if left else ():
                tensor[sorted(left)[0]] = math.nan
        want = model_of("mixtral")(tokens).logits[0]
        engine = engine_of(model)
        assert any(tensor.isnan().any() for tensor in tensors_in(engine.decoder.weights))
        got = engine(tokens, torch.ones_like(tokens)).logits[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_what_is_not_finite_stays_in_its_row() -> None:
    """A row chooses its experts by itself, and others have their bits."""
    decoder = decoder_of(*_given("mixtral"), torch.float32)
    cache, slots = cache_for(decoder, slots=3), torch.arange(3, dtype=torch.int32)
    x = torch.randn(3, 1, 64, generator=torch.manual_seed(0))
    with torch.no_grad():
        cache.reserve([0, 1, 2], 1)
        want = decoder.step(x, cache, slots)
        other = cache_for(decoder, slots=3)
        other.reserve([0, 1, 2], 1)
        x[1] = math.nan
        got = decoder.step(x, other, slots)
    assert torch.equal(got[::2], want[::2]) and bool(got[1].isnan().all())


def _given(case: str) -> tuple[Any, dict[str, Tensor]]:
    model = model_of(case)
    return model.config.to_dict(), model.state_dict()


@pytest.mark.parametrize(
    ("case", "ours", "others"),
    [
        ("mixtral", [], []),
        (
            "qwen2_moe",
            [
                *("skinny_linear", "skinny_linear", "moe_route"),
                *("moe_unpermute", "skinny_linear"),
            ],
            [],
        ),
        ("gpt_oss", ["bias_activation"], ["clamp", "add", "clamp", "mul"]),
    ],
)
def test_a_layer_is_a_few_launches(case: str, ours: list[str], others: list[str]) -> None:
    """Nothing is read back, nor made of numbers of the host: a graph records it."""
    decoder = decoder_of(*_given(case), torch.float32)
    of_one = replace(decoder.weights, layers=decoder.weights.layers[1:2])
    decoder = type(decoder)(decoder.of, of_one)
    cache, slots = cache_for(decoder), torch.zeros(1, dtype=torch.int32)
    cache.reserve(0, 1)
    with torch.no_grad():
        x = decoder.embedded(torch.tensor([[1]]), cache, slots)
        decoder.step(x, cache, slots)
        with Launches() as launches:
            decoder.step(x, cache, slots)
    want = ["rms_norm", "skinny_linear", "append_and_attend_", "skinny_linear", "rms_norm"]
    want += ["skinny_linear", "moe_route"]
    want += ["grouped_linear", *ours[:1] * (case == "gpt_oss"), "grouped_linear", "moe_unpermute"]
    want += [*ours * (case != "gpt_oss"), "rms_norm", "skinny_linear"]
    assert launches.ours == want and launches.others == others


@pytest.mark.parametrize("method", ["gptq", "gptq-act-order", "awq", "pack-8-zeros"])
def test_published_folders(method: str, tmp_path: Path) -> None:
    """Experts that come quantized, each in tensors of its own, stay so."""
    sizes = dict(moe_intermediate_size=48, num_hidden_layers=2)
    of = Published(tmp_path, "qwen3_moe", METHODS[method], **sizes)
    engine = engine_of(tmp_path)
    experts = engine.decoder.weights.layers[0].experts
    assert experts is not None and isinstance(experts.up.weight, PackedWeight)
    assert (experts.down.order is not None) == METHODS[method].mixed
    with InDouble(), torch.no_grad():
        want = of.exact()(torch.tensor([TOKENS]), use_cache=False).logits[0].log_softmax(-1)
    for cuts in ((), (32, *range(70, 75))):
        got = engine.decoder.logits(run(engine.decoder, TOKENS, cuts)).double().log_softmax(-1)
        assert float((got - want).abs().max()) < 2e-3
    saved = load(tmp_path / FILE)
    at = "model.layers.0.mlp.experts.2.up_proj"
    floats = {name: t for name, t in saved.items() if not name.startswith(f"{at}.")}
    save(floats | {f"{at}.weight": torch.ones(48, 64)}, tmp_path / FILE, durable=False)
    with pytest.raises(ValueError, match=f"^init_inference: {at} has a weight of floats, expected"):
        engine_of(tmp_path)
    if METHODS[method].mixed:
        other = METHODS[method].source(48, 64, 5, 5)
        changed = {f"{at}.{n}": t for n, t in METHODS[method].write(other).items()}
        save(saved | changed, tmp_path / FILE, durable=False)
        with pytest.raises(ValueError, match=r"layers.0. has experts that are quantized in differ"):
            engine_of(tmp_path)


def test_layers_before_the_first_with_experts() -> None:
    """As families say that have `first_k_dense_replace`."""
    table = QWEN3_MOE.experts
    assert table is not None
    own = replace(
        QWEN3_MOE,
        experts=replace(table, dense=(), first=Key("first_k_dense_replace", default=0)),
    )
    model = filled(made(config_of("qwen3_moe", mlp_only_layers=[0, 1]), "qwen3_moe"))
    config = {**model.config.to_dict(), "mlp_only_layers": [], "first_k_dense_replace": 2}
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits
    model.config = config
    engine = engine_of(model, policy=own)
    assert [each.experts is None for each in engine.decoder.weights.layers] == [True, True, False]
    got = engine(torch.tensor([TOKENS]), torch.ones(1, len(TOKENS))).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(num_experts_per_tok=7), "num_experts_per_tok is 7, expected 1 to 6"),
        (dict(num_experts_per_tok=0), "num_experts_per_tok is 0, expected 1 to 6"),
        (dict(num_experts=2000), "num_experts is 2000, expected 1 to 1024"),
        (dict(num_experts=0), "num_experts is 0, expected 1 to 1024"),
        (dict(num_experts=True), "num_experts is True, expected 1 to 1024"),
        (dict(num_local_experts=4), "num_local_experts is 4, expected 6, as num_experts says"),
        (dict(norm_topk_prob="yes"), "norm_topk_prob is 'yes', expected one of False, True"),
        (dict(mlp_only_layers=3), "mlp_only_layers is 3, expected numbers of layers"),
        (dict(mlp_only_layers=["0"]), r"mlp_only_layers is \['0'\], expected numbers of layers"),
        (dict(decoder_sparse_step=0), "decoder_sparse_step is 0, expected 1 to 2"),
        (dict(moe_intermediate_size=41), "gate_up_proj has shape"),
        (dict(shared_expert_intermediate_size=-1), "_size is -1, expected 0 to 2"),
        (dict(shared_expert_intermediate_size=0), "model has .*shared_expert.*, expected no tens"),
        (dict(decoder_sparse_step=1), "model has no tensor model.layers.0.mlp.experts.gate_up_p"),
        (dict(n_routed_experts=6), "n_routed_experts is 6, expected 0: the table of model_type"),
        (dict(routed_scaling_factor=2.5), "routed_scaling_factor is 2.5, expected 1: the table"),
        (dict(first_k_dense_replace=1), "first_k_dense_replace is 1, expected 0: the table"),
    ],
    ids=str,
)
def test_refuses_what_config_says(changes: dict[str, Any], text: str) -> None:
    model: nn.Module = made(config_of("qwen2_moe"), "qwen2_moe")
    config = model.config.to_dict()
    config["num_experts"] = EXPERTS
    config.pop("num_local_experts", None)
    model.config = config | changes
    with pytest.raises(ValueError, match=f"^init_inference: .*{text}"):
        engine_of(model)


def adapter(folder: Path, module: str, shape: tuple[int, int], targets: list[str]) -> Path:
    """Write a LoRA adapter for one layer, as peft does."""
    folder.mkdir()
    config = dict(peft_type="LORA", r=2, lora_alpha=4, target_modules=targets)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    at = f"base_model.model.{module}"
    halves = {"lora_A": torch.ones(2, shape[1]), "lora_B": torch.ones(shape[0], 2)}
    tensors = {f"{at}.{name}.weight": half for name, half in halves.items()}
    save(tensors, folder / "adapter_model.safetensors", durable=False)
    return folder


def test_adapters(tmp_path: Path) -> None:
    """Of attention they are merged; names of experts' layers are nothing to peft, nor to us."""
    folder = tmp_path / "model"
    filled(made(config_of("mixtral", num_hidden_layers=1), "mixtral")).save_pretrained(folder)
    of_attention = "model.layers.0.self_attn.q_proj"
    good = adapter(tmp_path / "good", of_attention, (64, 64), ["q_proj", "w1"])
    merged, plain = (
        engine_of(folder, adapter=given).decoder.weights.layers[0].qkv.weight
        for given in (good, None)
    )
    torch.testing.assert_close(merged[:64], plain[:64] + 4)
    of_expert = "model.layers.0.block_sparse_moe.experts.3.w1"
    bad = adapter(tmp_path / "bad", of_expert, (96, 64), ["w1"])
    with pytest.raises(ValueError, match=r"has '.*experts.3.w1', expected nothing for single exp"):
        engine_of(folder, adapter=bad)
    config = json.loads((good / "adapter_config.json").read_text())
    config["target_parameters"] = ["mlp.experts.gate_up_proj"]
    (good / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"has target_parameters .*, expected none; merge_and_unl"):
        engine_of(folder, adapter=good)


def test_refuses(tmp_path: Path) -> None:
    text = "^init_inference: model_type is 'deepseek_v3', expected a family whose attention has ke"
    with pytest.raises(ValueError, match=text):
        policy_of({"model_type": "deepseek_v3"})
    text = "^init_inference: quantize is 'fp8', expected None, 'int8' or 'int4' of a mixture of ex"
    with pytest.raises(ValueError, match=text):
        engine_of(model_of("mixtral"), quantize="fp8")
    text = (
        "^init_inference: num_local_experts is 4, expected 0: the table of model_type 'llama' has"
    )
    dense = made(config_of("llama"), "llama")
    dense.config = dense.config.to_dict() | {"num_local_experts": 4}
    with pytest.raises(ValueError, match=text):
        engine_of(dense)
    model_of("mixtral").save_pretrained(tmp_path)
    saved = load(tmp_path / FILE)
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    assert name in saved
    save({n: t for n, t in saved.items() if n != name}, tmp_path / FILE)
    with pytest.raises(ValueError, match=f"^init_inference: model has no tensor '{name}'"):
        engine_of(tmp_path)
    save(saved | {name.replace(".3.", ".6."): saved[name]}, tmp_path / FILE)
    with pytest.raises(ValueError, match=r"^init_inference: model has .*experts.6.w2.weight', exp"):
        engine_of(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quantized by 'mxfp4', .*dequantize=True\)\), and give"):
        engine_of(tmp_path)
