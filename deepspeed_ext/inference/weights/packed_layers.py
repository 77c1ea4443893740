"""Weights that come quantized: of published folders, and of modules with QuantizedLinear."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from deepspeed_ext.inference.weights.float8 import Float8Weight
from deepspeed_ext.inference.weights.host_memory import WeightMemory
from deepspeed_ext.inference.weights.linear import Linear
from deepspeed_ext.quantization.layout import WeightLayout
from deepspeed_ext.quantization.linear import NOTE, QuantizedLinear
from deepspeed_ext.quantization.packing import packed
from deepspeed_ext.quantization.stored_weight import Packing, Stored, copy_up

_OP = "init_inference"
_OWN = ("codes", "scales", "offsets", "order", NOTE)


class PackedLayers(Protocol):
    """Which layers come quantized, and how."""

    def has(self, name: str) -> bool:
        """Tell whether a layer does."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The tensors that such a layer may have, beside its bias."""

    @property
    def on_host(self) -> tuple[str, ...]:
        """Those of them that had better be on the CPU, as their values are looked at."""

    def stored(self, name: str, tensors: Mapping[str, Tensor], length: int) -> Stored:
        """Return the weight of a layer; of tensors on meta, all but its values.

        Args:
            name: of the layer.
            tensors: those of `parts` that are there.
            length: elements of a row.

        Raises:
            ValueError: a tensor is missing, or does not fit the others.
        """


class FolderLayers:
    """Those of a folder.

    Args:
        packing: how its weights are stored.
        names: of its tensors.
        folder: for errors.

    Raises:
        ValueError: no weight is stored so.
    """

    def __init__(self, packing: Packing, names: Sequence[str], folder: object) -> None:
        self._packing, self._folder = packing, folder
        mark = f".{packing.mark}"
        self._layers = {name.removesuffix(mark) for name in names if name.endswith(mark)}
        if not self._layers:
            raise ValueError(
                f"{_OP}: {folder} has no tensor named {packing.mark}, expected one for each layer,"
                " as its config says that weights are quantized"
            )

    def has(self, name: str) -> bool:
        """See `PackedLayers`, as of the others."""
        return name in self._layers

    @property
    def parts(self) -> tuple[str, ...]:
        return self._packing.parts

    @property
    def on_host(self) -> tuple[str, ...]:
        return self._packing.on_host

    def stored(self, name: str, tensors: Mapping[str, Tensor], length: int) -> Stored:
        return self._packing.stored(f"{_OP}: {name} of {self._folder}", tensors, length)


class OwnLayers:
    """Those that are `QuantizedLinear`, in a module or in a file that `save_quantized` has saved.

    Args:
        layouts: of each, by name.
    """

    def __init__(self, layouts: Mapping[str, WeightLayout]) -> None:
        self._layouts = layouts

    def has(self, name: str) -> bool:
        """See `PackedLayers`, as of the others."""
        return name in self._layouts

    @property
    def parts(self) -> tuple[str, ...]:
        return _OWN

    @property
    def on_host(self) -> tuple[str, ...]:
        return "order", NOTE

    def stored(self, name: str, tensors: Mapping[str, Tensor], length: int) -> Stored:
        layout = self._layouts[name]
        for part in layout.tensors():
            if part not in tensors:
                raise ValueError(f"{_OP}: {name} has no {part}, expected it beside {NOTE}")
        problem = layout.misfit(tensors)
        if problem is not None:
            raise ValueError(f"{_OP}: {name} has a QuantizedLinear of which {problem}")
        return _OwnWeight(layout, tensors)


@dataclass(frozen=True)
class _OwnWeight:
    """The tensors of a `QuantizedLinear`, which stay as they are."""

    layout: WeightLayout
    own: Mapping[str, Tensor]

    @property
    def order(self) -> Tensor | None:
        return self.own["order"] if self.layout.act_order else None

    def write(self, into: Mapping[str, Tensor]) -> None:
        n = self.layout.shape[0]
        into["codes"].copy_(self.own["codes"][:n])
        for name in self.layout.tensors().keys() - {"codes", "order"}:
            into[name][:, :n].copy_(self.own[name][:, :n])


