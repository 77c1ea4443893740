"""LoRA adapters, merged while weights are read: the bits of peft's merge_and_unload."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_folder
import torch
from torch import nn

from deepspeed_ext.inference.initialize import init_inference
from deepspeed_ext.io import load, save

SIZES = dict(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=128)
LAYERS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def folder_of(path: Path, family: str) -> Path:
    if family == "llama":
        return tiny_folder.write(path)
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**SIZES)).save_pretrained(path)
    return path


def adapter_of(folder: Path, to: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Write an adapter as peft does, its numbers drawn."""
    peft = pytest.importorskip("peft", reason="needs peft")
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    asked = dict(r=4, lora_alpha=6, target_modules=LAYERS) | options
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(**asked)
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(to)
    file = to / "adapter_model.safetensors"
    save({n: t.to(dtype) for n, t in load(file).items()}, file, durable=False)
    return to


def merged_by_peft(folder: Path, adapter: Path, dtype: torch.dtype) -> Any:
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    merged = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return merged.to("cuda" if torch.cuda.is_available() else "cpu")  # as an engine of a folder


def weights_of(engine: Any) -> list[torch.Tensor]:
    weights = engine.decoder.weights
    found = [weights.embedding, weights.head.weight]
    for layer in weights.layers:
        found += [each.weight for each in (layer.qkv, layer.out, layer.up, layer.down)]
    return found


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", dict(use_rslora=True)),
        ("llama", dict(rank_pattern={"q_proj": 2, r"1\.mlp\.gate_proj": 8}, r=3)),
        ("llama", dict(alpha_pattern={r"layers\.0\.self_attn\.v_proj": 3}, use_rslora=True)),
        ("llama", dict(target_modules=["lm_head", "k_proj"])),
        ("llama", dict(target_modules=["q_proj", "up_proj"], layers_to_transform=[1])),
        ("gpt2", dict(target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)),
        ("gpt2", dict(target_modules=["attn.c_proj"])),  # a square one
    ],
)
@pytest.mark.parametrize(
    ("dtype", "of_adapter"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16),
    ],
)
def test_weights_have_the_bits_of_peft(
    tmp_path: Path, family: str, options: Any, dtype: torch.dtype, of_adapter: torch.dtype
) -> None:
    folder = folder_of(tmp_path / "model", family)
    adapter = adapter_of(folder, tmp_path / "adapter", of_adapter, **options)
    expected = init_inference(merged_by_peft(folder, adapter, dtype))
    found = init_inference(folder, adapter=adapter, dtype=dtype)
    plain = init_inference(folder, dtype=dtype)
    differ = 0
    for ours, theirs, before in zip(
        weights_of(found), weights_of(expected), weights_of(plain), strict=True
    ):
        assert ours.dtype == dtype
        if dtype == torch.float32:  # a product's last bit may depend on where its memory lies
            torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=6e-8)
        else:
            assert torch.equal(ours, theirs)
        differ += not torch.equal(ours, before)
    assert differ > 0
    prompt = [[5, 6, 7]]
    tokens = [e.generate(prompt, max_new_tokens=5)[0].tokens for e in (found, expected)]
    assert tokens[0] == tokens[1]


def test_an_adapter_is_merged_before_weights_are_quantized(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "llama")
    adapter = adapter_of(folder, tmp_path / "adapter")
    merged = merged_by_peft(folder, adapter, torch.float32)
    engines = [
        init_inference(merged, quantize="int8"),
        init_inference(folder, adapter=str(adapter), quantize="int8"),
    ]
    one, other = (e.generate([5, 6], max_new_tokens=4, logprobs=0)[0] for e in engines)
    assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)


def written(path: Path, tensors: Any = None, **config: Any) -> Path:
    """Write an adapter by hand."""
    path.mkdir()
    at = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    made = {f"{at}A.weight": torch.ones(2, 64), f"{at}B.weight": torch.ones(64, 2)}
    save(made if tensors is None else tensors, path / "adapter_model.safetensors", durable=False)
    fields = dict(peft_type="LORA", r=2, lora_alpha=4, bias="none", use_dora=False) | config
    (path / "adapter_config.json").write_text(json.dumps(fields))
    return path


