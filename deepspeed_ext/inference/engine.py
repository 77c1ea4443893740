"""InferenceEngine: a model with our kernels inside, that continues prompts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.inference.decoder import Decoder
from deepspeed_ext.inference.kv_cache import KVCache
from deepspeed_ext.quantization.report import Report

CHUNK = 1024  # tokens of a prompt that are taken in at once
BUCKET = 64  # what the length of a shorter chunk is rounded up to


class InferenceEngine:
    """Continue prompts, several at a time.

    Args:
        decoder: the model.
        max_batch: requests at a time.
        max_tokens: of a request, those of its prompt and new ones.
        kv_quantized: as of `KVCache`.
        tokenizer: has encode(text) and decode(ids), or None.
        stop_tokens: that end a text.
        cuda_graphs: whether steps are recorded and replayed.
        report: what quantizing has done to the weights, or None.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_batch: int,
        max_tokens: int,
        kv_quantized: str | None = None,
        tokenizer: Any = None,
        stop_tokens: Sequence[int] = (),
        cuda_graphs: bool = True,
        report: Report | None = None,
    ) -> None:
        self.tokenizer, self.stop_tokens = tokenizer, tuple(stop_tokens)
        self.cuda_graphs, self.report = cuda_graphs, report
        of, embedding = decoder.of, decoder.weights.embedding
        self.decoder, self.device = decoder, embedding.device
        self.cache = KVCache(
            max_batch,
            max_tokens,
            of.kv_heads,
            of.head_dim,
            layers=of.layers,
            dtype=embedding.dtype,
            quantized=kv_quantized,
            device=self.device,
        )

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
        """Return what follows each prompt, the likeliest token each time."""
        results = []
        for prompt in prompts:
            token = self._prefill(list(prompt), 0).argmax(-1)
            tokens = [int(token)]
            slots = torch.zeros(1, dtype=torch.int32, device=self.device)
            while len(tokens) < max_new_tokens:
                self.cache.reserve(0, 1)
                hidden = self.decoder.hidden(token.view(1, 1), self.cache, slots)
                token = self.decoder.logits(hidden[:, -1]).argmax(-1)
                tokens.append(int(token))
            self.cache.free(0)
            results.append(tokens)
        return results

    def _prefill(self, prompt: list[int], slot: int) -> Tensor:
        """Return the logits of the first new token, (1, vocabulary)."""
        slots = torch.tensor([slot], dtype=torch.int32, device=self.device)
        hidden = None
        for begin in range(0, len(prompt), CHUNK):
            part = prompt[begin : begin + CHUNK]
            padded = part + [0] * (-len(part) % BUCKET)
            tokens = torch.tensor([padded], device=self.device)
            counts = torch.tensor([len(part)], dtype=torch.int32, device=self.device)
            self.cache.reserve(slot, len(part))
            hidden = self.decoder.hidden(tokens, self.cache, slots, counts)[:, len(part) - 1]
        assert hidden is not None
        return self.decoder.logits(hidden)
