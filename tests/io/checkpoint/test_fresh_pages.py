"""FreshPages: huge pages while they come fast, small ones from then on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from page_flags import flags_at
from state_dict_cases import MIB, assert_same, random_tensor

from deepspeed_ext.io.checkpoint import fresh_pages
from deepspeed_ext.io.checkpoint.fresh_pages import FreshPages
from deepspeed_ext.io.checkpoint.state_dict import load, save


def clock(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """Make the probes of pages take so long, one after another; there are no others."""

    def times() -> Iterator[float]:
        for taken in seconds:
            yield from (0.0, taken)

    steps = times()
    monkeypatch.setattr(fresh_pages.time, "perf_counter", lambda: next(steps))


def is_small(buffer: object) -> bool:
    memory = torch.frombuffer(buffer, dtype=torch.uint8)
    assert memory.data_ptr() % 4096 == 0
    memory[-1] = 1
    return "nh" in flags_at(memory.data_ptr())


def test_slow_huge_pages_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = FreshPages()
    clock(monkeypatch, 2e-4, 3e-4, 0.5, 2e-4, 4e-3, 5e-3)
    assert not is_small(pages.take(8 * MIB))
    assert not is_small(pages.take(8 * MIB)), "it was interrupted once"
    assert not is_small(pages.take(MIB)), "too little to tell"
    assert is_small(pages.take(8 * MIB))
    for nbytes in (8 * MIB, 4 * MIB + 4096, MIB):
        assert is_small(pages.take(nbytes)), "nothing is timed any more"


def test_small_pages_are_loaded_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"{i}": random_tensor((5 * MIB + 40 * i,), torch.uint8, i) for i in range(4)}
    state["small"] = torch.arange(9.0)
    save(state, tmp_path / "model")
    monkeypatch.setattr(fresh_pages, "_seconds_of_a_page", lambda _: 1.0)
    loaded = load(tmp_path / "model")
    assert_same(loaded, state)
    assert "nh" in flags_at(loaded["0"].data_ptr())
    for name in list(loaded):
        tensor = loaded.pop(name)
        tensor.add_(1)
        assert torch.equal(tensor, state[name] + 1)


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_pages.mmap, "MADV_NOHUGEPAGE", -1)
    monkeypatch.setattr(fresh_pages, "_seconds_of_a_page", lambda _: 1.0)
    assert torch.frombuffer(FreshPages().take(4 * MIB), dtype=torch.uint8).sum() == 0
