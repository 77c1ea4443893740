"""The weights of a model in the form that blocks compute with, taken over layer by layer."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepspeed_ext.inference.model.architecture import Architecture
from deepspeed_ext.inference.model.policy import Config, Or, Policy, value_of
from deepspeed_ext.inference.weights.float8 import Float8Weight
from deepspeed_ext.inference.weights.host_memory import WeightMemory
from deepspeed_ext.inference.weights.linear import Linear, Stack
from deepspeed_ext.inference.weights.packed_layers import PackedLayers, are_alike, linear_of
from deepspeed_ext.ops import PackedWeight
from deepspeed_ext.quantization.stored_weight import Stored


@dataclass(frozen=True)
class NormWeights:
    """What a norm multiplies by, and adds."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Layer:
    """The weights of one layer; see `Names` for what they are."""

    qkv: Linear
    out: Linear
    up: Linear
    down: Linear
    attention_norm: NormWeights | None
    mlp_norm: NormWeights | None
    attention_post_norm: NormWeights | None
    mlp_post_norm: NormWeights | None
    q_norm: Tensor | None
    k_norm: Tensor | None


@dataclass(frozen=True)
class Weights:
    """All weights of a model."""

    embedding: Tensor
    positions: Tensor | None
    token_types: Tensor | None
    embedding_norm: NormWeights | None
    project_in: Linear | None
    layers: list[Layer]
    final_norm: NormWeights | None
    project_out: Linear | None
    head: Linear | None
    pooler: Linear | None


Quantize = Callable[[Tensor], Tensor | PackedWeight | Float8Weight]


