"""Functions of older libraries by their names and arguments, each a line or two over ops.

What the builders' `load` returns has them: those of DeepSpeed's inference ops with the endings
_fp32, _fp16 and _bf16 too, which all are the same function, of whatever dtype its tensors are.
Nothing here keeps anything between calls: what DeepSpeed's have in one workspace of the process are
tensors of their own, and the cache of `softmax_context` is what its caller gives it. Gradients are
those of the ops; one of what is written in place is torch's, or an error in backward.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_ext import ops
from deepspeed_ext.ops._older_attention import (
    AttnMaskType as AttnMaskType,
    ColoAttention as ColoAttention,
    add_padding as add_padding,
    apply_rotary_pos_emb as apply_rotary_pos_emb,
    pad_transform as pad_transform,
    padded_width,
    softmax_context as softmax_context,
)

_ENDINGS = ("_fp32", "_fp16", "_bf16")


def __getattr__(name: str) -> Any:
    plain = name[:-5] if name.endswith(_ENDINGS) else ""
    if plain in globals():
        return globals()[plain]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Images


def nhwc_bias_add(activation: Tensor, bias: Tensor) -> Tensor:
    """Return activation + bias: ``ops.nhwc_bias_add``."""
    return ops.nhwc_bias_add(activation, bias)


def nhwc_bias_add_add(activation: Tensor, bias: Tensor, other: Tensor) -> Tensor:
    """Return (activation + bias) + other: ``ops.nhwc_bias_add``."""
    return ops.nhwc_bias_add(activation, bias, other)


def nhwc_bias_add_bias_add(
    activation: Tensor, bias: Tensor, other: Tensor, other_bias: Tensor
) -> Tensor:
    """Return (activation + bias) + (other + other_bias): ``ops.nhwc_bias_add``."""
    return ops.nhwc_bias_add(activation, bias, other, other_bias)


# Sums and activations


def residual_add_bias(
    hidden_state: Tensor,
    residual: Tensor,
    attention_output: Tensor,
    attention_bias: Tensor,
    final_bias: Tensor,
    mp_size: int,
    mlp_after_attn: bool,
    add_bias: bool,
    preln: bool,
) -> Tensor:
    """Write the sum at the end of a layer into residual, and return it.

    Arithmetic is in float32, or float64 if residual is of it, and rounds once.

    Args:
        hidden_state: (..., n), of the feed-forward part, without its bias.
        residual: of the same shape, as is attention_output; written.
        attention_output: without its bias.
        attention_bias: (n,).
        final_bias: (n,), of the feed-forward part.
        mp_size: processes, of which each gives its part of what is summed up over them.
        mlp_after_attn: (residual + attention_output + both biases) / mp_size + hidden_state with
            preln; without, residual + hidden_state + final_bias. If False, as in GPT-J:
            hidden_state + attention_output + (residual + final_bias) / mp_size.
        add_bias: of GPT-J's form, attention_bias is added to final_bias.
        preln: see mlp_after_attn.
    """
    wide = torch.promote_types(residual.dtype, torch.float32)
    hidden, rest, attended = (t.to(wide) for t in (hidden_state, residual, attention_output))
    if mlp_after_attn and not preln:
        return residual.copy_(rest + hidden + final_bias.to(wide))
    if mlp_after_attn:
        biased = rest + attended + final_bias.to(wide) + attention_bias.to(wide)
        return residual.copy_(biased / mp_size + hidden)
    bias = final_bias.to(wide) + (attention_bias.to(wide) if add_bias else 0.0)
    return residual.copy_(hidden + attended + (rest + bias) / mp_size)


def bias_residual(input: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
    """Write input + bias + residual into input, and return it; theirs leaves it as it is."""
    return input.copy_(_rows_biased(input, bias, residual))


def bias_add(input: Tensor, bias: Tensor) -> Tensor:
    """Write input + bias into input, and return it."""
    return input.copy_(_rows_biased(input, bias))


def bias_gelu(input: Tensor, bias: Tensor) -> Tensor:
    """Write gelu(input + bias) into input, and return it; gelu is the one by tanh."""
    return input.copy_(ops.bias_activation(input, bias, activation="gelu_tanh"))


def bias_relu(input: Tensor, bias: Tensor) -> Tensor:
    """Write relu(input + bias) into input, and return it."""
    return input.copy_(ops.bias_activation(input, bias, activation="relu"))


def bias_geglu(activation: Tensor, bias: Tensor) -> Tensor:
    """Return (a + its bias) x gelu(g + its bias) of a and g, the halves of rows; the exact gelu."""
    biased = activation.float() + bias.float()
    return ops.gated_activation(biased, activation="gelu", gate_last=True).to(activation.dtype)


def _rows_biased(input: Tensor, bias: Tensor, other: Tensor | None = None) -> Tensor:
    """Return sums along the last dimension, whatever the number of dimensions is."""
    n = input.shape[-1]
    rows = None if other is None else other.reshape(-1, n)
    return ops.nhwc_bias_add(input.reshape(-1, n), bias, rows).view(input.shape)


# Norms


def layer_norm(input: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> Tensor:
    """Return the layer norm of each row: ``ops.layer_norm``."""
    return ops.layer_norm(input, gamma, beta, eps=epsilon)


def layer_norm_residual_store_pre_ln_res(
    input: Tensor, bias: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor, epsilon: float
) -> list[Tensor]:
    """Return the layer norm of input + bias + residual, and the sum: ``ops.layer_norm``."""
    return [*ops.layer_norm(input, gamma, beta, residual=residual, x_bias=bias, eps=epsilon)]


def _layer_norm_residual(
    input: Tensor, bias: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor, epsilon: float
) -> Tensor:
    """Return the layer norm of input + bias + residual."""
    return layer_norm_residual_store_pre_ln_res(input, bias, residual, gamma, beta, epsilon)[0]


# Products. A weight is (in, out); transposed, or of 8 bits, (out, in).


def _weight(
    weight: Tensor, scale: Tensor, q_int8: bool, transposed_mode: bool, like: Tensor
) -> Tensor:
    """Return a weight as (out, in), also one of codes, of which a group has a scale."""
    if not q_int8:
        return weight if transposed_mode else weight.t()
    scales = scale.reshape(scale.shape[0], -1)[:, :1].float()
    groups = weight.reshape(len(scales), -1).float() * scales
    return groups.view(weight.shape).to(like.dtype)


def vector_matmul(
    input: Tensor,
    weight: Tensor,
    async_op: bool = False,
    q_scale: Tensor | None = None,
    q_int8: bool = False,
    transposed_mode: bool = False,
) -> Tensor:
    """Return input x weight.

    Args:
        input: (..., in).
        weight: (in, out); (out, in) with transposed_mode or q_int8.
        async_op: taken for code that gives it.
        q_scale: of q_int8, (groups, ...): the first of each row is what codes of a group, which
            are in the order of memory, are multiplied by.
        q_int8: whether the weight is of codes of 8 bits.
        transposed_mode: see weight.
    """
    scale = weight.new_ones(1) if q_scale is None else q_scale
    return F.linear(input, _weight(weight, scale, q_int8, transposed_mode, input))


def linear_layer(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    add_bias: bool,
    do_flash_attn: bool,
    num_heads: int,
    transposed_mode: bool = False,
) -> Tensor:
    """Return input x weight, and the bias added to it.

    Args:
        input: (..., in).
        weight: (in, out); (out, in) with transposed_mode.
        bias: (out,).
        add_bias: False: without the bias.
        do_flash_attn: return q, k and v, (3, batch, heads, tokens, width), with zeros behind a head
            up to a width of 32, 64 or 128.
        num_heads: of these.
        transposed_mode: see weight.
    """
    out = F.linear(input, weight if transposed_mode else weight.t(), bias if add_bias else None)
    if not do_flash_attn:
        return out
    heads = out.view(*out.shape[:2], 3, num_heads, -1).permute(2, 0, 3, 1, 4)
    return F.pad(heads, (0, padded_width(heads.shape[-1]) - heads.shape[-1])).contiguous()


def qkv_gemm(
    input: Tensor,
    weight: Tensor,
    q_scale: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
    add_bias: bool,
    num_layers: int = 1,
    external_cache: bool = False,
    mp_size: int = 1,
    rank: int = 0,
    q_int8: bool = False,
    transposed_mode: bool = False,
) -> list[Tensor]:
    """Return norm(input) x weight, and the bias added to it; and norm(input), of layer_norm.

    Args:
        input: (..., in).
        weight, q_scale, q_int8, transposed_mode: see ``vector_matmul``.
        bias: (out,), if add_bias.
        gamma, beta, epsilon: of the norm.
        num_layers, external_cache, mp_size, rank: taken for code that gives them.
    """
    normed = ops.layer_norm(input, gamma, beta, eps=epsilon)
    whole = _weight(weight, q_scale, q_int8, transposed_mode, input)
    return [F.linear(normed, whole, bias if add_bias else None), normed]


def mlp_gemm(
    input: Tensor,
    residual: Tensor,
    input_bias: Tensor,
    weight_interm: Tensor,
    weight_out: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
    pre_layer_norm: bool,
    mlp_after_attn: bool,
    interm_scale: Tensor,
    out_scale: Tensor,
    q_int8: bool,
    activation_func_type: int,
    transposed_mode: bool = False,
) -> list[Tensor]:
    """Return the feed-forward part of a layer, without the last bias, and the norm before it.

    Args:
        input: (..., n), of attention, without its bias.
        residual: of its shape.
        input_bias: (n,).
        weight_interm, weight_out: see ``vector_matmul``.
        bias: of the first product.
        gamma, beta, epsilon: of the norm.
        pre_layer_norm: taken for code that gives it.
        mlp_after_attn: the norm is of input + residual + input_bias; else of residual.
        interm_scale, out_scale: of the weights, if q_int8.
        q_int8: see ``vector_matmul``.
        activation_func_type: 1: gelu by tanh; 2: relu.
        transposed_mode: see ``vector_matmul``.

    Raises:
        ValueError: activation_func_type is another one.
    """
    names = {1: "gelu_tanh", 2: "relu"}
    if activation_func_type not in names:
        raise ValueError(
            f"mlp_gemm: activation_func_type is {activation_func_type}, expected 1 or 2"
        )
    if mlp_after_attn:
        normed = _layer_norm_residual(input, input_bias, residual, gamma, beta, epsilon)
    else:
        normed = ops.layer_norm(residual, gamma, beta, eps=epsilon)
    up = F.linear(normed, _weight(weight_interm, interm_scale, q_int8, transposed_mode, normed))
    active = ops.bias_activation(up, bias, activation=names[activation_func_type])
    down = _weight(weight_out, out_scale, q_int8, transposed_mode, normed)
    return [F.linear(active, down), normed]


def fused_gemm_gelu(
    input: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    weight_out: Tensor,
    weight_out_scale: Tensor,
    epsilon: float = 0.0,
    pre_layer_norm: bool = True,
    q_int8: bool = False,
    async_op: bool = False,
    transposed_mode: bool = False,
) -> Tensor:
    """Return gelu(input x weight + bias) x weight_out; gelu is the one by tanh.

    Args:
        input: (..., in).
        weight, weight_scale, weight_out, weight_out_scale, q_int8, transposed_mode: see
            ``vector_matmul``.
        bias: of the first product.
        epsilon, pre_layer_norm, async_op: taken for code that gives them.
    """
    up = F.linear(input, _weight(weight, weight_scale, q_int8, transposed_mode, input))
    active = ops.bias_activation(up, bias, activation="gelu_tanh")
    return F.linear(active, _weight(weight_out, weight_out_scale, q_int8, transposed_mode, input))


# The workspace of DeepSpeed's process, which is not there


def allocate_workspace(*sizes: Any) -> bool:
    """Do nothing, as results are tensors of their own; True, as there is no lack of it."""
    return True


def release_workspace() -> None:
    """Do nothing: there is no workspace."""


def retake_workspace() -> bool:
    """Do nothing: there is no workspace; True, as there is no lack of it."""
    return True


def reset_cache() -> None:
    """Do nothing: a caller that begins anew gives ``softmax_context`` no past."""