def quantized_in(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the layers of a module that are quantized, by all their names.

    Raises:
        TypeError: one is of a subclass, which may do anything.
    """
    found = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, QuantizedLinear):
            if type(layer) is not QuantizedLinear:
                raise TypeError(
                    f"{_OP}: {name} is a {type(layer).__name__}, expected a QuantizedLinear itself,"
                    " as no code of a module runs"
                )
            found[name] = layer
    return found


def check_asked(
    packed: PackedLayers | None,
    quantize: str | None,
    quantize_head: str | None,
    input_format: str | None,
) -> None:
    """Refuse what cannot be asked for with, or without, layers that come quantized.

    Args:
        packed: such layers, or None.
        quantize: as of ``init_inference``, as are the others.
    """
    if packed is not None and quantize is not None:
        raise ValueError(
            f"{_OP}: quantize is {quantize!r}, expected None, as the weights come quantized; for"
            " another format give the model of before that"
        )
    if input_format is not None and packed is None and quantize is quantize_head is None:
        raise ValueError(f"{_OP}: input_format is {input_format!r}, expected None without quantize")


def are_alike(weights: Sequence[Stored]) -> bool:
    """Tell whether weights can be one, below another: in formats, groups and orders of columns."""
    first = weights[0]
    for each in weights[1:]:
        if replace(each.layout, shape=first.layout.shape) != first.layout:
            return False
        orders = first.order, each.order
        if orders[0] is None or orders[1] is None or orders[0].is_meta:
            continue
        if not torch.equal(orders[0], orders[1]):
            return False
    return True


def linear_of(
    weights: Sequence[Stored],
    device: torch.device,
    memory: WeightMemory | None = None,
    rows: Tensor | None = None,
) -> Linear:
    """Return a layer with weights that are alike, one below another; without a bias.

    Args:
        weights: on meta, or where they are read from.
        device: where to.
        memory: for weights on the CPU; None: ordinary tensors.
        rows: which row of them each of the layer's is; None: as they stand.
    """
    first = weights[0].layout
    n = sum(each.layout.shape[0] for each in weights)
    layout = replace(first, shape=(n, first.shape[1]))
    made = _tensors_for(layout, device, memory)
    order = weights[0].order
    if order is not None and device.type != "meta":
        copy_up(order, made["order"])  # once, as all have it
    begin = 0
    for each in weights if device.type != "meta" else ():
        end = begin + each.layout.shape[0]
        each.write({name: _rows_of(name, tensor, begin, end) for name, tensor in made.items()})
        begin = end
    if rows is not None and device.type != "meta":
        there = torch.empty_like(rows, device=device)
        copy_up(rows, there)
        for name, tensor in made.items():
            if name != "order":
                part = _rows_of(name, tensor, 0, n)
                part.copy_(part.index_select(0 if name == "codes" else 1, there))
    order = made.pop("order", None)
    if layout.is_float8:
        return Linear(Float8Weight(made["codes"], made["scales"], layout))
    return Linear(packed(layout, made), None, layout.input_format, order)


def _tensors_for(
    layout: WeightLayout, device: torch.device, memory: WeightMemory | None
) -> dict[str, Tensor]:
    """Return tensors to be filled row by row; what is beside the rows is 0."""
    if layout.is_float8:
        return layout.tensors_on(device) if memory is None else memory.zeros(layout.tensors())
    if memory is None:
        made = layout.empty_on(device)
    else:
        made = {name: memory.empty(*each) for name, each in layout.tensors().items()}
    for name in made.keys() - {"codes", "order"}:
        made[name][:, layout.shape[0] :].zero_()
    return made


def _rows_of(name: str, tensor: Tensor, begin: int, end: int) -> Tensor:
    """Return what a tensor has of some rows of the weight."""
    if name == "order":
        return tensor
    return tensor[begin:end] if name == "codes" else tensor[:, begin:end]
