"""Experts of transformers' models, computed with our ops.

Transformers keeps all experts of a layer in one tensor for each matrix, and looks up what computes
them in a table, by a name in the model's configuration. Here is one more entry of that table. How
the tensors lie is told by flags that the experts carry, so nothing here knows one model from
another.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepspeed_ext import ops
from deepspeed_ext.dtensors import is_dtensor
from deepspeed_ext.dtypes import DTYPES

_NAME = "deepspeed_ext"
_GATE = "_apply_gate"  # the method of experts; private, and their protocol
_FLAGS = ("has_bias", "is_transposed")  # that all versions have; more came later
_ACTIVATIONS = {  # of configurations, as our ops name them
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def register_with_transformers() -> None:
    """Let transformers' models compute their experts with our ops.

    After it, ``model.set_experts_implementation("deepspeed_ext")`` does so for a model, as
    ``experts_implementation="deepspeed_ext"`` of ``from_pretrained`` does, and any other name goes
    back. Nothing else changes: parameters, checkpoints and routers are the model's own. Calling
    this again changes nothing.

    Experts are those of transformers 5 that can be switched at all: Mixtral, Qwen 2 and 3 MoE,
    OLMoE, DeepSeek V2 and V3, gpt-oss and others, with gates or without, with biases, transposed
    or not, in training and in inference, in float32, bfloat16 and float16. No token is dropped.
    Choices of experts that are elsewhere, which have the number of experts here, add nothing and
    have no gradient. What a token gets is added up in float32 and rounded once, and the same
    arguments give the same bits, in gradients too. The host never waits for CUDA, and a model can
    be compiled into one graph.

    Under autocast the products are in its dtype, as those of linear layers are; else in that of
    the weights, which hidden states are cast to. The results have the dtype of the hidden states.

    Raises:
        ImportError: transformers is not installed, or has no such table: it is older than 5.
    """
    import transformers

    if find_spec("transformers.integrations.moe") is None:
        raise ImportError(
            f"register_with_transformers: transformers is {transformers.__version__}, expected 5 or"
            " newer"
        )
    from transformers.integrations import moe

    moe.ALL_EXPERTS_FUNCTIONS.register(_NAME, experts_forward())


def experts_forward() -> Callable[..., Tensor]:
    """Return what computes experts; it takes them, hidden states, and experts and weights of each.

    Transformers 5 is there.
    """
    from transformers.integrations import moe

    without_gate: Any = type("Experts", (nn.Module,), {})
    gate = getattr(moe.use_experts_implementation(without_gate), _GATE)
    return partial(_forward, _Known(gate=gate, activations=known_activations()))


def known_activations() -> dict[type, str]:
    """Return what our ops call the activation of each class of transformers' that they know."""
    from transformers.activations import ACT2FN

    return {type(ACT2FN[theirs]): ours for theirs, ours in _ACTIVATIONS.items()}


class _Known(NamedTuple):
    """What of transformers' our ops compute in its place.

    Args:
        gate: the method that experts get which have none of their own.
        activations: what our ops call the activation of a class.
    """

    gate: Callable[..., Tensor]
    activations: Mapping[type, str]


def _forward(
    known: _Known,
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Return for each token the sum of what its experts make of it, by their weights.

    Args:
        known: see there.
        experts: those of one layer.
        hidden_states: (tokens, n).
        top_k_index: (tokens, k), the experts of each token.
        top_k_weights: (tokens, k).
    """
    _check_flags(known, experts)
    has_gate = getattr(experts, "has_gate", True)
    up, up_bias = _matrix(experts, "gate_up_proj" if has_gate else "up_proj")
    down, down_bias = _matrix(experts, "down_proj")
    activation = _activation(known, experts) if has_gate else None
    routing = ops.moe_assign(top_k_index.long(), top_k_weights, up.shape[0])
    rows = ops.grouped_linear(
        hidden_states.to(up.dtype),
        up,
        routing.offsets,
        up_bias,
        slots=routing.slots,
        activation=activation,
        gated=activation is not None,
    )
    if activation is None:
        rows = getattr(experts, _GATE)(rows) if has_gate else experts.act_fn(rows)
    rows = ops.grouped_linear(rows.to(down.dtype), down, routing.offsets, down_bias)
    if getattr(experts, "has_post_expert_norm", False):
        rows = experts.post_expert_norm(rows)
    return ops.moe_unpermute(rows, routing).to(hidden_states.dtype)


def _check_flags(known: _Known, experts: nn.Module) -> None:
    for flag in _FLAGS:
        if not hasattr(experts, flag):
            raise TypeError(
                f"{_name_of(experts)}: {flag} is missing, expected a class made with transformers'"
                " use_experts_implementation"
            )
    if not getattr(experts, "is_concatenated", True) and _has_default_gate(known, experts):
        raise ValueError(
            f"{_name_of(experts)}: is_concatenated is False, expected True, or an _apply_gate of"
            " its own: the one of transformers takes gates for the first half of each row"
        )


def _matrix(experts: Any, name: str) -> tuple[Tensor, Tensor | None]:
    """Return the weights of all experts, (experts, out, in), and their biases."""
    weight = _tensor(experts, name, 3)
    bias = _tensor(experts, f"{name}_bias", 2) if experts.has_bias else None
    return weight.transpose(1, 2) if experts.is_transposed else weight, bias


def _tensor(experts: Any, name: str, dimensions: int) -> Tensor:
    """Return a parameter in the dtype of the products.

    It is read once: where an adapter is laid over it, each look computes it anew.
    """
    found = getattr(experts, name, None)
    what = f"{_name_of(experts)}: {name}"
    if not isinstance(found, Tensor):
        raise TypeError(f"{what} is {type(found).__name__}, expected a tensor of all experts")
    if is_dtensor(found):
        raise ValueError(f"{what} is a DTensor, expected what is here of it, or all of it")
    if found.dtype not in DTYPES:
        raise ValueError(
            f"{what} is {str(found.dtype).removeprefix('torch.')}, expected float32, bfloat16 or"
            " float16"
        )
    if found.dim() != dimensions:
        raise ValueError(f"{what} has shape {list(found.shape)}, expected {dimensions} dimensions")
    return found.to(_product_dtype(found))


def _product_dtype(weight: Tensor) -> torch.dtype:
    device = weight.device.type
    if weight.is_meta or not torch.is_autocast_enabled(device):
        return weight.dtype
    return torch.get_autocast_dtype(device)


def _activation(known: _Known, experts: Any) -> str | None:
    """Return the activation of the gates, if there is nothing more to them and our ops know it."""
    if not _has_default_gate(known, experts):
        return None
    return known.activations.get(type(experts.act_fn))


def _has_default_gate(known: _Known, experts: Any) -> bool:
    # Not of the bound method: torch.compile says that it has no function.
    is_of_class = _GATE not in vars(experts)
    return is_of_class and getattr(type(experts), _GATE, None) is known.gate


def _name_of(experts: nn.Module) -> str:
    return type(experts).__name__
