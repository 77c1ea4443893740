"""The memory budget of an engine, and whether a device has it, before anything is read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_ext.inference.execution.kv_cache import KVCache
from deepspeed_ext.inference.execution.runner import ROWS
from deepspeed_ext.inference.execution.scoring import ORDERED, SCORED
from deepspeed_ext.inference.model.architecture import Architecture
from deepspeed_ext.op_builder.toolchain import free_memory
from deepspeed_ext.ops.attention.paged_kv import PAGE

_BYTES_OF_HISTORY = 9  # of a token of the vocabulary: whether it was seen, its count, its bias
_BYTES_OF_LOGIT = 24  # with what is made of it where a token is drawn
_GIB = 1 << 30


@dataclass(frozen=True)
class MemoryBudget:
    """The bytes that an engine takes of a device.

    Args:
        weights: of all tensors, as they will be.
        cache: of keys and values.
        reading: of what lies about while weights are made; the cache comes after that.
        working: of what a step makes and lets go.
        host: of layers that rest in host memory; all others are of the device.
    """

    weights: int
    cache: int
    reading: int = 0
    working: int = 0
    host: int = 0

    @property
    def peak(self) -> int:
        """Those of the moment when there are most."""
        return self.weights + max(self.cache + self.working, self.reading)


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


def working_bytes(
    of: Architecture,
    max_batch: int,
    tokens: int,
    dtype: torch.dtype,
    is_quantized: bool,
    packed: int,
    beside: int = 0,
) -> int:
    """Return about how many bytes a step makes and lets go, with what penalties and biases take.

    Args:
        of: the model.
        max_batch: of the engine.
        tokens: of a prompt that are prefilled at once.
        dtype: of hidden states.
        is_quantized: whether weights are made floats, one at a time, for many tokens.
        packed: tokens, with padding, that attention has copies of.
        beside: tokens that go through the layers side by side.
    """
    parts = 2 if of.gated else 1
    wide, copies, largest = of.intermediate * parts, 0, of.intermediate * parts
    if of.experts is not None:  # each choice has a copy of its token, and results of its own
        inner = of.experts.intermediate * parts
        copies = of.experts.chosen * (2 * of.hidden + inner + of.experts.intermediate)
        largest = max(wide, of.experts.count * inner)
    states = tokens * (max(wide, copies) + 6 * of.hidden) * dtype.itemsize
    states += packed * 2 * (of.heads + of.kv_heads) * of.head_dim * dtype.itemsize
    states += beside * 3 * of.hidden * dtype.itemsize
    floats = largest * of.hidden * dtype.itemsize if is_quantized and tokens > ROWS else 0
    choice = min(max_batch, ROWS) * of.vocabulary * _BYTES_OF_LOGIT
    scored = (min(tokens, SCORED) * dtype.itemsize + ORDERED * _BYTES_OF_LOGIT) * of.vocabulary
    history = (max_batch + 1) * of.vocabulary * _BYTES_OF_HISTORY  # once requests have asked for it
    return max(states + floats, choice, scored) + history


def check_positions(of: Architecture, positions: Tensor | None, max_tokens: int) -> None:
    """Refuse more tokens than a model has learned positions for, those of this table."""
    most = of.context or max_tokens
    if positions is not None:
        most = min(most, len(positions) - of.position_offset)
    if of.position == "learned" and max_tokens > most:
        raise ValueError(
            f"inference: max_tokens is {max_tokens}, expected at most {most}, as the model has no"
            " more positions"
        )


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a device that this process may still use."""
    if device.type != "cuda":
        return free_memory()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def check_capacity(
    device: torch.device,
    quantize: str | None,
    max_batch: int,
    max_tokens: int,
    budget_of: Callable[[str | None], MemoryBudget],
    kinds: Sequence[str] = ("int8", "int4"),
    offloaded: Callable[[str | None], MemoryBudget] | None = None,
) -> None:
    """Refuse a model whose memory budget the device has not.

    Args:
        device: where it is to be.
        quantize: as of ``init_inference``, as are max_batch and max_tokens.
        budget_of: returns the memory budget with a value of quantize.
        kinds: what else quantize may be.
        offloaded: as budget_of, of layers that rest in host memory; None: that is of no use.

    Raises:
        MemoryError: the device, or the host, has fewer bytes free than the engine takes; says what
            would fit.
    """
    budget, free = budget_of(quantize), free_bytes(device)
    if budget.peak <= free:
        _check_host(budget, device)
        return
    whole, part = [], []
    between = " with " if kinds else ""
    for kind in dict.fromkeys((quantize, *kinds)):
        other = budget if kind == quantize else budget_of(kind)
        told = f"quantize={kind!r}" if kinds else ""
        left = free - other.weights - other.working
        pages = left * max_batch * max_tokens // max(other.cache, 1) // PAGE
        if other.peak <= free:
            whole.append(told)
        elif other.weights + other.reading <= free and pages > 0:
            batch = min(max_batch, pages)
            tokens = pages // batch * PAGE
            part.append(f"{told}{between}max_batch={batch} and max_tokens={tokens}")
    options = part[:1] + whole[:1]
    if offloaded is not None:
        other = offloaded(quantize)
        if other.peak <= free and other.host <= free_memory():
            options.append("offload='cpu'")
    fits = " or ".join(options)
    raise MemoryError(
        f"init_inference: {device} has {_shown(free)} free, expected {_shown(budget.peak)}:"
        f" {_shown(budget.weights)} of weights, {_shown(budget.cache)} of keys and values for"
        f" max_batch {max_batch} x max_tokens {max_tokens}, and {_shown(budget.working)} to work"
        f" with; "
        + (
            f"what fits is {fits}"
            if fits
            else "nothing fits" + (f", not even {told}" if kinds else "")
        )
    )


def _check_host(budget: MemoryBudget, device: torch.device) -> None:
    """Refuse layers that host memory has no room for."""
    needed, free = budget.host, free_memory()
    if device.type == "cpu":  # all is in the same memory
        needed += budget.peak if needed else 0
    if needed > free:
        raise MemoryError(
            f"init_inference: host memory has {_shown(free)} free, expected {_shown(needed)}:"
            f" {_shown(budget.host)} of layers that rest there; what fits may be offload='nvme'"
        )


def _shown(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / (1 << 20):.1f} MiB"
