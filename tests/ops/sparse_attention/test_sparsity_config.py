"""Patterns of blocks: each block of each layout by the words of its pattern; what is drawn."""

import copy
import itertools
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import warm_python
from torch import Tensor

from deepspeed_ext.ops import sparse_attention
from deepspeed_ext.ops.sparse_attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

LENGTHS = [1, 2, 3, 5, 8, 11, 16, 21]


def in_words(config: Any, blocks: int) -> Tensor:
    """Return the layout of a pattern without random blocks, one block at a time."""
    layout = torch.zeros(config.num_heads, blocks, blocks, dtype=torch.int64)
    attention = getattr(config, "attention", "bidirectional")
    rows_too = getattr(config, "horizontal_global_attention", None)
    if rows_too is None:
        rows_too = not isinstance(config, LocalSlidingWindowSparsityConfig)
    heads = range(config.num_heads)
    is_per_head = config.different_layout_per_head
    all_globals = [globals_of(config, head if is_per_head else 0, blocks) for head in heads]
    for head, i, j in itertools.product(heads, range(blocks), range(blocks)):
        if attention == "unidirectional" and j > i:
            continue
        is_global = all_globals[head]
        layout[head, i, j] = (
            is_near(config, i, j) or j in is_global or (rows_too and i in is_global)
        )
    return layout


def is_near(config: Any, i: int, j: int) -> bool:
    if isinstance(config, DenseSparsityConfig):
        return True
    if isinstance(config, FixedSparsityConfig):
        return i // config.num_local_blocks == j // config.num_local_blocks
    if isinstance(config, VariableSparsityConfig):
        return window_of(config.local_window_blocks, i) == window_of(config.local_window_blocks, j)
    return abs(i - j) <= config.num_sliding_window_blocks // 2


def window_of(sizes: list[int], at: int) -> int:
    begin = 0
    for number, size in enumerate(itertools.chain(sizes, itertools.repeat(sizes[-1]))):
        if at < begin + size:
            return number
        begin += size
    raise AssertionError


