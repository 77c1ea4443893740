"""What a model is read from: a module, or a folder."""

import math
import os
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from deepspeed_ext.dtensors import is_dtensor
from deepspeed_ext.inference.arguments import dtype_of
from deepspeed_ext.inference.model.checkpoint_folder import ModelFolder
from deepspeed_ext.inference.model.policy import Config, Policy
from deepspeed_ext.inference.weights.packed_layers import (
    FolderLayers,
    OwnLayers,
    PackedLayers,
    quantized_in,
)
from deepspeed_ext.io import SavedTensor
from deepspeed_ext.moe.sending import Gate
from deepspeed_ext.quantization.layout import WeightLayout
from deepspeed_ext.torch_internals.modules import (
    ORIGINAL,
    forward_hooks_of,
    global_forward_hooks,
    is_compiled,
)

_OP = "init_inference"
_KNOWN = ("torch", "transformers", "transformers_modules")  # packages whose modules tables describe


class ModelSource:
    """A model, given as a module or as a folder.

    Attributes:
        config: of the model.
        tensors: without values in the case of a folder.
        folder: None for a module.
        buffers: of a module, those too that are no part of its state dict; of a folder, only these.
        packed: which layers come quantized; None: none.
    """

    def __init__(self, model: nn.Module | str | os.PathLike[str]) -> None:
        self.folder: ModelFolder | None = None
        self.tensors: Mapping[str, Tensor] | Mapping[str, SavedTensor]
        self.buffers: Mapping[str, Tensor] = {}
        self.packed: PackedLayers | None = None
        self._layers: Mapping[str, tuple[WeightLayout, torch.dtype]] = {}
        if isinstance(model, nn.Module):
            model = _unwrapped(model)
            self.config = _as_dict(getattr(model, "config", None))
            self._generation = _as_dict(getattr(model, "generation_config", None) or {})
            _check_layers(model)
            found = quantized_in(model)
            self._layers = {name: (each.layout, each.dtype) for name, each in found.items()}
            self.tensors = model.state_dict()
            _check_tensors(self.tensors)
            self.buffers = dict(model.named_buffers())
        elif isinstance(model, str | os.PathLike):
            self.folder = ModelFolder(Path(model))
            self.config = self.folder.config
            self._generation = self.folder.generation_config
            self.tensors = self.folder.shards.tensors
            self._layers, self.buffers = self.folder.layers, self.folder.buffers
            if self.folder.packing is not None:
                self.packed = FolderLayers(self.folder.packing, list(self.tensors), model)
        else:
            raise TypeError(
                f"{_OP}: model is {type(model).__name__}, expected a module or the path of a folder"
            )
        if self._layers:
            self.packed = OwnLayers({name: layout for name, (layout, _) in self._layers.items()})

    def dtype(self) -> torch.dtype:
        """Return what the model is computed in: what its folder names, or most of its bytes are."""
        named = self.config.get("dtype") or self.config.get("torch_dtype")
        if self.folder is not None and isinstance(named, str):
            return dtype_of(named)
        sizes: Counter[torch.dtype] = Counter()
        places = {  # those that are tied count once
            each.data_ptr() if isinstance(each, Tensor) else name: each
            for name, each in self.tensors.items()
            if name.rpartition(".")[0] not in self._layers  # whose scales are float32
        }
        for layout, dtype in {id(each[0]): each for each in self._layers.values()}.values():
            sizes[dtype] += math.prod(layout.shape) * dtype.itemsize
        for each in places.values():
            if each.dtype is not None and each.dtype.is_floating_point:  # masks may be large
                sizes[each.dtype] += each.nbytes
        return dtype_of(max(sizes, key=lambda one: sizes[one], default=None))

    def device(self) -> torch.device:
        """Return where an engine is if nobody says."""
        if self.folder is not None:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        devices = (each.device for each in self.tensors.values() if isinstance(each, Tensor))
        return next(devices, torch.device("cpu"))

    def stop_tokens(self, policy: Policy) -> tuple[int, ...]:
        """Return the tokens that end a text."""
        said = self._said(policy, "eos_token_id")
        found = said[0] if said else []
        tokens = found if isinstance(found, list) else [found]
        for token in tokens:
            if type(token) is not int:
                raise ValueError(f"{_OP}: eos_token_id is {found!r:.60}, expected whole numbers")
        return tuple(tokens)

    def pad_tokens(self, policy: Policy) -> tuple[int, ...]:
        """Return the tokens that rows may have been filled up with; old files say -1 for none."""
        said = self._said(policy, "pad_token_id")
        return tuple(dict.fromkeys(each for each in said if type(each) is int and each >= 0))

    def _said(self, policy: Policy, key: str) -> list[Any]:
        """Return what is said of a key, that which counts first."""
        places = self._generation, self.config, policy.part_of(self.config)
        said = (place.get(key) for place in places)
        return [each for each in said if each is not None]


