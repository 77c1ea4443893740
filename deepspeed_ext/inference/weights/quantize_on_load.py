"""What becomes of the weights of blocks when an engine is to have them quantized."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.inference.weights.experts import ExpertLinear, ExpertWeights, SharedExpert
from deepspeed_ext.inference.weights.float8 import Float8Weight, check_device
from deepspeed_ext.inference.weights.host_memory import WeightMemory
from deepspeed_ext.inference.weights.linear import Linear, Stack
from deepspeed_ext.inference.weights.loader import Layer, Weights
from deepspeed_ext.ops import PackedWeight
from deepspeed_ext.quantization.layout import WeightLayout, make_layout
from deepspeed_ext.quantization.packing import Errors, packed, quantize_weight, results_of
from deepspeed_ext.quantization.report import LayerReport, Report

_OP = "init_inference"
_HAVE_LINEARS = Layer, ExpertWeights, SharedExpert
# Groups of 128 cost 3 % of the bytes of int8, and bound each error by its neighbours' largest
# element instead of by the row's.
FORMATS = {"int8": ("int8", 128), "int4": ("int4", 128), "fp8": ("fp8_e4m3", None)}


class Done(NamedTuple):
    """A weight that was quantized, while nobody has waited for its errors.

    Args:
        weight: as it is now.
        layout: likewise.
        bytes_before: as floats.
        floats: the id of these, to tell whether they are still there.
        errors: of its elements.
    """

    weight: PackedWeight | Float8Weight
    layout: WeightLayout
    bytes_before: int
    floats: int
    errors: Errors


class Quantizer:
    """Quantizes weights one after another, and keeps account of bytes and errors.

    Weights on meta become codes on meta.

    Args:
        kind: "int8", "int4" or "fp8".
        input_format: as of ``quantized_linear``.
        device: of the weights.
        name: of the argument that the kind was, for errors.
        memory: for codes on the CPU; None: ordinary tensors.

    Attributes:
        format: of the codes.
        done: what was quantized.

    Raises:
        ValueError: an argument is none of these, or they do not go together.
    """

    def __init__(
        self,
        kind: str,
        input_format: str | None,
        device: torch.device,
        name: str = "quantize",
        memory: WeightMemory | None = None,
    ) -> None:
        if not isinstance(kind, str) or kind not in FORMATS:
            raise ValueError(
                f"{_OP}: {name} is {kind!r}, expected None or one of {', '.join(FORMATS)}"
            )
        if kind == "fp8":
            check_device(device)
        self.format, self._group_size = FORMATS[kind]
        self._input_format, self._memory = input_format, memory
        self._layout_of((1, 1))  # refuses what does not go together
        self.done: list[Done] = []

    def __call__(self, weight: Tensor) -> PackedWeight | Float8Weight:
        """Return a weight, (out, in), quantized."""
        layout = self._layout_of((weight.shape[0], weight.shape[1]))
        errors = Errors(layout, weight.device)
        if weight.is_meta:
            tensors = layout.tensors_on("meta")
        else:
            zeros = None if self._memory is None else self._memory.zeros(layout.tensors())
            tensors = quantize_weight(weight, layout, errors, zeros)
        made: PackedWeight | Float8Weight
        if layout.is_float8:
            made = Float8Weight(tensors["codes"], tensors["scales"], layout)
        else:
            made = packed(layout, tensors)
        self.done.append(Done(made, layout, weight.nbytes, id(weight), errors))
        return made

    def moved(self, before: Layer, after: Layer) -> None:
        """Let go of a layer that was quantized, in whose place there is another one."""
        others = _linears(after)
        new = {id(linear.weight): others[name].weight for name, linear in _linears(before).items()}
        for i, done in enumerate(self.done):
            weight = new.get(id(done.weight), done.weight)
            assert isinstance(weight, PackedWeight | Float8Weight)
            self.done[i] = done._replace(weight=weight)

    @property
    def largest_floats(self) -> int:
        """The bytes of the largest weight that was quantized, which is there beside its codes."""
        return max((done.bytes_before for done in self.done), default=0)

    def _layout_of(self, shape: tuple[int, int]) -> WeightLayout:
        return make_layout(
            _OP, self.format, shape, self._group_size, input_format=self._input_format
        )


def report_of(weights: Weights, quantizers: Sequence[Quantizer]) -> Report:
    """Return what became of each weight; waits for errors.

    Args:
        weights: that have them.
        quantizers: one or more, of which the first gives its name.

    Raises:
        ValueError: a weight was not finite.
    """
    names = {
        id(linear.weight): f"layers.{i}.{name}"
        for i, layer in enumerate(weights.layers)
        for name, linear in _linears(layer).items()
    }
    if weights.head is not None:
        names[id(weights.head.weight)] = "head"
    layers, total = {}, bytes_of(weights)
    before = total
    all_done = [each for quantizer in quantizers for each in quantizer.done]
    results = results_of([done.errors for done in all_done])
    for done, (largest, rms) in zip(all_done, results, strict=True):
        if not math.isfinite(largest):
            raise ValueError(
                f"{_OP}: {names[id(done.weight)]} has weights that are not finite, expected"
                " numbers, as codes stand for nothing else"
            )
        after = done.weight.codes.nbytes + done.weight.scales.nbytes
        layers[names[id(done.weight)]] = LayerReport(
            done.layout.shape, done.bytes_before, after, largest, rms
        )
        is_kept = done.floats == id(weights.embedding)  # a head that is tied to it
        before += (0 if is_kept else done.bytes_before) - after
    return Report(quantizers[0].format, layers, {}, before, total)


def with_input_format(weights: Weights, input_format: str) -> Weights:
    """Return weights that round what they are multiplied with.

    Raises:
        ValueError: there is no such format, or the codes of a weight are no integers.
    """

    def changed(value: Any) -> Any:
        if isinstance(value, Linear) and isinstance(value.weight, Stack):
            return replace(value, weight=Stack(tuple(map(changed, value.weight.parts))))
        if isinstance(value, Linear | ExpertLinear):
            weight = value.weight
            if not isinstance(weight, PackedWeight):
                return value
            make_layout(_OP, weight.format, weight.shape, None, input_format=input_format)
            return replace(value, input_format=input_format)
        if isinstance(value, _HAVE_LINEARS):
            return replace(
                value, **{f.name: changed(getattr(value, f.name)) for f in fields(value)}
            )
        return value

    head = None if weights.head is None else changed(weights.head)
    return replace(weights, layers=[changed(layer) for layer in weights.layers], head=head)


def _linears(layer: Any) -> dict[str, Linear | ExpertLinear]:
    """Return all linear layers of a layer, also those of its experts, by name."""
    found: dict[str, Linear | ExpertLinear] = {}
    for field in fields(layer):
        value = getattr(layer, field.name)
        if isinstance(value, Linear | ExpertLinear):
            found[field.name] = value
        elif isinstance(value, _HAVE_LINEARS):
            found |= {f"{field.name}.{name}": each for name, each in _linears(value).items()}
    return found


def bytes_of(weights: object) -> int:
    """Return the bytes of all tensors in weights; those that have several places count once."""
    tensors: dict[int, Tensor] = {}
    rest = [weights]
    while rest:
        value = rest.pop()
        if isinstance(value, Tensor):
            tensors[id(value)] = value
        elif isinstance(value, list | tuple):
            rest += value
        elif hasattr(value, "__dataclass_fields__"):
            rest += [getattr(value, name) for name in value.__dataclass_fields__]
    return sum(tensor.nbytes for tensor in tensors.values())
