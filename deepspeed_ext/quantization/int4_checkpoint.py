"""load_int4_checkpoint: models that others have quantized, from their safetensors files."""

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from deepspeed_ext.io import AsyncIO
from deepspeed_ext.io.checkpoint.shards import Shards, read_json
from deepspeed_ext.ops._renamed import refuse_renamed
from deepspeed_ext.quantization.compressed_tensors import PackSettings, read_pack_settings
from deepspeed_ext.quantization.filling import fill, other_buffers
from deepspeed_ext.quantization.int4_tensors import Int4Settings, read_settings
from deepspeed_ext.quantization.layout import WeightLayout, make_layout
from deepspeed_ext.quantization.linear import NOTE
from deepspeed_ext.quantization.parameters_on_meta import made_without_parameters
from deepspeed_ext.quantization.published import method_of, settings_in
from deepspeed_ext.torch_internals.modules import buffers_of

_OP = "load_int4_checkpoint"
Layers = dict[str, tuple[WeightLayout, torch.dtype]]


def load_int4_checkpoint(
    model: nn.Module | Callable[[], nn.Module],
    folder: str | os.PathLike[str],
    *,
    input_format: str | None = None,
    device: str | int | torch.device = "cpu",
    **older: NoReturn,
) -> nn.Module:
    """Load a model that GPTQ, AWQ or compressed-tensors has quantized, with `QuantizedLinear`.

    Of GPTQ and AWQ it reads 4 bits, which become layers with offsets. Of compressed-tensors it
    reads the format pack-quantized, of 4 bits, and of 8, which become int8; layers have offsets
    where those of the folder are not symmetric.

    Each element is (code - zero) * scale before it is multiplied, exactly if scales have 16 bits;
    see int4_tensors.py for float32. With act-order (desc_act) the columns are put in the order of
    their groups, and x is for each call.

    Args:
        model: whose tensors are replaced, so that it is best made on meta; or what makes it, which
            is called so that its parameters are: it is never whole in memory as floats. Buffers
            that are in no state dict, such as rotary frequencies, have to have values: no file
            of these packages has them. Of what is called they have those that it makes.
        folder: with config.json, in it quantization_config (or compression_config, or
            quantize_config.json), and model.safetensors, or its parts and their index.
        input_format: as of `QuantizedLinear`.
        device: where to, cpu or cuda.

    Returns:
        The model.

    Raises:
        TypeError: a weight of the model is no plain tensor of float32, bfloat16 or float16.
        ValueError: the folder has another packing, or what does not fit itself or the model, which
            is as it was then.
        OSError: a file is missing or cannot be read.

    See: deepspeed_ext/quantization/int4_tensors.py and compressed_tensors.py draw what is read.
    """
    if older:
        refuse_renamed(_OP, older)
    made_here: dict[str, Tensor] = {}
    if not isinstance(model, nn.Module):
        model = made_without_parameters(model)
        made_here = other_buffers(model)
    root = Path(folder)
    settings = _settings(root)
    layers: Layers = {}
    state: dict[str, Tensor] = {}
    target = torch.device(device)
    with AsyncIO(threads=2) as engine:
        shards = Shards(_OP, root)
        for prefix, parts in _layers(root, shards.files, settings.parts).items():
            tensors = shards.load([f"{prefix}.{part}" for part in parts], target, engine)
            of_layer = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
            layers[prefix] = _add(state, prefix, of_layer, settings, input_format, root)
        taken = {f"{prefix}.{part}" for prefix in layers for part in settings.parts}
        rest = [name for name in shards.files if name not in taken]
        state.update(shards.load(rest, target, engine))
    what = f"{_OP}: {root}"
    if not layers:
        raise ValueError(f"{what} has no tensor named {settings.mark}, expected one for each layer")
    fill(what, model, layers, _without_zero_biases(model, layers, state))
    for name, buffer in made_here.items():
        if not buffer.is_meta:
            holder, _, last = name.rpartition(".")
            buffers_of(model.get_submodule(holder))[last] = buffer.to(target)
    return model


def _add(
    state: dict[str, Tensor],
    prefix: str,
    tensors: Mapping[str, Tensor],
    settings: Int4Settings | PackSettings,
    input_format: str | None,
    root: Path,
) -> tuple[WeightLayout, torch.dtype]:
    """Give a state dict what QuantizedLinear has in one; return its layout and dtype."""
    stored = settings.stored(f"{_OP}: {prefix} of {root}", tensors)
    of, has_order = stored.layout, stored.order is not None
    given = of.format, of.shape, of.group_size, of.symmetric, input_format, has_order
    layout = make_layout(_OP, *given)
    dtype = stored.scales.dtype
    made = stored.tensors() | {NOTE: layout.note(dtype)}
    state.update({f"{prefix}.{name}": tensor for name, tensor in made.items()})
    return layout, dtype


def _without_zero_biases(
    model: nn.Module, layers: Layers, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Leave out biases that GPTQ's packages write, as zeros, for layers that have none."""
    of_model = model.state_dict().keys()
    unknown = {f"{name}.bias" for name in layers} & state.keys() - of_model
    zeros = {name for name in unknown if not bool(state[name].any())}
    return {name: tensor for name, tensor in state.items() if name not in zeros}


def _settings(root: Path) -> Int4Settings | PackSettings:
    """Return what a folder says of its packing."""
    file, what = root / "config.json", f"{_OP}: {root}"
    config = read_json(_OP, file) if file.exists() else {}
    settings = settings_in(_OP, root, config if isinstance(config, dict) else {})
    if settings is None:
        raise ValueError(
            f"{_OP}: {file} has no quantization_config, expected one of GPTQ, AWQ or"
            " compressed-tensors"
        )
    if isinstance(settings, dict) and method_of(settings) == "compressed-tensors":
        return read_pack_settings(what, settings)
    return read_settings(what, settings)


def _layers(root: Path, files: Mapping[str, Path], names: Collection[str]) -> dict[str, list[str]]:
    """Return for each layer which of its tensors are there."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in files:
        prefix, _, part = name.rpartition(".")
        if part in names:
            found[prefix].append(part)
    layers = {prefix: parts for prefix, parts in found.items() if parts != ["scales"]}
    for part in layers.get("", ()):
        raise ValueError(f"{_OP}: {root} has {part!r}, expected the name of a layer before it")
    return layers
