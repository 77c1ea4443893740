"""The weights of a model in the form that blocks compute with, taken over layer by layer."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepspeed_ext.inference.model.architecture import Architecture
from deepspeed_ext.inference.model.policy import Config, Or, Policy, value_of
from deepspeed_ext.inference.weights.expert_taker import take_experts
from deepspeed_ext.inference.weights.experts import ExpertWeights
from deepspeed_ext.inference.weights.host_memory import WeightMemory
from deepspeed_ext.inference.weights.linear import Linear
from deepspeed_ext.inference.weights.linear_taker import LinearTaker, Quantize
from deepspeed_ext.inference.weights.packed_layers import PackedLayers


@dataclass(frozen=True)
class NormWeights:
    """What a norm multiplies by, and adds."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Layer:
    """The weights of one layer; see `Names` for what they are.

    Args:
        up: None where there are experts, as down is.
    """

    qkv: Linear
    out: Linear
    up: Linear | None
    down: Linear | None
    attention_norm: NormWeights | None
    mlp_norm: NormWeights | None
    attention_post_norm: NormWeights | None
    mlp_post_norm: NormWeights | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    experts: ExpertWeights | None


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
        keep: what becomes of each layer, before the next one is taken; None: it stays as it is.

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
        keep: Callable[[Layer], Layer] | None = None,
    ) -> None:
        self._policy, self._config, self._of = policy, policy.part_of(config), architecture
        self._quantize_head, self._keep = quantize_head, keep
        part = self._config
        given = tensors, device, dtype, quantize, memory, packed, own
        self._take = LinearTaker(policy, part, architecture, *given)
        names = policy.names
        found = [p for p in names.prefixes if f"{p}{names.embedding}.weight" in self._take.names]
        if not found:
            looked = " or ".join(f"{p}{names.embedding}.weight" for p in names.prefixes)
            ending = f"{names.embedding}.weight"
            near = min((name for name in self._take.names if name.endswith(ending)), default=None)
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
        embedding = self._take.tensor(f"{prefix}{names.embedding}.weight", shape)
        weights = Weights(
            embedding=embedding,
            positions=self._positions(prefix),
            token_types=self._table(prefix, names.token_types),
            embedding_norm=self._norm(prefix, names.embedding_norm, of.hidden),
            project_in=self._projection(prefix, names.project_in, of.hidden, of.embedding),
            layers=[self._layer(prefix + names.layer.format(i), i) for i in range(of.layers)],
            final_norm=self._norm(prefix, names.final_norm, of.hidden),
            project_out=self._projection(prefix, names.project_out, of.embedding, of.hidden),
            head=self._packed_head(self._head(embedding)),
            pooler=self._pooler(prefix),
        )
        self._take.check_left()
        return weights

    def _layer(self, at: str, i: int) -> Layer:
        names, of, take = self._policy.names, self._of, self._take
        qkv_bias, out_bias, mlp_bias, _ = (value_of(e, self._config) for e in self._policy.biases)
        parts = tuple(n * of.head_dim for n in (of.heads, of.kv_heads, of.kv_heads))
        wide = (of.intermediate,) * (2 if of.gated else 1)
        has_experts = of.experts is not None and of.experts.layers[i]
        of_norms = parts[:2] if of.whole_norms else (of.head_dim, of.head_dim)
        up = down = None
        qkv = take.linear(at, names.qkv, parts, of.hidden, qkv_bias, self._policy.qkv_by_head)
        out = take.linear(at, (names.out,), (of.hidden,), parts[0], out_bias)
        if not has_experts:
            up = take.linear(at, names.up, wide, of.hidden, mlp_bias)
            down = take.linear(at, (names.down,), (of.hidden,), of.intermediate, mlp_bias)
        layer = Layer(
            qkv,
            out,
            up,
            down,
            self._norm(at, names.attention_norm, of.hidden),
            self._norm(at, names.mlp_norm, of.hidden),
            self._norm(at, names.attention_post_norm, of.hidden),
            self._norm(at, names.mlp_post_norm, of.hidden),
            self._norm_of_heads(at, names.q_norm, of_norms[0]),
            self._norm_of_heads(at, names.k_norm, of_norms[1]),
            self._sinks(at, names.sinks),
            take_experts(take, at, self._policy.experts, of) if has_experts else None,
        )
        return layer if self._keep is None else self._keep(layer)

    def _projection(self, at: str, name: str | None, n: int, length: int) -> Linear | None:
        """Return what is between hidden states and embeddings, if these are not of one size."""
        return None if name is None or n == length else self._take.single(f"{at}{name}", n, length)

    def _norm(self, at: str, name: Or, n: int) -> NormWeights | None:
        name = value_of(name, self._config)
        if name is None:
            return None
        is_older = f"{at}{name}.gamma" in self._take.names  # as in older files of BERT
        kinds = ("gamma", "beta") if is_older else ("weight", "bias")
        weight = self._take.tensor(f"{at}{name}.{kinds[0]}", (n,))
        has_bias = self._policy.norm == "layer"
        bias = self._take.tensor(f"{at}{name}.{kinds[1]}", (n,)) if has_bias else None
        return NormWeights(weight, bias)

    def _norm_of_heads(self, at: str, name: str | None, n: int) -> Tensor | None:
        return None if name is None else self._take.tensor(f"{at}{name}.weight", (n,))

    def _sinks(self, at: str, name: str | None) -> Tensor | None:
        """Return the scores of sinks in float32, as attention takes them."""
        if name is None:
            return None
        return self._take.tensor(f"{at}{name}", (self._of.heads,)).float()

    def _table(self, at: str, name: str | None) -> Tensor | None:
        """Return a table of any number of hidden states."""
        if name is None:
            return None
        tensor = self._take.read(f"{at}{name}.weight")
        rows = len(tensor) if tensor.dim() > 0 else 0
        self._take.check_shape(f"{at}{name}.weight", tensor, (rows, self._of.hidden))
        return self._take.empty(rows, self._of.hidden).copy_(tensor)

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
        name = next((n for n in names if self._take.is_packed(n)), None)
        if name is not None:
            return self._take.single(name, self._of.vocabulary, self._of.embedding, has_bias)
        name = next((n for n in names if f"{n}.weight" in self._take.names), names[0])
        bias = self._take.tensor(f"{name}.bias", (self._of.vocabulary,)) if has_bias else None
        is_tied = value_of(self._policy.tied, config)
        if is_tied and f"{name}.weight" not in self._take.names:
            return Linear(embedding, bias)
        shape, stays = (self._of.vocabulary, self._of.embedding), self._quantize_head is None
        weight = self._take.tensor(f"{name}.weight", shape, stays and not is_tied)
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
        has = name is not None and f"{at}{name}.weight" in self._take.names
        if not has and not self._take.is_packed(f"{at}{name}"):
            return None
        return self._take.single(f"{at}{name}", n, n, has_bias=True)
