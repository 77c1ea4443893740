"""Quantized models as safetensors files: each layer has its note, so that a file says it all."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn

from deepspeed_ext.io import file_bytes, inspect, load, save
from deepspeed_ext.ops._renamed import refuse_renamed
from deepspeed_ext.quantization.candidates import DEFAULT_SKIP, find_candidates
from deepspeed_ext.quantization.filling import fill, notes_in, other_buffers
from deepspeed_ext.quantization.layout import make_layout
from deepspeed_ext.quantization.linear import NOTE, QuantizedLinear, weight_of

_BUFFERS = "deepspeed_ext.buffers"  # lists, as JSON, those of the file that are in no state dict


def save_quantized(model: nn.Module, path: str | os.PathLike[str], *, durable: bool = True) -> None:
    """Save a model that has quantized layers into a file in the safetensors format.

    The file has the state dict, and buffers that are not part of it, such as tables of angles, so
    that `load_quantized` can fill a model that was made on meta.

    Args:
        model: with some `QuantizedLinear` in it.
        path: of the file; see `deepspeed_ext.io.save`, also for `durable`.

    Raises:
        TypeError: the model is a layer itself, or has a tensor that cannot be saved.
        ValueError: the model has no quantized layer.
        OSError: the disk is full, the folder is missing or cannot be written, or a write failed.
    """
    if isinstance(model, QuantizedLinear):
        raise TypeError(
            "save_quantized: model is a QuantizedLinear, expected a module that has some; for one"
            " layer there is state_dict"
        )
    if not any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise ValueError(
            "save_quantized: model has no QuantizedLinear, expected some; see quantize_model"
        )
    tensors, metadata = _content(model, model.state_dict())
    save(tensors, path, metadata=metadata, durable=durable)


def quantized_file_bytes(
    model: nn.Module,
    format: str = "int8",
    *,
    group_size: int | None = 128,
    symmetric: bool = True,
    skip: Iterable[str] = DEFAULT_SKIP,
    input_format: str | None = None,
    **older: NoReturn,
) -> int:
    """Return how many bytes the file of a model will have, before the model is quantized.

    Args:
        model: as of `quantize_model`, as are the others; it is not changed, and may be on meta.

    Returns:
        What `quantize_model` and `save_quantized` come to, to the byte; see `io.file_bytes`.

    Raises:
        TypeError: as by `quantize_model`.
        ValueError: as by `quantize_model`.
    """
    what, state, made = "quantized_file_bytes", model.state_dict(), {}
    if older:
        refuse_renamed(what, older)
    for names in find_candidates(what, model, skip).names:
        weight = weight_of(f"{what}: {names[0]}", model.get_submodule(names[0]))
        shape = weight.shape[0], weight.shape[1]
        layout = make_layout(what, format, shape, group_size, symmetric, input_format)
        note, tensors = layout.note(weight.dtype), layout.tensors_on("meta")
        for name in names:
            made[f"{name}.weight"] = {
                **{f"{name}.{key}": tensor for key, tensor in tensors.items()},
                f"{name}.{NOTE}": note.clone(),
            }
    after: dict[str, Tensor] = {}
    for name, tensor in state.items():
        after.update(made.get(name, {name: tensor}))
    content, metadata = _content(model, after)
    return file_bytes(content, metadata=metadata)


def load_quantized(
    model: nn.Module | Callable[[], nn.Module],
    path: str | os.PathLike[str],
    *,
    device: str | int | torch.device = "cpu",
) -> nn.Module:
    """Load what `save_quantized` has saved; the floats are never in memory.

    Args:
        model: whose tensors are replaced, so that it is best made on meta; or what makes it, which
            is called so that it is. Its layers may be those of before `quantize_model`.
        path: of the file.
        device: where to, cpu or cuda.

    Returns:
        The model.

    Raises:
        TypeError: a weight of the model is no plain tensor of float32, bfloat16 or float16, or a
            bias no plain tensor.
        ValueError: the file breaks a rule of its format, was cut short, or does not fit the model,
            which is as it was then.
        OSError: the file cannot be read.
    """
    if not isinstance(model, nn.Module):
        with torch.device("meta"):
            model = model()
    saved = inspect(path)
    notes = [
        name
        for name in saved.tensors
        if name.endswith(f".{NOTE}") and f"{name.removesuffix(NOTE)}codes" in saved.tensors
    ]
    what = f"load_quantized: {os.fspath(path)!r}"
    if not notes:
        raise ValueError(f"{what} has no quantized layers, expected some; see io.load")
    layers = notes_in(what, load(path, names=notes))
    extra = saved_buffers(saved.metadata)
    loaded = load(path, device=device)
    gone = extra - other_buffers(model).keys()  # the model may be of another version of its code
    fill(what, model, layers, {name: t for name, t in loaded.items() if name not in gone})
    return model


def _content(
    model: nn.Module, state: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return all tensors for a file, and its metadata."""
    buffers = {n: t for n, t in other_buffers(model).items() if n not in state}
    metadata = {"format": "pt"} | ({_BUFFERS: json.dumps(sorted(buffers))} if buffers else {})
    return {**state, **buffers}, metadata


def saved_buffers(metadata: Mapping[str, str]) -> set[str]:
    """Return the names of buffers in a file that are in no state dict.

    Of a text that `save_quantized` has not written there are none.
    """
    try:
        names = json.loads(metadata.get(_BUFFERS, "[]"))
    except (ValueError, RecursionError):
        return set()
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
