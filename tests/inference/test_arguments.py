"""Arguments by our names and by DeepSpeed's: each does something, or is refused by name."""

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch

from deepspeed_ext.inference.arguments import DEEPSPEED, Settings, settings_of, usual
from deepspeed_ext.inference.initialize import init_inference
from deepspeed_ext.inference.model.policies import POLICIES

# All that DeepSpeed's DeepSpeedInferenceConfig has, with its aliases.
NAMES = {
    *("replace_with_kernel_inject", "kernel_inject", "dtype", "tensor_parallel", "tp", "zero"),
    *("enable_cuda_graph", "triangular_masking", "tm", "moe", "quant", "checkpoint", "base_dir"),
    *("set_empty_params", "save_mp_checkpoint_path", "checkpoint_config", "return_tuple", "args"),
    *("training_mp_size", "injection_policy", "injection_dict", "injection_policy_tuple"),
    *("max_out_tokens", "max_tokens", "min_out_tokens", "transposed_mode", "replace_method"),
    *("mp_size", "mpu", "ep_size", "ep_group", "ep_mp_group", "moe_experts", "moe_type"),
    *("use_triton", "triton_autotune", "tp_grain_size", "keep_module_on_host"),
}

MEANT: list[tuple[dict[str, Any], dict[str, Any]]] = [  # what is given, and what it is in ours
    ({}, {}),
    ({"replace_with_kernel_inject": True, "kernel_inject": True}, {}),
    ({"dtype": torch.float16}, {"dtype": torch.float16}),
    ({"dtype": "fp32"}, {"dtype": torch.float32}),
    ({"dtype": "torch.half"}, {"dtype": torch.float16}),
    ({"dtype": "bf16"}, {"dtype": torch.bfloat16}),
    ({"dtype": torch.int8}, {"quantize": "int8"}),
    ({"dtype": "int8"}, {"quantize": "int8"}),
    ({"max_out_tokens": 77}, {"max_tokens": 77}),
    ({"max_tokens": 77}, {"max_tokens": 77}),
    ({"enable_cuda_graph": False}, {"cuda_graphs": False}),
    ({"tensor_parallel": {"tp_size": 1, "enabled": True, "mpu": None, "tp_group": None}}, {}),
    ({"tp": {"tp_size": 1, "tp_grain_size": 64}, "mp_size": 1, "training_mp_size": 1}, {}),
    ({"mpu": None, "tp_grain_size": 64, "keep_module_on_host": False}, {}),
    ({"moe": False, "moe_experts": [1], "moe_type": "standard", "ep_size": 1}, {}),
    ({"moe": {"enabled": False, "ep_size": 1, "moe_experts": 1, "type": "standard"}}, {}),
    ({"ep_group": None, "ep_mp_group": None}, {}),
    ({"quant": {"enabled": False, "weight": {"num_bits": 3}}}, {}),
    ({"quant": {}}, {"quantize": "int8"}),
    ({"quant": {"weight": {"num_bits": 4, "q_type": "symmetric"}}}, {"quantize": "int4"}),
    (
        {"quant": {"activation": {"num_bits": 8, "q_groups": 1}, "qkv": {"num_bits": 8}}},
        {"quantize": "int8", "input_format": "int8"},
    ),
    ({"zero": {}, "triangular_masking": True, "tm": True, "return_tuple": True}, {}),
    ({"zero": {"stage": 3, "offload_param": {"device": "none"}}}, {}),
    (
        {"zero": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}},
        {"offload": "cpu"},
    ),
    (
        {"zero": {"offload_param": {"device": "nvme", "nvme_path": "/x", "buffer_count": 5}}},
        {"offload": "nvme", "nvme_path": "/x"},
    ),
    ({"injection_policy": None, "injection_dict": None, "injection_policy_tuple": None}, {}),
    ({"checkpoint": None, "base_dir": "", "checkpoint_config": {}, "args": None}, {}),
    ({"set_empty_params": False, "save_mp_checkpoint_path": None, "min_out_tokens": 1}, {}),
    ({"transposed_mode": False, "replace_method": "auto", "use_triton": False}, {}),
    ({"triton_autotune": False}, {}),
]


def settings(*given: Any, **others: Any) -> Settings:
    """Return what init_inference makes of its arguments."""
    names = {field.name for field in fields(Settings)}
    ours: dict[str, Any] = {field.name: usual(field.default) for field in fields(Settings)}
    config = given[0] if given else None
    ours |= {name: value for name, value in others.items() if name in names}
    return settings_of(config, ours, {n: v for n, v in others.items() if n not in names})


