"""Mixtures of experts that are else as LLaMA: Mixtral, Qwen 2 and 3 MoE, OLMoE, gpt-oss."""

from dataclasses import replace

from deepspeed_ext.inference.model.policies.llama import LLAMA
from deepspeed_ext.inference.model.policy import ExpertNames, Experts, Key, Windows

# As transformers has them in memory, and as it, and everybody else, writes them to files.
_WHOLE = ExpertNames("mlp.gate", ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj")
_SINGLE = ExpertNames(
    router="mlp.gate",
    up=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    down="mlp.experts.{}.down_proj",
)
_NO_BIASES = (False, False, False, False)
_BIAS = Key("attention_bias", default=False)

MIXTRAL = replace(
    LLAMA,
    families=("mixtral",),
    sizes=replace(LLAMA.sizes, kv_heads=Key("num_key_value_heads", default=8)),
    rope_base=Key("rope_theta", default=1000000.0),
    biases=_NO_BIASES,
    windows=Windows(by_types=False),
    experts=Experts(
        names=(
            _WHOLE,
            ExpertNames(
                router="block_sparse_moe.gate",
                up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
                down="block_sparse_moe.experts.{}.w2",
            ),
        ),
        count=Key("num_local_experts", "num_experts", default=8),
        chosen=Key("num_experts_per_tok", default=2),
        intermediate=Key("intermediate_size"),
        normalize=True,
    ),
)

_QWEN = Experts(
    names=(_WHOLE, _SINGLE),
    count=Key("num_experts", "num_local_experts", default=60),
    chosen=Key("num_experts_per_tok", default=4),
    intermediate=Key("moe_intermediate_size", default=1408),
    normalize=Key("norm_topk_prob", default=False),
    period=Key("decoder_sparse_step", default=1),
    dense=Key("mlp_only_layers", default=()),
)

QWEN2_MOE = replace(
    LLAMA,
    families=("qwen2_moe",),
    biases=(Key("qkv_bias", default=True), False, False, False),
    windows=Windows(
        size=Key("sliding_window", default=4096),
        are_used=Key("use_sliding_window", default=False),
        behind=Key("max_window_layers", default=28),
        period=2,
    ),
    experts=replace(
        _QWEN,
        shared=Key("shared_expert_intermediate_size", default=5632),
        shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        shared_down="mlp.shared_expert.down_proj",
        shared_gate="mlp.shared_expert_gate",
    ),
)

QWEN3_MOE = replace(
    LLAMA,
    families=("qwen3_moe",),
    names=replace(LLAMA.names, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
    biases=(_BIAS, _BIAS, False, False),
    windows=Windows(
        size=Key("sliding_window", default=4096),
        are_used=Key("use_sliding_window", default=False),
        by_types=False,
    ),
    experts=replace(
        _QWEN,
        count=Key("num_experts", "num_local_experts", default=128),
        chosen=Key("num_experts_per_tok", default=8),
        intermediate=Key("moe_intermediate_size", default=768),
    ),
)

OLMOE = replace(
    LLAMA,
    families=("olmoe",),
    names=replace(LLAMA.names, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
    eps=Key("rms_norm_eps", default=1e-5),
    biases=(_BIAS, _BIAS, False, False),
    whole_norms=True,
    experts=Experts(
        names=(_WHOLE, _SINGLE),
        count=Key("num_experts", "num_local_experts", default=64),
        chosen=Key("num_experts_per_tok", default=8),
        intermediate=Key("intermediate_size", default=2048),
        normalize=Key("norm_topk_prob", default=False),
    ),
)

GPT_OSS = replace(
    LLAMA,
    families=("gpt_oss",),
    expects={"swiglu_alpha": 1.702},
    names=replace(LLAMA.names, sinks="self_attn.sinks"),
    sizes=replace(LLAMA.sizes, head_dim=Key("head_dim", default=64)),
    rope_base=Key("rope_theta", default=150000.0),
    rope_rules={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    biases=(
        Key("attention_bias", default=True),
        Key("attention_bias", default=True),
        False,
        False,
    ),
    windows=Windows(size=Key("sliding_window", default=128), period=2),
    experts=Experts(
        names=(replace(_WHOLE, router="mlp.router"),),
        count=Key("num_local_experts", "num_experts", default=128),
        chosen=Key("num_experts_per_tok", default=4),
        intermediate=Key("intermediate_size"),
        score="softmax_topk",
        interleaved=True,
        transposed=True,
        has_biases=True,
        limit=Key("swiglu_limit", default=7.0),
    ),
)
