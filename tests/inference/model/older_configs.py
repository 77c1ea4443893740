"""What config.json of each family was before transformers 5, at the sizes of small models."""

from typing import Any

_SIZES = dict(
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=256,
)
_GROUPED = _SIZES | dict(num_key_value_heads=2, intermediate_size=96)
_EVERY = dict(torch_dtype="bfloat16", transformers_version="4.42.3", use_cache=True)

OLDER: dict[str, dict[str, Any]] = {
    "llama": _EVERY
    | _GROUPED
    | dict(
        architectures=["LlamaForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=1,
        eos_token_id=2,
        hidden_act="silu",
        initializer_range=0.02,
        mlp_bias=False,
        model_type="llama",
        pretraining_tp=1,
        rms_norm_eps=1e-05,
        rope_scaling=dict(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
            rope_type="llama3",
        ),
        rope_theta=500000.0,
        tie_word_embeddings=True,
    ),
    "llama-oldest": _EVERY
    | _SIZES
    | dict(
        architectures=["LlamaForCausalLM"],
        hidden_act="silu",
        intermediate_size=96,
        model_type="llama",
        pad_token_id=0,
        rms_norm_eps=1e-06,
        rope_scaling=dict(type="linear", factor=4.0),
        tie_word_embeddings=False,
    ),
    "mistral": _EVERY
    | _GROUPED
    | dict(
        architectures=["MistralForCausalLM"],
        hidden_act="silu",
        model_type="mistral",
        rms_norm_eps=1e-05,
        rope_theta=10000.0,
        sliding_window=16,
        tie_word_embeddings=False,
    ),
    "mistral-without-windows": _EVERY
    | _GROUPED
    | dict(
        architectures=["MistralForCausalLM"],
        hidden_act="silu",
        head_dim=24,
        model_type="mistral",
        rms_norm_eps=1e-05,
        rope_theta=1000000.0,
        sliding_window=None,
        tie_word_embeddings=False,
    ),
    "qwen2": _EVERY
    | _GROUPED
    | dict(
        architectures=["Qwen2ForCausalLM"],
        attention_dropout=0.0,
        hidden_act="silu",
        max_window_layers=2,
        model_type="qwen2",
        rms_norm_eps=1e-06,
        rope_theta=1000000.0,
        sliding_window=16,
        tie_word_embeddings=True,
        use_sliding_window=False,
    ),
    "qwen2-with-windows": _EVERY
    | _GROUPED
    | dict(
        architectures=["Qwen2ForCausalLM"],
        hidden_act="silu",
        max_window_layers=2,
        model_type="qwen2",
        rms_norm_eps=1e-06,
        rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=64),
        rope_theta=1000000.0,
        sliding_window=16,
        tie_word_embeddings=False,
        use_sliding_window=True,
    ),
    "qwen3": _EVERY
    | _GROUPED
    | dict(
        architectures=["Qwen3ForCausalLM"],
        attention_bias=False,
        head_dim=24,
        hidden_act="silu",
        max_window_layers=3,
        model_type="qwen3",
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=None,
        tie_word_embeddings=True,
        use_sliding_window=False,
    ),
    "gemma2": _EVERY
    | _GROUPED
    | dict(
        architectures=["Gemma2ForCausalLM"],
        attn_logit_softcapping=50.0,
        cache_implementation="hybrid",
        final_logit_softcapping=30.0,
        head_dim=24,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        model_type="gemma2",
        query_pre_attn_scalar=16,
        rms_norm_eps=1e-06,
        rope_theta=10000.0,
        sliding_window=16,
        sliding_window_size=16,
    ),
    "gemma3": _EVERY
    | _GROUPED
    | dict(
        architectures=["Gemma3ForCausalLM"],
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        head_dim=24,
        hidden_activation="gelu_pytorch_tanh",
        model_type="gemma3_text",
        query_pre_attn_scalar=16,
        rms_norm_eps=1e-06,
        rope_local_base_freq=10000,
        rope_scaling=dict(factor=8.0, rope_type="linear"),
        rope_theta=1000000,
        sliding_window=16,
        sliding_window_pattern=2,
    ),
    "gemma3-with-images": _EVERY
    | dict(
        architectures=["Gemma3ForConditionalGeneration"],
        boi_token_index=255999,
        image_token_index=262144,
        mm_tokens_per_image=256,
        model_type="gemma3",
        text_config=dict(
            hidden_size=64,
            intermediate_size=96,
            model_type="gemma3_text",
            num_hidden_layers=7,
            rope_scaling=dict(factor=8.0, rope_type="linear"),
            sliding_window=16,
        ),
        vision_config=dict(hidden_size=16, model_type="siglip_vision_model"),
    ),
    "phi": _EVERY
    | _SIZES
    | dict(
        architectures=["PhiForCausalLM"],
        hidden_act="gelu_new",
        intermediate_size=96,
        layer_norm_eps=1e-05,
        model_type="phi",
        num_key_value_heads=4,
        partial_rotary_factor=0.5,
        qk_layernorm=False,
        rope_scaling=None,
        rope_theta=10000.0,
        tie_word_embeddings=False,
    ),
    "phi3": _EVERY
    | _GROUPED
    | dict(
        architectures=["Phi3ForCausalLM"],
        attention_bias=False,
        hidden_act="silu",
        model_type="phi3",
        original_max_position_embeddings=256,
        pad_token_id=0,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        rope_theta=10000.0,
        sliding_window=16,
        tie_word_embeddings=False,
    ),
    "gpt2": dict(
        activation_function="gelu_new",
        architectures=["GPT2LMHeadModel"],
        attn_pdrop=0.1,
        layer_norm_epsilon=1e-05,
        model_type="gpt2",
        n_ctx=256,
        n_embd=48,
        n_head=3,
        n_layer=3,
        n_positions=256,
        task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
        vocab_size=97,
    ),
    "gpt_neox": _EVERY
    | _SIZES
    | dict(
        architectures=["GPTNeoXForCausalLM"],
        hidden_act="gelu",
        intermediate_size=96,
        layer_norm_eps=1e-05,
        model_type="gpt_neox",
        rotary_emb_base=10000,
        rotary_pct=0.25,
        tie_word_embeddings=False,
        use_parallel_residual=True,
    ),
    "opt": _EVERY
    | _SIZES
    | dict(
        activation_function="relu",
        architectures=["OPTForCausalLM"],
        do_layer_norm_before=True,
        ffn_dim=96,
        layerdrop=0.0,
        model_type="opt",
        _remove_final_layer_norm=False,
        word_embed_proj_dim=64,
    ),
    "opt-norms-after": _EVERY
    | _SIZES
    | dict(
        activation_function="relu",
        architectures=["OPTForCausalLM"],
        do_layer_norm_before=False,
        ffn_dim=96,
        model_type="opt",
        word_embed_proj_dim=48,
    ),
    "bloom": dict(
        apply_residual_connection_post_layernorm=False,
        architectures=["BloomForCausalLM"],
        attention_softmax_in_fp32=True,
        bias_dropout_fusion=True,
        layer_norm_epsilon=1e-05,
        masked_softmax_fusion=True,
        model_type="bloom",
        n_embed=66,
        n_inner=None,
        n_layer=3,
        num_attention_heads=6,
        offset_alibi=100,
        pretraining_tp=1,
        skip_bias_add=True,
        slow_but_exact=False,
        unk_token_id=0,
        vocab_size=97,
    ),
}
