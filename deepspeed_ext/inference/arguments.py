"""The arguments of init_inference: ours, and those of DeepSpeed's function of this name.

Each of DeepSpeed's either does something here, or is refused with what to use instead, unless it
asks for what is so anyway.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeVar, cast

import torch

from deepspeed_ext.inference.model.policy import Policy
from deepspeed_ext.ops._renamed import RENAMED, refuse_renamed

_OP = "init_inference"
_DTYPES = {
    **dict.fromkeys(("fp32", "float", "float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "half", "float16"), torch.float16),
}
_T = TypeVar("_T")


class NotGiven:
    """Stands for an argument that nobody gave, and shows what that means."""

    def __init__(self, usual: Any) -> None:
        self.usual = usual

    def __repr__(self) -> str:
        return repr(self.usual)


def usual(value: _T) -> _T:
    """Return a default for an argument that can be told from the same value, given."""
    return cast(_T, NotGiven(value))


@dataclass(frozen=True)
class Settings:
    """What ``init_inference`` was asked for, in our names; it tells what they mean."""

    dtype: torch.dtype | None = None
    quantize: str | None = None
    quantize_head: str | None = None
    kv_dtype: str | None = None
    input_format: str | None = None
    max_batch: int = 8
    max_tokens: int | None = None
    cuda_graphs: bool = True
    pack_prefill: bool = False
    policy: Policy | None = None
    adapter: str | os.PathLike[str] | None = None
    tokenizer: Any = None
    device: torch.device | None = None
    progress: bool = False
    offload: str | None = None
    nvme_path: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_tokens"):
            value = getattr(self, name)
            if value is None and name == "max_tokens":
                continue
            if type(value) is not int or not 0 < value < 2**31:
                raise ValueError(f"{_OP}: {name} is {value!r}, expected 1 to 2^31 - 1")
        if self.kv_dtype not in (None, "int8", "fp8"):
            raise ValueError(f"{_OP}: kv_dtype is {self.kv_dtype!r}, expected None, int8 or fp8")
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise TypeError(
                f"{_OP}: policy is {type(self.policy).__name__}, expected a Policy of"
                " deepspeed_ext.inference"
            )
        if self.adapter is not None and not isinstance(self.adapter, str | os.PathLike):
            raise TypeError(
                f"{_OP}: adapter is {type(self.adapter).__name__}, expected the path of a folder"
            )
        for name in ("cuda_graphs", "pack_prefill", "progress"):
            value = getattr(self, name)
            if type(value) is not bool:
                raise TypeError(f"{_OP}: {name} is {value!r}, expected True or False")
        self._check_offload()

    def _check_offload(self) -> None:
        path = self.nvme_path
        if self.offload not in (None, "cpu", "nvme"):
            raise ValueError(f"{_OP}: offload is {self.offload!r}, expected None, cpu or nvme")
        if path is not None and not isinstance(path, str | os.PathLike):
            raise TypeError(f"{_OP}: nvme_path is {type(path).__name__}, expected a folder's path")
        if self.offload == "nvme" and not path:
            raise ValueError(f"{_OP}: nvme_path is {path!r}, expected a folder with offload='nvme'")
        if self.offload != "nvme" and path is not None:
            raise ValueError(f"{_OP}: nvme_path is given, expected offload='nvme' with it")


class Only(NamedTuple):
    """An argument of DeepSpeed's that asks for what is so anyway, or for what is not there."""

    values: tuple[Any, ...]
    instead: str


class As(NamedTuple):
    """An argument of DeepSpeed's that says the same as some of ours: from its name and value."""

    ours: Callable[[str, Any], Mapping[str, Any]]


class Instead(NamedTuple):
    """An argument of another library, and what says the same here."""

    ours: str


def _is(name: str) -> As:
    return As(lambda _, value: {name: value})


def dtype_of(value: Any) -> torch.dtype:
    """Return a dtype that is given as torch, or as configurations, name it.

    Raises:
        ValueError: it is not one that an engine computes in.
    """
    dtype = _DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES.values():
        raise ValueError(
            f"{_OP}: dtype is {value!r}, expected float32, bfloat16 or float16; for fewer bits"
            " there is quantize"
        )
    return dtype


def _dtype_or_bits(_: str, value: Any) -> Mapping[str, Any]:
    """Return what DeepSpeed's dtype means: of int8 it is what weights become."""
    if value is None:
        return {"dtype": None}
    if value in (torch.int8, "int8", "torch.int8"):
        return {"quantize": "int8"}
    return {"dtype": dtype_of(value)}


def _device(name: str, value: Any) -> Mapping[str, Any]:
    """Return a device in one form; a number is that of a GPU."""
    try:
        device = torch.device("cuda", value) if type(value) is int else torch.device(value)
        if type(value) is int and device.index != value:  # torch keeps 8 bits of it
            raise RuntimeError
        if isinstance(value, str) and device.index is not None and str(device) != value:
            raise RuntimeError
    except (RuntimeError, TypeError):
        if value is None:
            return {"device": None}
        kind = ValueError if isinstance(value, str | int) else TypeError
        raise kind(
            f"{_OP}: {name} is {value!r}, expected cpu, or cuda with or without a number"
        ) from None
    return {"device": device}


