"""load_int4_checkpoint: models that GPTQ or AWQ have quantized, from their safetensors files."""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_ext.io import AsyncIO, inspect, load
from deepspeed_ext.quantization.filling import fill
from deepspeed_ext.quantization.int4_tensors import Int4Settings, read_int4, read_settings
from deepspeed_ext.quantization.layout import WeightLayout, make_layout
from deepspeed_ext.quantization.linear import NOTE

_OP = "load_int4_checkpoint"
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
Layers = dict[str, tuple[WeightLayout, torch.dtype]]


def load_int4_checkpoint(
    model: nn.Module | Callable[[], nn.Module],
    folder: str | os.PathLike[str],
    *,
    activations: str | None = None,
    device: str | int | torch.device = "cpu",
) -> nn.Module:
    """Load a model that GPTQ or AWQ has quantized to 4 bits, as `QuantizedLinear` with offsets.

    Each element is (code - zero) * scale exactly, before it is multiplied. With act-order
    (desc_act) the columns are put in the order of their groups, and x is for each call.

    Args:
        model: whose tensors are replaced, so that it is best made on meta; or what makes it, which
            is called so that it is. Buffers that are in no state dict have to have values.
        folder: with config.json, in it quantization_config (or quantize_config.json), and
            model.safetensors, or its parts and their index.
        activations: as of `QuantizedLinear`.
        device: where to, cpu or cuda.

    Returns:
        The model.

    Raises:
        ValueError: the folder has another packing, or what does not fit itself or the model, which
            is as it was then.
        OSError: a file is missing or cannot be read.

    See: deepspeed_ext/quantization/int4_tensors.py draws what is read.
    """
    if not isinstance(model, nn.Module):
        with torch.device("meta"):
            model = model()
    root = Path(folder)
    settings = read_settings(f"{_OP}: {root}", _config(root))
    layers: Layers = {}
    state: dict[str, Tensor] = {}
    with AsyncIO(threads=2) as engine:
        files = _files(root)
        for prefix, parts in _layers(files).items():
            tensors: dict[str, Tensor] = {}
            for file, names in _by_file(files, [f"{prefix}.{part}" for part in parts]).items():
                tensors.update(load(file, names=names, device=device, engine=engine))
            of_layer = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
            layers[prefix] = _add(state, prefix, of_layer, settings, activations, root)
        taken = {f"{prefix}.{part}" for prefix in layers for part in _PARTS}
        rest = [name for name in files if name not in taken]
        for file, names in _by_file(files, rest).items():
            state.update(load(file, names=names, device=device, engine=engine))
    what = f"{_OP}: {root}"
    if not layers:
        raise ValueError(f"{what} has no tensor named qweight, expected one for each layer")
    fill(what, model, layers, _without_zero_biases(model, layers, state))
    return model


def _add(
    state: dict[str, Tensor],
    prefix: str,
    tensors: Mapping[str, Tensor],
    settings: Int4Settings,
    activations: str | None,
    root: Path,
) -> tuple[WeightLayout, torch.dtype]:
    """Give a state dict what QuantizedLinear has in one; return its layout and dtype."""
    read = read_int4(f"{_OP}: {prefix} of {root}", tensors, settings)
    weight, order = read.weight, read.order
    layout = make_layout(
        _OP, "int4", weight.shape, weight.group_size, False, activations, order is not None
    )
    dtype = tensors["scales"].dtype
    made = {"codes": weight.codes, "scales": weight.scales, "offsets": weight.offsets}
    made |= {"order": order, NOTE: layout.note(dtype)}
    state.update({f"{prefix}.{name}": t for name, t in made.items() if t is not None})
    return layout, dtype


def _without_zero_biases(
    model: nn.Module, layers: Layers, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Leave out biases that GPTQ's packages write, as zeros, for layers that have none."""
    of_model = model.state_dict().keys()
    unknown = {f"{name}.bias" for name in layers} & state.keys() - of_model
    zeros = {name for name in unknown if not bool(state[name].any())}
    return {name: tensor for name, tensor in state.items() if name not in zeros}


def _config(root: Path) -> Any:
    """Return what a folder says of its packing."""
    config = root / "config.json"
    if config.exists():
        found = _json(config)
        if isinstance(found, dict) and "quantization_config" in found:
            return found["quantization_config"]
    older = root / "quantize_config.json"
    if older.exists():
        return _json(older)
    raise ValueError(f"{_OP}: {config} has no quantization_config, expected one of GPTQ or AWQ")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_OP}: {path} is not JSON: {error}") from None


def _files(root: Path) -> dict[str, Path]:
    """Return for the name of each tensor the file that has it."""
    if not (root / _INDEX).exists():
        return dict.fromkeys(inspect(root / _ONE_FILE).tensors, root / _ONE_FILE)
    index = _json(root / _INDEX)
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(_is_plain(name) for name in files.values()):
        raise ValueError(
            f"{_OP}: {root / _INDEX} has the weight_map {files!r:.100}, expected names of files in"
            " the same folder"
        )
    return {name: root / file for name, file in files.items()}


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and bool(name) and os.path.basename(name) == name


def _layers(files: Mapping[str, Path]) -> dict[str, list[str]]:
    """Return for each layer which of its tensors are there."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in files:
        prefix, _, part = name.rpartition(".")
        if part in _PARTS:
            found[prefix].append(part)
    return {prefix: parts for prefix, parts in found.items() if parts != ["scales"]}


def _by_file(files: Mapping[str, Path], names: list[str]) -> dict[Path, list[str]]:
    found: defaultdict[Path, list[str]] = defaultdict(list)
    for name in names:
        found[files[name]].append(name)
    return found