@pytest.mark.parametrize(("given", "meant"), MEANT)
def test_what_deepspeeds_names_mean(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert settings(given) == settings(**given) == Settings(**meant)


def test_all_of_deepspeeds_names_are_known_and_tried() -> None:
    assert DEEPSPEED.keys() == NAMES
    assert {name for given, _ in MEANT for name in given} == NAMES


def test_ours_are_those_of_the_function() -> None:
    parameters = inspect.signature(init_inference).parameters
    for field in fields(Settings):
        default = parameters[field.name].default
        assert default.usual is field.default and repr(default) == repr(field.default)
    own = {"model", "config", "deepspeed"}
    assert parameters.keys() - own == {field.name for field in fields(Settings)}
    given = dict(quantize="int4", kv_dtype="fp8", max_batch=3, policy=POLICIES[0], device="cpu")
    meant = given | dict(device=torch.device("cpu"))
    assert settings(given) == settings(**given) == Settings(**meant)
    assert settings(device=1).device == torch.device("cuda:1")


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"replace_with_kernel_inject": False},
        ValueError,
        "replace_with_kernel_inject is False, expected True: our kernels are always used;",
    ),
    (
        {"tensor_parallel": {"tp_size": 2}},
        ValueError,
        r"tensor_parallel.tp_size is 2, expected 1: a model is on one device",
    ),
    ({"mp_size": 4}, ValueError, "mp_size is 4, expected 1: a model is on one device"),
    ({"moe": {"ep_size": 2}}, ValueError, "moe.ep_size is 2, expected 1: a model is on one device"),
    (
        {"moe_experts": [8]},
        ValueError,
        r"moe_experts is \[8\], expected \[1\] or 1: the model's config says",
    ),
    ({"moe_type": "residual"}, ValueError, "moe_type is 'residual', expected 'standard'"),
    (
        {"injection_policy": {"Block": ("attn",)}},
        ValueError,
        "injection_policy is .*, expected None: give a table as policy; see deepspeed_ext.infer",
    ),
    (
        {"checkpoint": "x.json"},
        ValueError,
        "checkpoint is 'x.json', expected None or '': give the folder with config.json and",
    ),
    ({"zero": {"stage": 4}}, ValueError, r"zero.stage is 4, expected 0 or 1 or 2 or 3: a model is"),
    ({"zero": {"offload_optimizer": {}}}, TypeError, "zero.offload_optimizer is no argument, exp"),
    (
        {"zero": {"offload_param": {"device": "disk"}}},
        ValueError,
        "zero.offload_param.device is 'disk', expected none, cpu or nvme",
    ),
    (
        {"zero": {"offload_param": {"device": "cpu", "buffer_count": 9}}},
        ValueError,
        "zero.offload_param.buffer_count is 9, expected 5: layers pass through two slots of their",
    ),
    ({"zero": {"offload_param": {"device": "nvme"}}}, ValueError, "nvme_path is None, expected a"),
    ({"zero": {"offload_param": {"device": "cpu"}}, "offload": "nvme"}, ValueError, "is given too"),
    ({"cpu_offload_gb": 4}, TypeError, "cpu_offload_gb is no argument, expected offload='cpu'"),
    (
        {"triangular_masking": False},
        ValueError,
        "triangular_masking is False, expected True: the family of a model says what a token sees",
    ),
    (
        {"return_tuple": False},
        ValueError,
        "return_tuple is False, expected True: an engine returns what its methods say",
    ),
    ({"min_out_tokens": 9}, ValueError, "min_out_tokens is 9, expected 1: give max_tokens"),
    ({"transposed_mode": True}, ValueError, "transposed_mode is True, expected False: a table"),
    ({"replace_method": "x"}, ValueError, "replace_method is 'x', expected 'auto' or None: leave"),
    ({"use_triton": True}, ValueError, "use_triton is True, expected False: there are no Triton"),
    ({"keep_module_on_host": True}, ValueError, "expected False: the module stays where it is"),
    (
        {"save_mp_checkpoint_path": "x"},
        ValueError,
        "save_mp_checkpoint_path is 'x', expected None: see deepspeed_ext.quantization",
    ),
    (
        {"quant": {"weight": {"num_bits": 6}}},
        ValueError,
        "quant.weight.num_bits is 6, expected 8 or 4: use quantize",
    ),
    (
        {"quant": {"activation": {"num_bits": 4}}},
        ValueError,
        "quant.activation.num_bits is 4, expected 8: use quantize",
    ),
    (
        {"quant": {"weight": {"q_type": "asymmetric"}}},
        ValueError,
        "quant.weight.q_type is 'asymmetric', expected 'symmetric': zero is always exact",
    ),
    (
        {"quant": {"weight": {"q_groups": 8}}},
        ValueError,
        "quant.weight.q_groups is 8, expected 1: groups are 128 elements of a row",
    ),
    (
        {"quant": {"qkv": {"num_bits": 4}}},
        ValueError,
        "quant.qkv.num_bits is 4, expected 8, as of weight",
    ),
    ({"quant": {"bits": {}}}, ValueError, "quant has 'bits', expected weight, activation, qkv"),
    ({"quant": {"weight": 8}}, TypeError, "quant.weight is int, expected a dict"),
    ({"max_batches": 8}, TypeError, "max_batches is no argument, expected max_batch$"),
    ({"torch_dtype": "auto"}, TypeError, "torch_dtype is no argument, expected dtype$"),
    (
        {"device_map": "auto"},
        TypeError,
        "device_map is no argument, expected device: a model is on",
    ),
    (
        {"load_in_8bit": True},
        TypeError,
        "load_in_8bit is no argument, expected quantize, 'int8' or",
    ),
    ({"max_model_len": 8}, TypeError, "max_model_len is no argument, expected max_tokens$"),
    ({"tp": {"size": 1}}, TypeError, "tp.size is no argument, expected tp_size$"),
    ({"qqq": 8}, TypeError, "qqq is no argument, expected adapter, args, base_dir, "),
    (
        {"dtype": "int4"},
        ValueError,
        "dtype is 'int4', expected float32, bfloat16 or float16; for fewer bits there is quantize",
    ),
    ({"dtype": torch.int8, "quantize": "int4"}, ValueError, "is 'int.', expected 'int.', which is"),
    ({"max_out_tokens": 5, "max_tokens": 6}, ValueError, "is ., expected ., which is given too"),
    ({"max_batch": 0}, ValueError, r"max_batch is 0, expected 1 to 2\^31 - 1"),
    ({"max_tokens": True}, ValueError, "max_tokens is True, expected 1 to"),
    ({"kv_dtype": "int4"}, ValueError, "kv_dtype is 'int4', expected None, int8 or fp8"),
    (
        {"quantize": "int8", "activations": "int8"},
        TypeError,
        "activations is now input_format; give input_format='int8'$",
    ),
    ({"enable_cuda_graph": "no"}, TypeError, "cuda_graphs is 'no', expected True or False"),
    ({"pack_prefill": 1}, TypeError, "pack_prefill is 1, expected True or False"),
    ({"enable_cuda_graph": None}, TypeError, "cuda_graphs is None, expected True or False"),
    ({"progress": "yes"}, TypeError, "progress is 'yes', expected True or False"),
    ({"max_batch": None}, ValueError, "max_batch is None, expected 1 to"),
    ({"device": ""}, ValueError, "device is '', expected cpu, or cuda with or without a number"),
    ({"device": "gpu"}, ValueError, "device is 'gpu', expected cpu, or cuda with or without"),
    ({"device": 256}, ValueError, "device is 256, expected cpu, or cuda with or without a number"),
    ({"device": "cuda:300"}, ValueError, "device is 'cuda:300', expected cpu, or cuda with or"),
    ({"device": -1}, ValueError, "device is -1, expected cpu, or cuda with or without a number"),
    ({"device": [1]}, TypeError, r"device is \[1\], expected cpu, or cuda with or without"),
    ({"policy": "llama"}, TypeError, "policy is str, expected a Policy of deepspeed_ext.inference"),
]


