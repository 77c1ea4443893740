"""Small models of each family of decoders with random weights, and what they compute exactly."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from deepspeed_ext.inference import KVCache
from deepspeed_ext.inference.execution.decoder import Decoder
from deepspeed_ext.inference.model.architecture import architecture_of
from deepspeed_ext.inference.model.policies import policy_of
from deepspeed_ext.inference.model.policy import Config
from deepspeed_ext.inference.weights.loader import Taker

VOCABULARY = 97
EXPERTS = 6
_COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=256,
)
_GROUPED = _COMMON | dict(num_key_value_heads=2, intermediate_size=96)
_EXPERTS = _GROUPED | dict(num_experts=EXPERTS, num_experts_per_tok=3, moe_intermediate_size=40)
_GEMMA = _GROUPED | dict(
    hidden_size=60,  # of which the root is no number of 16 bits
    head_dim=24,
    query_pre_attn_scalar=30,
    sliding_window=16,
)
_LLAMA3 = dict(
    rope_type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)

# Of each case the prefix of transformers' classes, and arguments of its configuration.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GROUPED | dict(attention_bias=True, mlp_bias=True)),
    "llama-llama3": ("Llama", _GROUPED | dict(rope_parameters=_LLAMA3 | dict(rope_theta=5e5))),
    "llama-linear": (
        "Llama",
        _GROUPED | dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)),
    ),
    "mistral": ("Mistral", _GROUPED | dict(sliding_window=16)),
    "qwen2": (
        "Qwen2",
        _GROUPED | dict(use_sliding_window=True, sliding_window=16, max_window_layers=1),
    ),
    "qwen3": (
        "Qwen3",
        _GROUPED | dict(head_dim=24, rope_parameters=_YARN | dict(rope_theta=1e6)),
    ),
    "gemma2": ("Gemma2", _GEMMA),
    "gemma3": ("Gemma3", _GEMMA | dict(sliding_window_pattern=3)),
    "gemma3-with-images": (
        "Gemma3Images",
        dict(
            text_config=_GEMMA | dict(sliding_window_pattern=3),
            vision_config=dict(
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                image_size=28,
                patch_size=14,
            ),
            mm_tokens_per_image=4,
            image_token_index=VOCABULARY - 1,
        ),
    ),
    "phi": ("Phi", _COMMON | dict(intermediate_size=96)),
    "phi3": ("Phi3", _GROUPED | dict(pad_token_id=0)),
    "gpt2": (
        "GPT2",
        dict(vocab_size=VOCABULARY, n_embd=51, n_layer=3, n_head=3, n_positions=256),
    ),
    "gpt_neox": ("GPTNeoX", _COMMON | dict(intermediate_size=96)),
    "gpt_neox-one-by-one": (
        "GPTNeoX",
        _COMMON | dict(intermediate_size=96, use_parallel_residual=False),
    ),
    "opt": ("OPT", _COMMON | dict(ffn_dim=96)),
    "opt-norms-after": (
        "OPT",
        _COMMON | dict(ffn_dim=96, do_layer_norm_before=False, word_embed_proj_dim=48),
    ),
    "bloom": (
        "Bloom",
        dict(vocab_size=VOCABULARY, hidden_size=66, n_layer=3, n_head=6),
    ),
    "mixtral": ("Mixtral", _GROUPED | dict(num_local_experts=EXPERTS, sliding_window=16)),
    "qwen2_moe": (
        "Qwen2Moe",
        _EXPERTS
        | dict(
            shared_expert_intermediate_size=40,
            decoder_sparse_step=2,
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=2,
        ),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        _EXPERTS | dict(head_dim=24, mlp_only_layers=[1], norm_topk_prob=True),
    ),
    "olmoe": ("Olmoe", _EXPERTS | dict(eos_token_id=2)),
    "gpt_oss": (
        "GptOss",
        _GROUPED
        | dict(
            num_local_experts=EXPERTS,
            num_experts_per_tok=3,
            head_dim=24,
            sliding_window=16,
            swiglu_limit=1.5,
            rope_parameters=_YARN | dict(rope_theta=1.5e5, truncate=False),
        ),
    ),
}
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")
_HEADS = {"GPT2": "GPT2LMHeadModel", "Gemma3Images": "Gemma3ForConditionalGeneration"}
_CONFIGS = {"Gemma3": "Gemma3TextConfig", "Gemma3Images": "Gemma3Config"}


class InDouble(TorchFunctionMode):
    """Makes models that compute in float32, some of it whatever their dtype, do it in float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        kwargs = {name: wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(wide, args), **kwargs)


