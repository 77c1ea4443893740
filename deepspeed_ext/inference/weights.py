"""The weights of a model in the form that blocks compute with, taken over layer by layer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_ext.inference.architecture import Architecture
from deepspeed_ext.inference.policy import Config, Policy, value_of
from deepspeed_ext.ops import PackedWeight, quantized_linear, skinny_linear


@dataclass(frozen=True)
class Linear:
    """x @ weight.T + bias, with the weight as floats or in few bits.

    Args:
        weight: (out, in), or what ``pack_weight`` returned for it.
        bias: (out,), or None.
        activations: as of ``quantized_linear``.
    """

    weight: Tensor | PackedWeight
    bias: Tensor | None = None
    activations: str | None = None

    def __call__(
        self,
        x: Tensor,
        *,
        activation: str | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return residual + activation(x @ weight.T + bias)."""
        if isinstance(self.weight, PackedWeight):
            return quantized_linear(
                x,
                self.weight,
                self.bias,
                activation=activation,
                gated=gated,
                residual=residual,
                activations=self.activations,
            )
        return skinny_linear(
            x, self.weight, self.bias, activation=activation, gated=gated, residual=residual
        )


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
    layers: list[Layer]
    final_norm: NormWeights | None
    head: Linear | None
    pooler: Linear | None


Quantize = Callable[[Tensor], Tensor | PackedWeight]


class Taker:
    """Takes tensors out of a state dict by the names of a table, and notes which are left.

    Args:
        policy: has the table.
        config: of the model.
        architecture: likewise.
        tensors: of the model; each is read once, when it is needed.
        device: where they are to be.
        dtype: what they are to be.
        quantize: what becomes of the weights of linear layers in blocks.
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
    ) -> None:
        self._policy, self._config, self._of = policy, config, architecture
        self._tensors, self._device, self._dtype = tensors, device, dtype
        self._quantize = quantize
        self._left = set(tensors)
        names = policy.names
        found = [p for p in names.prefixes if f"{p}{names.embedding}.weight" in tensors]
        if not found:
            looked = " or ".join(f"{p}{names.embedding}.weight" for p in names.prefixes)
            raise ValueError(
                f"init_inference: model has no tensor {looked}, expected it for model_type"
                f" {config.get('model_type')!r}"
            )
        self._prefix = found[0]

    def take(self) -> Weights:
        """Return all weights.

        Raises:
            ValueError: a tensor is missing, is left over, or has a shape that does not fit.
        """
        names, of = self._policy.names, self._of
        prefix = self._prefix
        embedding = self._tensor(f"{prefix}{names.embedding}.weight", (of.vocabulary, of.hidden))
        layers = [self._layer(prefix + names.layer.format(i)) for i in range(of.layers)]
        weights = Weights(
            embedding,
            self._optional(prefix, names.positions),
            self._optional(prefix, names.token_types),
            self._norm(prefix, names.embedding_norm, of.hidden),
            layers,
            self._norm(prefix, names.final_norm, of.hidden),
            self._head(embedding),
            self._pooler(prefix),
        )
        self._check_left()
        return weights

    def _layer(self, at: str) -> Layer:
        names, of = self._policy.names, self._of
        qkv_bias, out_bias, mlp_bias, _ = (value_of(e, self._config) for e in self._policy.biases)
        heads = of.heads, of.kv_heads, of.kv_heads
        parts = [n * of.head_dim for n in heads]
        wide = of.intermediate * (2 if of.gated else 1)
        return Layer(
            self._linear(at, names.qkv, sum(parts), of.hidden, qkv_bias),
            self._linear(at, (names.out,), of.hidden, of.heads * of.head_dim, out_bias),
            self._linear(at, names.up, wide, of.hidden, mlp_bias),
            self._linear(at, (names.down,), of.hidden, of.intermediate, mlp_bias),
            self._norm(at, names.attention_norm, of.hidden),
            self._norm(at, names.mlp_norm, of.hidden),
            self._norm(at, names.attention_post_norm, of.hidden),
            self._norm(at, names.mlp_post_norm, of.hidden),
            self._head_norm(at, names.q_norm),
            self._head_norm(at, names.k_norm),
        )

    def _linear(self, at: str, names: tuple[str, ...], n: int, length: int, bias: bool) -> Linear:
        """Return one layer of what may be several, one below the other."""
        weights = [self._read(f"{at}{name}.weight") for name in names]
        if self._policy.transposed:
            weights = [weight.t() for weight in weights]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self._check_shape(at + names[0], weight, (n, length))
        biases = [self._read(f"{at}{name}.bias") for name in names] if bias else []
        weight = weight.to(self._device, self._dtype, copy=len(weights) == 1).contiguous()
        packed = weight if self._quantize is None else self._quantize(weight)
        return Linear(packed, torch.cat(biases).to(self._device, self._dtype) if bias else None)

    def _norm(self, at: str, name: str | None, n: int) -> NormWeights | None:
        if name is None:
            return None
        weight = self._tensor(f"{at}{name}.weight", (n,))
        has_bias = self._policy.norm == "layer"
        return NormWeights(weight, self._tensor(f"{at}{name}.bias", (n,)) if has_bias else None)

    def _head_norm(self, at: str, name: str | None) -> Tensor | None:
        return None if name is None else self._tensor(f"{at}{name}.weight", (self._of.head_dim,))

    def _optional(self, at: str, name: str | None) -> Tensor | None:
        if name is None:
            return None
        return self._read(f"{at}{name}.weight").to(self._device, self._dtype, copy=True)

    def _head(self, embedding: Tensor) -> Linear | None:
        name, of = self._policy.names.head, self._of
        if name is None:
            return None
        has_bias = value_of(self._policy.biases[3], self._config)
        bias = self._tensor(f"{name}.bias", (of.vocabulary,)) if has_bias else None
        if f"{name}.weight" not in self._tensors:
            return Linear(embedding, bias)
        weight = self._tensor(f"{name}.weight", (of.vocabulary, of.hidden))
        is_tied = bool(self._config.get("tie_word_embeddings"))
        return Linear(embedding if is_tied else weight, bias)

    def _pooler(self, prefix: str) -> Linear | None:
        name, n = self._policy.names.pooler, self._of.hidden
        if name is None or f"{prefix}{name}.weight" not in self._tensors:
            return None
        weight = self._tensor(f"{prefix}{name}.weight", (n, n))
        return Linear(weight, self._tensor(f"{prefix}{name}.bias", (n,)))

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._read(name)
        self._check_shape(name, tensor, shape)
        return tensor.to(self._device, self._dtype, copy=True)

    def _read(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ValueError(
                f"init_inference: model has no tensor {name!r}, expected it for model_type"
                f" {self._config.get('model_type')!r}"
            )
        self._left.discard(name)
        return self._tensors[name].detach()

    @staticmethod
    def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"init_inference: {name} has shape {list(tensor.shape)}, expected {list(shape)}"
            )

    def _check_left(self) -> None:
        names = self._policy.names
        left = sorted(
            name
            for name in self._left
            if not name.endswith(names.ignored) and not name.startswith(names.ignored_heads)
        )
        if left:
            raise ValueError(
                f"init_inference: model has {left[0]!r}, expected no tensor of this name for"
                f" model_type {self._config.get('model_type')!r}"
            )