def globals_of(config: Any, head: int, blocks: int) -> set[int]:
    found: set[int] = set()
    if isinstance(config, FixedSparsityConfig):
        size, count = config.num_local_blocks, config.num_global_blocks
        first = size - (1 + head % config.num_different_global_patterns) * count
        for window in range(-(-blocks // size)):
            begin = window * size + first
            if (window + 1) * size > blocks:
                begin = min(begin, blocks - count)
            found |= set(range(begin, begin + count))
    elif isinstance(config, BigBirdSparsityConfig):
        found = set(range(config.num_global_blocks))
    elif hasattr(config, "global_block_indices"):
        starts, ends = config.global_block_indices, config.global_block_end_indices
        for start, end in zip(starts, ends or starts, strict=True):
            some = range(blocks)[start:end] if ends else [start % blocks]
            found |= set(some) if ends or -blocks <= start < blocks else set()
    return found


def drawn_configs(count: int) -> Iterator[Any]:
    draw = random.Random(0)
    one_of = draw.choice
    for _ in range(count):
        common = dict(num_heads=one_of([1, 2, 5]), block=one_of([16, 32, 64, 128]))
        per_head = dict(different_layout_per_head=one_of([True, False]))
        attention = one_of(["bidirectional", "unidirectional"])
        rows_too = attention == "bidirectional" and one_of([True, False])
        starts = [draw.randrange(-3, 24) for _ in range(draw.randrange(4))]
        ends = one_of([None, [start + draw.randrange(1, 5) for start in starts]])
        listed = dict(global_block_indices=starts, global_block_end_indices=ends)
        band = dict(num_sliding_window_blocks=draw.randrange(7))
        count_of = one_of([1, 1, 2, 3])
        size = count_of * draw.randrange(1, 5)
        patterns = draw.randrange(1, size // count_of + 1)
        yield DenseSparsityConfig(**common, **per_head)
        yield FixedSparsityConfig(
            **common,
            **per_head,
            num_local_blocks=size,
            num_global_blocks=count_of,
            attention=attention,
            horizontal_global_attention=rows_too,
            num_different_global_patterns=patterns if per_head["different_layout_per_head"] else 1,
        )
        windows = [draw.randrange(1, 6) for _ in range(draw.randrange(1, 5))]
        yield VariableSparsityConfig(
            **common,
            **per_head,
            local_window_blocks=windows,
            **listed,
            attention=attention,
            horizontal_global_attention=rows_too,
        )
        yield BigBirdSparsityConfig(
            **common,
            **per_head,
            num_random_blocks=0,
            **band,
            num_global_blocks=draw.randrange(4),
            attention=attention,
        )
        yield BSLongformerSparsityConfig(
            **common, **per_head, **band, **listed, attention=attention
        )
        yield LocalSlidingWindowSparsityConfig(**common, **band, attention=attention)


def test_layouts_are_what_their_words_say() -> None:
    compared = 0
    for number, config in enumerate(drawn_configs(14)):
        blocks = LENGTHS[number % len(LENGTHS)]
        least = max(
            getattr(config, "num_sliding_window_blocks", 0),
            config.num_global_blocks if isinstance(config, BigBirdSparsityConfig) else 0,
        )
        if blocks < least:
            text = f"expected at most the blocks of seq_len, {blocks}$"
            with pytest.raises(ValueError, match=text):
                config.make_layout(blocks * config.block)
            blocks = least
        layout = config.make_layout(blocks * config.block)
        assert layout.dtype == torch.int64 and layout.device.type == "cpu"
        assert torch.equal(layout, in_words(config, blocks)), vars(config)
        compared += 1
    assert compared == 84


def test_a_layout_as_a_picture() -> None:
    config = FixedSparsityConfig(1, num_local_blocks=2, attention="unidirectional")
    rows = ["".join(map(str, row)) for row in config.make_layout(5 * 16)[0].tolist()]
    assert rows == ["10000", "11000", "01100", "01110", "01011"]


def test_no_layout_of_nothing() -> None:
    assert DenseSparsityConfig(3).make_layout(0).shape == (3, 0, 0)
    with pytest.raises(NotImplementedError, match=r"^SparsityConfig: make_layout is not defined"):
        SparsityConfig(4).make_layout(64)


RANDOM = [
    (kind, attention, per_head, count)
    for kind in (BigBirdSparsityConfig, VariableSparsityConfig)
    for attention in ("bidirectional", "unidirectional")
    for per_head in (True, False)
    for count in (1, 3, 9)
]


def random_config(kind: Any, attention: str, per_head: bool, count: int, **more: Any) -> Any:
    if kind is BigBirdSparsityConfig:
        more |= dict(num_sliding_window_blocks=0, num_global_blocks=0)
    else:
        more |= dict(local_window_blocks=[1], global_block_indices=[])
    return kind(3, 16, per_head, num_random_blocks=count, attention=attention, **more)


@pytest.mark.parametrize(("kind", "attention", "per_head", "count"), RANDOM)
def test_random_blocks(kind: Any, attention: str, per_head: bool, count: int) -> None:
    """So many in a row, or all that there are; beside the one on the diagonal, which may be one."""
    blocks = 12
    layout = random_config(kind, attention, per_head, count).make_layout(blocks * 16)
    there = torch.full((blocks,), blocks)
    if attention == "unidirectional":
        there = torch.arange(1, blocks + 1)
        assert torch.equal(layout, layout.tril())
    beside = (layout - torch.eye(blocks, dtype=torch.int64)).sum(-1)
    want = there.clamp(max=count)
    assert ((beside == want) | (beside == want - 1)).all()
    assert (layout[0] != layout[1]).any() == per_head
    again = random_config(kind, attention, per_head, count, seed=0).make_layout(blocks * 16)
    other = random_config(kind, attention, per_head, count, seed=-5).make_layout(blocks * 16)
    assert torch.equal(layout, again) and not torch.equal(layout, other)


def test_each_block_is_drawn_as_often() -> None:
    """Of 4,096 rows with 2 of 8: 1,024 +- 28 each."""
    config = BigBirdSparsityConfig(512, 16, True, 2, 0, 0)
    layout = config.make_layout(8 * 16)
    drawn = (layout * (1 - torch.eye(8, dtype=torch.int64))).sum((0, 1))
    assert (drawn - 1024 * 7 / 8).abs().max() < 6 * 28


def test_other_processes_and_defaults_of_torch_draw_the_same() -> None:
    config = BigBirdSparsityConfig(2, num_random_blocks=2, seed=7)
    want = config.make_layout(160)
    before = torch.get_rng_state()
    with torch.device("meta"):
        assert torch.equal(config.make_layout(160), want)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(config.make_layout(160), want)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert torch.equal(same.make_layout(160), want)
    code = (
        "import torch; torch.manual_seed(3);"
        "from deepspeed_ext.ops.sparse_attention import BigBirdSparsityConfig as C;"
        "print(C(2, num_random_blocks=2, seed=7).make_layout(160).flatten().tolist())"
    )
    done = warm_python.run("-c", code)
    assert done.stdout.strip() == str(want.flatten().tolist())


def test_nothing_is_shared() -> None:
    first, second = VariableSparsityConfig(1), VariableSparsityConfig(1)
    first.local_window_blocks.append(9)
    first.global_block_indices.clear()
    assert second.local_window_blocks == [4] and second.global_block_indices == [0]
    given = [1, 2]
    config = BSLongformerSparsityConfig(1, global_block_indices=given)
    given.append(3)
    assert config.global_block_indices == [1, 2]
    layout = config.make_layout(64)
    layout.zero_()
    assert config.make_layout(64).any()


def test_numbers_of_numpy() -> None:
    config = FixedSparsityConfig(np.int64(2), np.int32(16), num_local_blocks=np.int64(2))
    assert torch.equal(
        config.make_layout(np.int64(64)), FixedSparsityConfig(2, num_local_blocks=2).make_layout(64)
    )


def test_a_pattern_of_your_own() -> None:
    class Diagonal(SparsityConfig):
        def make_layout(self, seq_len: int) -> Tensor:
            layout = self.setup_layout(seq_len)
            layout[0].fill_diagonal_(1)
            return self.check_and_propagate_first_head_layout(layout)

    want = torch.eye(4, dtype=torch.int64).expand(2, 4, 4)
    assert torch.equal(Diagonal(2).make_layout(64), want)
    per_head = Diagonal(2, different_layout_per_head=True).make_layout(64)
    assert per_head[0].any() and not per_head[1].any()


WRONG: list[tuple[type, dict[str, Any], str]] = [
    (DenseSparsityConfig, dict(num_heads=0), "num_heads is 0, expected at least 1"),
    (DenseSparsityConfig, dict(num_heads=1.5), "num_heads is 1.5, expected a whole number"),
    (DenseSparsityConfig, dict(block=-16), "block is -16, expected at least 1"),
    (FixedSparsityConfig, dict(num_local_blocks=0), "num_local_blocks is 0, expected at least 1"),
    (FixedSparsityConfig, dict(num_global_blocks=0), "num_global_blocks is 0, expected at least"),
    (FixedSparsityConfig, dict(num_global_blocks=3), "num_global_blocks is 3, expected a divisor"),
    (FixedSparsityConfig, dict(attention="both"), "attention is 'both', expected 'bidirectional'"),
    (BSLongformerSparsityConfig, dict(attention=None), "attention is None, expected 'bidir"),
    (LocalSlidingWindowSparsityConfig, dict(attention=""), "attention is '', expected 'bidir"),
    (
        FixedSparsityConfig,
        dict(attention="unidirectional", horizontal_global_attention=True),
        "horizontal_global_attention is True, expected False with attention 'unidirectional'",
    ),
    (
        FixedSparsityConfig,
        dict(num_different_global_patterns=2),
        "num_different_global_patterns is 2, expected 1, or different_layout_per_head True",
    ),
    (
        FixedSparsityConfig,
        dict(num_different_global_patterns=5, different_layout_per_head=True),
        "num_different_global_patterns is 5, expected at most 4",
    ),
    (VariableSparsityConfig, dict(local_window_blocks=[]), "local_window_blocks is empty, expec"),
    (
        VariableSparsityConfig,
        dict(local_window_blocks=[4, 0]),
        r"local_window_blocks\[1\] is 0, expected at least 1",
    ),
    (
        VariableSparsityConfig,
        dict(global_block_indices=[0, 2], global_block_end_indices=[1]),
        "global_block_end_indices has 1 numbers, expected 2",
    ),
    (
        BSLongformerSparsityConfig,
        dict(global_block_indices=[0, 2], global_block_end_indices=[1, 2]),
        r"global_block_end_indices\[1\] is 2, expected more than global_block_indices\[1\], 2",
    ),
    (
        BSLongformerSparsityConfig,
        dict(global_block_indices=["0"]),
        "global_block_indices has '0', expected whole numbers",
    ),
    (BigBirdSparsityConfig, dict(seed=0.5), "seed is 0.5, expected a whole number"),
    (BigBirdSparsityConfig, dict(seed=True), "seed is True, expected a whole number"),
    (DenseSparsityConfig, dict(num_heads=True), "num_heads is True, expected a whole number"),
    (
        FixedSparsityConfig,
        dict(horizontal_global_attention="no"),
        "horizontal_global_attention is 'no', expected True or False",
    ),
    (
        BigBirdSparsityConfig,
        dict(different_layout_per_head="no"),
        "different_layout_per_head is 'no', expected True or False",
    ),
    (
        VariableSparsityConfig,
        dict(local_window_blocks=4),
        "local_window_blocks is 4, expected a list of whole numbers",
    ),
    (
        BSLongformerSparsityConfig,
        dict(global_block_indices=0),
        "global_block_indices is 0, expected a list of whole numbers",
    ),
]


@pytest.mark.parametrize(("kind", "options", "text"), WRONG)
def test_what_does_not_fit_is_refused(kind: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{kind.__name__}: {text}"):
        kind(**{"num_heads": 2, **options})


def test_lengths_that_do_not_fit_are_refused() -> None:
    text = "seq_len is 100, expected a multiple of block, 16; see SparseAttentionUtils.pad_to_b"
    with pytest.raises(ValueError, match=f"^DenseSparsityConfig: {text}"):
        DenseSparsityConfig(1).make_layout(100)
    with pytest.raises(ValueError, match=r"num_random_blocks is 5, expected at most the blocks of"):
        VariableSparsityConfig(1, num_random_blocks=5).make_layout(64)


def test_all_names_are_there() -> None:
    assert set(sparse_attention.__all__) <= set(dir(sparse_attention))
    assert all(callable(getattr(sparse_attention, name)) for name in sparse_attention.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = sparse_attention.nothing
