"""An encoder: from the tokens of whole texts to their hidden states."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed_ext.inference.execution.varlen_batch import Limits, Part
from deepspeed_ext.inference.model.architecture import Architecture
from deepspeed_ext.inference.weights.linear import Linear
from deepspeed_ext.inference.weights.loader import Layer, NormWeights, Weights
from deepspeed_ext.ops import bias_activation, gated_activation, layer_norm, rms_norm

_FEW_ROWS = 8  # on the CPU, of more than these torch's multiplications are faster
_16_BITS = (torch.bfloat16, torch.float16)


class Encoder:
    """All layers of a model whose tokens see one another in both directions.

    It works on tokens, (n, hidden), of texts one behind another: padding is not computed with.

    Args:
        architecture: of the model.
        weights: of the model.

    Raises:
        ValueError: an encoder cannot do what the architecture says.
    """

    def __init__(self, architecture: Architecture, weights: Weights) -> None:
        _check(architecture, weights)
        self.of, self.weights = architecture, weights
        types, positions = weights.token_types, weights.positions
        self.limits = Limits(
            tokens=architecture.vocabulary,
            types=1 if types is None else len(types),
            positions=None if positions is None else len(positions),
            offset=architecture.position_offset,
            padding=architecture.position_padding,
        )

    def hidden(self, part: Part) -> Tensor:
        """Return the last hidden states of tokens, (n, hidden)."""
        x = self.embedded(part)
        for layer in self.weights.layers:
            x = self.block(layer, x, part)
        return x

    def pooled(self, firsts: Tensor) -> Tensor | None:
        """Return what the model makes of the hidden states of first tokens, or None.

        Args:
            firsts: (texts, hidden).

        Returns:
            (texts, hidden).
        """
        pooler = self.weights.pooler
        return None if pooler is None else pooler(firsts).tanh()

    def embedded(self, part: Part) -> Tensor:
        """Return what goes into the first layer, (n, hidden).

        It is a sum that is rounded to float32 only, before it is normalized.
        """
        weights = self.weights
        x = F.embedding(part.tokens, weights.embedding)
        others = []
        if weights.positions is not None:
            others.append(F.embedding(part.positions, weights.positions).float())
        if weights.token_types is not None:
            others.append(F.embedding(part.types, weights.token_types).float())
        return self._sum(x, sum(others[1:], others[0]) if others else None, weights.embedding_norm)

    def block(self, layer: Layer, x: Tensor, part: Part) -> Tensor:
        """Return what a layer makes of hidden states, (n, hidden)."""
        of = self.of
        mixed = self._attention(_linear(layer.qkv, x), part)
        x = self._sum(_linear(layer.out, mixed), x, layer.attention_norm)
        assert layer.up is not None and layer.down is not None, "no encoder has experts"
        wide = _linear(layer.up, x, of.activation, of.gated)
        return self._sum(_linear(layer.down, wide), x, layer.mlp_norm)

    def _attention(self, qkv: Tensor, part: Part) -> Tensor:
        """Let the tokens of each text see one another; (n, heads * head_dim)."""
        of = self.of
        heads = qkv.view(len(qkv), of.heads + 2 * of.kv_heads, of.head_dim)
        if self._has_varlen_kernel(qkv) and len(part.groups) > 1:
            return self._attention_at_once(heads, part)
        mixed, begin = [], 0
        for texts, length in part.groups:
            end = begin + texts * length
            group = heads[begin:end].view(texts, length, -1, of.head_dim).transpose(1, 2)
            q, k, v = group.split((of.heads, of.kv_heads, of.kv_heads), 1)
            found = F.scaled_dot_product_attention(
                q, k, v, scale=of.attention_scale, enable_gqa=of.heads != of.kv_heads
            )
            mixed.append(found.transpose(1, 2).reshape(texts * length, -1))
            begin = end
        return torch.cat(mixed) if len(mixed) > 1 else mixed[0]

    def _has_varlen_kernel(self, qkv: Tensor) -> bool:
        """Tell whether torch has a kernel for texts of different lengths."""
        of = self.of
        return (
            qkv.is_cuda
            and qkv.dtype in _16_BITS
            and of.heads == of.kv_heads
            and of.head_dim % 8 == 0
            and of.head_dim <= 256
            and math.isclose(of.attention_scale, of.head_dim**-0.5)
            and torch.cuda.get_device_capability(qkv.device) >= (8, 0)
        )

    def _attention_at_once(self, heads: Tensor, part: Part) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = heads.split(self.of.heads, 1)
        longest = part.groups[-1][1]
        out = varlen_attn(q, k, v, part.ends, part.ends, longest, longest)
        assert isinstance(out, Tensor)
        return out.reshape(len(heads), -1)

    def _sum(self, x: Tensor, residual: Tensor | None, norm: NormWeights | None) -> Tensor:
        """Return the norm of a sum, in one pass."""
        if norm is None:
            return x if residual is None else (x + residual).to(x.dtype)
        of = self.of
        if of.norm == "rms":
            out = rms_norm(
                x,
                norm.weight,
                residual=residual,
                return_sum=False,
                eps=of.eps,
                weight_offset=of.norm_offset,
            )
        else:
            out = layer_norm(
                x,
                norm.weight,
                norm.bias,
                residual=residual,
                return_sum=False,
                eps=of.eps,
                weight_offset=of.norm_offset,
            )
        assert isinstance(out, Tensor)
        return out


def _linear(
    linear: Linear, x: Tensor, activation: str | None = None, gated: bool = False
) -> Tensor:
    """Return activation(x @ weight.T + bias) in the fastest way, as no bits are promised."""
    weight, bias = linear.weight, linear.bias
    if x.is_cuda or len(x) <= _FEW_ROWS or not isinstance(weight, Tensor):
        return linear(x, activation=activation, gated=gated)
    if activation is None:
        return F.linear(x, weight, bias)
    if gated:
        return gated_activation(F.linear(x, weight, bias), activation=activation)
    return bias_activation(F.linear(x, weight), bias, activation=activation)


def _check(of: Architecture, weights: Weights) -> None:
    """Refuse what encoders do not do."""
    only: dict[str, tuple[object, object]] = {
        "norm_place": (of.norm_place, "after"),
        "position": (of.position, "none" if weights.positions is None else "learned"),
        "parallel": (of.parallel, False),
        "softcap": (of.softcap, 0.0),
        "embedding_scale": (of.embedding_scale, 1.0),
        "windows": (max(of.windows), 0),
    }
    for name, (value, wanted) in only.items():
        if value != wanted:
            raise ValueError(
                f"init_inference: {name} is {value!r}, expected {wanted!r} of an encoder"
            )
