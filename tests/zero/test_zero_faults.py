"""Checkpoints and trainings in which something goes wrong: what is left, and what is said."""

import contextlib
import errno
import inspect
import json
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import warm_python
from processes import Case
from torch.distributed.checkpoint.api import CheckpointException
from zero_cases import Net, adam, loss_of, whole

from deepspeed_ext import zero
from deepspeed_ext.io.checkpoint.new_file import NewFile
from deepspeed_ext.zero.checkpoint import data_file, plain_values, storage
from deepspeed_ext.zero.checkpoint.manifest import BadManifest, decode
from deepspeed_ext.zero.checkpoint.storage import MANIFEST


def trained():
    model = zero.shard(Net(), 3)
    optimizer = adam(model.parameters())
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def weights(model):
    return {name: whole(param).clone() for name, param in model.named_parameters()}


def full_disk(row, folder):
    """What is there stays, what was begun goes, and all are told why."""
    home = folder / "full"
    model, optimizer = trained()
    zero.save(home, "a", model, optimizer)
    before = weights(model)
    loss_of(model, 1).backward()
    optimizer.step()
    reserve = NewFile.reserve
    for rank in range(dist.get_world_size()):

        def full(self, nbytes, rank=rank):
            if dist.get_rank() == rank and not self.path.endswith(".json"):
                raise OSError(errno.ENOSPC, "io.save: there is no space")
            reserve(self, nbytes)

        NewFile.reserve = full
        for tag in ("a", "b"):
            for wait in (True, False):
                with pytest.raises(OSError, match="there is no space") as caught:
                    zero.save(home, tag, model, optimizer, wait=wait).result()
                assert caught.value.errno == errno.ENOSPC
        NewFile.reserve = reserve
        dist.barrier()
        assert list((home / "b").iterdir()) == []
        assert len(list((home / "a").iterdir())) == dist.get_world_size() + 1
        other = zero.shard(Net(seed=3), 1)
        zero.load(home, None, other)
        assert all(torch.equal(value, before[name]) for name, value in weights(other).items())
        dist.barrier()


def in_doubt(row, folder):
    """A manifest that may be there keeps its files, and so does one that another save writes."""
    home = folder / "doubt"
    model, optimizer = trained()
    zero.save(home, "a", model, optimizer, step=1)
    dist.barrier()
    if dist.get_rank() == 0:
        (home / "latest").unlink()
        (home / "latest").mkdir()
    dist.barrier()
    with pytest.raises(OSError):
        zero.save(home, "a", model, optimizer, step=2)
    assert zero.load(home, "a", *trained()) == {"step": 2}
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            stack.enter_context(storage._held(home / "a"))
        dist.barrier()
        with pytest.raises(BlockingIOError, match="is written by another save, expected one"):
            zero.save(home, "a", model, optimizer, step=3)
    assert zero.load(home, "a", *trained()) == {"step": 2}
    dist.barrier()


def own_folders(row, folder):
    """Nothing is written into folders that are not the same, and what was there stays."""
    rank, shared, good = dist.get_rank(), folder / "shared", folder / "own0"
    model, optimizer = trained()
    zero.save(shared, "a", model, optimizer, step=1)
    dist.barrier()
    if rank == 0:
        shared.rename(good)
    dist.barrier()
    own, before = folder / f"own{rank}", {p: p.read_bytes() for p in (good / "a").iterdir()}
    text = "folder is not the same for all processes: .*own1/a of process 1 is not that of proc"
    for wait in (True, False):
        with pytest.raises(OSError, match=text):
            zero.save(own, "a", model, optimizer, wait=wait, step=2).result()
    with pytest.raises(CheckpointException, match=text):
        dcp.save({"a": torch.ones(3)}, storage_writer=zero.Writer(own / "a"))
    dist.barrier()
    assert list((folder / "own1" / "a").iterdir()) == []
    assert before.items() <= {p: p.read_bytes() for p in (good / "a").iterdir()}.items()
    assert zero.load(good, "a", model, optimizer) == {"step": 1}
    zero.save(good, "a", model, optimizer, step=3)  # what DCP has left of its own goes
    dist.barrier()
    assert len(list((good / "a").iterdir())) == dist.get_world_size() + 1


def lost_files(row, folder):
    """A file that goes, or gets shorter, while others write."""
    home, write = folder / "lost", data_file.write
    model, optimizer = trained()
    zero.save(home, "a", model, optimizer, step=1)
    dist.barrier()
    before = sorted((home / "a").iterdir())
    cases = {
        "is not there": os.unlink,
        "has 8 bytes": lambda path: os.truncate(path, 8),
        "has 0 bytes": lambda path: os.truncate(path, 0),
    }
    for lost in range(dist.get_world_size()):
        for what, change in cases.items():

            def changed(path, *arguments, change=change, lost=lost):
                pieces = write(path, *arguments)
                if dist.get_rank() == lost:
                    change(path)
                return pieces

            data_file.write = changed
            with pytest.raises(OSError, match=f"-{lost}.safetensors of process {lost} {what}, exp"):
                zero.save(home, "a", model, optimizer, step=2)
            data_file.write = write
            dist.barrier()
            assert sorted((home / "a").iterdir()) == before
            assert zero.load(home, "a", model, optimizer) == {"step": 1}
            dist.barrier()


