"""Commits of state on disk: what resumes is what was committed, bit for bit."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch
import warm_python
from durable_net import BUDGET, Net, folder as folder, opened, train, values
from offload_cases import FORMATS
from optim_cases import BF16, F32, assert_same_bits, on_each_device
from torch import nn
from torch.nn import Parameter

from deepspeed_ext.io import TensorStore
from deepspeed_ext.io.engine.async_io import AsyncIO
from deepspeed_ext.offload import OffloadOptimizer, estimate

COMMITTED, LAST = 3, 6  # steps


@on_each_device
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.0])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("adam", "float32"), ("adam", "compact"), ("adam", "master"), ("lion", "bfloat16")],
)
def test_goes_on_where_it_was(device, kind, name, fraction, folder):
    dtype = F32 if name == "float32" else BF16
    net = Net(device, dtype)
    with opened(net, folder, kind, fraction=fraction, **FORMATS[name]) as optimizer:
        assert optimizer.committed is None
        train(net, optimizer, 1, COMMITTED)
        optimizer.commit(step=COMMITTED, order=torch.arange(5), names=["a", {"b": 1.5}])
        at_commit = values(net, optimizer)
        train(net, optimizer, COMMITTED + 1, LAST)
        expected, groups = values(net, optimizer), optimizer.param_groups[1]["lr"]
    net = Net(device, dtype)
    with torch.no_grad():
        for value in net.state_dict().values():
            value.zero_()
    with opened(net, folder, kind, fraction=fraction, **FORMATS[name]) as optimizer:
        assert optimizer.committed["step"] == COMMITTED
        assert optimizer.committed["names"] == ["a", {"b": 1.5}]
        assert torch.equal(optimizer.committed["order"], torch.arange(5))
        assert_same_bits(values(net, optimizer), at_commit)
        train(net, optimizer, COMMITTED + 1, LAST)
        assert_same_bits(values(net, optimizer), expected)
        assert optimizer.param_groups[1]["lr"] == groups


def test_state_can_go_elsewhere(folder):
    """What was committed is taken up where the budget puts it now, kept on the device or not."""
    net = Net()
    with opened(net, folder, fraction=1.0) as optimizer:
        train(net, optimizer, 1, COMMITTED)
        optimizer.commit()
        expected = values(net, optimizer)
    for options in ({"fraction": 0.4}, {"fraction": 0.0}, {"gpu_fraction": 0.5}, {}):
        net = Net()
        with opened(net, folder, **options) as optimizer:
            assert_same_bits(values(net, optimizer), expected)
            optimizer.commit()


def test_writes_what_is_not_on_disk(folder):
    net = Net(dtype=BF16)
    with opened(net, folder, master="remainder", fraction=1.0) as optimizer:
        weights = sum(value.nbytes for value in net.state_dict().values())
        weights -= net.tied.weight.nbytes
        for _ in range(3):
            train(net, optimizer, 1, 1)
            optimizer.synchronize()
            before = optimizer.stats()["bytes_committed"]
            optimizer.commit()
            written = optimizer.stats()["bytes_committed"] - before
            assert weights <= written < weights + 20_000
        stats = optimizer.stats()
        least = stats["bytes_written"] * 2 // 3  # zeros are not read
        assert least <= stats["bytes_read"] <= least + 2 * 4 * optimizer._disk.ring.slab_bytes


def test_what_was_written_to_state_and_weights_counts(folder):
    net = Net(dtype=BF16)
    others = {"note": "mine", "numbers": torch.arange(3)}
    with opened(net, folder, master="float32") as optimizer:
        train(net, optimizer, 1, 2)
        state = optimizer.state[net.last.weight]
        state["exp_avg"].fill_(0.25)
        state.update(others)
        with torch.no_grad():
            net.first.weight[0] = 2.0
        optimizer.commit()
        optimizer.state[net.last.weight]["exp_avg"][0] = 0.5  # before the next step
        optimizer.commit()
        train(net, optimizer, 3, 4)
        expected = values(net, optimizer)[: len(net.state_dict())]
    net = Net(dtype=BF16)
    with opened(net, folder, master="float32") as optimizer:
        state = optimizer.state[net.last.weight]
        assert state["exp_avg"][0].eq(0.5).all() and state["exp_avg"][1:].eq(0.25).all()
        assert state["note"] == "mine" and torch.equal(state["numbers"], torch.arange(3))
        train(net, optimizer, 3, 4)
        assert_same_bits(values(net, optimizer)[: len(net.state_dict())], expected)


@pytest.mark.parametrize("verb", ["write", "fsync", "replace"])
def test_a_commit_that_fails_leaves_the_one_before(verb, folder, monkeypatch):
    net = Net(width=50)
    optimizer = opened(net, folder)
    train(net, optimizer, 1, 1)
    optimizer.commit(step=1)
    kth, failed, last = 0, True, 1
    while failed:
        train(net, optimizer, 2, 2)
        optimizer.synchronize()
        optimizer._pipeline.finish_disk()
        expected = values(net, optimizer)
        with monkeypatch.context() as patch:
            fail_at(patch, verb, kth)
            try:
                optimizer.commit(step=2 + kth)
                failed, last = False, 2 + kth
            except OSError as error:
                assert error.errno == errno.EIO
        if optimizer.committed == {"step": 2 + kth}:
            last = 2 + kth  # all but the end of it was done
        assert optimizer.committed == {"step": last}
        assert_same_bits(values(net, optimizer), expected)  # and it can go on
        kth += 1
    assert kth > 1
    optimizer.close()
    again = Net(width=50)
    with opened(again, folder) as optimizer:
        assert optimizer.committed == {"step": last}
        assert_same_bits(values(again, optimizer), expected)


def fail_at(patch, verb, kth):
    """Let one call of what commits, and all after it in this commit, fail."""
    count = [0]
    owner = AsyncIO if verb == "write" else os
    real = getattr(owner, verb)

    def call(*arguments, **named):
        count[0] += 1
        if count[0] == kth + 1:
            raise OSError(errno.EIO, "it is broken")
        return real(*arguments, **named)

    patch.setattr(owner, verb, call)


def test_after_a_failed_step_it_resumes(folder, monkeypatch):
    net = Net()
    optimizer = opened(net, folder)
    train(net, optimizer, 1, 1)
    optimizer.commit(step=1)
    expected = values(net, optimizer)
    with monkeypatch.context() as patch:
        fail_at(patch, "write", 2)
        with pytest.raises((OSError, RuntimeError)):
            train(net, optimizer, 2, 4)
            optimizer._pipeline.finish_disk()
    with pytest.raises(RuntimeError, match="make the optimizer anew with resume=True"):
        optimizer.commit(step=2)
    with pytest.raises(RuntimeError):
        optimizer.close()
    again = Net()
    with opened(again, folder) as optimizer:
        assert optimizer.committed == {"step": 1}
        assert_same_bits(values(again, optimizer), expected)


def test_refuses_what_does_not_fit(folder):
    net = Net()
    with opened(net, folder) as optimizer:
        train(net, optimizer, 1, 1)
        with pytest.raises(TypeError, match=r"^OffloadOptimizer.commit: b is or has a Net, ex"):
            optimizer.commit(a=1, b=[{"c": net}])
        assert optimizer.committed is None
        optimizer.commit()
        assert optimizer.committed == {}
        with pytest.raises(BlockingIOError, match=r"process-0"):
            opened(Net(), folder)
    with pytest.raises(FileExistsError, match="with a commit, expected resume=True to go on from"):
        opened(Net(), folder, resume=False)
    with pytest.raises(ValueError, match=r"^OffloadOptimizer: parameter 2 is .*401.*, expected"):
        opened(Net(width=401), folder)
    with pytest.raises(ValueError, match=r"parameter 0 is .*bfloat16.*, expected .*float32"):
        opened(Net(dtype=BF16), folder)
    less = Net()
    with pytest.raises(ValueError, match=r"parameters in groups is \[1\], expected \[2, "):
        OffloadOptimizer(
            [less.first.weight],
            device="nvme",
            nvme_path=folder,
            durable=True,
            resume=True,
            memory_budget=BUDGET,
        )
    with opened(Net(), folder) as optimizer:  # all that left the folder as it was
        assert optimizer.committed == {}
    with pytest.raises(RuntimeError, match=r"commit is called after close\(\), expected an open"):
        optimizer.commit()
    with pytest.raises(RuntimeError, match=r"state is read after close\(\), expected before it"):
        optimizer.state_dict()


def test_parameters_in_another_order(folder):
    """They may have the same shapes."""
    nets = [nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50)) for _ in range(2)]
    options = {"device": "nvme", "nvme_path": folder, "memory_budget": BUDGET, "durable": True}
    with OffloadOptimizer(nets[0].parameters(), model=nets[0], resume=True, **options) as optimizer:
        optimizer.commit()
    params = list(nets[1].parameters())
    with pytest.raises(ValueError, match=r"name of parameter 0 is 1.weight, expected 0.weight as"):
        OffloadOptimizer(params[2:] + params[:2], model=nets[1], resume=True, **options)
    compiled = torch.compile(nets[1], backend="eager")
    OffloadOptimizer(params, model=compiled, resume=True, **options).close()


@pytest.mark.parametrize("kind", ["weights", "state"])
def test_damage_is_seen(kind, folder):
    net = Net()
    with opened(net, folder) as optimizer:
        train(net, optimizer, 1, 1)
        optimizer.commit()
    rows = json.loads((folder / "process-0" / "manifest.json").read_text())["tensors"]
    wanted = r"commit\.1\.0" if kind == "weights" else r"\d+\.\d+\.[01]"
    row = next(row for row in rows if re.fullmatch(wanted, row["name"]))
    with (folder / "process-0" / "data").open("r+b") as file:
        file.seek(row["offset"] + 1000)
        byte = file.read(1)
        file.seek(row["offset"] + 1000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(OSError, match=r"has crc32c .*, expected .*are not what was put"):
        opened(Net(), folder)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"resume": True}, "resume is True, expected durable=True with it"),
        ({"durable": "yes"}, "durable is 'yes', expected True or False"),
        ({"durable": True, "device": "cpu"}, "durable is given, expected device='nvme' with it"),
        ({}, "commit is called of a scratch store, expected an open one with durable=True"),
        ({"device": "cpu"}, "commit is called with device='cpu', expected 'nvme' with durable"),
    ],
)
def test_wrong_options(options, text, folder):
    where = {"nvme_path": folder} if options.get("device") != "cpu" else {}
    param = Parameter(torch.zeros(3))
    with pytest.raises((ValueError, TypeError, RuntimeError), match=text.replace("(", r"\(")):
        OffloadOptimizer(
            [param], memory_budget=BUDGET, **{"device": "nvme"} | where | options
        ).commit()


def test_state_that_is_held_shows_zeros_after_close(folder):
    net = Net()
    with opened(net, folder) as optimizer:
        train(net, optimizer, 1, 1)
        optimizer.commit()
        held = optimizer.state[net.last.weight]["exp_avg"]
        assert held.any()
    assert not held.any()
    with opened(net, folder) as optimizer:
        train(net, optimizer, 2, 3)
    assert not held.any()


def test_the_file_has_room_for_two_and_no_more(folder):
    net = Net(dtype=BF16)
    with opened(net, folder, fraction=0.5, state_dtype=torch.uint8) as optimizer:
        path = folder / "process-0" / "data"
        size = path.stat().st_size
        for step in range(1, 8):
            train(net, optimizer, step, step)
            optimizer.commit(step=step)
            optimizer.commit(step=step)
        assert path.stat().st_size == size
    for step in range(8, 11):
        with opened(Net(dtype=BF16), folder, fraction=0.5, state_dtype=torch.uint8) as optimizer:
            assert path.stat().st_size <= size + (1 << 16)
            optimizer.commit(step=step)


def test_estimate_counts_commits():
    params = [Parameter(torch.zeros(1_000_000, dtype=BF16))]
    options = {"device": "nvme", "memory_budget": BUDGET, "master": "remainder"}
    scratch = estimate(params, **options, nvme_fraction=0.5)
    durable = estimate(params, **options, nvme_fraction=0.5, durable=True)
    assert durable.disk_bytes > 2 * (scratch.disk_bytes + 2_000_000)
    assert durable.disk["the next commit"] * 2 == durable.disk_bytes
    assert "the next commit" in str(durable)


def test_state_that_is_written_before_the_first_step(folder):
    net = Net()
    with opened(net, folder) as optimizer:
        train(net, optimizer, 1, 1)
        optimizer.commit()
    net = Net()
    with opened(net, folder) as optimizer:
        optimizer.state[net.last.weight]["exp_avg"].fill_(3.0)
        optimizer.commit()
        optimizer.state[net.last.weight]["exp_avg_sq"].fill_(4.0)
        net.last.weight.grad = torch.zeros_like(net.last.weight)
        optimizer.step()
        state = optimizer.state[net.last.weight]
        torch.testing.assert_close(state["exp_avg"], torch.full_like(net.last.weight, 2.7))
        torch.testing.assert_close(state["exp_avg_sq"], torch.full_like(net.last.weight, 3.996))


def test_a_store_of_something_else(folder):
    with TensorStore(folder / "process-0", durable=True) as store:
        store.put("a", torch.zeros(3))
    with pytest.raises(FileExistsError, match="expected"):
        opened(Net(), folder)


@pytest.mark.long
def test_killed_at_any_moment(tmp_path):
    done = warm_python.run(Path(__file__).with_name("kill_commits.py"), tmp_path)
    assert done.returncode == 0, done.stderr
    steps, *kills = map(int, done.stdout.split())
    assert steps > 50 and kills == [30, 12]
