"""What others have quantized and nothing here reads is refused by its method, with what to do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from int4_files import AWQ, GPTQ, Source, awq, compressed, gptq
from torch import Tensor

from deepspeed_ext.quantization.compressed_tensors import PackSettings
from deepspeed_ext.quantization.int4_tensors import Int4Settings
from deepspeed_ext.quantization.packing import dequantize_tensors
from deepspeed_ext.quantization.published import packing_of, settings_in

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
PACK: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}


def of_weights(**changes: Any) -> dict[str, Any]:
    return PACK | {"config_groups": {"group_0": {"weights": WEIGHTS | changes}}}


def of_group(**changes: Any) -> dict[str, Any]:
    return PACK | {"config_groups": {"group_0": {"weights": WEIGHTS} | changes}}


def two_groups(**changes: Any) -> dict[str, Any]:
    second = {"weights": WEIGHTS | changes}
    return PACK | {"config_groups": {"group_0": {"weights": WEIGHTS}, "group_1": second}}


READ = [
    (GPTQ, Int4Settings("gptq", 16, False, True, False)),
    (GPTQ | {"dynamic": {"-:.*mlp.*": {}, "+:.*q_proj": {"bits": 4}}}, None),
    (GPTQ | {"dynamic": None}, None),
    ({"bits": 4, "group_size": -1}, Int4Settings("gptq", None, False, True, False)),
    (AWQ, Int4Settings("awq", 16, False, False, False)),
    (PACK, PackSettings(4, 16, True, False)),
    (of_weights(num_bits=8), PackSettings(8, 16, True, False)),
    (of_weights(strategy="channel", group_size=None), PackSettings(4, None, True, False)),
    (of_weights(strategy=None, group_size=-1), PackSettings(4, None, True, False)),
    (of_weights(strategy=None), PackSettings(4, 16, True, False)),
    (of_weights(actorder="weight"), PackSettings(4, 16, True, False)),
    (of_weights(actorder="group", symmetric=False), PackSettings(4, 16, False, True)),
    (two_groups(), PackSettings(4, 16, True, False)),
    (of_group(format="pack-quantized") | {"format": "mixed-precision"}, None),
    (PACK | {"sparsity_config": {"format": "dense"}, "transform_config": {}}, None),
]


@pytest.mark.parametrize(("settings", "want"), READ)
def test_reads(settings: Any, want: Any) -> None:
    found = packing_of("here", settings)
    assert found == want if want is not None else found is not None


FLOATS = "give the folder of the model before that, with quantize='int4' or 'int8'"
REFUSED: list[tuple[Any, tuple[str, ...]]] = [
    ({"quant_method": "bitsandbytes"}, ("by 'bitsandbytes', expected floats, 4", "dequantize()")),
    ({"load_in_4bit": True}, ("by 'bitsandbytes',", "model.dequantize()")),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("'fp8'", "FineGrainedFP8Config(")),
    ({"quant_method": "mxfp4"}, ("'mxfp4',", "Mxfp4Config(dequantize=True)")),
    ({"quant_method": "exl2"}, ("'exl2', expected",)),
    (GPTQ | {"checkpoint_format": "marlin"}, ("'gptq' for marlin", "checkpoint_format 'gptq'")),
    (GPTQ | {"is_marlin_format": True}, ("'gptq' for marlin",)),
    (AWQ | {"version": "marlin"}, ("'awq' for marlin",)),
    (GPTQ | {"bits": 3}, ("here has bits 3, expected 4, of gptq;",)),
    (GPTQ | {"bits": {"q_proj": 4}}, ("has bits {'q_proj': 4}, expected int, of gptq;",)),
    (
        GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}},
        ("has bits 8 for layers '+:.*down.*' in dynamic, expected 4, one for all", "of gptq;"),
    ),
    (GPTQ | {"dynamic": {".*down": {"group_size": 32}}}, ("has group_size 32 for layers",)),
    (GPTQ | {"dynamic": [1]}, ("has dynamic [1], expected an object",)),
    (AWQ | {"version": "gemv"}, ("has version 'gemv', expected gemm, of awq;",)),
    (of_weights(num_bits=3), ("has in group_0 num_bits 3, expected 4 or 8, of compressed-ten",)),
    (of_weights(num_bits=True), ("num_bits True, expected 4 or 8",)),
    (of_weights(type="float"), ("has in group_0 type 'float', expected 'int'",)),
    (of_weights(dynamic=True), ("has in group_0 dynamic True, expected False",)),
    (of_weights(strategy="tensor"), ("strategy 'tensor', expected 'group' or 'channel'",)),
    (of_weights(strategy=None, group_size=None), ("strategy 'tensor', expected",)),
    (of_weights(group_size=0), ("has in group_0 group_size 0, expected 1 or more",)),
    (of_weights(group_size="16"), ("has in group_0 group_size '16', expected 1 or more",)),
    (of_weights(actorder="x"), ("has in group_0 actorder 'x', expected None or",)),
    (of_group(input_activations={"num_bits": 8}), ("input_activations {'num_bits': 8}, exp",)),
    (of_group(weights=None), ("has in group_0 weights None, expected an object",)),
    (two_groups(num_bits=8), ("has other settings in group_1 than in group_0 (8 bits in gr",)),
    (PACK | {"config_groups": {}}, ("has config_groups {}, expected an object",)),
    (PACK | {"config_groups": {"W4A16": ["Linear"]}}, ("has in W4A16 weights None, expected",)),
    (PACK | {"format": "float-quantized"}, ("has format 'float-quantized', expected 'pack-q",)),
    (PACK | {"format": "marlin-24"}, ("has format 'marlin-24', expected 'pack-quantized'",)),
    (PACK | {"kv_cache_scheme": {"num_bits": 8}}, ("has kv_cache_scheme {'num_bits': 8}, exp",)),
    (PACK | {"transform_config": {"config_groups": {"a": 1}}}, ("has transform_config",)),
    (PACK | {"sparsity_config": {"format": "sparse-24"}}, ("has sparsity_config of format 's",)),
]


@pytest.mark.parametrize(("settings", "texts"), REFUSED)
def test_refuses(settings: Any, texts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        packing_of("here", settings)
    said = str(error.value)
    assert said.startswith("here has ") and said.endswith(FLOATS)
    for text in texts:
        assert text in said


def test_refuses_what_is_no_object() -> None:
    with pytest.raises(
        ValueError, match=r"^here has the quantization_config 'gptq', expected an o"
    ):
        packing_of("here", "gptq")


def test_where_settings_are(tmp_path: Path) -> None:
    assert settings_in("op", tmp_path, {}) is None
    assert settings_in("op", tmp_path, {"quantization_config": None}) is None
    assert settings_in("op", tmp_path, {"compression_config": PACK}) == PACK
    (tmp_path / "quantize_config.json").write_text(json.dumps(GPTQ))
    assert settings_in("op", tmp_path, {}) == GPTQ
    assert settings_in("op", tmp_path, {"quantization_config": AWQ}) == AWQ


N, LENGTH = 12, 40


def layer(bits: int = 4, **changes: Tensor | None) -> dict[str, Tensor]:
    tensors: dict[str, Tensor | None] = {
        "weight_packed": torch.zeros(N, LENGTH * bits // 32, dtype=torch.int32),
        "weight_scale": torch.ones(N, 3, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([N, LENGTH]),
    }
    tensors |= changes
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


ZEROS = torch.zeros(2, 3, dtype=torch.int32)
ORDER = torch.arange(LENGTH) // 16


@pytest.mark.parametrize(
    ("settings", "changes", "text"),
    [
        ({}, dict(weight_scale=None), "has no weight_scale, expected it beside weight_packed"),
        ({}, dict(weight_scale=torch.ones(N, 2)), r"scale as torch.float32 of shape \[12, 2\], ex"),
        ({}, dict(weight_scale=torch.ones(N, 3, dtype=torch.int8)), "weight_scale as torch.int8"),
        (
            {},
            dict(weight_shape=torch.tensor([N, 41])),
            r"weight_shape \[12, 41\], expected \[12, 40",
        ),
        ({}, dict(weight_shape=torch.tensor(3)), r"weight_shape \[3\], expected \[12, 40"),
        (
            {"bits": 8},
            {},
            r"weight_packed as torch.int32 of shape \[12, 5\], .* of shape \[12, 10\]",
        ),
        ({}, dict(weight_packed=torch.zeros(N, 5)), "weight_packed as torch.float32 of shape"),
        (
            {},
            dict(weight_packed=torch.tensor(1)),
            r"weight_packed as torch.int64 of shape \[\], ex",
        ),
        ({"symmetric": False}, {}, "has no weight_zero_point, expected it, as symmetric is false"),
        (
            {"symmetric": False},
            dict(weight_zero_point=ZEROS.t()),
            r"weight_zero_point as torch.int32 of shape \[3, 2\], expected int32 of shape \[2, 3\]",
        ),
        (
            {},
            dict(weight_zero_point=ZEROS),
            "has weight_zero_point that is not 0, expected 0, as s",
        ),
        ({"act_order": True}, {}, "has no weight_g_idx, expected it, as actorder is 'group'"),
        ({}, dict(weight_g_idx=ORDER[1:]), "weight_g_idx as torch.int64 of shape"),
        ({}, dict(weight_g_idx=ORDER * 0), "weight_g_idx with groups of other sizes, expected 16"),
        ({}, dict(weight_g_idx=ORDER - 1), "weight_g_idx with groups of other sizes, expected 16"),
    ],
)
def test_refuses_tensors(settings: Any, changes: Any, text: str) -> None:
    of = PackSettings(**(dict(bits=4, group_size=16, symmetric=True, act_order=False) | settings))
    with pytest.raises(ValueError, match=f"^here .*{text}"):
        of.stored("here", layer(**changes), LENGTH)


def test_what_older_files_have() -> None:
    """Zero points of symmetric weights, which say 0, and g_idx of -1, which says nothing."""
    of = PackSettings(4, 16, True, False)
    zeros = torch.full((2, 3), -0x77777778, dtype=torch.int32)
    ones = torch.full((LENGTH,), -1, dtype=torch.int32)
    stored = of.stored("here", layer(weight_zero_point=zeros, weight_g_idx=ones), LENGTH)
    assert stored.order is None and stored.zeros is None


@pytest.mark.parametrize("zeros", [None, "packed", "bytes"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "length"), [(13, 41), (24, 40), (1, 1), (2100, 2100)])
def test_any_sizes(n: int, length: int, bits: int, zeros: str | None) -> None:
    """Words need not be full; a weight may be more than a block of rows."""
    random = torch.Generator().manual_seed(n)
    groups = (torch.arange(length) // 16)[torch.randperm(length, generator=random)]
    source = Source(n, length, 16, groups=groups)
    source.codes = torch.randint(1 << bits, source.codes.shape, generator=random)
    source.zeros = torch.randint(1 << bits, source.zeros.shape, generator=random)
    if zeros is None:
        source.zeros.fill_(1 << bits - 1)
    tensors = compressed(source, bits=bits, zeros=zeros, g_idx=True)
    stored = PackSettings(bits, 16, zeros is None, True).stored("here", tensors, length)
    floats = dequantize_tensors(stored.layout, stored.tensors(), torch.float32)
    assert torch.equal(floats.double(), source.weight())


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_more_rows_than_a_block(method: str) -> None:
    source = Source(4200, 1024, 16)
    settings = packing_of("here", {"gptq": GPTQ, "awq": AWQ}[method])
    stored = settings.stored("here", {"gptq": gptq, "awq": awq}[method](source), 1024)
    tensors = stored.layout.tensors_on("cpu")
    stored.write(tensors)
    floats = dequantize_tensors(stored.layout, tensors, torch.float32)
    assert torch.equal(floats.double(), source.weight())
