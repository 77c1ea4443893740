"""Whether a model fits a device, which is told before anything of it is read."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepspeed_ext.inference.architecture import Architecture
from deepspeed_ext.inference.kv_cache import KVCache
from deepspeed_ext.op_builder.toolchain import free_memory
from deepspeed_ext.ops.transformer.paged_kv import PAGE

_GIB = 1 << 30


@dataclass(frozen=True)
class Need:
    """The bytes that an engine takes.

    Args:
        weights: of all tensors, as they will be.
        cache: of keys and values.
        reading: of what lies about while weights are made; the cache comes after that.
    """

    weights: int
    cache: int
    reading: int = 0

    @property
    def most(self) -> int:
        """Those of the moment when there are most."""
        return self.weights + max(self.cache, self.reading)


def cache_bytes(
    of: Architecture, max_batch: int, max_tokens: int, dtype: torch.dtype, kv_dtype: str | None
) -> int:
    """Return the bytes of the cache of a decoder."""
    cache = KVCache(
        max_batch,
        max_tokens,
        of.kv_heads,
        of.head_dim,
        layers=of.layers,
        dtype=dtype,
        quantized=kv_dtype,
        device="meta",
    )
    return cache.nbytes


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a device that this process may still use."""
    if device.type != "cuda":
        return free_memory()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def check_room(
    device: torch.device,
    quantize: str | None,
    max_batch: int,
    max_tokens: int,
    need_of: Callable[[str | None], Need],
) -> None:
    """Refuse a model that has no room.

    Args:
        device: where it is to be.
        quantize: as of ``init_inference``, as are max_batch and max_tokens.
        need_of: returns the need with a value of quantize.

    Raises:
        MemoryError: the device has fewer bytes free than the engine takes; says what would fit.
    """
    need, free = need_of(quantize), free_bytes(device)
    if need.most <= free:
        return
    whole, part = [], []
    for kind in dict.fromkeys((quantize, "int8", "int4")):
        smaller = need if kind == quantize else need_of(kind)
        room = free - smaller.weights
        tokens = room * max_batch * max_tokens // max(smaller.cache, 1)
        if smaller.most <= free:
            whole.append(f"quantize={kind!r}")
        elif smaller.reading <= room and tokens >= PAGE:
            part.append(f"quantize={kind!r} with max_batch x max_tokens of {tokens // PAGE * PAGE}")
    fits = " or ".join(part[:1] + whole[:1])
    raise MemoryError(
        f"init_inference: {device} has {_shown(free)} free, expected {_shown(need.most)}:"
        f" {_shown(need.weights)} of weights, and {_shown(need.cache)} of keys and values for"
        f" max_batch {max_batch} x max_tokens {max_tokens}; "
        + (f"what fits is {fits}" if fits else f"not even weights in {kind} fit")
    )


def _shown(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB // 100 else f"{count / (1 << 20):.2f} MiB"
