"""StoredWeight: a weight of integers as a file has it, rewritten as ours in one pass.

What is common to the packages whose files are read: eight or four codes in an int32, from its
lowest bits on, and columns whose groups are mixed.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from deepspeed_ext.ops import repack_weight_
from deepspeed_ext.ops.quantization.formats import unpack_nibbles
from deepspeed_ext.quantization.layout import WeightLayout

_ALONE_BYTES = 1 << 20  # of codes: up to so many repack_weight_ works alone
_ALONE_ELEMENTS = 1 << 15  # so many are where torch begins to use threads
_ROWS_MULTIPLE = 128  # so many are what repack_weight_ works on at once, if words are across


class Stored(Protocol):
    """A weight in whatever form.

    Attributes:
        layout: what it becomes.
        order: (in,), int64: see `StoredWeight`.
    """

    @property
    def layout(self) -> WeightLayout: ...
    @property
    def order(self) -> Tensor | None: ...

    def write(self, into: Mapping[str, Tensor]) -> None:
        """Fill the tensors of the layout, which may be rows of larger ones; `order` is there."""


class Packing(Protocol):
    """How a method stores the weights of layers.

    Attributes:
        mark: the tensor that says that a layer is stored so.
        parts: all tensors that a layer may have, beside its bias.
        on_host: those of them that may stay on the CPU, and better do: their values are looked at,
            and CUDA would have to be waited for.
    """

    mark: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]

    @property
    def on_host(self) -> tuple[str, ...]: ...

    def stored(self, what: str, tensors: Mapping[str, Tensor], length: int) -> Stored:
        """Return the weight of a layer; of tensors on meta, all but its values.

        Args:
            what: begins the text of an error: which layer of which file.
            tensors: those of `parts` that are there.
            length: elements of a row.

        Raises:
            ValueError: a tensor is missing, or does not fit the others.
        """


@dataclass(frozen=True)
class StoredWeight:
    """A weight, (n, length), as codes that stand for (code - zero) * scale.

    Args:
        layout: what it becomes.
        words: as ``repack_weight_`` takes them, columns in the order of the file; of 8 bits the
            code 128 stands for 0.
        scales: (groups, n), of a dtype of floats.
        zeros: returns those of rows begin to end, (groups, end - begin), uint8 or int32; or one
            for all of them; None: the code that has a zero in the middle.
        order: (in,), int64: which column of the file is each of ours; None: as they stand. It may
            be on the CPU while the rest is on CUDA.
        across: whether words are across the rows.
    """

    layout: WeightLayout
    words: Tensor
    scales: Tensor
    zeros: Callable[[int, int], Tensor] | int | None
    order: Tensor | None
    across: bool = False

    def write(self, into: Mapping[str, Tensor]) -> None:
        """See `Stored`; on the CPU by as many threads as torch has."""
        n = self.layout.shape[0]
        at_once = self._rows_at_once() if into["codes"].device.type == "cpu" else max(n, 1)
        in_threads(
            [partial(self._write_rows, into, i, min(i + at_once, n)) for i in range(0, n, at_once)]
        )

    def _rows_at_once(self) -> int:
        """Return of how many rows one thread makes the codes, and torch all else, without others.

        Threads of torch's spin while they wait for the next piece of work. Where there is more to
        do than there are cores, such as to read, they take more time than the work.
        """
        groups, row_bytes = max(len(self.scales), 1), self.layout.tensors()["codes"][0][1]
        rows = min(_ALONE_BYTES // max(row_bytes, 1), (_ALONE_ELEMENTS - 1) // groups)
        return max(rows // _ROWS_MULTIPLE, 1) * _ROWS_MULTIPLE

    def _write_rows(self, into: Mapping[str, Tensor], begin: int, end: int) -> None:
        per_lane = 8 if self.across else 1
        repack_weight_(
            self.words[begin // per_lane : -(-end // per_lane)],
            into["codes"][begin:end],
            None if self.order is None else into["order"],
            format=self.layout.format,
            length=self.layout.shape[1],
            biased=True,
            across=self.across,
        )
        scales = into["scales"][:, begin:end].copy_(self.scales[:, begin:end])
        if self.zeros is not None:  # 4 or 8 bits times 11 of a scale: exact
            zeros = self.zeros if isinstance(self.zeros, int) else self.zeros(begin, end)
            torch.mul(scales, zeros, out=into["offsets"][:, begin:end]).neg_()

    def tensors(self) -> dict[str, Tensor]:
        """Return what a layer keeps."""
        made = self.layout.tensors_on(self.scales.device)
        if self.order is not None:
            copy_up(self.order, made["order"])
        self.write(made)
        return made


def copy_up(source: Tensor, into: Tensor) -> None:
    """Copy, from the CPU to CUDA without waiting for it."""
    if into.is_cuda and not source.is_cuda:
        source = source.pin_memory()
    into.copy_(source, non_blocking=True)


def in_threads(tasks: Sequence[Callable[[], object]]) -> None:
    """Do all tasks, of which each should be one for one thread, by as many as torch has.

    Raises:
        Exception: of a task; what has not begun by then never does.
    """
    threads = min(len(tasks), torch.get_num_threads())
    if threads < 2:
        for task in tasks:
            task()
        return
    with ThreadPoolExecutor(threads) as pool:
        try:
            for future in [pool.submit(task) for task in tasks]:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def words_of(words: Tensor, bits: int = 4) -> Tensor:
    """Return the numbers of each int32 along the last dimension, as uint8."""
    # Of one word in each row the stride may be any; a flat tensor has 1.
    flat = words.contiguous().view(-1).view(torch.uint8)
    as_bytes = flat.view(*words.shape[:-1], 4 * words.shape[-1])
    return as_bytes if bits == 8 else unpack_nibbles(as_bytes, words.shape[-1] * 8)


def order_of(
    what: str, name: str, g_idx: Tensor | None, length: int, group: int, is_mixed: bool
) -> Tensor | None:
    """Return the columns in the order of their groups, or None if they are.

    Args:
        what: begins the text of an error.
        name: of the tensor.
        g_idx: the group of each column, or None.
        length: how many there are.
        group: columns in each group.
        is_mixed: what is taken for true on meta, where there are no values.

    Raises:
        ValueError: there are other numbers of columns in groups.
    """
    if g_idx is None:
        return None
    if g_idx.shape != (length,) or g_idx.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{what} has {name} as {g_idx.dtype} of shape {list(g_idx.shape)}, expected whole"
            f" numbers of shape {[length]}"
        )
    if g_idx.is_meta:
        return g_idx.long() if is_mixed else None
    in_order = torch.arange(length, dtype=g_idx.dtype, device=g_idx.device) // group
    if torch.equal(g_idx, in_order):
        return None
    groups, order = g_idx.sort(stable=True)
    if not torch.equal(groups, in_order):
        raise ValueError(
            f"{what} has {name} with groups of other sizes, expected {group} columns in each"
        )
    return order