class Taker:
    """Takes tensors out of a state dict by the names of a table, and notes which are left.

    Each goes straight to where it is to be, and nothing of the model is kept: it may be trained, or
    thrown away. Only what `quantize` is given is there for a moment beside what it returns.

    Args:
        policy: has the table.
        config: of the model.
        architecture: likewise.
        tensors: of the model; each is read once, when it is needed.
        device: where they are to be; on meta, only names and shapes are looked at.
        dtype: what they are to be.
        quantize: what becomes of the weights of linear layers in blocks.
        quantize_head: what becomes of that of the head; of one that is tied to the embedding too,
            which stays beside it.
        memory: for weights on the CPU; None: ordinary tensors.
        packed: which layers come quantized, and stay so; None: none.
        own: the names of tensors that nobody else has: they are kept where they are, if they are of
            this device and dtype.

    Raises:
        ValueError: there is no embedding.
    """

    def __init__(
        self,
        policy: Policy,
        config: Config,
        architecture: Architecture,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        quantize: Quantize | None = None,
        quantize_head: Quantize | None = None,
        memory: WeightMemory | None = None,
        packed: PackedLayers | None = None,
        own: Collection[str] = (),
    ) -> None:
        self._policy, self._config, self._of = policy, policy.part_of(config), architecture
        self._tensors, self._device, self._dtype = tensors, device, dtype
        self._quantize, self._quantize_head = quantize, quantize_head
        self._memory, self._packed, self._own = memory, packed, own
        self._names = frozenset(tensors)  # as asking whether one is there may read it
        self._left = set(tensors)
        self._biased: dict[str, Tensor] = {}  # whether biases have values that no layer takes
        names = policy.names
        found = [p for p in names.prefixes if f"{p}{names.embedding}.weight" in self._names]
        if not found:
            looked = " or ".join(f"{p}{names.embedding}.weight" for p in names.prefixes)
            ending = f"{names.embedding}.weight"
            near = min((name for name in self._names if name.endswith(ending)), default=None)
            raise ValueError(
                f"init_inference: model has no tensor {looked}, expected it for model_type"
                f" {config.get('model_type')!r}"
                + (f"; it has {near!r}, as of a model within another one" if near else "")
            )
        self._prefix = found[0]

    @torch.no_grad()
    def take(self) -> Weights:
        """Return all weights.

        Raises:
            ValueError: a tensor is missing, is left over, or has a shape that does not fit.
        """
        names, of, prefix = self._policy.names, self._of, self._prefix
        shape = of.vocabulary, of.embedding
        embedding = self._tensor(f"{prefix}{names.embedding}.weight", shape)
        weights = Weights(
            embedding=embedding,
            positions=self._positions(prefix),
            token_types=self._table(prefix, names.token_types),
            embedding_norm=self._norm(prefix, names.embedding_norm, of.hidden),
            project_in=self._projection(prefix, names.project_in, of.hidden, of.embedding),
            layers=[self._layer(prefix + names.layer.format(i)) for i in range(of.layers)],
            final_norm=self._norm(prefix, names.final_norm, of.hidden),
            project_out=self._projection(prefix, names.project_out, of.embedding, of.hidden),
            head=self._packed_head(self._head(embedding)),
            pooler=self._pooler(prefix),
        )
        self._check_left()
        return weights

    def _layer(self, at: str) -> Layer:
        names, of = self._policy.names, self._of
        qkv_bias, out_bias, mlp_bias, _ = (value_of(e, self._config) for e in self._policy.biases)
        parts = tuple(n * of.head_dim for n in (of.heads, of.kv_heads, of.kv_heads))
        wide = (of.intermediate,) * (2 if of.gated else 1)
        return Layer(
            self._linear(at, names.qkv, parts, of.hidden, qkv_bias, self._policy.qkv_by_head),
            self._linear(at, (names.out,), (of.hidden,), parts[0], out_bias),
            self._linear(at, names.up, wide, of.hidden, mlp_bias),
            self._linear(at, (names.down,), (of.hidden,), of.intermediate, mlp_bias),
            self._norm(at, names.attention_norm, of.hidden),
            self._norm(at, names.mlp_norm, of.hidden),
            self._norm(at, names.attention_post_norm, of.hidden),
            self._norm(at, names.mlp_post_norm, of.hidden),
            self._head_norm(at, names.q_norm),
            self._head_norm(at, names.k_norm),
        )

    def _linear(
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
        if any(map(self._is_packed, (f"{at}{name}" for name in names))):
            return self._packed_linear(at, names, rows, length, has_bias, by_head)
        weight = self._empty(sum(rows), length, stays=self._quantize is None)
        for name, into in zip(names, weight.split(rows), strict=True):
            self._copy(f"{at}{name}.weight", into, self._policy.transposed, by_head)
        bias = self._bias(at, names, rows, by_head) if has_bias else None
        return Linear(weight if self._quantize is None else self._quantize(weight), bias)

    def _bias(
        self, at: str, names: tuple[str, ...], rows: tuple[int, ...], by_head: bool
    ) -> Tensor:
        bias = self._empty(sum(rows))
        for name, into in zip(names, bias.split(rows), strict=True):
            self._copy(f"{at}{name}.bias", into, by_head=by_head)
        return bias

    def _is_packed(self, name: str) -> bool:
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
            if self._is_packed(f"{at}{name}"):
                stored.append(self._stored(f"{at}{name}", n, length, has_bias))
            else:
                floats = self._empty(n, length)
                self._copy(f"{at}{name}.weight", floats, self._policy.transposed)
                apart.append(Linear(floats))
        bias = self._bias(at, names, rows, by_head) if has_bias else None
        if not apart and are_alike(stored):
            by_rows = self._rows_by_head(sum(rows)) if by_head else None
            whole = linear_of(stored, self._device, self._memory, by_rows)
            return replace(whole, bias=bias)
        waiting, floats_left = iter(stored), iter(apart)
        parts = [
            linear_of([next(waiting)], self._device, self._memory)
            if self._is_packed(f"{at}{name}")
            else next(floats_left)
            for name in names
        ]
        biases = [None] * len(rows) if bias is None else bias.split(rows)
        both = zip(parts, biases, strict=True)
        return Linear(Stack(tuple(replace(part, bias=its) for part, its in both)))

    def _stored(self, name: str, n: int, length: int, has_bias: bool) -> Stored:
        """Return the weight of one layer that comes quantized."""
        assert self._packed is not None
        there = [part for part in self._packed.parts if f"{name}.{part}" in self._names]
        tensors = {part: self._read(f"{name}.{part}", is_floats=False) for part in there}
        stored = self._packed.stored(name, tensors, length)
        if stored.layout.shape != (n, length):
            raise ValueError(
                f"init_inference: {name} has a quantized weight of shape"
                f" {list(stored.layout.shape)}, expected {[n, length]}"
            )
        bias = f"{name}.bias"
        if not has_bias and bias in self._names:  # packages write zeros for layers without one
            values = self._read(bias)
            if not values.is_meta:  # on CUDA nobody waits for it now
                self._biased[bias] = values.any()
        return stored

    def _rows_by_head(self, n: int) -> Tensor:
        """Return where the rows of queries, keys and values are that lie head by head."""
        rows = torch.arange(n, device="cpu").view(self._of.heads, 3, self._of.head_dim)
        return rows.transpose(0, 1).reshape(-1)

    def _single(self, name: str, n: int, length: int, has_bias: bool = False) -> Linear:
        """Return a layer that nothing quantizes, but that may come so."""
        if self._is_packed(name):
            return self._packed_linear("", (name,), (n,), length, has_bias)
        weight = self._tensor(f"{name}.weight", (n, length))
        return Linear(weight, self._tensor(f"{name}.bias", (n,)) if has_bias else None)

    def _projection(self, at: str, name: str | None, n: int, length: int) -> Linear | None:
        """Return what is between hidden states and embeddings, if these are not of one size."""
        return None if name is None or n == length else self._single(f"{at}{name}", n, length)

    def _norm(self, at: str, name: Or, n: int) -> NormWeights | None:
        name = value_of(name, self._config)
        if name is None:
            return None
        is_older = f"{at}{name}.gamma" in self._names  # as in older files of BERT
        kinds = ("gamma", "beta") if is_older else ("weight", "bias")
        weight = self._tensor(f"{at}{name}.{kinds[0]}", (n,))
        has_bias = self._policy.norm == "layer"
        bias = self._tensor(f"{at}{name}.{kinds[1]}", (n,)) if has_bias else None
        return NormWeights(weight, bias)

    def _head_norm(self, at: str, name: str | None) -> Tensor | None:
        return None if name is None else self._tensor(f"{at}{name}.weight", (self._of.head_dim,))

    def _table(self, at: str, name: str | None) -> Tensor | None:
        """Return a table of any number of hidden states."""
        if name is None:
            return None
        tensor = self._read(f"{at}{name}.weight")
        rows = len(tensor) if tensor.dim() > 0 else 0
        self._check_shape(f"{at}{name}.weight", tensor, (rows, self._of.hidden))
        return self._empty(rows, self._of.hidden).copy_(tensor)

    def _positions(self, at: str) -> Tensor | None:
        of, name = self._of, f"{at}{self._policy.names.positions}.weight"
        table = self._table(at, self._policy.names.positions)
        if table is None or of.position != "learned":
            return table
        before = of.position_offset if of.position_padding is None else of.position_padding + 1
        count = of.context if of.causal and of.context is not None else 1
        if len(table) < before + count:
            raise ValueError(
                f"init_inference: {name} has {len(table)} rows, expected {before + count} or more,"
                f" for {count} positions from row {before} on, as config says"
            )
        return table

    def _head(self, embedding: Tensor) -> Linear | None:
        names, config = self._policy.names.head, self._config
        if names is None:
            return None
        has_bias = value_of(self._policy.biases[3], config)
        name = next((n for n in names if self._is_packed(n)), None)
        if name is not None:
            return self._single(name, self._of.vocabulary, self._of.embedding, has_bias)
        name = next((n for n in names if f"{n}.weight" in self._names), names[0])
        bias = self._tensor(f"{name}.bias", (self._of.vocabulary,)) if has_bias else None
        is_tied = value_of(self._policy.tied, config)
        if is_tied and f"{name}.weight" not in self._names:
            return Linear(embedding, bias)
        shape, stays = (self._of.vocabulary, self._of.embedding), self._quantize_head is None
        weight = self._tensor(f"{name}.weight", shape, stays and not is_tied)
        if not is_tied:
            return Linear(weight, bias)
        bits = {2: torch.int16, 4: torch.int32}[weight.dtype.itemsize]
        if not weight.is_meta and not torch.equal(weight.view(bits), embedding.view(bits)):
            raise ValueError(
                f"init_inference: {name}.weight is other than"
                f" {self._prefix}{self._policy.names.embedding}.weight, expected the same, as"
                f" config ties them for model_type {config.get('model_type')!r}"
            )
        return Linear(embedding, bias)

    def _packed_head(self, head: Linear | None) -> Linear | None:
        if head is None or self._quantize_head is None:
            return head
        if not isinstance(head.weight, Tensor):
            raise ValueError(
                "init_inference: quantize_head is given, expected None, as the head comes quantized"
            )
        return replace(head, weight=self._quantize_head(head.weight))

    def _pooler(self, at: str) -> Linear | None:
        name, n = self._policy.names.pooler, self._of.hidden
        has = name is not None and f"{at}{name}.weight" in self._names
        if not has and not self._is_packed(f"{at}{name}"):
            return None
        return self._single(f"{at}{name}", n, n, has_bias=True)

    def _empty(self, *shape: int, stays: bool = True) -> Tensor:
        """Return a tensor to be filled; `stays` if the engine has it in the end."""
        if self._memory is not None and stays:
            return self._memory.empty(shape, self._dtype)
        return torch.empty(shape, device=self._device, dtype=self._dtype)

    def _tensor(self, name: str, shape: tuple[int, ...], stays: bool = True) -> Tensor:
        if name in self._own:
            given = self._read(name)
            self._check_shape(name, given, shape)
            if given.dtype == self._dtype and given.device == self._device:
                return given
            return self._empty(*shape, stays=stays).copy_(given)
        tensor = self._empty(*shape, stays=stays)
        self._copy(name, tensor)
        return tensor

    def _copy(
        self, name: str, into: Tensor, is_transposed: bool = False, by_head: bool = False
    ) -> None:
        """Copy a tensor to where it is to be, once."""
        tensor = self._read(name)
        shape = tuple(into.shape)
        self._check_shape(name, tensor, shape[::-1] if is_transposed else shape)
        tensor = tensor.t() if is_transposed else tensor
        if by_head:
            heads, width = self._of.heads, self._of.head_dim
            tensor = tensor.unflatten(0, (heads, 3, width)).transpose(0, 1)
            into = into.unflatten(0, (3, heads, width))
        into.copy_(tensor)

    def _read(self, name: str, is_floats: bool = True) -> Tensor:
        if name not in self._names:
            raise ValueError(
                f"init_inference: model has no tensor {name!r}, expected it for model_type"
                f" {self._config.get('model_type')!r}"
            )
        self._left.discard(name)
        tensor = self._tensors[name].detach()
        if is_floats and not tensor.is_floating_point():
            raise ValueError(f"init_inference: {name} has dtype {tensor.dtype}, expected floats")
        if tensor.is_meta and self._device.type != "meta":
            raise ValueError(f"init_inference: {name} is on meta, expected a tensor with elements")
        return tensor

    @staticmethod
    def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"init_inference: {name} has shape {list(tensor.shape)}, expected {list(shape)}"
            )

    def _check_left(self) -> None:
        for bias, is_one in self._biased.items():
            if bool(is_one):
                raise ValueError(
                    f"init_inference: model has {bias!r}, expected no tensor of this name for"
                    f" model_type {self._config.get('model_type')!r}, or zeros"
                )
        ignored = self._policy.names.ignored
        left = sorted(name for name in self._left if not any(part in name for part in ignored))
        if left:
            raise ValueError(
                f"init_inference: model has {left[0]!r}, expected no tensor of this name for"
                f" model_type {self._config.get('model_type')!r}"
            )
