"""A save in the background: who is told of its failure, and who may wait for it."""

import io
import os
import sys
from types import SimpleNamespace

import pytest

from deepspeed_ext.zero.checkpoint import background, saving
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


ENDS = (None, SystemExit(0), SystemExit(None), SystemExit(3), KeyboardInterrupt(), ValueError("x"))


@pytest.mark.parametrize("has_failed", [False, True], ids=["saved", "failed"])
@pytest.mark.parametrize("end", ENDS, ids=repr)
def test_the_status_of_a_worker(
    end: BaseException | None, has_failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has ended it says more than a save that has failed, unless it has ended well."""
    monkeypatch.setattr(background, "_tell", lambda: has_failed)
    says_more = end is not None and not (isinstance(end, SystemExit) and not end.code)
    found: BaseException | None = None
    try:
        try:
            if end is not None:
                raise end
        finally:
            background._end_worker()
    except BaseException as error:
        found = error
    if has_failed and not says_more:
        assert isinstance(found, SystemExit) and found.code == 120
    else:
        assert found is end


@pytest.mark.parametrize("has_failed", [False, True], ids=["saved", "failed"])
@pytest.mark.parametrize("has_raised", [False, True], ids=["ended well", "raised"])
def test_the_status_of_a_program(
    has_raised: bool, has_failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python makes 120 of a flush that fails at the end; an exception has a status of its own."""
    monkeypatch.setattr(background, "_tell", lambda: has_failed)
    monkeypatch.setattr(sys, "last_value", ValueError() if has_raised else None, raising=False)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    background._end_program()
    if has_failed and not has_raised:
        with pytest.raises(OSError, match="the last save failed"):
            sys.stderr.flush()
    else:
        assert sys.stderr is stream
