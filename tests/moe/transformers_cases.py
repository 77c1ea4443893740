"""Small models of transformers with experts, and experts in every layout, that tests share."""

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations import moe

VOCABULARY = 61
_COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
_DEEPSEEK = _COMMON | dict(
    moe_intermediate_size=20,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
    kv_lora_rank=8,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    n_group=2,
    topk_group=1,
)
_QWEN = _COMMON | dict(moe_intermediate_size=20, num_experts=6, num_experts_per_tok=3)
MODELS: dict[str, dict[str, Any]] = {  # by the prefix of transformers' classes
    "Mixtral": _COMMON | dict(num_local_experts=4),
    "Qwen2Moe": _QWEN | dict(shared_expert_intermediate_size=16),
    "Qwen3Moe": _QWEN | dict(head_dim=8, norm_topk_prob=True),
    "Olmoe": _COMMON | dict(num_experts=5, num_experts_per_tok=2),
    "DeepseekV2": _DEEPSEEK | dict(q_lora_rank=None, topk_method="group_limited_greedy"),
    "DeepseekV3": _DEEPSEEK | dict(q_lora_rank=8),
    "GptOss": _COMMON | dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8),
}


def model_of(family: str, device: str = "cpu", **options: Any) -> Any:
    """Return a random model, with weights that are large enough to matter."""
    config = getattr(transformers, f"{family}Config")(**MODELS[family], **options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval().to(device)


def exact(model: Any) -> Any:
    """Return a copy in float64, on the CPU, that transformers computes in its own loop."""
    made = copy.deepcopy(model).cpu().double()
    made.zero_grad()
    made.set_experts_implementation("eager")
    return made


def tokens(device: str = "cpu", length: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (2, length), generator=generator).to(device)


# What experts are made with: the flags of transformers' decorator, an activation, a gate.
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "transposed": dict(is_transposed=True),
    "biases": dict(has_bias=True),
    "interleaved": dict(
        is_concatenated=False, is_transposed=True, has_bias=True, gate=lambda x: x[..., ::2]
    ),
    "without gate": dict(has_gate=False, activation="relu2"),
    "post norm": dict(has_post_expert_norm=True),
    "another gate": dict(gate=lambda x: x.tanh().chunk(2, -1)[0]),
    **{name: dict(activation=name) for name in ("swish", "gelu", "gelu_new", "relu", "quick_gelu")},
    "an activation of its own": dict(activation="mish"),
}
KNOWN = set(inspect.signature(moe.use_experts_implementation).parameters)


def experts_of(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int, int] = (4, 24, 20),
    activation: str = "silu",
    gate: Any = None,
    **flags: Any,
) -> Any:
    """Return random experts that are computed with our ops.

    Args:
        sizes: how many they are, and their width outside and inside.
        activation: what transformers calls it.
        gate: of which the method of the class returns the results; None: transformers' own.
        flags: of transformers' decorator.
    """
    count, n, inner = sizes
    is_transposed, has_bias = flags.get("is_transposed"), flags.get("has_bias")
    first = "gate_up_proj" if flags.get("has_gate", True) else "up_proj"

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = count
            generator = torch.Generator().manual_seed(5)
            wide = inner * (1 + flags.get("has_gate", True))
            for name, out, length in ((first, wide, n), ("down_proj", n, inner)):
                shape = (count, length, out) if is_transposed else (count, out, length)
                made = {name: torch.randn(shape, generator=generator) * 0.3}
                if has_bias:
                    made[f"{name}_bias"] = torch.randn(count, out, generator=generator)
                for each, value in made.items():
                    self.register_parameter(each, nn.Parameter(value))
            self.act_fn = ACT2FN[activation]
            if flags.get("has_post_expert_norm"):
                self.post_expert_norm = nn.RMSNorm(n, eps=1e-5)

        if gate is not None:

            def _apply_gate(self, rows: Tensor) -> Tensor:
                return gate(rows)

        def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            """A token and a choice at a time."""
            found = []
            for token, chosen, factors in zip(hidden, indices.tolist(), weights, strict=True):
                total = token * 0
                for expert, factor in zip(chosen, factors, strict=True):
                    if 0 <= expert < count:
                        total = total + factor * self.one(expert, token)
                found.append(total)
            return torch.stack(found) if found else hidden * 0

        def one(self, expert: int, x: Tensor) -> Tensor:
            x = self.product(first, expert, x)
            x = self.act_fn(x) if first == "up_proj" else self._apply_gate(x)
            x = self.product("down_proj", expert, x)
            return self.post_expert_norm(x) if flags.get("has_post_expert_norm") else x

        def product(self, name: str, expert: int, x: Tensor) -> Tensor:
            weight = getattr(self, name)[expert]
            out = x @ (weight if is_transposed else weight.t())
            return out + getattr(self, f"{name}_bias")[expert] if has_bias else out

    config = SimpleNamespace(_experts_implementation="deepspeed_ext")
    return moe.use_experts_implementation(**flags)(Experts)(config).to(device, dtype)


def looped(experts: Any) -> Any:
    """Return a copy in float64, on the CPU, that goes through tokens and choices in a loop."""
    made = copy.deepcopy(experts).cpu().double()
    made.zero_grad()
    made.config._experts_implementation = "eager"
    return made
