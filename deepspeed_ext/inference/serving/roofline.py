"""The roofline of decoding: the bytes that a token reads, and the bandwidth of memory."""

import time
from collections.abc import Callable

import torch

from deepspeed_ext.inference.execution.decoder import Decoder
from deepspeed_ext.inference.execution.kv_cache import KVCache
from deepspeed_ext.inference.execution.memory_budget import free_bytes
from deepspeed_ext.inference.weights.loader import Layer
from deepspeed_ext.inference.weights.quantize_on_load import bytes_of

_ROUNDS = 5


def bytes_per_token(decoder: Decoder, cache: KVCache, length: float) -> float:
    """Return the bytes that one request's next token reads: weights, keys and values.

    Args:
        decoder: the model. Of its embedding a row is read, unless it is the head, too; of experts,
            those that a token chooses.
        cache: of the engine.
        length: tokens before it.
    """
    weights, kv = decoder.weights, cache.layer(0)
    read = bytes_of([weights.layers, weights.final_norm, weights.project_out, weights.head])
    experts = decoder.of.experts
    if experts is not None:
        passed_over = 1 - experts.chosen / experts.count
        read -= round(passed_over * sum(map(bytes_of_experts, weights.layers)))
    of_token = sum(
        each[0, :, 0].numel() * each.itemsize
        for each in (kv.keys, kv.values, kv.key_scales, kv.value_scales)
        if each is not None
    )
    seen = sum(min(length, window or length) for window in decoder.of.windows)
    return read + seen * of_token


def bytes_of_experts(layer: Layer) -> int:
    """Return the bytes of all experts of a layer that tokens choose from."""
    return 0 if layer.experts is None else bytes_of([layer.experts.up, layer.experts.down])


def memory_bandwidth(device: torch.device) -> float | None:
    """Return how many bytes of memory a second a device reads, or copies, in some milliseconds.

    Returns:
        The best of some rounds; None if there is no room to measure in.
    """
    nbytes = 1 << 30 if device.type == "cuda" else 1 << 28
    if free_bytes(device) < 3 * nbytes:
        return None
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(_ROUNDS):
        best = max(best, nbytes / _seconds(lambda: source.sum(), device))
        best = max(best, 2 * nbytes / _seconds(lambda: target.copy_(source), device))
    return best


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
