"""Experts out of a state dict, which has all of them in one tensor, or each in its own."""

from collections.abc import Sequence

from torch import Tensor

from deepspeed_ext.inference.model.architecture import Architecture
from deepspeed_ext.inference.model.policy import ExpertNames, Experts
from deepspeed_ext.inference.weights.experts import ExpertLinear, ExpertWeights, SharedExpert
from deepspeed_ext.inference.weights.float8 import Float8Weight
from deepspeed_ext.inference.weights.linear_taker import LinearTaker
from deepspeed_ext.inference.weights.packed_layers import are_alike, linear_of
from deepspeed_ext.ops import PackedWeight


def take_experts(
    take: LinearTaker, at: str, table: Experts | None, of: Architecture
) -> ExpertWeights:
    """Return the experts of a layer.

    Args:
        take: has the tensors.
        at: what names of the layer begin with.
        table: where they are.
        of: the model.

    Raises:
        ValueError: a tensor is missing, or has a shape that does not fit; or they come quantized,
            each in another way.
    """
    sizes = of.experts
    assert table is not None and sizes is not None, "the layer has none"
    names = _names_there(take, at, table)
    wide = (sizes.intermediate,) * (2 if of.gated else 1)
    router = take.single(f"{at}{names.router}", sizes.count, of.hidden, table.has_biases)
    one = _OneLayer(take, at, table, sizes.count)
    return ExpertWeights(
        router,
        one.taken(names.up, wide, of.hidden),
        one.taken((names.down,), (of.hidden,), sizes.intermediate),
        _shared(take, at, table, of) if sizes.shared > 0 else None,
    )


def _names_there(take: LinearTaker, at: str, table: Experts) -> ExpertNames:
    """Return the names of the form that the experts are in."""
    for names in table.names:
        first = f"{at}{names.up[0]}"
        if first in take.names or take.has(first.format(0)):
            return names
    looked = " or ".join(at + _tensor_of(names.up[0].format(0), names) for names in table.names)
    raise ValueError(
        f"init_inference: model has no tensor {looked}, expected it for model_type {take.family!r}"
    )


def _tensor_of(name: str, names: ExpertNames) -> str:
    return f"{name}.weight" if "{}" in names.down else name


class _OneLayer:
    """Takes the experts of one layer."""

    def __init__(self, take: LinearTaker, at: str, table: Experts, count: int) -> None:
        self._take, self._at, self._table, self._count = take, at, table, count

    def taken(self, names: tuple[str, ...], rows: tuple[int, ...], length: int) -> ExpertLinear:
        """Return one layer of all experts, of what may be several, one below the other.

        Args:
            names: of each part, or of all together.
            rows: of each part.
            length: of a row.
        """
        take, at, count = self._take, self._at, self._count
        if len(names) == 1:
            rows = (sum(rows),)
        elif len(names) != len(rows):
            raise ValueError(
                f"init_inference: the table has {len(names)} names of what lies in"
                f" {at}{names[0]}, expected 1 or {len(rows)}"
            )
        singles = [at + name.format(i) for i in range(count) for name in names]
        is_whole = "{}" not in names[0]
        if not is_whole and any(map(take.is_packed, singles)):
            return self._packed(singles, rows, length)
        n = sum(rows)
        weight = take.empty(count, n, length, stays=take.quantize is None)
        bias = take.empty(count, n) if self._table.has_biases else None
        for name, at_row, size in _places(names, rows):
            part = slice(at_row, at_row + size)
            if is_whole:
                self._copy_whole(f"{at}{name}", weight[:, part])
                if bias is not None:
                    self._copy_whole(f"{at}{name}_bias", bias[:, part])
                continue
            for i in range(count):
                single = f"{at}{name.format(i)}"
                take.copy(f"{single}.weight", weight[i, part])
                if bias is not None:
                    take.copy(f"{single}.bias", bias[i, part])
        if take.quantize is None:
            return ExpertLinear(weight, bias)
        quantized = take.quantize(weight.flatten(0, 1))
        assert not isinstance(quantized, Float8Weight), "it is refused"
        return ExpertLinear(quantized, bias)

    def _copy_whole(self, name: str, into: Tensor) -> None:
        """Copy the weights or biases of all experts."""
        table, tensor = self._table, self._take.read(name)
        is_turned = table.transposed and into.dim() == 3
        shape = tuple(into.shape)
        self._take.check_shape(name, tensor, (shape[0], *shape[:0:-1]) if is_turned else shape)
        tensor = tensor.transpose(1, 2) if is_turned else tensor
        if table.interleaved and self._is_gated(name):
            tensor = tensor.unflatten(1, (-1, 2)).transpose(1, 2)
            into = into.unflatten(1, (2, -1))
        into.copy_(tensor)

    def _is_gated(self, name: str) -> bool:
        """Tell whether a tensor has gates and what they are for."""
        ups = [f"{self._at}{names.up[0]}" for names in self._table.names]
        return name in ups or name.removesuffix("_bias") in ups

    def _packed(self, names: Sequence[str], rows: tuple[int, ...], length: int) -> ExpertLinear:
        """Return the same of weights that come quantized, all in one way."""
        take = self._take
        floats = [name for name in names if not take.is_packed(name)]
        if floats or self._table.has_biases:
            raise ValueError(
                f"init_inference: {(floats or names)[0]} has"
                f" {'a weight of floats' if floats else 'a bias'}, expected none, as other experts"
                " of its layer come quantized"
            )
        stored = [
            take.stored(name, rows[i % len(rows)], length, False) for i, name in enumerate(names)
        ]
        if not are_alike(stored):
            raise ValueError(
                f"init_inference: {self._at} has experts that are quantized in different ways,"
                " expected one format, group size and order of columns for all; give the folder of"
                " the model before that, with quantize='int4' or 'int8'"
            )
        whole = linear_of(stored, take.device, take.memory)
        assert isinstance(whole.weight, PackedWeight), "folders have no experts in fp8"
        return ExpertLinear(whole.weight, None, None, whole.order)


def _places(names: tuple[str, ...], rows: tuple[int, ...]) -> list[tuple[str, int, int]]:
    """Return of each part its name, its first row, and how many it has."""
    begins = [sum(rows[:i]) for i in range(len(rows))]
    return list(zip(names, begins, rows, strict=True))


def _shared(take: LinearTaker, at: str, table: Experts, of: Architecture) -> SharedExpert:
    """Return the expert that all tokens go to."""
    assert of.experts is not None
    n = of.experts.shared
    gate = table.shared_gate
    return SharedExpert(
        take.linear(at, table.shared_up, (n,) * (2 if of.gated else 1), of.hidden, False),
        take.linear(at, (table.shared_down,), (of.hidden,), n, False),
        None if gate is None else take.single(f"{at}{gate}", 1, of.hidden),
    )