def _as_dict(config: Any) -> Config:
    if isinstance(config, Mapping):
        return config
    if not callable(getattr(config, "to_dict", None)):
        raise TypeError(
            f"{_OP}: model has the config {type(config).__name__}, expected one of Hugging Face's,"
            " or a dict with what the table of the model's family reads"
        )
    found: Config = config.to_dict()
    return found


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return what is inside of what stands around a model for compiling or training.

    Raises:
        TypeError: something stands around it, or in it, that computes something else.
    """
    around = nn.DataParallel, nn.parallel.DistributedDataParallel
    while is_compiled(model) or isinstance(model, around):
        if not all(map(_looks_only, forward_hooks_of(model))):
            raise ValueError(
                f"{_OP}: {type(model).__name__} has forward hooks, expected none, as the engine"
                " reads tensors and the config, and calls no module; remove them"
            )
        inside: nn.Module = getattr(model, ORIGINAL if is_compiled(model) else "module")
        model = inside
    if isinstance(model, AveragedModel):
        raise TypeError(
            f"{_OP}: model is {type(model).__name__}, expected the module inside of it; give"
            " model.module"
        )
    for name, layer in model.named_modules():
        if type(layer).__module__.partition(".")[0] == "peft":
            what = name or "model"
            raise TypeError(
                f"{_OP}: {what} is {type(layer).__name__} of peft, expected a model without"
                " adapters; give model.merge_and_unload(), or the folder of the model with the"
                " folder of the adapter as adapter"
            )
    return model


def _check_layers(model: nn.Module) -> None:
    if not all(map(_looks_only, global_forward_hooks())):
        raise ValueError(
            f"{_OP}: torch has forward hooks for all modules, expected none, as the engine reads"
            " tensors and the config, and calls no module; remove what"
            " register_module_forward_hook or register_module_forward_pre_hook returned"
        )
    for name, layer in model.named_modules():
        lost = _lost_with(layer)
        if lost is not None:
            raise ValueError(
                f"{_OP}: {name or 'the model'} has {lost}, expected none, as the engine reads"
                " tensors and the config, and calls no module; remove it, or make it part of the"
                " weights"
            )


def _looks_only(hook: Any) -> bool:
    """Return whether a hook is of a package whose hooks move and record, and change no result."""
    while isinstance(hook, partial):
        hook = hook.func
    module: str = getattr(hook, "__module__", None) or type(hook).__module__
    return module.partition(".")[0] in (*_KNOWN, "accelerate", "deepspeed_ext")


def _keeps_forward(layer: nn.Module) -> bool:
    """Tell whether what is in the place of a forward does the same: accelerate's, and patch's."""
    kind = type(vars(layer)["forward"]).__module__
    return hasattr(layer, "_hf_hook") or kind.startswith("deepspeed_ext.patching.")


def _lost_with(layer: nn.Module) -> str | None:
    """Return what else than tensors a result of this module depends on; None: nothing known."""
    if not all(map(_looks_only, forward_hooks_of(layer))):
        return "forward hooks"
    if "forward" in vars(layer) and not _keeps_forward(layer):
        return "a forward of its own"
    forwards = [kind for kind in type(layer).__mro__ if "forward" in vars(kind)]
    known = [kind for kind in forwards if kind.__module__.partition(".")[0] in _KNOWN]
    if forwards[0] is Gate:  # a router in float32, as those of the engine are
        return None
    if forwards[0] not in known and known[0] is not nn.Module:
        return f"a forward of its own, of {forwards[0].__qualname__}"
    return None


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):  # a state dict may hold anything
            raise TypeError(
                f"{_OP}: {name} is {type(tensor).__name__}, expected a tensor; give the model of"
                " before it was quantized or converted"
            )
        if tensor.is_meta or is_dtensor(tensor):
            what = "on meta" if tensor.is_meta else "a DTensor"
            raise ValueError(
                f"{_OP}: {name} is {what}, expected values; give the folder of the model instead"
            )
