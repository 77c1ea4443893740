"""Megatron's and Colossal-AI's module of this name, by ``scaled_upper_triang_masked_softmax``."""

from torch import Tensor

from deepspeed_ext.ops import scaled_upper_triang_masked_softmax
from deepspeed_ext.ops.softmax_and_loss.softmax import softmax_gradient


def forward(input: Tensor, scale: float) -> Tensor:
    """Return softmax of input * scale, of what is on the diagonal and below it."""
    return scaled_upper_triang_masked_softmax(input, float(scale))


def backward(output_grads: Tensor, softmax_results: Tensor, scale: float) -> Tensor:
    """Return the gradient of input; theirs writes it to output_grads, too."""
    return softmax_gradient(output_grads, softmax_results, float(scale), causal=True, offset=0)
