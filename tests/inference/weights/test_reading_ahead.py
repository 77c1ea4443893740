"""FolderTensors: what is read while other tensors are waited for, and what is left after that."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_folder
import torch
from torch import Tensor

from deepspeed_ext.inference.initialize import init_inference
from deepspeed_ext.inference.model.checkpoint_folder import FolderTensors
from deepspeed_ext.io.checkpoint import state_dict
from deepspeed_ext.io.checkpoint.shards import Shards

CPU = torch.device("cpu")
NAMES = [f"{i}.weight" for i in range(5)]
PATIENCE = 60.0  # seconds; others may want all processors


class Slow:
    """Shards of which each layer is read when a test says so."""

    def __init__(self, fails: str = "") -> None:
        self.tensors = dict.fromkeys(NAMES, SimpleNamespace(nbytes=4))
        self.begun = {name: threading.Event() for name in NAMES}
        self.may_end = {name: threading.Event() for name in NAMES}
        self.under_way, self.most, self._fails = 0, 0, fails
        self._lock = threading.Lock()

    def load(self, names: list[str], *_: object) -> dict[str, Tensor]:
        with self._lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        (name,) = names
        self.begun[name].set()
        if not self.may_end[name].wait(PATIENCE):
            raise TimeoutError(name)
        with self._lock:
            self.under_way -= 1
        if name == self._fails:
            raise OSError(f"{name} is gone")
        return {name: torch.tensor(float(name[0]))}


def readers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.endswith("model.checkpoint_folder")]


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_the_next_layer_begins_before_this_one_has_ended() -> None:
    """And the one after that does not: two lie about."""
    slow: Any = Slow()
    found: list[float] = []
    with FolderTensors(slow, NAMES, CPU) as tensors:
        asking = in_thread(lambda: found.extend(float(tensors[name]) for name in NAMES))
        for i, name in enumerate(NAMES):
            for each in NAMES[i : i + 2]:
                assert slow.begun[each].wait(PATIENCE), each
            assert not any(slow.begun[each].is_set() for each in NAMES[i + 2 :])
            slow.may_end[name].set()
        asking.join()
    assert found == [0.0, 1.0, 2.0, 3.0, 4.0] and slow.most == 2 and not readers()


@pytest.mark.parametrize("fails", [0, 1, 2, 4])
def test_a_failure_leaves_nothing_under_way(fails: int) -> None:
    slow: Any = Slow(NAMES[fails])
    for event in slow.may_end.values():
        event.set()
    with (
        pytest.raises(OSError, match=rf"^{fails}.weight is gone$"),
        FolderTensors(slow, NAMES, CPU) as tensors,
    ):
        for number, name in enumerate(NAMES):
            assert float(tensors[name]) == number
    assert number == fails and slow.under_way == 0 and not readers()
    with pytest.raises(RuntimeError, match="engine is closed"):
        tensors._engine.read(torch.empty(1), "file")


def test_who_catches_a_failure_may_ask_for_others() -> None:
    slow: Any = Slow(NAMES[1])
    for event in slow.may_end.values():
        event.set()
    with FolderTensors(slow, NAMES, CPU) as tensors:
        for name in (NAMES[1], NAMES[1]):
            with pytest.raises(OSError, match="is gone"):
                tensors[name]
        for number in (0, 2, 3, 4):
            assert float(tensors[NAMES[number]]) == number


def test_the_end_waits_for_what_is_read_ahead() -> None:
    slow: Any = Slow()
    slow.may_end[NAMES[0]].set()
    left = threading.Event()

    def load() -> None:
        with FolderTensors(slow, NAMES, CPU) as tensors:
            tensors[NAMES[0]]
        left.set()

    loading = in_thread(load)
    assert slow.begun[NAMES[1]].wait(PATIENCE) and not left.wait(0.2)
    slow.may_end[NAMES[1]].set()
    loading.join()
    assert slow.under_way == 0 and not readers()


def test_ctrl_c_leaves_no_more_than_two_under_way() -> None:
    """What was waited for still uses memory that a third one would be given."""
    slow: Any = Slow()
    seen = threading.Event()

    def press() -> None:
        assert all(slow.begun[name].wait(PATIENCE) for name in NAMES[:2])
        while not seen.wait(0.05):  # one that comes right before a wait begins does not end that
            os.kill(os.getpid(), signal.SIGINT)

    def interrupt(*_: object) -> None:
        if not seen.is_set():
            seen.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with FolderTensors(slow, NAMES, CPU) as tensors:
            with pytest.raises(KeyboardInterrupt):
                pressing = in_thread(press)
                tensors[NAMES[0]]
            pressing.join()
            asking = in_thread(lambda: tensors[NAMES[2]])
            assert not slow.begun[NAMES[2]].wait(0.2)
            for event in slow.may_end.values():
                event.set()
            asking.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert slow.most == 2 and slow.under_way == 0 and not readers()


@pytest.mark.parametrize("files", [1, 3])
def test_a_header_is_parsed_once(
    files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_folder.write(tmp_path, files=files)
    parsed: list[str] = []
    parse = state_dict.parse_header

    def noted(text: bytes, file_bytes: int, path: str) -> Any:
        parsed.append(path)
        return parse(text, file_bytes, path)

    monkeypatch.setattr(state_dict, "parse_header", noted)
    init_inference(tmp_path, device="cpu")
    assert len(parsed) == len(set(parsed)) == files


def test_a_file_that_is_cut_short_between_layers(tmp_path: Path) -> None:
    tensors = tiny_folder.tensors_of()
    shards = Shards("test", tiny_folder.write(tmp_path, tensors=tensors))
    file, cut = tmp_path / "model.safetensors", tmp_path / "cut"
    first = "model.layers.{}.self_attn.q_proj.weight".format
    with (
        pytest.raises(ValueError, match=r"has \d+ bytes, expected \d+ by its header: it was cut"),
        FolderTensors(shards, list(tensors), CPU) as lazy,
    ):
        assert torch.equal(lazy[first(0)], tensors[first(0)])  # layer 1 may be there, or not
        cut.write_bytes(file.read_bytes()[:-1])
        cut.replace(file)  # what is read now is read from the old one
        for i in (1, 2):
            lazy[first(i)]
    assert not readers()


def test_a_file_that_is_gone_between_layers(tmp_path: Path) -> None:
    tensors = tiny_folder.tensors_of()
    shards = Shards("test", tiny_folder.write(tmp_path, tensors=tensors))
    with pytest.raises(FileNotFoundError), FolderTensors(shards, list(tensors), CPU) as lazy:
        lazy["model.layers.0.self_attn.q_proj.weight"]
        (tmp_path / "model.safetensors").unlink()
        lazy["model.layers.1.self_attn.q_proj.weight"]
        lazy["model.layers.2.self_attn.q_proj.weight"]
    assert not readers()
