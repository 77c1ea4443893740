"""A LoRA adapter of peft's, merged into weights while they are read, as merge_and_unload does."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.inference.model.policy import Policy
from deepspeed_ext.io import SavedTensor, inspect, load
from deepspeed_ext.io.checkpoint.shards import read_json

_OP = "init_inference"
_CONFIG, _FILE = "adapter_config.json", "adapter_model.safetensors"
_BEFORE, _PARTS = "base_model.model.", (".lora_A.weight", ".lora_B.weight")
_BASE = ".base_layer.weight"  # the weight itself, which peft saves of a head, and reads again
_READ = frozenset(("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"))
# What says which layers have an adapter, which its tensors say too, or how it was trained.
_PASSED_OVER = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("lora_dropout", "fan_in_fan_out", "peft_version", "runtime_config", "megatron_core"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    )
)
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")  # others change the weights below
_MERGE = "merge_and_unload of peft, and give the folder of that"


@dataclass(frozen=True)
class _Part:
    """What is added to one weight: scale * B @ A; `base` is put in its place before."""

    a: Tensor
    b: Tensor
    base: Tensor | None
    scale: float
    is_transposed: bool

    def added_to(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a weight in a dtype and the part: one product in float32, added and rounded."""
        a, b = (each.to(weight.device).to(_wide(each.dtype)) for each in (self.a, self.b))
        weight = weight if self.base is None else self.base.to(weight.device)
        product = b @ a
        delta = (product.t() if self.is_transposed else product) * self.scale
        return torch.add(weight.to(dtype), delta).to(dtype)


class Adapter:
    """What an adapter adds to weights, checked against their shapes before any is read.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        tensors: of the model that it is for.
        policy: of the model.

    Raises:
        ValueError: it is of another kind, or does not fit the model.
        OSError: a file is missing or cannot be read.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, SavedTensor], policy: Policy) -> None:
        for name in (_CONFIG, _FILE):
            if not (folder / name).is_file():
                raise FileNotFoundError(
                    f"{_OP}: adapter {folder} has no {name}, expected the folder of a LoRA adapter,"
                    " as save_pretrained of peft writes it"
                )
        config = read_json(_OP, folder / _CONFIG)
        _check(folder, config)
        described = inspect(folder / _FILE).tensors
        wrong = [name for name in described if not name.endswith((*_PARTS, _BASE))]
        if wrong or not described:
            has = repr(wrong[0]) if wrong else "no tensors"
            raise ValueError(
                f"{_OP}: adapter {folder} has {has}, expected lora_A and lora_B of linear layers;"
                f" {_MERGE}"
            )
        modules = {
            name.removesuffix(_BASE) if name.endswith(_BASE) else name.rpartition(".lora_")[0]
            for name in described
        }
        names = {module: _name_of(module, tensors, policy) for module in sorted(modules)}
        for module, name in names.items():
            if _is_of_expert(name, policy):
                raise ValueError(
                    f"{_OP}: adapter {folder} has {module!r}, expected nothing for single experts;"
                    f" {_MERGE}"
                )
        loaded = load(folder / _FILE)
        self._parts: dict[str, _Part] = {}
        for module, name in names.items():
            if name in self._parts:
                raise ValueError(f"{_OP}: adapter {folder} has {name} twice, expected it once")
            is_head = name.removesuffix(".weight") in (policy.names.head or ())
            part = _part_of(module, loaded, config, policy.transposed and not is_head)
            rows, columns = len(part.b), part.a.shape[1]
            shape = (columns, rows) if part.is_transposed else (rows, columns)
            for each in (shape, shape if part.base is None else tuple(part.base.shape)):
                if tuple(tensors[name].shape) != each:
                    raise ValueError(
                        f"{_OP}: adapter {folder} is for {name} of shape {list(each)}, expected"
                        f" {list(tensors[name].shape)}"
                    )
            self._parts[name] = part
        _check_none_missing(folder, config, tensors, self._parts, policy)

    def merged(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Return tensors with the adapter in them, each made when it is asked for.

        Args:
            tensors: of the model.
            dtype: that the model has when the adapter is merged.
        """
        return _Merged(tensors, self._parts, dtype)


class _Merged(Mapping[str, Tensor]):
    """Tensors, some with something added."""

    def __init__(
        self, tensors: Mapping[str, Tensor], parts: Mapping[str, _Part], dtype: torch.dtype
    ) -> None:
        self._tensors, self._parts, self._dtype = tensors, parts, dtype

    def __getitem__(self, name: str) -> Tensor:
        weight, part = self._tensors[name], self._parts.get(name)
        return weight if part is None else part.added_to(weight, self._dtype)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return what an adapter is computed in, as peft loads it: halves become float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _check(folder: Path, config: Any) -> None:
    """Refuse what is more than a product of two matrices."""
    if not isinstance(config, dict):
        raise ValueError(f"{_OP}: {folder / _CONFIG} has {config!r:.60}, expected an object")
    if config.get("peft_type") != "LORA":
        kind = config.get("peft_type")
        raise ValueError(f"{_OP}: adapter {folder} is {kind!r:.60}, expected 'LORA'; {_MERGE}")
    if config.get("init_lora_weights", True) not in _INITS:
        raise ValueError(
            f"{_OP}: adapter {folder} has init_lora_weights {config['init_lora_weights']!r:.60},"
            f" expected one that leaves the weights of the model as they are; {_MERGE}"
        )
    for name, value in config.items():
        known = name in _READ or name in _PASSED_OVER or name == "init_lora_weights"
        if not known and value and not (name == "bias" and value == "none"):
            raise ValueError(
                f"{_OP}: adapter {folder} has {name} {value!r:.60}, expected none; {_MERGE}"
            )


