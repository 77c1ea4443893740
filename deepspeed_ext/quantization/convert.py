"""quantize_model: puts layers with quantized weights in place of those of a model."""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import NamedTuple, NoReturn

import torch
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]

from deepspeed_ext.ops._renamed import refuse_renamed
from deepspeed_ext.quantization.candidates import (
    DEFAULT_SKIP,
    Candidates,
    find_candidates,
    own_tensors,
)
from deepspeed_ext.quantization.layout import WeightLayout, make_layout
from deepspeed_ext.quantization.linear import QuantizedLinear, weight_of
from deepspeed_ext.quantization.packing import Errors, results_of
from deepspeed_ext.quantization.report import LayerReport, Report
from deepspeed_ext.torch_internals.modules import modules_of
from deepspeed_ext.torch_internals.tensors import storage_id

_OP = "quantize_model"
_HolderOf = Callable[[str], nn.Module]  # get_submodule of the model


class _Done(NamedTuple):
    """A layer that was replaced, while nobody has waited for its errors."""

    names: list[str]
    layout: WeightLayout
    bytes_before: int
    errors: Errors


def quantize_model(
    model: nn.Module,
    format: str = "int8",
    *,
    group_size: int | None = 128,
    symmetric: bool = True,
    skip: Iterable[str] = DEFAULT_SKIP,
    input_format: str | None = None,
    progress: bool = False,
    **older: NoReturn,
) -> Report:
    """Replace the linear layers of a model by `QuantizedLinear`, one after another, in place.

    Each old weight is released before the next layer begins, on whatever device it is, so that
    beside the model there is no more memory in use than the largest layer, some blocks of rows
    where they do not lie in one piece each, and 16 bytes for each row take. Replaced are nn.Linear
    and transformers' Conv1D. Kept, and named in the report, are layers that others rely on in ways
    that would be lost: subclasses, parametrized and hooked ones, those that have modules or tensors
    beside weight and bias, those that an attribute has too, in lists and the like, which may be
    what is called (functions and objects of other classes are not looked into), and those that
    share their weight with another module, such as a head that is tied to an embedding. A layer
    that has several places in the model is replaced by one layer in all of them.

    When something fails on the way, layers that were replaced stay so, each of them whole.

    Args:
        model: what has the layers.
        format: as of `QuantizedLinear`, as are group_size, symmetric and input_format.
        skip: patterns of names of layers to keep, or of modules that hold them, such as "*.gate" or
            "encoder.layer.0"; one without a dot is compared with the last part of a name too.
            Default: the head of a language model.
        progress: whether a bar is drawn on stderr, where that is a terminal.

    Returns:
        Bytes and errors of each layer, and what was kept; printed, it is a table.

    Raises:
        TypeError: a weight is no plain tensor of float32, bfloat16 or float16, a bias no plain
            tensor, or the model is a linear layer itself. Nothing is changed then, nor with a
            ValueError.
        ValueError: an argument breaks a rule above, a weight is on meta, or a bias has not one
            element for each row of the weight.

    See: Dettmers et al., "QLoRA", 2023, for nf4; deepspeed_ext.ops.quantize for the formulas.
    """
    if older:
        refuse_renamed(_OP, older)
    found = find_candidates(_OP, model, skip)
    layout_of = cache(
        partial(
            make_layout,
            _OP,
            format,
            group_size=group_size,
            symmetric=symmetric,
            input_format=input_format,
        )
    )
    holder_of = cache(model.get_submodule)  # many layers have the same one, and none is replaced
    layouts = [layout_of(_shape_of(holder_of, names[0])) for names in found.names]
    done = []
    bar = tqdm(
        total=sum(layout.shape[0] * layout.shape[1] for layout in layouts),
        desc=f"to {format}",
        unit="weight",
        unit_scale=True,
        disable=None if progress else True,
        leave=False,
    )
    with bar, torch.inference_mode(False):  # or no gradient could pass later
        for names, layout in zip(found.names, layouts, strict=True):
            done.append(_replace(holder_of, names, layout))
            bar.update(layout.shape[0] * layout.shape[1])
    return _report(format, done, found, _bytes_of(model))


def _layer_of(holder_of: _HolderOf, name: str) -> nn.Module:
    holder, _, last = name.rpartition(".")
    layer = modules_of(holder_of(holder))[last]
    assert layer is not None
    return layer


def _shape_of(holder_of: _HolderOf, name: str) -> tuple[int, int]:
    """Return the shape of the weight of a layer, after everything about it is checked."""
    weight = weight_of(f"{_OP}: {name}", _layer_of(holder_of, name))
    if weight.is_meta:
        raise ValueError(
            f"{_OP}: {name} has a weight on meta, expected values; for files see load_quantized"
        )
    return weight.shape[0], weight.shape[1]


def _replace(holder_of: _HolderOf, names: list[str], layout: WeightLayout) -> _Done:
    """Put a new layer at all places of an old one; nothing here outlives the old weight."""
    linear = _layer_of(holder_of, names[0])
    weight = weight_of(_OP, linear)
    errors = Errors(layout, weight.device)
    layer = QuantizedLinear.of_weight(linear, weight, layout, errors)
    put_in_place(holder_of, names, layer)
    return _Done(names, layout, weight.nbytes, errors)


def put_in_place(holder_of: _HolderOf, names: Iterable[str], layer: nn.Module) -> None:
    """Make this layer the one of some names.

    Args:
        holder_of: returns the module of a name, as the get_submodule of a model does.
        names: of the layer in the model.
        layer: that takes the place.
    """
    for name in names:
        holder, _, last = name.rpartition(".")
        setattr(holder_of(holder), last, layer)


def _report(format: str, done: list[_Done], found: Candidates, bytes_after: int) -> Report:
    layers = {}
    results = results_of([each.errors for each in done])
    for each, (largest, rms) in zip(done, results, strict=True):
        sizes = each.bytes_before, each.layout.nbytes
        also = tuple(each.names[1:])
        layers[each.names[0]] = LayerReport(each.layout.shape, *sizes, largest, rms, also)
    return Report(format, layers, found.kept, found.nbytes, bytes_after)


def _bytes_of(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers; memory that some share counts once."""
    storages: dict[int, int] = {}
    for module in model.modules():
        for _, tensor in own_tensors(module):
            storage = tensor.untyped_storage()
            storages[storage_id(storage)] = storage.nbytes()
    return sum(storages.values())
