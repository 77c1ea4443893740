"""A save in the background: who is told of its failure, and who may wait for it."""

import os
from types import SimpleNamespace

import pytest

from deepspeed_ext.zero.checkpoint import saving
from deepspeed_ext.zero.checkpoint.background import Saving, in_background


def failed() -> Saving:
    def fail() -> None:
        raise OSError("no space")

    return in_background(fail)


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_failure_is_told_once(is_asked: bool, caplog: pytest.LogCaptureFixture) -> None:
    sharding = SimpleNamespace(saving=failed())
    if is_asked:
        with pytest.raises(OSError, match="no space"):
            sharding.saving.result()
    saving._await_previous("zero.save", sharding)
    told = ["zero.save: the save before this one failed: no space"]
    assert caplog.messages == ([] if is_asked else told)
    assert sharding.saving is None


def test_a_fork_waits_for_no_thread_of_its_parent() -> None:
    sharding = SimpleNamespace(saving=failed())
    sharding.saving._process = os.getppid()
    with pytest.raises(RuntimeError, match=r"^zero\.load: this process is a fork of the one whose"):
        saving._await_previous("zero.load", sharding)
    sharding.saving._process = os.getpid()
    assert sharding.saving.exception() is not None
