"""State on a disk that fails, fills up, is slow or goes: nothing is silent, and no number wrong."""

import copy
import errno
import gc
import itertools
import re

import pytest
import torch
from disks import PIECES, SLABS, disk as disk, few, on_disk
from offload_cases import small_parts
from optim_cases import BF16, assert_same_bits
from torch.nn import Parameter

from deepspeed_ext.io.store.space import Space
from deepspeed_ext.offload.bucket import HostBucket

REFUSAL = r"^OffloadOptimizer: state on disk is OSError .*expected a disk that works: weights and"


def warm(path, **options):
    """Return a pair after two steps, with gradients."""
    pair = on_disk(path, **options)
    for _ in range(2):
        pair.backward()
        pair.step()
    pair.ours.synchronize()
    pair.backward()
    return pair


def refuses(pair):
    """See that nobody gets wrong numbers of an optimizer that has failed, and that it ends."""
    ours = pair.ours
    calls = (
        ours.step,
        ours.synchronize,
        ours.state_dict,
        lambda: ours.state[pair.params[0]],
        lambda: ours.load_state_dict(pair.plain.state_dict()),
        lambda: ours.clip_and_step(1.0),
        ours.reset_master,
        lambda: copy.deepcopy(ours),
        ours.close,
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=REFUSAL):
            call()
    assert all(torch.isfinite(param).all() for param in pair.params)  # weights can be read


@pytest.mark.parametrize("verb", ["read", "write"])
def test_each_request_of_a_step_may_fail(verb, disk, tmp_path):
    """The step in which it fails raises that, or the next one; then all is refused."""
    for k in itertools.count():
        pair = warm(tmp_path)
        before = disk.counts[verb]
        disk.fail(verb, k)
        with pytest.raises((OSError, RuntimeError), match=r"TensorStore: (get|put) of .* failed"):
            for _ in range(3):
                pair.ours.step()
                pair.ours.zero_grad()
                pair.backward()
        refuses(pair)
        assert disk.counts[verb] > before + k
        if k > PIECES + 4:  # all of a step, and what is read ahead for the next
            return


WAITS = {
    "step": lambda ours: ours.step(),
    "synchronize": lambda ours: ours.synchronize(),
    "state": lambda ours: ours.state,
    "state_dict": lambda ours: ours.state_dict(),
    "load": lambda ours: ours.load_state_dict({}),
    "deepcopy": copy.deepcopy,
    "reset_master": lambda ours: ours.reset_master(),
    "add_param_group": lambda ours: ours.add_param_group({"params": [Parameter(torch.ones(3))]}),
    "close": lambda ours: ours.close(),
}


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("model", [None, torch.nn.ParameterList()], ids=["plain", "model"])
def test_what_is_written_behind_fails(name, model, disk, tmp_path):
    """The last piece does, after step() has returned."""
    pair = warm(tmp_path, model=model)
    disk.fail("write", PIECES - 1)
    disk.hold(after=PIECES - 1)
    pair.ours.step()
    disk.open()
    disk_is_done(pair)
    with pytest.raises(RuntimeError, match=REFUSAL):
        WAITS[name](pair.ours)
    refuses(pair)


def disk_is_done(pair):
    """Return when all is written, without asking how that ended."""
    for write in list(pair.ours._pipeline.ring._writes):
        write.future.exception()


def test_a_failure_that_nobody_can_raise_any_more(disk, tmp_path, caplog):
    """It is logged, once, when the optimizer goes."""
    pair = warm(tmp_path)
    disk.fail("write", PIECES - 1)
    disk.hold(after=PIECES - 1)
    pair.ours.step()
    disk.open()
    pair.ours = None
    gc.collect()
    [text] = [record.getMessage() for record in caplog.records]
    assert re.match(r"OffloadOptimizer: state on disk is OSError .*TensorStore: put of", text)


# A slow disk


def forget_a_parameter(pair):
    """State of others moves."""
    for optimizer, params in pair.both():
        del optimizer.param_groups[0]["params"][1]
        del optimizer.state[params.pop(1)]


def other_dtype(pair):
    for _, params in pair.both():
        params[3].data = params[3].data.to(BF16)
        params[3].grad = None


def load_own(pair):
    for optimizer, _ in pair.both():
        optimizer.load_state_dict(optimizer.state_dict())


def other_option(pair):
    for optimizer, _ in pair.both():
        optimizer.param_groups[0]["amsgrad"] = True


def write_state(pair):
    for optimizer, params in pair.both():
        optimizer.state[params[3]]["exp_avg"][35_000:] = 0.5


CHANGES = [forget_a_parameter, other_dtype, load_own, other_option, write_state]


def test_a_step_of_a_slow_disk(disk, tmp_path):
    """Writes that do not end hold it up when all slabs are in use, and nothing else."""
    pair = warm(tmp_path)
    for _ in range(3):
        disk.hold()
        pair.step()
        pair.backward()
    pair.check()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_while_a_piece_is_still_to_be_written(change, disk, tmp_path):
    """It is waited for by whoever needs it, also where state moves."""
    pair = warm(tmp_path)
    for _ in range(2):
        disk.hold(after=len(pair.ours._pipeline.ring._order) - 1)
        pair.step()
        assert disk.held == 1
        disk.stop_holding()
        change(pair)
        pair.backward()
        pair.step()
        assert_same_bits(pair.params, pair.twins)
        pair.check()
        change = CHANGES[-1]
        pair.backward()


