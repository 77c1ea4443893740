"""save and load beside each other, what they refuse, random numbers that go on, steps together."""

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from processes import Case
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from deepspeed_ext import zero
from deepspeed_ext.zero.checkpoint import exchange, saving
from deepspeed_ext.zero.checkpoint.background import Saving
from deepspeed_ext.zero.checkpoint.exchange import Exchange
from deepspeed_ext.zero.checkpoint.plain_values import dumps, loads
from deepspeed_ext.zero.checkpoint.storage import Writer


def held_back(patch: pytest.MonkeyPatch) -> threading.Event:
    """Let no save write until this is set, or somebody waits for a save."""
    go, write, wait = threading.Event(), Writer.write_data, Saving.exception

    def writing(*arguments: Any) -> Any:
        assert go.wait(60)
        return write(*arguments)

    def waiting(self: Saving, timeout: float | None = None) -> Any:
        go.set()
        return wait(self, timeout)

    patch.setattr(Writer, "write_data", writing)
    patch.setattr(Saving, "exception", waiting)
    return go


def beside_a_save(row: str, folder: Path) -> None:
    """A load waits for the save before it; where a save goes is known when it is called."""
    home, model = Path("relative"), zero.shard(nn.Linear(3, 2, bias=False), 3, blocks=[])
    weight: Any = model.weight
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for number in (1, 2):
            nn.init.constant_(weight.to_local(), number)
            if number == 1:
                zero.save(home, "a", model, number=1)
        go = held_back(patch)
        future = zero.save(home, "a", model, wait=False, number=2)
        nn.init.constant_(weight.to_local(), 3)
        (folder / "elsewhere").mkdir()
        patch.chdir(folder / "elsewhere")
        try:
            found = zero.load(folder / "relative", None, model)
        finally:
            go.set()
            future.result(60)
    assert found == {"number": 2} and weight.to_local().eq(2).all()
    assert not list((folder / "elsewhere").iterdir())


def test_beside_a_save(groups: Any) -> None:
    groups.run(Case(1, "beside_a_save", ""))


def drawn() -> list[Any]:
    """One of each, so that none begins where numbers are made of what was mixed before."""
    of_numpy = [numpy.random.rand(), numpy.random.randn()]
    return [torch.rand(1).item(), random.random(), random.gauss(0, 1), *of_numpy]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_random_numbers_go_on(before: int) -> None:
    """Wherever they were among those that are made together."""
    for _ in range(before):
        drawn()
    state = loads(dumps(saving._random()))["random"]
    expected = [drawn() for _ in range(3)]
    saving._set_random(state)
    assert [drawn() for _ in range(3)] == expected
    saving._set_random({**state, "numpy": None})  # of before NumPy's were saved
    del state["numpy"]
    saving._set_random(state)
    assert drawn()[:3] == expected[0][:3]


@pytest.mark.parametrize("missing", ["common", "process.0", "process.1", "process.2"])
def test_processes_that_gave_nothing(missing: str) -> None:
    names = {"common", "process.0", "process.1", "process.2", "model.w"}
    metadata = Metadata({name: BytesStorageMetadata() for name in names - {missing}})
    with pytest.raises(RuntimeError, match=f"^zero.save: no process has given '{missing}', exp"):
        saving._check_processes(metadata, 3)
    metadata.state_dict_metadata[missing] = BytesStorageMetadata()
    saving._check_processes(metadata, 3)


def test_objects_that_could_not_be_loaded() -> None:
    scaler = zero.LossScaler()
    saving._check_objects({"scaler": scaler}, {"scaler": {}, "step": 1})
    text = "^zero.load: step is a int, expected an object with load_state_dict; other values are"
    with pytest.raises(TypeError, match=text):
        saving._check_objects({"scaler": scaler, "step": 1}, {"scaler": {}, "step": 1})


LOST, FULL, WRONG = ConnectionError("lost"), OSError(28, "full"), RuntimeError("another failed")
OF_SEVERAL = [  # errors of processes, and the one that all are told
    ([WRONG, FULL], 1),
    ([FULL, LOST], 0),
    ([WRONG, WRONG, ValueError("name")], 2),
    ([KeyError("k"), TypeError("kind"), FULL], 1),
    ([KeyError("k"), WRONG], 0),
]


