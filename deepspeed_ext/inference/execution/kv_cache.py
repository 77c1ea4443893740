"""The keys and values of tokens so far, of many requests, in pages that they share."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_ext.dtypes import DTYPES
from deepspeed_ext.inference.execution.page_table import PageTable
from deepspeed_ext.inference.execution.to_device import ready_to_send
from deepspeed_ext.ops.attention.paged_kv import PAGE, PagedKV

_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class KVCache:
    """Keep keys and values of all layers for a number of slots, one request each.

    A slot has tokens in pages of 64, which a table numbers. The host knows every length without
    asking the device; the device has the same numbers in the order of the stream, so that steps may
    be queued far ahead, and CUDA graphs be replayed. A step is:

        cache.reserve(slots, 1)                      # on the host; raises before anything is queued
        for i, layer in enumerate(model):            # may be a graph
            rope_append_(..., cache.layer(i))        # writes the last token of each slot
            decode_attention(..., cache.layer(i))    # reads all of them

    `reserve` makes tokens part of their slot. One that nothing is appended to leaves tokens in it
    that hold what memory held, perhaps another request's: ``truncate`` takes them back. Forks share
    pages. Whoever writes first to a last page that is shared gets a copy of it, of 64 tokens at
    most, queued by `reserve`: nothing else is ever copied.

    Methods may be called from any thread. Those that change something are queued on the current
    stream, on which, or after which, the ops must be; they are not for a graph that is captured.

    Args:
        slots: how many requests there can be.
        capacity: tokens of a slot at most.
        kv_heads: heads of keys and of values.
        head_dim: elements of a head.
        layers: of the model; they share tables and lengths.
        dtype: of keys and values, float32, bfloat16 or float16; with `quantized`, of nothing.
        quantized: None, or "int8" or "fp8" (e4m3): codes with a float32 scale for each token and
            head.
        pages: for all slots together; None for as many as all need at capacity.
        device: where it is.

    Raises:
        ValueError: an argument breaks a rule above.
    """

    def __init__(
        self,
        slots: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        *,
        layers: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        quantized: str | None = None,
        pages: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        of_slot = -(-capacity // PAGE)
        pages = slots * of_slot if pages is None else pages
        sizes = dict(slots=slots, capacity=capacity, kv_heads=kv_heads, head_dim=head_dim)
        for name, value in {**sizes, "layers": layers, "pages": pages}.items():
            if not 0 < value < 2**31:
                raise ValueError(f"kv_cache: {name} is {value}, expected 1 to 2^31 - 1")
        if quantized is not None and quantized not in _CODES:
            raise ValueError(f"kv_cache: quantized is {quantized!r}, expected None, int8 or fp8")
        if dtype not in DTYPES:
            raise ValueError(f"kv_cache: dtype is {dtype}, expected float32, bfloat16 or float16")
        self.capacity, self.quantized = capacity, quantized
        stored = dtype if quantized is None else _CODES[quantized]
        step = max(1, 16 // stored.itemsize)  # rows begin where 16 bytes can be read at once
        shape = (layers, pages, kv_heads, PAGE, -(-head_dim // step) * step)
        self._keys, self._values = (
            torch.empty(shape, dtype=stored, device=device)[..., :head_dim] for _ in range(2)
        )
        self._scales: tuple[Tensor, ...] = ()
        if quantized is not None:
            both = (torch.empty(shape[:-1], dtype=torch.float32, device=device) for _ in range(2))
            self._scales = tuple(both)
        self._table = torch.full((slots, of_slot), -1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(slots, dtype=torch.int32, device=device)
        self._violations = torch.zeros(1, dtype=torch.int32, device=device)
        is_real = not self._table.is_meta  # or it is there to tell its bytes, however many
        self._page_table = PageTable(slots * is_real, capacity, pages * is_real)
        self._lock = threading.Lock()

    def layer(self, i: int) -> PagedKV:
        """Return the tensors of layer i, for ops; always the same memory."""
        scales = [each[i] for each in self._scales]
        tables = (self._table, self._lengths, self._violations)
        return PagedKV(self._keys[i], self._values[i], *tables, *scales)

    def length(self, slot: int) -> int:
        """Return how many tokens the slot has, those that are reserved included."""
        self._page_table.check_slot("length", slot)
        return self._page_table.lengths[slot]

    @property
    def nbytes(self) -> int:
        """How many bytes it takes where it is; one on meta takes none, but tells."""
        tables = (self._table, self._lengths, self._violations)
        stored = (self._keys, self._values)
        return sum(each.untyped_storage().nbytes() for each in (*stored, *self._scales, *tables))

    @property
    def free_pages(self) -> int:
        """How many pages no slot has."""
        return len(self._page_table.free)

    def reserve(self, slots: int | Sequence[int], n: int | Sequence[int]) -> None:
        """Make room for the next n tokens of one slot, or of several: of all, or of none.

        Args:
            slots: one, or some, none of them twice. A free one is in use from then on.
            n: tokens for each, or one number for all.

        Raises:
            ValueError: a slot would be longer than its capacity, or an argument is wrong; nothing
                has changed, and nothing is queued.
            RuntimeError: there are too few pages; likewise.
        """
        some = [slots] if isinstance(slots, int) else list(slots)
        counts = [n] * len(some) if isinstance(n, int) else list(n)
        if len(counts) != len(some):
            raise ValueError(f"kv_cache.reserve: n has length {len(counts)}, expected {len(some)}")
        with self._lock:
            self._check_no_capture("reserve")
            changes = self._page_table.plan(some, counts)
            for change in changes:
                before = self._page_table.tables[change.slot]
                same = len(before) - (change.copied is not None)
                if change.copied is not None:
                    self._copy_page(change.copied, change.pages[same])
                self._set(change.slot, change.length, change.pages, same)
            self._send_lengths()

    def fork(self, source: int, target: int) -> None:
        """Let a free slot go on from where another one is, sharing its pages.

        Raises:
            ValueError: the source is not in use, or the target is, or there is no such slot.
        """
        with self._lock:
            self._check_no_capture("fork")
            self._page_table.check_slot("fork", source, in_use=True)
            self._page_table.check_slot("fork", target, in_use=False)
            self._set(
                target, self._page_table.lengths[source], list(self._page_table.tables[source])
            )
            self._send_lengths()

    def reorder(self, slots: Sequence[int], sources: Sequence[int]) -> None:
        """Let each of some slots go on from where another one is now, as beams do.

        Args:
            slots: that change, none of them twice.
            sources: for each, the slot that it is to be like; any may be named often.

        Raises:
            ValueError: a source is not in use, or an argument is wrong; nothing has changed.
        """
        if len(slots) != len(sources):
            raise ValueError(
                f"kv_cache.reorder: sources has length {len(sources)}, expected {len(slots)}"
            )
        if len(set(slots)) != len(slots):
            raise ValueError(f"kv_cache.reorder: slots are {list(slots)}, expected no slot twice")
        with self._lock:
            self._check_no_capture("reorder")
            for slot, source in zip(slots, sources, strict=True):
                self._page_table.check_slot("reorder", slot)
                self._page_table.check_slot("reorder", source, in_use=True)
            state = self._page_table
            after = [(state.lengths[source], list(state.tables[source])) for source in sources]
            kept = [page for _, pages in after for page in pages]
            for page in kept:  # while slots change one by one
                state.holders[page] += 1
            for slot, (length, pages) in zip(slots, after, strict=True):
                self._set(slot, length, pages)
            for page in kept:
                state.holders[page] -= 1
            self._send_lengths()

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first tokens of a slot, as those that were not accepted.

        Raises:
            ValueError: the slot is not in use, or shorter, or there is no such slot.
        """
        with self._lock:
            self._check_no_capture("truncate")
            self._page_table.check_slot("truncate", slot, in_use=True)
            if not 0 <= length <= self._page_table.lengths[slot]:
                raise ValueError(
                    f"kv_cache.truncate: length is {length}, expected 0 to"
                    f" {self._page_table.lengths[slot]}, that of slot {slot}"
                )
            pages = self._page_table.tables[slot][: -(-length // PAGE)]
            self._set(slot, length, pages, len(pages))
            self._send_lengths()

    def free(self, slot: int) -> None:
        """Give the pages of a slot back; another request may have it.

        Raises:
            ValueError: the slot is free already, or there is no such slot.
        """
        with self._lock:
            self._check_no_capture("free")
            self._page_table.check_slot("free", slot, in_use=True)
            self._set(slot, 0, [])
            self._page_table.used[slot] = False
            self._send_lengths()

    def clear(self) -> None:
        """Free all slots, whatever an interruption has left of the tables."""
        with self._lock:
            self._check_no_capture("clear")
            old = self._page_table
            self._page_table = PageTable(len(old.lengths), old.capacity, len(old.holders))
            self._table.fill_(-1)
            self._send_lengths()

    def check(self) -> None:
        """Wait for the device, and raise if an op was to write outside of a slot's pages.

        Raises:
            RuntimeError: one was, since the last check, as when a graph is replayed for a slot that
                was freed; it wrote nothing there.
        """
        if int(self._violations.item()):
            self._violations.zero_()
            raise RuntimeError(
                "kv_cache: an op was to write outside of the pages of its slot, expected reserve"
                " before each step, for the slots of the step"
            )

    def _set(self, slot: int, length: int, pages: list[int], same: int = 0) -> None:
        """Change one slot, whose first `same` pages stay, on the host and on the device."""
        end = max(len(pages), len(self._page_table.tables[slot]))
        self._page_table.set(slot, length, pages)
        if same < end:
            row = pages[same:] + [-1] * (end - max(len(pages), same))
            self._send(row, self._table[slot, same:end])

    def _send_lengths(self) -> None:
        self._send(self._page_table.lengths, self._lengths)

    @staticmethod
    def _send(numbers: list[int], target: Tensor) -> None:
        """Queue a copy; the numbers may change at once."""
        target.copy_(ready_to_send(numbers, torch.int32, target.device), non_blocking=True)

    def _copy_page(self, source: int, target: int) -> None:
        for tensor in (self._keys, self._values, *self._scales):
            tensor[:, target].copy_(tensor[:, source])

    def _check_no_capture(self, op: str) -> None:
        if self._table.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"kv_cache.{op}: the current stream is capturing a graph, expected a call before"
                " the graph is replayed, as a replay would not count on the host"
            )