_AT = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("tensors", "config", "text"),
    [
        (None, dict(use_dora=True), "has use_dora True, expected none; merge_and_unload of peft"),
        (None, dict(peft_type="IA3"), "is 'IA3', expected 'LORA'"),
        (None, dict(bias="all"), "has bias 'all', expected none"),
        (None, dict(modules_to_save=["lm_head"]), r"has modules_to_save \['lm_head'\], expected"),
        (None, dict(something_new=3), "has something_new 3, expected none"),
        (None, dict(init_lora_weights="pissa"), "has init_lora_weights 'pissa', expected one that"),
        (None, dict(r=3), "has rank 2 and 2, expected 3, as adapter_config.json says"),
        (None, dict(r=0), "r is 0 for model.layers.0.self_attn.q_proj, expected more than 0"),
        (None, dict(lora_alpha="x"), "lora_alpha is 'x' for model.layers.0"),
        (None, dict(rank_pattern={"(": 2}), r"rank_pattern is {'\(': 2}, expected patterns"),
        ({}, {}, "has no tensors, expected lora_A and lora_B of linear layers"),
        (
            {"base_model.model.x.lora_magnitude_vector": torch.ones(2)},
            {},
            "has 'base_model.model.x",
        ),
        ({_AT + "A.weight": torch.ones(2, 64)}, {}, "has half of 'base_model.model.model.layers.0"),
        (
            {"base_model.model.x.lora_A.weight": torch.ones(2, 64)},
            {},
            "adapter has 'base_model.model.x', expected a layer with a weight of the model",
        ),
        (
            {_AT + "A.weight": torch.ones(2, 60), _AT + "B.weight": torch.ones(64, 2)},
            {},
            r"is for model.layers.0.self_attn.q_proj.weight of shape \[64, 60\], expected \[64, 64",
        ),
        (
            {_AT + "A.weight": torch.ones(2, 64).int(), _AT + "B.weight": torch.ones(64, 2)},
            {},
            r"lora_A has dtype torch.int32 and shape \[2, 64\], expected a matrix of floats",
        ),
    ],
)
def test_an_adapter_that_is_more_or_less_is_refused(
    tmp_path: Path, tensors: Any, config: Any, text: str
) -> None:
    folder = tiny_folder.write(tmp_path / "model")
    with pytest.raises(ValueError, match=f"^init_inference: .*{text}"):
        init_inference(folder, adapter=written(tmp_path / "adapter", tensors, **config))


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ({}, "layers.1.mlp.down_proj"),
        (dict(target_modules=r".*\.(q|k)_proj"), "layers.0.self_attn.k_proj"),
        (
            dict(target_modules=["q_proj", "up_proj"], layers_to_transform=[1]),
            "layers.1.mlp.up_pro",
        ),
        (
            dict(target_modules="all-linear", exclude_modules=["v_proj"]),
            "layers.0.self_attn.o_proj",
        ),
    ],
)
def test_an_adapter_has_a_part_of_each_layer_that_it_names(
    tmp_path: Path, options: Any, lost: str
) -> None:
    folder = tiny_folder.write(tmp_path / "model")
    adapter = adapter_of(folder, tmp_path / "adapter", **options)
    init_inference(folder, adapter=adapter)
    file = adapter / "adapter_model.safetensors"
    save({n: t for n, t in load(file).items() if lost not in n}, file, durable=False)
    with pytest.raises(ValueError, match=rf"^init_inference: .* has nothing for .*{lost}.*, expec"):
        init_inference(folder, adapter=adapter)


@pytest.mark.parametrize("config", [dict(target_modules=5), dict(target_modules="(")])
def test_names_of_layers_that_are_none_are_passed_over(tmp_path: Path, config: Any) -> None:
    folder = tiny_folder.write(tmp_path / "model")
    init_inference(folder, adapter=written(tmp_path / "adapter", **config))


def test_an_adapter_is_a_folder_for_a_folder(tmp_path: Path) -> None:
    folder = tiny_folder.write(tmp_path / "model")
    with pytest.raises(TypeError, match=r"^init_inference: adapter is int, expected the path of a"):
        init_inference(folder, adapter=5)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config.json, expected the folder"):
        init_inference(folder, adapter=tmp_path)
    model = nn.Module()
    model.config = dict(tiny_folder.CONFIG)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"^init_inference: adapter is .* and model is a module,"):
        init_inference(model, adapter=tmp_path)


def test_a_module_of_peft_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder.write(tmp_path / "model"))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    with_adapter = peft.get_peft_model(model, config)
    for given in (with_adapter, nn.DataParallel(with_adapter), with_adapter.base_model.model):
        with pytest.raises(
            TypeError, match=r"of peft, expected .* give model.merge_and_unload\(\)"
        ):
            init_inference(given)
