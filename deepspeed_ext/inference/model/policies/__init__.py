"""The tables of all families that the engine knows."""

from deepspeed_ext.inference.model.policies.bert import BERT, ROBERTA
from deepspeed_ext.inference.model.policies.bloom import BLOOM
from deepspeed_ext.inference.model.policies.gemma import GEMMA2, GEMMA3, GEMMA3_TEXT
from deepspeed_ext.inference.model.policies.gpt2 import GPT2
from deepspeed_ext.inference.model.policies.gpt_neox import GPT_NEOX
from deepspeed_ext.inference.model.policies.llama import LLAMA, MISTRAL, PHI3, QWEN2, QWEN3
from deepspeed_ext.inference.model.policies.mixtures import (
    GPT_OSS,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
)
from deepspeed_ext.inference.model.policies.opt import OPT
from deepspeed_ext.inference.model.policies.phi import PHI
from deepspeed_ext.inference.model.policy import Config, Policy

POLICIES = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    OLMOE,
    GPT_OSS,
    GEMMA2,
    GEMMA3_TEXT,
    GEMMA3,
    PHI,
    PHI3,
    GPT2,
    GPT_NEOX,
    OPT,
    BLOOM,
    BERT,
    ROBERTA,
)
_OF_LATENTS = ("deepseek_v2", "deepseek_v3", "deepseek_v32")


def policy_of(config: Config) -> Policy:
    """Return the table of a model's family.

    Raises:
        ValueError: there is none.
    """
    kind = config.get("model_type")
    for policy in POLICIES:
        if kind in policy.families:
            return policy
    if kind in _OF_LATENTS:
        raise ValueError(
            f"init_inference: model_type is {kind!r}, expected a family whose attention has keys"
            " and values for heads: here they are made of latent vectors, which no block does"
        )
    known = ", ".join(sorted(name for policy in POLICIES for name in policy.families))
    raise ValueError(
        f"init_inference: model_type is {kind!r}, expected one of {known}; give a table of your"
        " own as policy"
    )
