"""TensorStore and processes: killed ones, two at a time, forked ones."""

import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import warm_python

from deepspeed_ext.io.store.tensor_store import TensorStore

WORKER = [sys.executable, str(Path(__file__).with_name("store_worker.py"))]


def free_on(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def in_child(body: Callable[[], object]) -> None:
    """Run something in a forked child; it has to come to its end."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException:
            os.write(write, traceback.format_exc().encode()[-4000:])
        os._exit(0)
    os.close(write)
    failure = b"".join(iter(lambda: os.read(read, 4096), b"")).decode()
    os.close(read)
    assert os.waitpid(child, 0) == (child, 0)
    assert not failure, failure


def test_a_killed_writer_leaves_old_or_new(tmp_path: Path) -> None:
    done = warm_python.run(WORKER[1], "crash", tmp_path / "s", "50")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["found"]) == 50
    generations = [generation for _, generation in result["found"]]
    assert generations == sorted(generations)
    assert generations[-1] >= 40, "one in five was killed before it told of a commit"
    assert result["data"] < 3 << 20, "killed writers leave nothing for long"
    TensorStore(tmp_path / "s", durable=True).close()
    assert sorted(os.listdir(tmp_path / "s")) == ["data", "manifest.json", "store.lock"]


def test_a_killed_process_leaves_nothing(small_disk: Path) -> None:
    """Also when a child that it had forked lives on: neither space nor the lock is kept."""
    TensorStore(small_disk / "s", durable=True).close()
    free = free_on(small_disk)
    folder = os.open(small_disk, os.O_RDONLY)  # its path may be of this process alone
    with subprocess.Popen(
        [*WORKER, "hold", f"/proc/self/fd/{folder}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[folder],
    ) as worker:
        os.close(folder)
        try:
            assert worker.stdout
            child = int(worker.stdout.readline())
            assert free - free_on(small_disk) >= 4 << 20
            assert os.listdir(small_disk) == ["s"], "a scratch store is not to be seen"
            for read_only in (False, True):
                with pytest.raises(BlockingIOError, match=f"a writer, process {worker.pid} on "):
                    TensorStore(small_disk / "s", durable=True, read_only=read_only)
            with TensorStore(small_disk) as other:
                other.put("x", torch.zeros(1000))
                assert torch.equal(other.get("x"), torch.zeros(1000)), "two jobs do not meet"
            worker.send_signal(signal.SIGKILL)
            worker.wait()
            os.kill(child, 0)  # is there
            with TensorStore(small_disk / "s", durable=True) as store:
                assert store.names() == ["x", "y"], "what was committed"
                store.delete("x")
                store.delete("y")
            assert free_on(small_disk) >= free - (64 << 10)
            os.kill(child, 0)
        finally:
            worker.kill()


def test_a_child_of_a_killed_process_keeps_no_requests(small_disk: Path) -> None:
    """What was under way at the fork is the parent's alone, and so is the space."""
    free = free_on(small_disk)
    folder = os.open(small_disk, os.O_RDONLY)
    with subprocess.Popen(
        [*WORKER, "fork", f"/proc/self/fd/{folder}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[folder],
    ) as worker:
        os.close(folder)
        try:
            assert worker.stdout
            child = int(worker.stdout.readline())
            assert free - free_on(small_disk) >= 7 << 20
            worker.send_signal(signal.SIGKILL)
            worker.wait()
            assert free_on(small_disk) >= free - (64 << 10)
            os.kill(child, 0)  # is there
        finally:
            worker.kill()


def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    with (
        TensorStore(tmp_path) as scratch,
        TensorStore(tmp_path / "s", durable=True) as durable,
        TensorStore(tmp_path / "other", durable=True) as closed,
    ):
        closed.close()
        for store in (scratch, durable):
            store.put("x", torch.arange(3000))
        durable.commit()
        durable.put("x", torch.arange(3000) + 1)
        pending = durable.put_async("y", torch.ones(300_000))

        def child() -> None:
            for store in (scratch, durable):
                for call in (
                    lambda store=store: store.put("x", torch.ones(1)),
                    lambda store=store: store.get("x"),
                    lambda store=store: store.delete("x"),
                    lambda store=store: "x" in store,
                    lambda store=store: store.info("x"),
                    lambda store=store: store.reserve(1),
                    store.names, store.stats, store.wait, store.commit,
                ):  # fmt: skip
                    with pytest.raises(RuntimeError, match="open another one after fork"):
                        call()
                store.close()
            with pytest.raises(BlockingIOError):
                TensorStore(tmp_path / "s", durable=True)  # it is still the parent's
            with TensorStore(tmp_path) as own:
                own.put("x", torch.zeros(5000))
                assert torch.equal(own.get("x"), torch.zeros(5000))

        in_child(child)
        assert torch.equal(scratch.get("x"), torch.arange(3000))
        assert torch.equal(durable.get("x"), torch.arange(3000) + 1)
        pending.result()
        with pytest.raises(BlockingIOError):
            TensorStore(tmp_path / "s", durable=True)
    with TensorStore(tmp_path / "s", durable=True, read_only=True) as store:
        assert torch.equal(store.get("x"), torch.arange(3000) + 1)
        assert torch.equal(store.get("y"), torch.ones(300_000))


def test_a_child_drops_its_copy(tmp_path: Path) -> None:
    stores = [TensorStore(tmp_path / "s", durable=True)]
    stores[0].put("x", torch.ones(3000))

    def child() -> None:
        with pytest.raises(RuntimeError, match="after fork"), stores[0]:
            pass
        stores.clear()
        gc.collect()

    in_child(child)
    stores[0].commit()
    stores[0].close()
    with TensorStore(tmp_path / "s", durable=True) as store:
        assert torch.equal(store.get("x"), torch.ones(3000))
