"""Extents: every page is taken or free, once; best fit; neighbours merge."""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from deepspeed_ext.io.extents import PAGE, Extent, Extents, whole_pages

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 9 * PAGE)),
        st.tuples(st.just("give_back"), st.integers(0, 1000)),
        st.tuples(st.just("cut"), st.integers(0, 4)),
    ),
    max_size=60,
)


def gaps_of(taken: list[Extent], end: int) -> list[Extent]:
    """Return what is free, merged, of a file in which these are taken."""
    gaps, start = [], 0
    for extent in [*sorted(taken), Extent(end, 0)]:
        assert extent.offset >= start, "two extents overlap"
        if extent.offset > start:
            gaps.append(Extent(start, extent.offset - start))
        start = extent.end
    return gaps


def free_of(extents: Extents) -> list[Extent]:
    """Return what the books call free, after looking whether they agree with each other."""
    free = sorted(Extent(offset, nbytes) for nbytes, offset in extents._free)
    assert extents._free == sorted(extents._free)
    assert extents._free_at == {extent.offset: extent for extent in free}
    assert extents._free_to == {extent.end: extent for extent in free}
    return free


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_every_page_is_accounted_for(steps: list[tuple[str, int]]) -> None:
    extents, taken = Extents(), []
    for step, number in steps:
        if step == "take":
            need = whole_pages(max(number, 1))
            gaps = gaps_of(taken, extents.end)
            fitting = [gap for gap in gaps if gap.nbytes >= need]
            missing = extents.missing(number)
            assert (missing == 0) == bool(fitting), "it grows only when nothing fits"
            if not fitting:
                assert extents.take(number) is None
                assert missing == need - extents.tail
                extents.grow(missing)
                fitting = [gap for gap in gaps_of(taken, extents.end) if gap.nbytes >= need]
            extent = extents.take(number)
            best = min(fitting, key=lambda gap: (gap.nbytes, gap.offset))
            assert extent == Extent(best.offset, need)
            taken.append(extent)
        elif step == "give_back" and taken:
            extents.give_back(taken.pop(number % len(taken)))
        elif step == "cut":
            extents.cut(min(number * PAGE, extents.tail))
        gaps = gaps_of(taken, extents.end)
        assert free_of(extents) == gaps
        assert extents.used == sum(extent.nbytes for extent in taken)
        tail = gaps[-1] if gaps and gaps[-1].end == extents.end else None
        assert extents.tail == (tail.nbytes if tail else 0)
        again = Extents(taken)
        assert free_of(again) == [gap for gap in gaps if gap is not tail]
        assert again.used == extents.used


def test_the_file_does_not_grow_for_what_was_freed() -> None:
    extents = Extents()
    extents.grow(8 * PAGE)
    first, second, third = (extents.take(2 * PAGE) for _ in range(3))
    assert first and second and third
    extents.give_back(first)
    extents.give_back(second)
    assert extents.missing(4 * PAGE) == 0, "neighbours have merged"
    assert extents.take(PAGE) == Extent(6 * PAGE, PAGE), "the smallest that fits"


def test_refuses_what_is_not_so() -> None:
    with pytest.raises(ValueError, match="overlaps what ends at 8192"):
        Extents([Extent(0, 2 * PAGE), Extent(PAGE, PAGE)])
    with pytest.raises(ValueError, match="expected whole pages of 4096"):
        Extents([Extent(1, PAGE)])
    extents = Extents([Extent(0, PAGE)])
    with pytest.raises(ValueError, match="is not taken"):
        extents.give_back(Extent(PAGE, PAGE))
    with pytest.raises(ValueError, match="expected at most 0"):
        extents.cut(PAGE)


def test_ctrl_c_at_every_line() -> None:
    """What is taken is what it was, or what it was to become; the rest is free."""
    for name in ("take", "give_back", "grow", "cut"):
        for number in itertools.count():
            extents = Extents([Extent(PAGE, PAGE), Extent(3 * PAGE, PAGE), Extent(6 * PAGE, PAGE)])
            extents.grow(PAGE)
            argument = Extent(3 * PAGE, PAGE) if name == "give_back" else PAGE
            was_stopped = stopped_at(number, partial(getattr(extents, name), argument))
            extents.take(2 * PAGE)  # before the end, and the gaps ahead of it stay as they are
            taken = sorted(extents._taken.values())
            assert free_of(extents) == gaps_of(taken, extents.end), (name, number)
            assert extents.used == sum(extent.nbytes for extent in taken)
            if not was_stopped:
                break


def stopped_at(number: int, function: Callable[[], object]) -> bool:
    """Call a function, with Ctrl-C at one line of extents; tell whether it got there."""
    left = number

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename == Extents.take.__code__.co_filename and event == "line":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