@pytest.mark.parametrize(("given", "error", "text"), REFUSED)
def test_refuses(given: dict[str, Any], error: type[Exception], text: str) -> None:
    for call in (lambda: settings(given), lambda: settings(**given)):
        with pytest.raises(error, match=rf"^init_inference: .*{text}"):
            call()


def test_one_thing_by_two_names() -> None:
    text = "init_inference: max_out_tokens is 6, expected 5, which is given too"
    with pytest.raises(ValueError, match=text):
        settings({"max_out_tokens": 6}, max_tokens=5)
    assert settings({"max_out_tokens": 5}, max_tokens=5).max_tokens == 5
    for one, other, text in (
        ({"max_batch": 4}, dict(max_batch=8), "max_batch is 4, expected 8"),
        ({"enable_cuda_graph": False}, dict(cuda_graphs=True), "graph is False, expected True"),
        ({"quantize": "int8"}, dict(quantize=None), "quantize is 'int8', expected None"),
        ({"dtype": "fp16"}, dict(dtype=None), "dtype is torch.float16, expected None"),
        ({"max_tokens": None}, dict(max_tokens=4), "max_tokens is None, expected 4"),
    ):
        with pytest.raises(ValueError, match=f"^init_inference: .*{text}, which is given too"):
            settings(one, **other)
    assert settings({"max_batch": 8}, max_batch=8) == settings(max_batch=8) == Settings()
    assert settings({"device": "cpu"}, device=torch.device("cpu")).device.type == "cpu"
    with pytest.raises(TypeError, match="init_inference: config is list, expected a dict"):
        settings([1])
