"""The self-checks of functional ops pass, and find an op that is wrong."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from deepspeed_ext import ops
from deepspeed_ext.ops import self_checks

NAMES = [name for name, check in vars(self_checks).items() if isinstance(check, self_checks._Check)]
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "value": lambda result: result + 0.01 * result.detach(),
    "gradient": lambda result: result + 0.01 * (result - result.detach()),
}


@pytest.mark.parametrize("name", NAMES)
def test_passes(name: str, device: str) -> None:
    getattr(self_checks, name)(device)


def test_replay_passes() -> None:
    self_checks.replay("cpu")


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", NAMES)
def test_finds(name: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check = getattr(self_checks, name)
    op = getattr(ops, check.name)

    def changed(*arguments: Any, **options: Any) -> Tensor | list[Tensor]:
        found = op(*arguments, **options)
        change = WRONG[wrong]
        return change(found) if isinstance(found, Tensor) else [change(t) for t in found]

    monkeypatch.setattr(self_checks.ops, check.name, changed)
    text = rf"^{check.name}: \d of results and gradients on cpu has .*, expected "
    with pytest.raises(RuntimeError, match=text):
        check("cpu")