def _quant(name: str, value: Any) -> Mapping[str, Any]:
    """Return what DeepSpeed's `quant` means."""
    if value is None or value is False:
        return {}
    parts = dict(_object(name, value))
    if not parts.pop("enabled", True):
        return {}
    bits = {"weight": 8, "activation": None, "qkv": None}
    for part, told in parts.items():
        if part not in bits:
            raise ValueError(f"{_OP}: {name} has {part!r}, expected {', '.join(bits)}")
        at = f"{name}.{part}"
        rules = {
            "enabled": Only((True,), "leave it out"),
            "q_type": Only(("symmetric",), "zero is always exact"),
            "q_groups": Only((1,), "groups are 128 elements of a row"),
            "num_bits": Only((8,) if part == "activation" else (8, 4), "use quantize"),
            "quantized_initialization": Only(({}, None), "leave it out"),
        }
        told = dict(_object(at, told))
        for _ in _translated(told, rules, f"{at}."):
            pass
        bits[part] = told.get("num_bits", 8)
    if bits["qkv"] not in (None, bits["weight"]):
        raise ValueError(
            f"{_OP}: {name}.qkv.num_bits is {bits['qkv']}, expected {bits['weight']}, as of weight"
        )
    found = {"quantize": f"int{bits['weight']}"}
    return found if bits["activation"] is None else found | {"input_format": "int8"}


def _zero(name: str, value: Any) -> Mapping[str, Any]:
    """Return what ZeRO's settings mean on one device: where the weights of layers rest."""
    parts = {} if value is None else dict(_object(name, value))
    rest = parts.pop("offload_param", None)
    for _ in _translated(parts, {"stage": Only((0, 1, 2, 3), _ONE)}, f"{name}."):
        pass
    at = f"{name}.offload_param"
    told = {} if rest is None else dict(_object(at, rest))
    device, path = told.pop("device", "none"), told.pop("nvme_path", None)
    rules = {
        "pin_memory": Only(_anything, ""),
        "buffer_count": Only((5,), _SLOTS),
        "buffer_size": Only((100_000_000, 1e8), _SLOTS),
        "max_in_cpu": Only((1_000_000_000, 1e9), "all layers rest in one place"),
    }
    for _ in _translated(told, rules, f"{at}."):
        pass
    if device not in ("none", "cpu", "nvme"):
        raise ValueError(f"{_OP}: {at}.device is {device!r}, expected none, cpu or nvme")
    if device == "none":
        return {}
    return {"offload": device} | ({"nvme_path": path} if device == "nvme" else {})


def _group(**rules: Only) -> As:
    """Return the rule of an object of values that have rules; or of True and False."""

    def check(name: str, value: Any) -> Mapping[str, Any]:
        if value is not None and not isinstance(value, bool):
            for _ in _translated(_object(name, value), rules, f"{name}."):
                pass
        return {}

    return As(check)


