"""init_inference: from a model to an engine."""

import torch
from torch import nn

from deepspeed_ext.inference.architecture import architecture_of
from deepspeed_ext.inference.decoder import Decoder
from deepspeed_ext.inference.encoder import Encoder
from deepspeed_ext.inference.encoder_engine import EncoderEngine
from deepspeed_ext.inference.engine import InferenceEngine
from deepspeed_ext.inference.policies import policy_of
from deepspeed_ext.inference.policy import Config, Policy
from deepspeed_ext.inference.weights import Taker


def init_inference(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    max_batch: int = 8,
    max_tokens: int | None = None,
    policy: Policy | None = None,
) -> InferenceEngine | EncoderEngine:
    """Return an engine with a copy of a model's weights, in the form that our kernels read."""
    config: Config = model.config.to_dict()  # type: ignore[operator, union-attr]
    policy = policy_of(config) if policy is None else policy
    architecture = architecture_of(policy, config)
    tensors = model.state_dict()
    some = next(iter(tensors.values()))
    taker = Taker(policy, config, architecture, tensors, some.device, dtype or some.dtype)
    with torch.no_grad():
        weights = taker.take()
    if not architecture.causal:
        return EncoderEngine(Encoder(architecture, weights))
    decoder = Decoder(architecture, weights)
    length = max_tokens or architecture.context or 2048
    return InferenceEngine(decoder, max_batch=max_batch, max_tokens=length)
