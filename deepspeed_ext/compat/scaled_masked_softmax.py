"""Megatron's and Colossal-AI's module scaled_masked_softmax, by the op of the same name.

The formula is that of ``deepspeed_ext.ops.scaled_masked_softmax``: a row of which all is masked is
zeros, where theirs has equal probabilities.
"""

from torch import Tensor

from deepspeed_ext.ops import scaled_masked_softmax
from deepspeed_ext.ops.softmax_and_loss.softmax import softmax_gradient


def forward(input: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return softmax of input * scale without what the mask, where it is not 0, leaves out."""
    return scaled_masked_softmax(input, mask, float(scale))


def backward(output_grads: Tensor, softmax_results: Tensor, scale: float) -> Tensor:
    """Return the gradient of input; theirs writes it to output_grads, too."""
    return softmax_gradient(output_grads, softmax_results, float(scale), causal=False, offset=None)


def get_batch_per_block(queries: int, keys: int, batches: int, heads: int) -> int:
    """Return what the number of rows must be divisible by: 1, as there is no such rule here."""
    return 1