_ONE = "a model is on one device; models that need several are not supported"
_EXPERTS = "the model's config says which layers have experts, and how many"
_TABLE = "give a table as policy; see deepspeed_ext.inference.model.policies"
_SLOTS = "layers pass through two slots of their size"
_FOLDER = "give the folder with config.json and safetensors as model"
_TRITON = "there are no Triton kernels; those that are there are always used"
_anything = (True, False)
_parallel = _group(
    enabled=Only(_anything, ""),
    tp_size=Only((1,), _ONE),
    mpu=Only((None,), _ONE),
    tp_group=Only((None,), _ONE),
    tp_grain_size=Only((64,), _ONE),
)
_experts = _group(
    enabled=Only(_anything, ""),
    ep_size=Only((1,), _ONE),
    moe_experts=Only(([1], 1), _EXPERTS),
    type=Only(("standard",), _EXPERTS),
    ep_mp_group=Only((None,), _ONE),
    ep_group=Only((None,), _ONE),
)
_always = Only((True,), "our kernels are always used; without them, call the model itself")
Rule = Only | As | Instead
OTHERS: Mapping[str, Rule] = {  # of transformers' from_pretrained, and of vLLM
    "torch_dtype": Instead("dtype"),
    "device_map": Instead(f"device: {_ONE}"),
    **dict.fromkeys(
        ("load_in_8bit", "load_in_4bit", "quantization_config"),
        Instead("quantize, 'int8' or 'int4'"),
    ),
    "quantization": Instead("quantize"),
    "attn_implementation": Instead("none: our kernels are always used"),
    "trust_remote_code": Instead("none: no code of a folder runs; a table of yours is policy"),
    "low_cpu_mem_usage": Instead("none: a folder is read a layer at a time"),
    "max_model_len": Instead("max_tokens"),
    "max_num_seqs": Instead("max_batch"),
    "enforce_eager": Instead("cuda_graphs=False"),
    "tensor_parallel_size": Instead(f"none: {_ONE}"),
    "gpu_memory_utilization": Instead("max_batch and max_tokens, whose cache is all that is taken"),
    "kv_cache_dtype": Instead("kv_dtype"),
    "enable_lora": Instead("adapter, the folder of one"),
    "offload_folder": Instead("nvme_path, with offload='nvme'"),
    "cpu_offload_gb": Instead("offload='cpu'"),
}
DEEPSPEED: Mapping[str, Rule] = {
    **dict.fromkeys(("replace_with_kernel_inject", "kernel_inject"), _always),
    "dtype": As(_dtype_or_bits),
    **dict.fromkeys(("max_out_tokens", "max_tokens"), _is("max_tokens")),
    "enable_cuda_graph": _is("cuda_graphs"),
    "quant": As(_quant),
    **dict.fromkeys(("tensor_parallel", "tp"), _parallel),
    "moe": _experts,
    **dict.fromkeys(("mp_size", "training_mp_size"), Only((1,), _ONE)),
    "mpu": Only((None,), _ONE),
    "tp_grain_size": Only((64,), _ONE),
    "ep_size": Only((1,), _ONE),
    **dict.fromkeys(("ep_group", "ep_mp_group"), Only((None,), _ONE)),
    "moe_experts": Only(([1], 1), _EXPERTS),
    "moe_type": Only(("standard",), _EXPERTS),
    **dict.fromkeys(
        ("injection_policy", "injection_dict", "injection_policy_tuple"), Only((None,), _TABLE)
    ),
    **dict.fromkeys(("checkpoint", "base_dir"), Only((None, ""), _FOLDER)),
    "checkpoint_config": Only((None, {}), _FOLDER),
    "set_empty_params": Only((False,), _FOLDER),
    "save_mp_checkpoint_path": Only((None,), "see deepspeed_ext.quantization.save_quantized"),
    "zero": As(_zero),
    **dict.fromkeys(
        ("triangular_masking", "tm"), Only((True,), "the family of a model says what a token sees")
    ),
    "return_tuple": Only((True,), "an engine returns what its methods say"),
    "min_out_tokens": Only((1,), "give max_tokens, which is reserved as a whole"),
    "transposed_mode": Only((False,), "a table says how weights lie: Policy.transposed"),
    "replace_method": Only(("auto", None), "leave it out"),
    "args": Only((None,), "leave it out"),
    "keep_module_on_host": Only((False,), "the module stays where it is"),
    **dict.fromkeys(("use_triton", "triton_autotune"), Only((False,), _TRITON)),
}


def settings_of(
    config: Mapping[str, Any] | None, given: Mapping[str, Any], others: Mapping[str, Any]
) -> Settings:
    """Return all that was asked for.

    Args:
        config: names of ours or of DeepSpeed's with their values, or None.
        given: our arguments, some of which are `NotGiven`.
        others: of DeepSpeed's names.

    Raises:
        TypeError: a name is unknown; tells the nearest that is.
        ValueError: a value is refused, or two are given for one thing.
    """
    found: dict[str, Any] = {}
    given = {name: value for name, value in given.items() if not isinstance(value, NotGiven)}
    ours = {field.name: _is(field.name) for field in fields(Settings)}
    rules = {**ours, "device": As(_device), **DEEPSPEED, **OTHERS}
    sources = (given, _object("config", {} if config is None else config), others)
    for name, value, said in (each for source in sources for each in _translated(source, rules)):
        if name in found and found[name] != value:
            raise ValueError(
                f"{_OP}: {said} is {value!r}, expected {found[name]!r}, which is given too"
            )
        found[name] = value
    return Settings(**found)


def _translated(
    given: Mapping[str, Any], rules: Mapping[str, Rule], at: str = ""
) -> Iterator[tuple[str, Any, str]]:
    """Yield in our names what was given: name, value, and the name that it was given by."""
    for name, value in given.items():
        rule = rules.get(name)
        if rule is None and name in RENAMED and not at:
            refuse_renamed(_OP, {name: value})
        if rule is None:
            some = [name for name, each in rules.items() if not isinstance(each, Instead)]
            near = get_close_matches(str(name), some, 1)
            known = near[0] if near else ", ".join(sorted(some))
            raise TypeError(f"{_OP}: {at}{name} is no argument, expected {known}")
        if isinstance(rule, Instead):
            raise TypeError(f"{_OP}: {at}{name} is no argument, expected {rule.ours}")
        if isinstance(rule, Only):
            if not any(type(value) is type(one) and value == one for one in rule.values):
                what = " or ".join(map(repr, rule.values))
                raise ValueError(
                    f"{_OP}: {at}{name} is {value!r:.100}, expected {what}: {rule.instead}"
                )
        else:
            for ours, meant in rule.ours(f"{at}{name}", value).items():
                yield ours, meant, f"{at}{name}"


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{_OP}: {name} is {type(value).__name__}, expected a dict")
    return value