def flipped_bits(row, folder):
    """Every byte that counts is checked, and all processes are told."""
    home = folder / "flipped"
    model, optimizer = trained()
    zero.save(home, "a", model, optimizer, step=1)
    files = sorted((home / "a").iterdir())
    for path in files:
        content = path.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            at = len(content) - 5
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        dist.barrier()
        kind = ValueError if path.name == MANIFEST else OSError
        with pytest.raises((kind, RuntimeError)):
            zero.load(home, "a", *trained())
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(content)
        dist.barrier()
    assert zero.load(home, "a", model, optimizer) == {"step": 1}


class Bomb:
    """What runs when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def nothing_runs(row, folder):
    """Neither what stands in the place of files nor what was to be saved is run."""
    home, mark = folder / "bombs", folder / "went off"
    model, optimizer = trained()
    with pytest.raises(TypeError, match="expected numbers, text"):
        zero.save(home, "a", model, optimizer, bomb=Bomb(mark))
    text = r"zero.save: client_state\['mine'\]: value\['k'\]\['k'\].*deeper than 200 levels"
    with pytest.raises(ValueError, match=text):
        zero.save(home, "a", model, optimizer, mine=nested(201, lambda value: {"k": value}))
    optimizer.param_groups[0]["mine"] = nested(5000, lambda value: [value])
    with pytest.raises(ValueError, match=r"zero.save: value\['groups'\]\[0\]\['mine'\]\[0\]"):
        zero.save(home, "a", model, optimizer)
    del optimizer.param_groups[0]["mine"]
    zero.save(home, "a", model, optimizer)
    files = [*(home / "a").iterdir(), home / "latest"]
    for path in files:
        content = path.read_bytes()
        for bomb in (pickle.dumps(Bomb(mark)), saved_by_torch(Bomb(mark), folder)):
            path.write_bytes(bomb)
            with pytest.raises((ValueError, OSError)):
                zero.load(home, None, model, optimizer)
        path.write_bytes(content)
    zero.load(home, None, model, optimizer)
    assert not mark.exists()


def saved_by_torch(value, folder):
    torch.save(value, folder / "bomb.pt")
    return (folder / "bomb.pt").read_bytes()


def dies(row, folder):
    """One process ends in the middle of a step."""
    model, _ = trained()
    if dist.get_rank() == 1:
        os._exit(7)
    for number in range(3):
        loss_of(model, number).backward()


CASES = [
    Case(2, "full_disk", ""),
    Case(2, "in_doubt", ""),
    Case(2, "own_folders", ""),
    Case(2, "lost_files", ""),
    Case(2, "flipped_bits", ""),
    Case(1, "nothing_runs", ""),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function}-{c.row}-{c.world}")
def test_processes(case, groups):
    groups.run(case)


def test_a_process_that_dies_ends_the_others(groups):
    """At once, by what torch says of the connection."""
    groups.need_gloo()
    with pytest.raises(AssertionError) as caught:
        groups.run(Case(2, "dies", ""))
    text = str(caught.value)
    assert "process 1: ended with 7" in text and "process 0: Traceback" in text
    assert "Connection" in text or "peer" in text, text


@pytest.mark.long
def test_killed_savers_leave_a_whole_checkpoint(tmp_path):
    program = Path(__file__).with_name("kill_checkpoints.py")
    done = warm_python.run(program, tmp_path)
    assert done.returncode == 0, done.stderr
    steps, *kills = map(int, done.stdout.split())
    assert steps > 10 and kills == [22, 8]


@pytest.mark.parametrize(
    "ways",
    (
        ("destroy", "no_disk", "one_is_killed"),
        pytest.param((), id="all", marks=pytest.mark.long),
    ),
    ids=" ".join,
)
def test_programs_that_end_while_a_save_is_under_way(ways, tmp_path):
    """What was saved is there, or what was before, and a failure is not missed."""
    program = Path(__file__).with_name("end_while_saving.py")
    done = warm_python.run(program, tmp_path, *ways, timeout=600)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == (len(ways) or 15)


VALUES = (
    None,
    [1, -(2**70), 0.1, float("inf"), True, "a\n\u00e9"],
    (1, (2,), [], {}),
    {"a": {1: b"\0\xff", (2, 3): None}, 4: {5, 6}},
    {frozenset((1, (frozenset(), 2))): {frozenset((3,)), (4, frozenset((5,)))}},
    torch.bfloat16,
)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_plain_values_are_restored(value):
    restored = plain_values.loads(plain_values.dumps(value))
    assert restored == value and type(restored) is type(value)


def nested(levels, outer):
    value = 1
    for _ in range(levels):
        value = outer(value)
    return value


OUTER = {
    "list": lambda value: [value],
    "tuple": lambda value: (value,),
    "dict": lambda value: {"k": value},
    "set": lambda value: frozenset((value,)),
}


@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
def test_values_are_nested_only_so_deep(outer):
    """What is taken can be read, from some functions further down as well."""

    def further_down(calls):
        return further_down(calls - 1) if calls else plain_values.loads(text)

    text = plain_values.dumps(nested(202, outer))
    restored = further_down(100)
    while isinstance(restored, list | tuple | dict | set | frozenset):
        (restored,) = restored.values() if isinstance(restored, dict) else restored
    assert restored == 1
    for levels in (203, 900, 10_000):
        value = nested(levels, outer)
        for broken in (value, [value], [{1: value}]):
            with pytest.raises(
                ValueError, match=r"^value.*\.\.\. is nested deeper than 202 levels"
            ):
                plain_values.dumps(broken)
    with pytest.raises(ValueError, match="deeper than 200 levels"):
        plain_values.dumps(nested(201, outer), within=2)


def test_values_that_could_not_be_read():
    around = []
    around.append({"again": around})
    with pytest.raises(ValueError, match=r"^value\[0\]\['again'\]\[0\].*or contains itself"):
        plain_values.dumps(around)
    assert plain_values.loads(plain_values.dumps(-(2**13_999))) == -(2**13_999)
    with pytest.raises(
        ValueError, match=r"^value\['a'\] is an int of 14001 bits, expected at most"
    ):
        plain_values.dumps({"a": 2**14_000})


def test_values_where_the_stack_has_no_room():
    """As deep in functions as a value may be in others: it says so, and not that it is damaged."""
    value = nested(200, OUTER["dict"])
    text = plain_values.dumps(value)

    def further_down(function, argument, calls):
        if calls == 0:
            return function(argument)
        return further_down(function, argument, calls - 1)

    room = sys.getrecursionlimit() - len(inspect.stack(0)) - 150
    for function, argument in ((plain_values.dumps, value), (plain_values.loads, text)):
        with pytest.raises(ValueError, match="than there is room for on Python's stack here"):
            further_down(function, argument, room)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.bool, torch.int64))
@pytest.mark.parametrize("shape", ((), (0, 3), (2, 3)))
def test_tensors_among_plain_values(dtype, shape):
    value = torch.ones(shape).to(dtype)
    restored = plain_values.loads(plain_values.dumps([value]))[0]
    assert restored.dtype == dtype and torch.equal(restored, value) and restored.shape == shape


@pytest.mark.parametrize(
    "text",
    (
        *("", "{", "{}", '{"a":1,"b":2}', '{"reduce":[1]}', '{"tensor":1}', '{"dict":[1]}'),
        *('{"tensor":["float32",[9],"AAAA"]}', '{"tensor":["Tensor",[1],"AAAA"]}'),
        *('{"dtype":"nn"}', "[" * 10**5),
    ),
    ids=lambda text: text[:20],
)
def test_text_that_is_no_plain_value_is_refused(text):
    with pytest.raises(ValueError):
        plain_values.loads(text)


def test_manifests_are_checked():
    """As one that was made on purpose, with a right seal, is."""
    chunk = {"offsets": [0], "sizes": [2], "file": "f", "offset": 0, "nbytes": 8, "crc32c": [1]}
    row = {"name": "a", "dtype": "float32", "shape": [2], "chunks": [chunk]}

    def sealed(rows, format=1):
        document = {"format": format, "entries": rows, "planner": "null"}
        body = json.dumps(document, separators=(",", ":"))[:-1].encode()
        return body + zero.checkpoint.manifest._seal(body)

    assert decode(sealed([row]), "p").state_dict_metadata["a"].size == (2,)
    changes = ({"file": "../f"}, {"file": "a/b"}, {"offset": -1}, {"nbytes": 9}, {"crc32c": []})
    changes += ({"crc32c": [1, 2]}, {"sizes": [1], "nbytes": 4}, {"offsets": [1]}, {"sizes": []})
    changes += ({"offset": 2**63}, {"offset": True}, {"offset": 1.5})
    bad = [[row | {"chunks": [chunk | change]}] for change in changes]
    bad += [[row, row], [row | {"dtype": "nn"}], [row | {"shape": [3]}], [row | {"name": 1}], [1]]
    for rows in bad:
        with pytest.raises((BadManifest, ValueError)):
            decode(sealed(rows), "p")
    for text in (b"", sealed([row])[:-1], sealed([row]).replace(b'"f"', b'"g"'), sealed([row], 2)):
        with pytest.raises(BadManifest):
            decode(text, "p")