def test_state_that_was_looked_at_and_is_still_to_be_written(disk, tmp_path):
    """What is shown of it is not what the next step begins with."""
    pair = on_disk(tmp_path, params=[few()[3]])  # of fewer pieces than there are slabs
    for _ in range(2):
        pair.backward()
        pair.step()
        pair.check()
        disk.hold()
        pair.backward()
        pair.step()
        assert 0 < disk.held < SLABS
        disk.stop_holding()
        pair.backward()
        pair.step()
        assert_same_bits(pair.params, pair.twins)
        pair.check()


def test_state_that_is_written_before_the_first_step(tmp_path):
    """After it was loaded, when no step has made the buckets that take note of that."""
    first, second = warm(tmp_path), on_disk(tmp_path)
    for ours, other in zip(second.both(), first.both(), strict=True):
        ours[0].load_state_dict(other[0].state_dict())
    for optimizer, params in second.both():
        optimizer.state[params[0]]["exp_avg"].fill_(0.5)
    for _ in range(2):
        second.backward()
        second.step()
        assert_same_bits(second.params, second.twins)
    second.check()


# A full disk


def test_thawed_and_added_parameters_for_which_there_is_no_room(monkeypatch, tmp_path):
    """Nothing is stepped then, or lost: when there is room again, training goes on."""
    params = few()
    params[0].requires_grad_(False)
    pair = on_disk(tmp_path, params=params)
    late = Parameter(torch.ones(40_000)), Parameter(torch.ones(40_000))
    for _ in range(2):
        pair.backward()
        pair.step()
    for frozen in (pair.params[0], pair.twins[0]):
        frozen.requires_grad_(True)
    for what in ("thawed", "added"):
        if what == "added":
            for (optimizer, known), param in zip(pair.both(), late, strict=True):
                optimizer.add_param_group({"params": [param]})
                known.append(param)
        pair.backward()
        pair.give()
        before = [param.detach().clone() for param in pair.params]
        with monkeypatch.context() as full:
            full.setattr(Space, "disk_free", lambda space: 0)
            for _ in range(2):
                with pytest.raises(OSError, match=r"OffloadOptimizer: .*has 0 free") as caught:
                    pair.ours.step()
                assert caught.value.errno == errno.ENOSPC
        assert_same_bits(pair.params, before)
        pair.step()
        pair.check()
    for _ in range(2):
        pair.backward()
        pair.step()
    pair.check()


def test_state_moves_with_room_for_a_bucket(monkeypatch, tmp_path):
    """Not for all of it twice: a disk with room for what it has is not full all of a sudden."""
    small_parts(monkeypatch, most=30_000)
    pair = on_disk(tmp_path, params=[Parameter(torch.ones(20_000)) for _ in range(10)])
    for _ in range(2):
        pair.backward()
        pair.step()
    store = pair.ours._pipeline.ring.records.store
    before = store.stats()["file_bytes"]
    forget_a_parameter(pair)
    pair.backward()
    pair.step()
    pair.check()
    assert store.stats()["file_bytes"] < 1.5 * before


# Folders


def test_a_folder_that_takes_no_file():
    with pytest.raises(OSError, match="OffloadOptimizer: nvme_path is /proc, expected a folder"):
        on_disk("/proc")


def test_a_folder_that_goes(tmp_path):
    """The file has no name: it does not need one."""
    folder = tmp_path / "folder"
    folder.mkdir()
    pair = warm(folder)
    folder.rmdir()
    for _ in range(2):
        pair.step()
        pair.check()
        pair.backward()


def test_two_models_in_one_folder(tmp_path):
    """At the same time, and one after another."""
    pairs = [on_disk(tmp_path, params=few(dtype=dtype)) for dtype in (torch.float32, BF16)]
    for _ in range(3):
        for pair in pairs:
            pair.backward()
        for pair in pairs:
            pair.step()
    for pair in pairs:
        pair.check()
    pairs.pop(0).ours.close()
    pairs.append(on_disk(tmp_path))
    for _ in range(3):
        for pair in pairs:
            pair.backward()
            pair.step()
            pair.check()
    assert not list(tmp_path.iterdir())


# Exceptions in the step


class Broken(Exception):
    """What a test lets go wrong."""


def breaking(monkeypatch, after):
    """Let the kernel raise, once, after so many calls."""
    original, calls = HostBucket._step_part, itertools.count()

    def broken(*args):
        if next(calls) == after:
            raise Broken
        return original(*args)

    monkeypatch.setattr(HostBucket, "_step_part", broken)


def test_an_exception_in_the_kernel_before_anything_is_done(monkeypatch, tmp_path):
    """As in host memory: it is raised, and what was wrong can be put right."""
    pair = warm(tmp_path)
    for _ in range(2 * SLABS):  # none of which gets lost
        with monkeypatch.context() as context:
            breaking(context, after=0)
            with pytest.raises(Broken):
                pair.ours.step()
    pair.step()
    pair.check()
    pair.backward()
    pair.ours.param_groups[0]["betas"] = (2.0, 0.5)
    with pytest.raises(ValueError, match="beta"):
        pair.ours.step()
    pair.ours.param_groups[0]["betas"] = pair.plain.param_groups[0]["betas"]
    pair.step()
    pair.check()


@pytest.mark.parametrize("after", range(1, PIECES, 3))
def test_an_exception_in_the_middle_of_a_step(after, monkeypatch, tmp_path):
    """Pieces are of two steps then: nothing goes on with them."""
    pair = warm(tmp_path)
    breaking(monkeypatch, after)
    with pytest.raises(Broken):
        pair.ours.step()
    with pytest.raises(RuntimeError, match="OffloadOptimizer: state on disk is Broken"):
        pair.ours.step()
    with pytest.raises(RuntimeError, match="OffloadOptimizer: state on disk is Broken"):
        pair.ours.state_dict()