def _is_of_expert(weight: str, policy: Policy) -> bool:
    """Tell whether a weight is of one expert of several, which are no layers in memory."""
    every = () if policy.experts is None else policy.experts.names
    singles = [each for names in every for each in (*names.up, names.down) if "{}" in each]
    patterns = (re.escape(name).replace(r"\{\}", r"\d+") for name in singles)
    return any(re.search(rf"\.{pattern}\.weight$", weight) for pattern in patterns)


def _check_none_missing(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Any],
    parts: Mapping[str, Any],
    policy: Policy,
) -> None:
    """Refuse an adapter that has lost parts: peft saves one of each layer that is named."""
    for weight in sorted(set(tensors) - set(parts)):
        module = weight.removesuffix(".weight")
        if _is_of_expert(weight, policy):
            continue  # peft finds no layers there
        if module != weight and _is_target(config, module):
            raise ValueError(
                f"{_OP}: adapter {folder} has nothing for {module}, expected lora_A and lora_B, as"
                f" target_modules of {_CONFIG} names it; layers_to_transform says which layers"
                " count if not all do"
            )


def _is_target(config: Mapping[str, Any], module: str) -> bool:
    """Return whether peft puts an adapter on a layer of this name."""
    layers, index = config.get("layers_to_transform"), re.search(r"\.(\d+)\.", f".{module}.")
    if layers is not None:
        some = layers if isinstance(layers, list) else [layers]
        if index is None or int(index[1]) not in some:
            return False
    return _matches(config.get("target_modules"), module) and not _matches(
        config.get("exclude_modules"), module
    )


def _matches(names: Any, module: str) -> bool:
    """Return whether names have a layer: ends of names, or a pattern of whole names."""
    if isinstance(names, str):
        try:
            return re.fullmatch(names, module) is not None
        except re.error:
            return False
    some = names if isinstance(names, list) else ()
    return any(f".{module}".endswith(f".{name}") for name in some)


def _name_of(module: str, tensors: Mapping[str, Any], policy: Policy) -> str:
    """Return the name of the weight that a part is for; files may leave a prefix out."""
    inside = module.removeprefix(_BEFORE)
    prefixes = policy.names.prefixes
    bare = [inside.removeprefix(prefix) for prefix in prefixes if inside.startswith(prefix)]
    for name in (inside, *(prefix + each for each in bare for prefix in prefixes)):
        if f"{name}.weight" in tensors:
            return f"{name}.weight"
    raise ValueError(f"{_OP}: adapter has {module!r}, expected a layer with a weight of the model")


def _part_of(
    module: str, loaded: Mapping[str, Tensor], config: Mapping[str, Any], is_transposed: bool
) -> _Part:
    inside = module.removeprefix(_BEFORE)
    rank = _number(config, "r", "rank_pattern", inside)
    alpha = _number(config, "lora_alpha", "alpha_pattern", inside)
    halves = [loaded.get(module + part) for part in _PARTS]
    a, b = halves
    if a is None or b is None:
        raise ValueError(f"{_OP}: adapter has half of {module!r}, expected lora_A and lora_B")
    for name, each in (("lora_A", a), ("lora_B", b)):
        if not each.is_floating_point() or each.dim() != 2:
            raise ValueError(
                f"{_OP}: {module}.{name} has dtype {each.dtype} and shape {list(each.shape)},"
                " expected a matrix of floats"
            )
    if len(a) != rank or b.shape[1] != rank:
        raise ValueError(
            f"{_OP}: {module} has rank {len(a)} and {b.shape[1]}, expected {rank:g}, as"
            f" {_CONFIG} says"
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return _Part(a, b, loaded.get(module + _BASE), scale, is_transposed)


def _number(config: Mapping[str, Any], name: str, pattern: str, module: str) -> float:
    """Return a number of a layer: that of the first pattern which its name ends in, or of all."""
    value, patterns = config.get(name, 8), config.get(pattern) or {}
    try:
        found = [each for key, each in patterns.items() if re.match(rf"(.*\.)?({key})$", module)]
    except (re.error, AttributeError):
        raise ValueError(f"{_OP}: {pattern} is {patterns!r:.60}, expected patterns") from None
    value = found[0] if found else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
        raise ValueError(f"{_OP}: {name} is {value!r:.60} for {module}, expected more than 0")
    return value
