"""Which blocks of an attention are computed: patterns by DeepSpeed's names, of any length."""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops._kinds import check_flags, check_whole

_DIRECTIONS = ("bidirectional", "unidirectional")


class SparsityConfig:
    """What patterns of blocks have in common; a class of your own has `make_layout`, too.

    A layout is (num_heads, n, n) for a sequence of n blocks, int64, on the CPU: 1 where the tokens
    of a row of blocks attend to those of a column of blocks, else 0. The six patterns below have
    the arguments and layouts of DeepSpeed 0.9.0, but for these, which are its defects:

    - A unidirectional layout names no block behind the diagonal. Theirs does: Fixed and Variable
      in groups of several global blocks, and Variable in random ones.
    - Random blocks are drawn from `seed`, so that every process and every run has the same ones.
      Theirs come from the state of Python's module random. A row of a unidirectional layout with
      fewer blocks than are to be drawn has all it has; theirs raises.
    - BSLongformer and LocalSlidingWindow refuse an attention that is neither of the two; theirs
      take anything.
    - Counts and sizes are whole numbers, 1 or more where 0 has no meaning; theirs fail later with a
      division by zero, or give a layout that nobody asked for.
    - Lists of defaults are of no two objects.

    As there, a band of `num_sliding_window_blocks` reaches half of that, rounded down, to both
    sides of the diagonal; an even number is one block more than it says.

    Args:
        num_heads: of the attention.
        block: tokens in a block.
        different_layout_per_head: each head has a layout of its own, where the pattern has several.
    """

    def __init__(
        self, num_heads: int, block: int = 16, different_layout_per_head: bool = False
    ) -> None:
        self.num_heads = self._whole(1, num_heads=num_heads)
        self.block = self._whole(1, block=block)
        check_flags(self._name, different_layout_per_head=different_layout_per_head)
        self.different_layout_per_head = bool(different_layout_per_head)
        self.num_layout_heads = self.num_heads if self.different_layout_per_head else 1

    def make_layout(self, seq_len: int) -> Tensor:
        """Return the layout of a sequence.

        Args:
            seq_len: tokens, a multiple of block.

        Raises:
            ValueError: seq_len is no such number, or has fewer blocks than the pattern needs.
        """
        layout = self.setup_layout(seq_len)
        layout.copy_(self._seen(layout.shape[-1]))
        return layout

    def setup_layout(self, seq_len: int) -> Tensor:
        """Return a layout of zeros, to begin one of your own with."""
        if self._whole(0, seq_len=seq_len) % self.block:
            raise ValueError(
                f"{self._name}: seq_len is {seq_len}, expected a multiple of block, {self.block};"
                " see SparseAttentionUtils.pad_to_block_size"
            )
        blocks = int(seq_len) // self.block
        return torch.zeros(self.num_heads, blocks, blocks, dtype=torch.int64, device="cpu")

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Copy the layout of the first head to all, but with different_layout_per_head."""
        if not self.different_layout_per_head:
            layout[1:] = layout[0]
        return layout

    def _seen(self, blocks: int) -> Tensor:
        """Return which blocks are seen, bool, of a shape that broadcasts to that of the layout."""
        raise NotImplementedError(
            f"{self._name}: make_layout is not defined, expected a class with a pattern, such as"
            " FixedSparsityConfig"
        )

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _whole(self, least: int, **value: Any) -> int:
        [(name, number)] = value.items()
        check_whole(self._name, **value)
        if number < least:
            raise ValueError(f"{self._name}: {name} is {number}, expected at least {least}")
        return int(number)

    def _direction(self, attention: str) -> str:
        if attention not in _DIRECTIONS:
            expected = " or ".join(map(repr, _DIRECTIONS))
            raise ValueError(f"{self._name}: attention is {attention!r}, expected {expected}")
        return attention

    def _rows_of_globals(self, wanted: bool, attention: str) -> bool:
        check_flags(self._name, horizontal_global_attention=wanted)
        if wanted and attention != "bidirectional":
            raise ValueError(
                f"{self._name}: horizontal_global_attention is True, expected False with"
                f" attention {attention!r}"
            )
        return bool(wanted)

    def _check_room(self, blocks: int, **counts: int) -> None:
        for name, count in counts.items():
            if blocks < count:
                raise ValueError(
                    f"{self._name}: {name} is {count}, expected at most the blocks of seq_len,"
                    f" {blocks}"
                )


class DenseSparsityConfig(SparsityConfig):
    """All blocks, to compare with.

    Args:
        num_heads: see SparsityConfig.
        block: likewise.
        different_layout_per_head: changes nothing.
    """

    def _seen(self, blocks: int) -> Tensor:
        return torch.ones(1, dtype=torch.bool, device="cpu")


class FixedSparsityConfig(SparsityConfig):
    """Windows one behind the other, and the last blocks of each, which all see.

    Args:
        num_heads: see SparsityConfig.
        block: likewise.
        different_layout_per_head: likewise.
        num_local_blocks: blocks in a window, each of which sees the others.
        num_global_blocks: how many of a window all others see, neighbours of each other; a divisor
            of num_local_blocks.
        attention: "bidirectional", or "unidirectional" for none behind the diagonal.
        horizontal_global_attention: those that all see also see all; for bidirectional attention.
        num_different_global_patterns: with different_layout_per_head, heads take turns: the last
            blocks of a window, those before them, and so on, this many. At most num_local_blocks /
            num_global_blocks.

    Raises:
        ValueError: these do not fit together.

    See: Child et al., "Generating Long Sequences with Sparse Transformers", 2019.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_local_blocks = self._whole(1, num_local_blocks=num_local_blocks)
        self.num_global_blocks = self._whole(1, num_global_blocks=num_global_blocks)
        if self.num_local_blocks % self.num_global_blocks:
            raise ValueError(
                f"{self._name}: num_global_blocks is {num_global_blocks}, expected a divisor of"
                f" num_local_blocks, {num_local_blocks}"
            )
        self.attention = self._direction(attention)
        self.horizontal_global_attention = self._rows_of_globals(
            horizontal_global_attention, attention
        )
        patterns = self._whole(1, num_different_global_patterns=num_different_global_patterns)
        if patterns > 1 and not different_layout_per_head:
            raise ValueError(
                f"{self._name}: num_different_global_patterns is {patterns}, expected 1, or"
                " different_layout_per_head True"
            )
        most = self.num_local_blocks // self.num_global_blocks
        if patterns > most:
            raise ValueError(
                f"{self._name}: num_different_global_patterns is {patterns}, expected at most"
                f" {most}, num_local_blocks / num_global_blocks"
            )
        self.num_different_global_patterns = patterns

    def _seen(self, blocks: int) -> Tensor:
        size, count = self.num_local_blocks, self.num_global_blocks
        at = torch.arange(blocks, device="cpu")
        heads = torch.arange(self.num_layout_heads, device="cpu")[:, None]
        first = size - (1 + heads % self.num_different_global_patterns) * count
        whole = blocks - blocks % size  # the last window may be short, and takes its last ones
        is_global = (at < whole) & _is_in(at % size, first, count)
        if whole < blocks:
            is_global |= _is_in(at, (whole + first).clamp(max=blocks - count), count)
        return _joined(
            _is_same(at // size), is_global, self.attention, self.horizontal_global_attention
        )


class VariableSparsityConfig(SparsityConfig):
    """Windows of sizes that are listed, blocks that all see, and random ones.

    Args:
        num_heads: see SparsityConfig.
        block: likewise.
        different_layout_per_head: heads draw random blocks of their own.
        num_random_blocks: how many different blocks each row draws of those that it could see;
            some of them may be seen anyway.
        local_window_blocks: sizes of windows one behind the other; the last one goes on.
        global_block_indices: blocks that all see; from the end where negative. What the sequence
            does not reach does nothing.
        global_block_end_indices: None, or for each of these the end of a group that begins there.
        attention: see FixedSparsityConfig.
        horizontal_global_attention: likewise.
        seed: of random blocks, any whole number; another one for each layer, lest all draw alike.

    Raises:
        ValueError: these do not fit together.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_random_blocks = self._whole(0, num_random_blocks=num_random_blocks)
        _check_list(self._name, local_window_blocks=local_window_blocks)
        self.local_window_blocks = [
            self._whole(1, **{f"local_window_blocks[{i}]": size})
            for i, size in enumerate(local_window_blocks)
        ]
        if not self.local_window_blocks:
            raise ValueError(f"{self._name}: local_window_blocks is empty, expected a size or more")
        self.global_block_indices, self.global_block_end_indices = _groups_of(
            self._name, global_block_indices, global_block_end_indices
        )
        self.attention = self._direction(attention)
        self.horizontal_global_attention = self._rows_of_globals(
            horizontal_global_attention, attention
        )
        self.seed = _seed_of(self._name, seed)

    def _seen(self, blocks: int) -> Tensor:
        self._check_room(blocks, num_random_blocks=self.num_random_blocks)
        at = torch.arange(blocks, device="cpu")
        ends = torch.tensor(self.local_window_blocks, device="cpu").cumsum(0)
        window = torch.bucketize(at, ends, right=True)
        window += (at - ends[-1]).clamp(min=0) // self.local_window_blocks[-1]
        is_global = _is_listed(blocks, self.global_block_indices, self.global_block_end_indices)
        drawn = _drawn(
            self.num_layout_heads, blocks, self.num_random_blocks, self.attention, self.seed
        )
        return _joined(
            _is_same(window) | drawn, is_global, self.attention, self.horizontal_global_attention
        )


class BigBirdSparsityConfig(SparsityConfig):
    """A band, first blocks that all see and that see all, and random ones.

    Args:
        num_heads: see SparsityConfig.
        block: likewise.
        different_layout_per_head: heads draw random blocks of their own.
        num_random_blocks: see VariableSparsityConfig.
        num_sliding_window_blocks: the width of the band, see SparsityConfig.
        num_global_blocks: how many first blocks all see.
        attention: see FixedSparsityConfig.
        seed: see VariableSparsityConfig.

    See: Zaheer et al., "Big Bird: Transformers for Longer Sequences", 2020.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_random_blocks = self._whole(0, num_random_blocks=num_random_blocks)
        self.num_sliding_window_blocks = self._whole(
            0, num_sliding_window_blocks=num_sliding_window_blocks
        )
        self.num_global_blocks = self._whole(0, num_global_blocks=num_global_blocks)
        self.attention = self._direction(attention)
        self.seed = _seed_of(self._name, seed)

    def _seen(self, blocks: int) -> Tensor:
        self._check_room(
            blocks,
            num_random_blocks=self.num_random_blocks,
            num_sliding_window_blocks=self.num_sliding_window_blocks,
            num_global_blocks=self.num_global_blocks,
        )
        at = torch.arange(blocks, device="cpu")
        drawn = _drawn(
            self.num_layout_heads, blocks, self.num_random_blocks, self.attention, self.seed
        )
        seen = drawn | _is_near(at, self.num_sliding_window_blocks)
        return _joined(seen, at < self.num_global_blocks, self.attention, True)


class BSLongformerSparsityConfig(SparsityConfig):
    """A band, and listed blocks that all see and that see all.

    Args:
        num_heads: see SparsityConfig.
        block: likewise.
        different_layout_per_head: changes nothing.
        num_sliding_window_blocks: the width of the band, see SparsityConfig.
        global_block_indices: see VariableSparsityConfig.
        global_block_end_indices: likewise.
        attention: see FixedSparsityConfig.

    Raises:
        ValueError: these do not fit together.

    See: Beltagy, Peters & Cohan, "Longformer: The Long-Document Transformer", 2020.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_sliding_window_blocks = self._whole(
            0, num_sliding_window_blocks=num_sliding_window_blocks
        )
        self.global_block_indices, self.global_block_end_indices = _groups_of(
            self._name, global_block_indices, global_block_end_indices
        )
        self.attention = self._direction(attention)

    def _seen(self, blocks: int) -> Tensor:
        self._check_room(blocks, num_sliding_window_blocks=self.num_sliding_window_blocks)
        near = _is_near(torch.arange(blocks, device="cpu"), self.num_sliding_window_blocks)
        is_global = _is_listed(blocks, self.global_block_indices, self.global_block_end_indices)
        return _joined(near, is_global, self.attention, True)


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A band alone.

    Args:
        num_heads: see SparsityConfig.
        block: likewise.
        num_sliding_window_blocks: the width of the band, see SparsityConfig; of it a unidirectional
            attention has what is not behind the diagonal.
        attention: see FixedSparsityConfig.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        num_sliding_window_blocks: int = 3,
        attention: str = "unidirectional",
    ) -> None:
        super().__init__(num_heads, block)
        self.num_sliding_window_blocks = self._whole(
            0, num_sliding_window_blocks=num_sliding_window_blocks
        )
        self.attention = self._direction(attention)

    def _seen(self, blocks: int) -> Tensor:
        self._check_room(blocks, num_sliding_window_blocks=self.num_sliding_window_blocks)
        at = torch.arange(blocks, device="cpu")
        return _joined(_is_near(at, self.num_sliding_window_blocks), at < 0, self.attention, False)


def _is_in(at: Tensor, first: Tensor, count: int) -> Tensor:
    return (at >= first) & (at < first + count)


def _is_same(window: Tensor) -> Tensor:
    return window[:, None] == window


def _is_near(at: Tensor, width: int) -> Tensor:
    return (at[:, None] - at).abs() <= width // 2


def _joined(seen: Tensor, is_global: Tensor, attention: str, rows_too: bool) -> Tensor:
    """Return what is seen with columns, and rows, of global blocks, as the direction lets it be.

    Args:
        seen: (heads or none, blocks, blocks).
        is_global: (heads or none, blocks).
        attention: the direction.
        rows_too: global blocks see all.
    """
    seen = seen | is_global[..., None, :]
    if rows_too:
        seen = seen | is_global[..., None]
    return seen.tril() if attention == "unidirectional" else seen


def _is_listed(blocks: int, starts: list[int], ends: list[int] | None) -> Tensor:
    listed = torch.zeros(blocks, dtype=torch.bool, device="cpu")
    if ends is None:
        listed[[start for start in starts if -blocks <= start < blocks]] = True
    else:
        for start, end in zip(starts, ends, strict=True):
            listed[start:end] = True
    return listed


def _drawn(heads: int, blocks: int, count: int, attention: str, seed: int) -> Tensor:
    """Return random blocks: as many different ones in each row, or all that it could see."""
    drawn = torch.zeros(heads, blocks, blocks, dtype=torch.bool, device="cpu")
    if count == 0:
        return drawn
    generator = torch.Generator(device="cpu").manual_seed(seed % 2**63)
    order = torch.rand(drawn.shape, dtype=torch.float32, device="cpu", generator=generator)
    if attention == "unidirectional":
        order -= torch.ones(blocks, blocks, device="cpu").triu(1)  # after all that could be seen
    return drawn.scatter_(-1, order.topk(count).indices, True)


def _groups_of(
    name: str, starts: Sequence[int], ends: Sequence[int] | None
) -> tuple[list[int], list[int] | None]:
    """Return copies of the lists of global blocks, if they fit together."""
    _check_list(name, global_block_indices=starts)
    if ends is not None:
        _check_list(name, global_block_end_indices=ends)
    for argument, values in (("indices", starts), ("end_indices", () if ends is None else ends)):
        for value in values:
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(
                    f"{name}: global_block_{argument} has {value!r}, expected whole numbers"
                )
    if ends is None:
        return [int(start) for start in starts], None
    if len(starts) != len(ends):
        raise ValueError(
            f"{name}: global_block_end_indices has {len(ends)} numbers, expected {len(starts)}, one"
            " for each of global_block_indices"
        )
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if start >= end:
            raise ValueError(
                f"{name}: global_block_end_indices[{i}] is {end}, expected more than"
                f" global_block_indices[{i}], {start}"
            )
    return [int(start) for start in starts], [int(end) for end in ends]


def _seed_of(name: str, seed: int) -> int:
    check_whole(name, seed=seed)
    return int(seed)


def _check_list(name: str, **value: object) -> None:
    for argument, given in value.items():
        if isinstance(given, (str, Tensor)) or not isinstance(given, Iterable):
            raise TypeError(f"{name}: {argument} is {given!r}, expected a list of whole numbers")