@pytest.mark.parametrize("errors, telling", OF_SEVERAL, ids=str)
def test_of_several_errors_the_first_that_tells_enough(
    errors: list[Exception], telling: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only says that others have failed comes of processes in which all went well."""
    said = [(None, None), *((None, error) for error in errors)]
    answers = exchange._decided(said, lambda values: pytest.fail())
    assert answers == [(None, errors[telling])] * len(said)
    assert raised_by_a_load(dict(enumerate(errors)), len(errors), monkeypatch) is errors[telling]


def test_ctrl_c_in_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that where it was, and an error that a program may catch elsewhere."""
    interrupt = KeyboardInterrupt()
    for failures in ({0: interrupt}, {0: interrupt, 1: FULL}):
        assert raised_by_a_load(failures, 0, monkeypatch) is interrupt
    assert raised_by_a_load({0: interrupt, 1: FULL}, 1, monkeypatch) is FULL
    elsewhere = raised_by_a_load({0: interrupt}, 1, monkeypatch)
    assert type(elsewhere) is RuntimeError and "KeyboardInterrupt" in str(elsewhere)


def raised_by_a_load(
    failures: dict[int, BaseException], rank: int, patch: pytest.MonkeyPatch
) -> BaseException:
    """Return what a process raises when reading has failed in some."""

    def fails(*arguments: Any, **named: Any) -> None:
        raise CheckpointException("load", {r: (error, None) for r, error in failures.items()})

    patch.setattr(saving, "dcp_load", fails)
    patch.setattr(saving.dist, "get_rank", lambda: rank)
    with pytest.raises(BaseException) as caught:
        saving._read(None, {}, [])
    return caught.value


class Together:
    """Processes that are threads of this one, and their group.

    Args:
        size: how many there are.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=20)
        self._given: list[Any] = [None] * size

    def run(self, work: Callable[[Exchange], Any]) -> list[Any]:
        """Return what each has returned or raised."""
        found: list[Any] = [None] * self.size

        def process(rank: int) -> None:
            try:
                found[rank] = work(Exchange(_Rank(self, rank), "cpu"))
            except BaseException as error:
                found[rank] = error

        threads = [threading.Thread(target=process, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def given(self, rank: int, value: Any) -> list[Any]:
        """Return what each of them gives."""
        self._given[rank] = value
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found


class _Rank:
    """What one of them has of a process group."""

    def __init__(self, together: Together, rank: int) -> None:
        self._together, self._rank = together, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._together.size

    def wait(self) -> None:
        pass

    def allgather(self, into: list[list[Tensor]], values: list[Tensor]) -> "_Rank":
        found = self._together.given(self._rank, values[0])
        for row, value in zip(into[0], found, strict=True):
            row.copy_(value)
        return self

    def gather(self, into: list[list[Tensor]], values: list[Tensor]) -> "_Rank":
        return self.allgather(into or [[torch.empty_like(values[0])] * self.size()], values)

    def scatter(self, into: list[Tensor], values: list[list[Tensor]]) -> "_Rank":
        into[0].copy_(self._together.given(self._rank, values)[0][0][self._rank])
        return self


@pytest.mark.parametrize("size", [1, 3])
def test_steps_together(size: int) -> None:
    """The first decides on what all have, of whatever lengths, and each gets its own answer."""

    def work(own: Exchange) -> Any:
        def decide(values: list[Any]) -> Sequence[Any]:
            assert values == ["x" * 50 * (size - i) for i in range(size)]
            return [(i, "y" * 70 * i) for i in range(size)]

        return own.step(lambda: "x" * 50 * (size - own.rank), decide), own.same(own.rank)

    assert Together(size).run(work) == [((i, "y" * 70 * i), 0) for i in range(size)]


class Odd(Exception):
    """Can be pickled, and not made again."""

    def __init__(self, what: str, more: str) -> None:
        super().__init__(what)


@pytest.mark.parametrize("error", [KeyboardInterrupt("now"), SystemExit(3), Odd("now", "")])
@pytest.mark.parametrize("where", [0, 1])
def test_what_cannot_be_sent_is_told_in_words(where: int, error: BaseException) -> None:
    """The others do not wait for who has left; Ctrl-C is that where it was."""

    def work(own: Exchange) -> None:
        def local() -> None:
            if own.rank == where:
                raise error

        own.step(local, lambda values: pytest.fail())

    found = Together(2).run(work)
    told = found[1 - where]
    assert type(told) is RuntimeError and str(told) == f"{type(error).__name__}: {error}"
    mine = found[where]
    assert mine is error if not isinstance(error, Exception) else str(mine) == str(told)


def test_each_exchange_of_saves_has_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models may save at a time: a group would find what another has left in the store."""
    together, prefixes = Together(1), []
    world: Any = _Rank(together, 0)
    world._get_backend = lambda device: None
    monkeypatch.setattr(exchange, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=world)))
    monkeypatch.setattr(exchange, "default_store", lambda: None)
    monkeypatch.setattr(exchange, "PrefixStore", lambda prefix, store: prefixes.append(prefix))
    monkeypatch.setattr(exchange, "ProcessGroupGloo", lambda *arguments: world)
    for _ in range(2):
        exchange.made_for_saves("cpu")
    assert len(set(prefixes)) == 2
