"""EncoderEngine: a model with our kernels inside, that tells what tokens of whole texts mean."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.inference.execution.encoder import Encoder
from deepspeed_ext.inference.execution.varlen_batch import batch_of

TOKENS = 8192  # that go through the layers together: more would only take more memory


class Encoded(NamedTuple):
    """What an encoder makes of texts.

    Args:
        last_hidden_state: (texts, n, hidden); 0 where no token counts.
        pooler_output: (texts, hidden), or None for a model without a pooler.
    """

    last_hidden_state: Tensor
    pooler_output: Tensor | None


class EncoderEngine:
    """Call it as the model is called.

    Padding costs nothing: only tokens that count are computed with, and padding changes the others
    by rounding at most, as other texts of the batch do. The engine holds nothing but weights,
    so several threads may call it at a time. Results have no gradients.

    Args:
        encoder: the model.
        tokenizer: None, or what `tokenizer` of the engine is to be: the engine takes no text.
        report: what quantizing has done to the weights, or None.
    """

    def __init__(self, encoder: Encoder, *, tokenizer: Any = None, report: Any = None) -> None:
        self.encoder, self.device = encoder, encoder.weights.embedding.device
        self.tokenizer, self.report = tokenizer, report

    @torch.no_grad()
    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Encoded:
        """Return the hidden states of tokens.

        Args:
            input_ids: (texts, n), int64 or int32. Of these and the next two, tensors on the CPU are
                taken fastest, whatever device the engine is on.
            attention_mask: the same shape, bool, int64, int32 or float32: 1 for tokens that count,
                0 for padding, wherever it is; None: all count.
            token_type_ids: the same shape, int64 or int32; None for zeros.

        Returns:
            Hidden states of the dtype and on the device of the engine. The pooled one of a text is
            that of its first token that counts, and 0 for a text without any.

        Raises:
            ValueError: an argument does not fit the model; the text names it, its value, and what
                would fit.
            TypeError: an argument is no tensor.
        """
        encoder = self.encoder
        batch = batch_of(input_ids, attention_mask, token_type_ids, encoder.limits)
        hidden, embedding = encoder.of.hidden, encoder.weights.embedding
        states = embedding.new_zeros(batch.shape[0] * batch.shape[1], hidden)
        with torch.autocast(self.device.type, enabled=False):  # the engine has a dtype of its own
            for part in batch.parts(TOKENS, self.device):
                states[part.places] = encoder.hidden(part)
            pooled = self._pooled(states, batch.firsts.to(self.device))
        return Encoded(states.view(*batch.shape, hidden), pooled)

    def _pooled(self, states: Tensor, firsts: Tensor) -> Tensor | None:
        has_some = (firsts >= 0).unsqueeze(1)
        if len(states) == 0:
            states = states.new_zeros(1, states.shape[1])
        pooled = self.encoder.pooled(states[firsts.clamp(min=0)])
        return None if pooled is None else torch.where(has_some, pooled, 0)
