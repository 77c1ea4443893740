"""LinearTaker: tensors and linear layers out of a state dict, in the form that blocks read."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from deepspeed_ext.inference.model.architecture import Architecture
from deepspeed_ext.inference.model.policy import Config, Policy
from deepspeed_ext.inference.weights.float8 import Float8Weight
from deepspeed_ext.inference.weights.host_memory import WeightMemory
from deepspeed_ext.inference.weights.linear import Linear, Stack
from deepspeed_ext.inference.weights.packed_layers import PackedLayers, are_alike, linear_of
from deepspeed_ext.ops import PackedWeight
from deepspeed_ext.quantization.stored_weight import Stored

Quantize = Callable[[Tensor], Tensor | PackedWeight | Float8Weight]


class LinearTaker:
    """Takes tensors, and linear layers of one or several, and notes which are left.

    Args:
        policy: has the table.
        config: what it is read from.
        architecture: of the model.
        tensors: of the model; each is read once, when it is needed.
        device: where they are to be; on meta, only names and shapes are looked at.
        dtype: what they are to be.
        quantize: what becomes of the weights of linear layers.
        memory: for weights on the CPU; None: ordinary tensors.
        packed: which layers come quantized, and stay so; None: none.
        own: the names of tensors that nobody else has: they are kept where they are, if they are of
            this device and dtype.

    Attributes:
        names: of all tensors, as asking whether one is there may read it.
        device: as given, as are quantize and memory.
    """

    def __init__(
        self,
        policy: Policy,
        config: Config,
        architecture: Architecture,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        quantize: Quantize | None,
        memory: WeightMemory | None,
        packed: PackedLayers | None,
        own: Collection[str],
    ) -> None:
        self._policy, self._of = policy, architecture
        self.family = config.get("model_type")
        self._tensors, self.device, self._dtype = tensors, device, dtype
        self.quantize, self.memory = quantize, memory
        self._packed, self._own = packed, own
        self.names = frozenset(tensors)
        self._left = set(tensors)
        self._biased: dict[str, Tensor] = {}  # whether biases have values that no layer takes

    def has(self, name: str) -> bool:
        """Tell whether a layer of this name has a weight, as floats or quantized."""
        return f"{name}.weight" in self.names or self.is_packed(name)

    def linear(
        self,
        at: str,
        names: tuple[str, ...],
        rows: tuple[int, ...],
        length: int,
        has_bias: bool,
        by_head: bool = False,
    ) -> Linear:
        """Return one layer of what may be several, one below the other.

        Args:
            names: of each part, or of all together.
            rows: of each part.
        """
        if len(names) == 1:
            rows = (sum(rows),)
        elif len(names) != len(rows) or by_head:
            want = "1" if by_head else f"1 or {len(rows)}"
            raise ValueError(
                f"init_inference: the table has {len(names)} names of what lies in"
                f" {at}{names[0]}, expected {want}"
            )
        if any(map(self.is_packed, (f"{at}{name}" for name in names))):
            return self._packed_linear(at, names, rows, length, has_bias, by_head)
        weight = self.empty(sum(rows), length, stays=self.quantize is None)
        for name, into in zip(names, weight.split(rows), strict=True):
            self.copy(f"{at}{name}.weight", into, self._policy.transposed, by_head)
        bias = self._bias(at, names, rows, by_head) if has_bias else None
        return Linear(weight if self.quantize is None else self.quantize(weight), bias)

    def _bias(
        self, at: str, names: tuple[str, ...], rows: tuple[int, ...], by_head: bool
    ) -> Tensor:
        bias = self.empty(sum(rows))
        for name, into in zip(names, bias.split(rows), strict=True):
            self.copy(f"{at}{name}.bias", into, by_head=by_head)
        return bias

    def is_packed(self, name: str) -> bool:
        """Tell whether the weight of a layer comes quantized."""
        return self._packed is not None and self._packed.has(name)

    def _packed_linear(
        self,
        at: str,
        names: tuple[str, ...],
        rows: tuple[int, ...],
        length: int,
        has_bias: bool,
        by_head: bool = False,
    ) -> Linear:
        """Return the same of weights that come quantized; of those that differ, in parts."""
        stored, apart = list[Stored](), list[Linear]()
        for name, n in zip(names, rows, strict=True):
            if self.is_packed(f"{at}{name}"):
                stored.append(self.stored(f"{at}{name}", n, length, has_bias))
            else:
                floats = self.empty(n, length)
                self.copy(f"{at}{name}.weight", floats, self._policy.transposed)
                apart.append(Linear(floats))
        bias = self._bias(at, names, rows, by_head) if has_bias else None
        if not apart and are_alike(stored):
            by_rows = self._rows_by_head(sum(rows)) if by_head else None
            whole = linear_of(stored, self.device, self.memory, by_rows)
            return replace(whole, bias=bias)
        waiting, floats_left = iter(stored), iter(apart)
        parts = [
            linear_of([next(waiting)], self.device, self.memory)
            if self.is_packed(f"{at}{name}")
            else next(floats_left)
            for name in names
        ]
        biases = [None] * len(rows) if bias is None else bias.split(rows)
        both = zip(parts, biases, strict=True)
        return Linear(Stack(tuple(replace(part, bias=its) for part, its in both)))

    def stored(self, name: str, n: int, length: int, has_bias: bool) -> Stored:
        """Return the weight of one layer that comes quantized."""
        assert self._packed is not None
        there = [part for part in self._packed.parts if f"{name}.{part}" in self.names]
        tensors = {part: self.read(f"{name}.{part}", is_floats=False) for part in there}
        stored = self._packed.stored(name, tensors, length)
        if stored.layout.shape != (n, length):
            raise ValueError(
                f"init_inference: {name} has a quantized weight of shape"
                f" {list(stored.layout.shape)}, expected {[n, length]}"
            )
        bias = f"{name}.bias"
        if not has_bias and bias in self.names:  # packages write zeros for layers without one
            values = self.read(bias)
            if not values.is_meta:  # on CUDA nobody waits for it now
                self._biased[bias] = values.any()
        return stored

    def _rows_by_head(self, n: int) -> Tensor:
        """Return where the rows of queries, keys and values are that lie head by head."""
        rows = torch.arange(n, device="cpu").view(self._of.heads, 3, self._of.head_dim)
        return rows.transpose(0, 1).reshape(-1)

    def single(self, name: str, n: int, length: int, has_bias: bool = False) -> Linear:
        """Return a layer that nothing quantizes, but that may come so."""
        if self.is_packed(name):
            return self._packed_linear("", (name,), (n,), length, has_bias)
        weight = self.tensor(f"{name}.weight", (n, length))
        return Linear(weight, self.tensor(f"{name}.bias", (n,)) if has_bias else None)

    def empty(self, *shape: int, stays: bool = True) -> Tensor:
        """Return a tensor to be filled; `stays` if the engine has it in the end."""
        if self.memory is not None and stays:
            return self.memory.empty(shape, self._dtype)
        return torch.empty(shape, device=self.device, dtype=self._dtype)

    def tensor(self, name: str, shape: tuple[int, ...], stays: bool = True) -> Tensor:
        """Return a tensor of this shape where it is to be; `stays` as of `empty`."""
        if name in self._own:
            given = self.read(name)
            self.check_shape(name, given, shape)
            if given.dtype == self._dtype and given.device == self.device:
                return given
            return self.empty(*shape, stays=stays).copy_(given)
        tensor = self.empty(*shape, stays=stays)
        self.copy(name, tensor)
        return tensor

    def copy(
        self, name: str, into: Tensor, is_transposed: bool = False, by_head: bool = False
    ) -> None:
        """Copy a tensor to where it is to be, once."""
        tensor = self.read(name)
        shape = tuple(into.shape)
        self.check_shape(name, tensor, shape[::-1] if is_transposed else shape)
        tensor = tensor.t() if is_transposed else tensor
        if by_head:
            heads, width = self._of.heads, self._of.head_dim
            tensor = tensor.unflatten(0, (heads, 3, width)).transpose(0, 1)
            into = into.unflatten(0, (3, heads, width))
        into.copy_(tensor)

    def read(self, name: str, is_floats: bool = True) -> Tensor:
        """Return a tensor as it is given.

        Raises:
            ValueError: there is none, or it has no floats, or no elements.
        """
        if name not in self.names:
            raise ValueError(
                f"init_inference: model has no tensor {name!r}, expected it for model_type"
                f" {self.family!r}"
            )
        self._left.discard(name)
        tensor = self._tensors[name].detach()
        if is_floats and not tensor.is_floating_point():
            raise ValueError(f"init_inference: {name} has dtype {tensor.dtype}, expected floats")
        if tensor.is_meta and self.device.type != "meta":
            raise ValueError(f"init_inference: {name} is on meta, expected a tensor with elements")
        return tensor

    @staticmethod
    def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        """Refuse a tensor of another shape.

        Raises:
            ValueError: it is.
        """
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"init_inference: {name} has shape {list(tensor.shape)}, expected {list(shape)}"
            )

    def check_left(self) -> None:
        """Refuse a model that has tensors which nothing has taken.

        Raises:
            ValueError: it has.
        """
        for bias, is_one in self._biased.items():
            if bool(is_one):
                raise ValueError(
                    f"init_inference: model has {bias!r}, expected no tensor of this name for"
                    f" model_type {self.family!r}, or zeros"
                )
        ignored = self._policy.names.ignored
        left = sorted(name for name in self._left if not any(part in name for part in ignored))
        if left:
            raise ValueError(
                f"init_inference: model has {left[0]!r}, expected no tensor of this name for"
                f" model_type {self.family!r}"
            )
