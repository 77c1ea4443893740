"""Weights of 4 or 8 bits as compressed-tensors packs them ("pack-quantized"), as ours.

An element is (q - zero) * scale, q and zero being signed; so it is exactly here, with scales of 16
bits. Codes are q + 8, or of 8 bits q + 128, in an int32 from its lowest bits on:

  weight_packed      (out, words of a row)       consecutive elements of a row
  weight_scale       (out, groups)
  weight_zero_point  (words of out, groups)      consecutive rows; older files have (out, groups) in
                                                 int8; none if symmetric
  weight_g_idx       (in,)                       the group of each column, or -1 in all of it
  weight_shape       (2,)                        out and in

See: the package compressed-tensors, `compressors/pack_quantized`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed_ext.dtypes import DTYPES
from deepspeed_ext.ops.quantization.formats import groups_of
from deepspeed_ext.quantization.layout import make_layout
from deepspeed_ext.quantization.stored_weight import StoredWeight, order_of, words_of

_WORD = 32  # bits
_FORMAT = "pack-quantized"


@dataclass(frozen=True)
class PackSettings:
    """What a folder says of all its layers.

    Args:
        bits: 4 or 8.
        group_size: None for a whole row.
        symmetric: whether there are no zeros.
        act_order: whether the groups of columns may be mixed.
    """

    mark: ClassVar[str] = "weight_packed"
    parts: ClassVar[tuple[str, ...]] = (
        *("weight_packed", "weight_scale", "weight_zero_point"),
        *("weight_g_idx", "weight_shape"),
    )
    bits: int
    group_size: int | None
    symmetric: bool
    act_order: bool

    @property
    def on_host(self) -> tuple[str, ...]:
        """Those whose values are looked at; see `Packing`."""
        looked_at = "weight_g_idx", "weight_shape"
        return (*looked_at, "weight_zero_point") if self.symmetric else looked_at

    def stored(
        self, what: str, tensors: Mapping[str, Tensor], length: int | None = None
    ) -> StoredWeight:
        """Return the weight of a layer; see `Packing`. Without a length the tensors say it."""
        for name in ("weight_packed", "weight_scale"):
            if name not in tensors:
                raise ValueError(f"{what} has no {name}, expected it beside {', '.join(tensors)}")
        words, scales = tensors["weight_packed"], tensors["weight_scale"]
        if length is None:
            length = _length(what, tensors, self.bits)
        n = len(words) if words.dim() > 0 else 0
        want = n, -(-length * self.bits // _WORD)
        if words.dtype != torch.int32 or words.shape != want:
            raise ValueError(
                f"{what} has weight_packed as {words.dtype} of shape {list(words.shape)}, expected"
                f" int32 of shape {list(want)}, {self.bits} bits for each of {length} elements"
            )
        _check_shape(what, tensors.get("weight_shape"), (n, length))
        group = min(self.group_size or length, max(length, 1))
        shape = groups_of(length, group), n
        if scales.dtype not in DTYPES or scales.shape != shape[::-1]:
            raise ValueError(
                f"{what} has weight_scale as {scales.dtype} of shape {list(scales.shape)}, expected"
                f" floats of shape {list(shape[::-1])} for groups of {group}"
            )
        zeros = self._zeros(what, tensors.get("weight_zero_point"), shape)
        g_idx = tensors.get("weight_g_idx")
        if g_idx is not None and not g_idx.is_meta and bool((g_idx == -1).all()):
            g_idx = None
        if self.act_order and shape[0] > 1 and "weight_g_idx" not in tensors:
            raise ValueError(f"{what} has no weight_g_idx, expected it, as actorder is 'group'")
        order = order_of(what, "weight_g_idx", g_idx, length, group, self.act_order)
        has_order = order is not None
        format = f"int{self.bits}"
        layout = make_layout(what, format, (n, length), group, self.symmetric, None, has_order)
        return StoredWeight(layout, words, scales.t(), zeros, order)

    def _zeros(
        self, what: str, given: Tensor | None, shape: tuple[int, int]
    ) -> Callable[[int, int], Tensor] | None:
        """Return the codes that stand for zero; see `StoredWeight`."""
        if given is None:
            if self.symmetric:
                return None
            raise ValueError(f"{what} has no weight_zero_point, expected it, as symmetric is false")
        groups, n = shape
        packed = -(-n * self.bits // _WORD), groups
        is_packed = given.dtype == torch.int32 and given.shape == packed
        if not is_packed and (given.dtype != torch.int8 or given.shape != (n, groups)):
            raise ValueError(
                f"{what} has weight_zero_point as {given.dtype} of shape {list(given.shape)},"
                f" expected int32 of shape {list(packed)}"
            )
        zeros = partial(self._rows_of_zeros, given, is_packed)
        if not self.symmetric:
            return zeros
        if not given.is_meta and not bool((zeros(0, n) == 1 << self.bits - 1).all()):
            raise ValueError(
                f"{what} has weight_zero_point that is not 0, expected 0, as symmetric is true"
            )
        return None

    def _rows_of_zeros(self, given: Tensor, is_packed: bool, begin: int, end: int) -> Tensor:
        """Return the code that stands for zero, of each group and of rows from a word's first."""
        if not is_packed:
            return given[begin:end].t().int() + (1 << self.bits - 1)
        per_word = _WORD // self.bits
        words = given[begin // per_word : -(-end // per_word)]
        return words_of(words.t(), self.bits)[:, : end - begin]


def _check_shape(what: str, given: Tensor | None, shape: tuple[int, int]) -> None:
    if given is None or given.is_meta:
        return
    if given.is_floating_point() or given.tolist() != list(shape):
        raise ValueError(
            f"{what} has weight_shape {given.flatten()[:4].tolist()}, expected {list(shape)}"
        )


def _length(what: str, tensors: Mapping[str, Tensor], bits: int) -> int:
    """Return how long rows are, which weight_shape says; words may have more room."""
    words, shape = tensors["weight_packed"], tensors.get("weight_shape")
    if shape is None:
        return (words.shape[-1] if words.dim() else 0) * (_WORD // bits)
    if shape.is_floating_point() or shape.shape != (2,) or int(shape[1]) < 0:
        raise ValueError(
            f"{what} has weight_shape {shape.flatten()[:4].tolist()}, expected two whole numbers"
        )
    return int(shape[1])


def read_pack_settings(what: str, config: Mapping[str, Any]) -> PackSettings:
    """Return what a quantization_config of compressed-tensors says.

    Args:
        what: begins the text of an error.
        config: as it is in config.json.

    Raises:
        ValueError: it is of another format, or says other things of some layers.
    """
    _check_all(what, config)
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"{what} has config_groups {groups!r:.100}, expected an object")
    found = {name: _of_group(f"{what} has in {name}", group) for name, group in groups.items()}
    first = next(iter(found))
    for name, settings in found.items():
        if settings != found[first]:
            raise ValueError(
                f"{what} has other settings in {name} than in {first} ({_told(settings)} and"
                f" {_told(found[first])}), expected one for all layers"
            )
    return found[first]


def _check_all(what: str, config: Mapping[str, Any]) -> None:
    """Refuse what is said of all groups, and would change the result."""
    format = config.get("format")
    if format not in (_FORMAT, "mixed-precision"):  # of the latter each group names its own
        raise ValueError(f"{what} has format {format!r:.100}, expected {_FORMAT!r}")
    for name in ("kv_cache_scheme", "transform_config"):
        if config.get(name):
            raise ValueError(f"{what} has {name} {config[name]!r:.60}, expected none")
    sparsity = config.get("sparsity_config")
    kind = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else "dense"
    if kind != "dense":
        raise ValueError(f"{what} has sparsity_config of format {kind!r:.100}, expected 'dense'")


def _of_group(what: str, group: Any) -> PackSettings:
    """Return what one of config_groups says."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ValueError(f"{what} weights {weights!r:.100}, expected an object")
    wanted = {
        "format": (group.get("format"), (None, _FORMAT)),
        "input_activations": (group.get("input_activations"), (None,)),
        "output_activations": (group.get("output_activations"), (None,)),
        "num_bits": (weights.get("num_bits"), (4, 8)),
        "type": (weights.get("type", "int"), ("int",)),
        "dynamic": (weights.get("dynamic", False), (False,)),
        "symmetric": (weights.get("symmetric", True), (True, False)),
        "strategy": (_strategy(weights), ("group", "channel")),
        "actorder": (
            weights.get("actorder"),
            (None, False, "weight", "static", True, "group", "dynamic"),
        ),
    }
    for name, (value, values) in wanted.items():
        if not any(type(value) is type(each) and value == each for each in values):
            known = " or ".join(map(repr, values))
            raise ValueError(f"{what} {name} {value!r:.100}, expected {known}")
    size = weights.get("group_size") if _strategy(weights) == "group" else None
    if _strategy(weights) == "group" and (type(size) is not int or size < 1):
        raise ValueError(f"{what} group_size {size!r:.100}, expected 1 or more")
    act_order = weights.get("actorder") in (True, "group", "dynamic")
    return PackSettings(weights["num_bits"], size, weights.get("symmetric", True), act_order)


def _strategy(weights: Mapping[str, Any]) -> Any:
    """Return over what a scale is, which may be told by group_size alone."""
    size = weights.get("group_size")
    usual = "channel" if size == -1 else "tensor" if size is None else "group"
    return weights.get("strategy") or usual


def _told(settings: PackSettings) -> str:
    size = settings.group_size or "a whole row"
    kind = "symmetric" if settings.symmetric else "with zeros"
    return f"{settings.bits} bits in groups of {size}, {kind}"