def config_of(name: str, **changes: Any) -> Any:
    """A configuration; transformers changes some when it makes a model of them."""
    import transformers

    kind, options = CASES[name]
    config_class = getattr(transformers, _CONFIGS.get(kind, f"{kind}Config"))
    config = config_class(**(options | changes))
    if kind == "GptOss" and not hasattr(config, "swiglu_alpha"):
        config.swiglu_limit = 7.0  # of transformers that take no other
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def made(config: Any, case: str) -> nn.Module:
    """A model of transformers' own."""
    import transformers

    kind = CASES[case][0]
    model: nn.Module = getattr(transformers, _HEADS.get(kind, f"{kind}ForCausalLM"))(config)
    return model.eval()


def filled(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights that let each of them count: norms are not 1, nor biases 0.

    Embeddings are small beside what layers add, or a tied head would see nothing else.
    """
    random = torch.Generator().manual_seed(seed)
    is_gemma = "Gemma" in type(model).__name__
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=random)
            if tensor.dim() == 3:  # of all experts
                fan_in = tensor.shape[1 if "GptOss" in type(model).__name__ else 2]
                tensor.copy_(noise * 2 * fan_in**-0.5)
            elif tensor.dim() == 2 and not name.endswith("_bias"):
                is_embedding = "embed" in name or ".wte" in name or ".wpe" in name
                fan_in = tensor.shape[0] if "c_" in name else tensor.shape[1]
                small = 0.04 if is_gemma else 0.3
                tensor.copy_(noise * (small if is_embedding else 2 * fan_in**-0.5))
            elif "norm" in name or ".ln_" in name:
                is_weight = name.endswith("weight") and not is_gemma
                tensor.copy_(is_weight + (0.3 if name.endswith("weight") else 0.1) * noise)
            else:
                tensor.copy_(0.1 * noise)
    return model


@functools.cache
def model_of(name: str, **changes: Any) -> nn.Module:
    """The model of a case, in float32; nobody may change it."""
    return filled(made(config_of(name, **changes), name))


def exact(name: str, state: dict[str, Tensor], config: Any = None) -> nn.Module:
    """The same model in float64, throughout: constants and norms, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            model = made(config_of(name) if config is None else config, name)
            model.load_state_dict(state)
    finally:
        torch.set_default_dtype(before)
    return model


@torch.no_grad()
def states_of(model: nn.Module, tokens: Sequence[int]) -> list[Tensor]:
    """What goes into the first layer, comes out of each but the last, and the logits."""
    out = model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
    return [*(state[0] for state in out.hidden_states[:-1]), out.logits[0]]


def decoder_of(
    config: Config, state: dict[str, Tensor], dtype: torch.dtype, device: str = "cpu"
) -> Decoder:
    """Our decoder for a configuration and the tensors of a model."""
    policy = policy_of(config)
    architecture = architecture_of(policy, config)
    place = torch.device(device)
    taker = Taker(policy, config, architecture, state, place, dtype)
    return Decoder(architecture, taker.take())


def cache_for(decoder: Decoder, slots: int = 1, capacity: int = 256) -> KVCache:
    of, embedding = decoder.of, decoder.weights.embedding
    return KVCache(
        slots,
        capacity,
        of.kv_heads,
        of.head_dim,
        layers=of.layers,
        dtype=embedding.dtype,
        device=embedding.device,
    )


@torch.no_grad()
def run(decoder: Decoder, tokens: Sequence[int], cuts: Sequence[int]) -> Tensor:
    """Our last hidden states of one request, whose tokens come in chunks that end at the cuts."""
    device = decoder.weights.embedding.device
    cache, parts = cache_for(decoder), []
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    for begin, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        cache.reserve(0, end - begin)
        chunk = torch.tensor([list(tokens[begin:end])], device=device)
        parts.append(decoder.hidden(chunk, cache, slots)[0])
    cache.check()
    return torch.cat(parts)


@torch.no_grad()
def our_states(decoder: Decoder, tokens: Sequence[int], cuts: Sequence[int]) -> list[Tensor]:
    """Ours, as those of `states_of`: layer after layer is left out."""
    weights, states = decoder.weights, []
    for n in range(len(weights.layers)):
        lower = Decoder(decoder.of, replace(weights, layers=weights.layers[:n]))
        states.append(run(lower, tokens, cuts))
    states.append(decoder.logits(run(decoder, tokens, cuts)))
    return states
