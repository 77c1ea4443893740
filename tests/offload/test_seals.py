"""Version stamps of tensors and of what a process holds of them: each sees other writes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deepspeed_ext.offload import seals


class Both:
    """A tensor and what this process holds of it, as a DTensor has it: two of their own."""

    def __init__(self) -> None:
        self.whole, self.part = torch.ones(4), torch.ones(2)
        self.kept = self.part.data  # its memory is not used again

    def local(self, tensor: Tensor) -> Tensor:
        return self.part if tensor is self.whole else tensor


def to_the_whole(both: Both) -> None:
    both.whole.add_(0)


def to_the_part(both: Both) -> None:
    both.part.add_(0)


def of_other_memory(both: Both) -> None:
    version = both.part._version
    both.part.data = both.part.data.clone()
    assert both.part._version == version


@pytest.mark.parametrize("change", [to_the_whole, to_the_part, of_other_memory])
def test_stamps_differ_after_a_write(
    change: Callable[[Both], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    both, other = Both(), torch.ones(3)
    monkeypatch.setattr(seals, "local", both.local)
    before = seals.stamps_of([other, None, both.whole])
    assert before[1] is None and seals.stamps_of([other, None, both.whole]) == before
    change(both)
    after = seals.stamps_of([other, None, both.whole])
    assert after[:2] == before[:2] and after[2] != before[2]


def test_parts_are_of_the_same_memory_and_have_no_graph() -> None:
    params = [nn.Parameter(torch.ones(3)), None, torch.ones(2, requires_grad=True) * 2]
    parts = seals.parts_of(params)
    assert [part.requires_grad for part in parts] == [False, False]
    expected = [param.data_ptr() for param in params if param is not None]
    assert [part.data_ptr() for part in parts] == expected


def test_a_thread_that_reads_sleeps_until_there_are_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each device: torch would keep a processor busy."""
    slept: list[torch.device] = []
    monkeypatch.setattr(seals, "sleep_until", slept.append)
    values = [torch.tensor([True, False]), torch.tensor(3.0), torch.tensor([])]
    assert seals.read(values) == [[1.0, 0.0], [3.0], []]
    assert slept == [torch.device("cpu")]
