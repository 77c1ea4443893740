"""How long others keep the interpreter: less while a step with state on disk is under way."""

import sys
import threading

import pytest
from disks import on_disk
from test_offload_faults import in_child

from deepspeed_ext.offload.bucket import HostBucket
from deepspeed_ext.offload.pipeline import Pipeline
from deepspeed_ext.offload.tiers.prompt_switches import prompt_switches


@pytest.fixture(autouse=True)
def before():
    kept = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    known = sys.getswitchinterval()
    yield known
    assert sys.getswitchinterval() == known
    sys.setswitchinterval(kept)


def stepped(pair):
    pair.backward()
    pair.step()
    pair.ours.synchronize()
    pair.ours._pipeline.finish_disk()


def test_it_is_short_during_a_step(monkeypatch, tmp_path, before):
    pair, seen = on_disk(tmp_path), []
    original = HostBucket._step_part

    def step_part(*args):
        seen.append(sys.getswitchinterval())
        return original(*args)

    monkeypatch.setattr(HostBucket, "_step_part", step_part)
    stepped(pair)
    assert seen and max(seen) < 1e-4
    assert sys.getswitchinterval() == before


def test_it_is_short_for_the_caller_of_a_step_too(monkeypatch, tmp_path, before):
    pair, seen = on_disk(tmp_path), []
    original = Pipeline._decide

    def decide(*args):
        seen.append(sys.getswitchinterval())
        return original(*args)

    monkeypatch.setattr(Pipeline, "_decide", decide)
    stepped(pair)
    assert seen and max(seen) < 1e-4


def test_it_is_put_back_after_a_step_that_fails(monkeypatch, tmp_path, before):
    pair = on_disk(tmp_path)

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(HostBucket, "_step_part", fail)
    pair.backward()
    with pytest.raises(MemoryError):
        pair.step()
        pair.ours.synchronize()
    assert sys.getswitchinterval() == before


def test_the_last_one_puts_it_back(before):
    first, second = prompt_switches(), prompt_switches()
    with first:
        second.__enter__()
    assert sys.getswitchinterval() < 1e-4
    second.__exit__(None, None, None)


def test_what_others_set_meanwhile_stays(before):
    with prompt_switches():
        sys.setswitchinterval(0.002)
        theirs = sys.getswitchinterval()
    assert sys.getswitchinterval() == theirs
    sys.setswitchinterval(before)


def test_a_shorter_one_stays():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    theirs = sys.getswitchinterval()
    with prompt_switches():
        assert sys.getswitchinterval() == theirs
    assert sys.getswitchinterval() == theirs
    sys.setswitchinterval(before)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_has_what_was_before(before):
    """Also one that is made while another thread has the lock: its threads are not there."""
    entered, over = threading.Event(), threading.Event()

    def ask():
        with prompt_switches():
            entered.set()
            over.wait(60)

    def check():
        assert sys.getswitchinterval() == before
        with prompt_switches():
            assert sys.getswitchinterval() < 1e-4
        assert sys.getswitchinterval() == before

    thread = threading.Thread(target=ask)
    thread.start()
    assert entered.wait(60)
    try:
        assert in_child(check) == ""
    finally:
        over.set()
        thread.join()
