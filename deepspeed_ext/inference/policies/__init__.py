"""The tables of all families that the engine knows."""

from deepspeed_ext.inference.policies.bert import BERT, ROBERTA
from deepspeed_ext.inference.policies.llama import LLAMA
from deepspeed_ext.inference.policy import Config, Policy

POLICIES = (LLAMA, BERT, ROBERTA)


def policy_of(config: Config) -> Policy:
    """Return the table of a model's family.

    Raises:
        ValueError: there is none.
    """
    kind = config.get("model_type")
    for policy in POLICIES:
        if kind in policy.families:
            return policy
    known = ", ".join(sorted(name for policy in POLICIES for name in policy.families))
    raise ValueError(
        f"init_inference: model_type is {kind!r}, expected one of {known}; give a table of your"
        " own as policy"
    )
