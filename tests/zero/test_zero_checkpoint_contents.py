"""What a checkpoint holds: values as they were at the call, names, buffers, extra state, blocks."""

import os
import shutil
import threading

import numpy
import pytest
import torch
import torch.distributed as dist
from processes import Case
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from zero_cases import adam, at_home, whole

from deepspeed_ext import io, zero
from deepspeed_ext.io.checkpoint.shards import Shards
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim import DeepSpeedCPUAdagrad, DeepSpeedCPULion, FusedSGD
from deepspeed_ext.zero.checkpoint import saving
from deepspeed_ext.zero.checkpoint.background import Saving
from deepspeed_ext.zero.checkpoint.manifest import BLOCK
from deepspeed_ext.zero.checkpoint.storage import Writer
from deepspeed_ext.zero.saved_model import slices_in

NAMES = {
    *(f"0.{i}.{name}" for i in range(2) for name in ("weight", "bias", "running_mean")),
    *(f"0.{i}.{name}" for i in range(2) for name in ("running_var", "num_batches_tracked")),
    *("1.weight", "1.bias", "2.scale"),
}


class Extra(nn.Module):
    """Has state of its own beside a buffer, and one that is in no state dict."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.seen = {"count": 0, "last": torch.zeros(2)}

    def reset_parameters(self):
        self.scratch.fill_(1)

    def forward(self, x):
        self.seen = {"count": self.seen["count"] + 1, "last": x.detach().sum(0)}
        return x * self.scale

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def net(is_wrapped):
    norms, linear = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)), nn.Linear(2, 2)
    if is_wrapped:
        norms, linear = checkpoint_wrapper(norms), torch.compile(linear, backend="eager")
    return nn.Sequential(norms, linear, checkpoint_wrapper(Extra()) if is_wrapped else Extra())


def buffers(model):
    return {zero.names.plain_name(n): b.clone() for n, b in model.named_buffers()}


def wrapped(row, folder):
    """Wrapped or not, saved and loaded by the same names, with one process's buffers."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for saved_wrapped in (False, True):
        home = folder / f"wrapped{world}{saved_wrapped}"
        model = zero.shard(net(saved_wrapped), 3, blocks=[])
        optimizer = torch.optim.Adam(model.parameters())
        for number in range(3):
            x = torch.full((4, 2), float(rank + 1)).addcmul(torch.rand(4, 2), torch.rand(4, 2))
            model(x + number).sum().backward()
            optimizer.step()
        zero.save(home, "a", model, optimizer)
        of_first = buffers(model)
        for value in of_first.values():
            dist.broadcast(value, 0)
        weights = {zero.names.plain_name(n): whole(p) for n, p in model.named_parameters()}
        seen = model.state_dict()["2._extra_state"]
        last = seen["last"].clone()
        dist.broadcast(last, 0)
        last = last.cpu()
        entries = zero.Reader(home / "a").read_metadata().state_dict_metadata
        assert {n[6:] for n in entries if n.startswith("model.")} == NAMES
        for loaded_wrapped in (False, True):
            other = zero.shard(net(loaded_wrapped), 2, blocks=[])
            zero.load(home, None, other, torch.optim.Adam(other.parameters()))
            for name, value in buffers(other).items():
                assert torch.equal(value, of_first[name]) or "scratch" in name, name
            for name, param in other.named_parameters():
                assert torch.equal(whole(param), weights[zero.names.plain_name(name)]), name
            extra = other.state_dict()["2._extra_state"]
            assert extra["count"] == seen["count"] >= 3 and torch.equal(extra["last"].cpu(), last)
        if rank == 0:
            (file,) = zero.consolidate(home, home / "out")
            assert io.load(file).keys() == NAMES
        dist.barrier()
        for is_wrapped in (False, True):
            with zero.Init(files=home / "out") as init:
                other = net(is_wrapped)
            zero.shard(other, 3, blocks=[])
            init.fill(other)
            for name, param in other.named_parameters():
                assert torch.equal(whole(param), weights[zero.names.plain_name(name)]), name
    plain = zero.shard(nn.Sequential(*net(False)[:2]), 3, blocks=[])
    with pytest.raises(ValueError, match=r"has '2\.scale'"):
        zero.load(home, None, plain)


def captured(row, folder):
    """What changes after the call is not in the checkpoint, also when the next one has begun."""
    home, rank = folder / f"captured{dist.get_world_size()}", dist.get_rank()
    model = zero.shard(nn.Linear(3, 5, bias=False), 3, blocks=[])
    ema = {"w": torch.zeros(1 << 15), "small": [torch.zeros(2)], "array": numpy.zeros(3)}
    first_is_held, write = threading.Event(), Writer.write_data
    copy, wait = saving.staged, Saving.exception
    copies = []

    def hold(*arguments):
        assert first_is_held.wait(60)
        return write(*arguments)

    def copied(*arguments):
        made = copy(*arguments)
        copies.append(1)
        if len(copies) == 2:
            first_is_held.set()  # too early, if the first is still to be written
        return made

    def waited(self, timeout=None):
        first_is_held.set()
        return wait(self, timeout)

    Writer.write_data, saving.staged, Saving.exception = hold, copied, waited
    for number in (1, 2):
        nn.init.constant_(model.weight.to_local(), number)
        ema["w"].fill_(number + rank)
        ema["small"][0].fill_(number)
        ema["array"][:] = number
        drawn = [torch.get_rng_state(), numpy.random.get_state()[1].copy()]
        future = zero.save(home, str(number), model, wait=False, ema=ema, position={"at": [number]})
        torch.rand(1), numpy.random.rand(1)
    ema["w"].fill_(9)
    ema["small"][0].fill_(9)
    ema["array"][:] = 9
    future.result(60)
    Writer.write_data, saving.staged, Saving.exception = write, copy, wait
    dist.barrier()
    for number in (1, 2):
        client = zero.load(home, str(number), model)
        assert whole(model.weight).eq(number).all(), number
        assert client["position"] == {"at": [number]}
        assert client["ema"]["w"].eq(number + rank).all(), number
        assert client["ema"]["small"][0].eq(number).all()
        assert isinstance(client["ema"]["array"], numpy.ndarray)
        assert (client["ema"]["array"] == number).all()
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert (numpy.random.get_state()[1] == drawn[1]).all()
    dist.barrier()


def blocks(row, folder):
    """A flip in any block of any tensor is found, whoever reads it."""
    home, rank = folder / "blocks", dist.get_rank()
    rows = 2 * BLOCK // 4 + 3
    layers = (nn.Linear(2, rows, bias=False) for _ in range(2))
    model = zero.shard(nn.Sequential(*layers), 3, blocks=[])
    zero.save(home, "a", model)
    metadata = zero.Reader(home / "a").read_metadata()
    for index, piece in sorted(metadata.storage_data.items(), key=str):
        if not index.fqn.startswith("model."):
            continue
        for at in (0, BLOCK, BLOCK + 1, piece.nbytes - 1):
            path = home / "a" / piece.file
            flip(path, piece.offset + at)
            with pytest.raises((OSError, RuntimeError), match=r"not what was saved|another"):
                zero.load(home, "a", model)
            if rank == 0:
                with pytest.raises(OSError, match="not what was saved"):
                    zero.consolidate(home, folder / "out")
            flip(path, piece.offset + at)
    zero.load(home, "a", model)
    dist.barrier()


class Stop(Exception):
    """What ends a consolidate."""


KINDS = {
    "lion": lambda params: at_home(DeepSpeedCPULion)(params, lr=0.1),
    "adam": lambda params: adam(params, lr=0.1),
    "sgd": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: at_home(DeepSpeedCPUAdagrad)(params, lr=0.1),
    "lion on the host": lambda params: OffloadOptimizer(params, DeepSpeedCPULion, lr=0.1),
    "adam on the host": lambda params: OffloadOptimizer(params, lr=0.1),
    "torch's adam": lambda params: torch.optim.AdamW(params, lr=0.1),
    "torch's sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}
SAME = {name: name.split()[-1] if "torch" in name else name.split()[0] for name in KINDS}


def stepped(name, steps=1):
    torch.manual_seed(steps)
    model = zero.shard(net(False), 3)
    optimizer = KINDS[name](model.parameters())
    for _ in range(steps):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def everything(model, optimizer):
    """Tensors by name, as they are."""
    packed = optimizer.state_dict()
    found = {(i, k): v for i, entry in packed["state"].items() for k, v in entry.items()}
    return {**buffers(model), **dict(model.named_parameters()), **found, "x": model[2].seen["last"]}


def other_classes(row, folder):
    """State of another class of optimizers, or options that this one refuses: nothing changes."""
    for saved in ("lion", "adam", "torch's sgd"):
        home = folder / f"state of {saved}"
        zero.save(home, "a", *stepped(saved, 2))
        for name in KINDS:
            model, optimizer = stepped(name)
            before = everything(model, optimizer)
            values = {key: whole(value).clone() for key, value in before.items()}
            if SAME[name] == SAME[saved]:
                zero.load(home, None, model, optimizer)
                changed = everything(model, optimizer)
                assert not torch.equal(whole(changed["1.weight"]), values["1.weight"])
                continue
            title = rf"{type(optimizer).__name__}: state of params\[0\] has keys .*, expected"
            with pytest.raises(ValueError, match=title):
                zero.load(home, None, model, optimizer)
            after = everything(model, optimizer)
            assert after.keys() == values.keys(), (saved, name)
            for key, value in after.items():
                assert torch.equal(whole(value), values[key]), (saved, name, key)
    model, optimizer = stepped("adam")
    for group in optimizer.param_groups:
        group["eps"] = -1.0
    zero.save(folder / "options", "a", model, optimizer)
    model, optimizer = stepped("adam", 2)
    before = whole(model[1].weight).clone()
    with pytest.raises(ValueError, match=f"{type(optimizer).__name__}: eps is"):
        zero.load(folder / "options", "a", model, optimizer)
    assert torch.equal(whole(model[1].weight), before)


def replaces_results(row, folder):
    """Killed or not, readers find one model or none, and nothing is left of the older."""
    home, out = folder / "results", folder / "result"
    models = {}
    for number in (1, 2):
        models[number] = zero.shard(nn.Linear(3, 5), 3, blocks=[])
        for param in models[number].parameters():
            nn.init.constant_(param.to_local(), number)
        zero.save(home, str(number), models[number])
    sizes = (1 << 20, 60, 1)  # one file; a file for each tensor, twice with the same names
    real = {name: getattr(os, name) for name in ("replace", "unlink", "fsync")}
    for first in sizes:
        for second in sizes:
            step, ended = 0, False
            while not ended:
                shutil.rmtree(out, ignore_errors=True)
                zero.consolidate(home, out, tag="1", max_shard_bytes=first)
                step, left = step + 1, [step + 1]

                def stopping(name, left=left):
                    def call(path, *rest, **named):
                        if f"{out}/.cons" not in str(path) or name == "replace":
                            left[0] -= 1
                        if left[0] == 0:
                            raise Stop
                        return real[name](path, *rest, **named)

                    return call

                for name in ("replace", "unlink"):
                    setattr(os, name, stopping(name))
                try:
                    files = zero.consolidate(home, out, tag="2", max_shard_bytes=second)
                    ended = True
                except Stop:
                    ended = False
                for name, function in real.items():
                    setattr(os, name, function)
                assert one_model(out) == (2 if ended else one_model(out)), (first, second, step)
                if ended:
                    assert sorted(out.iterdir()) == sorted(files), (first, second)
            assert step > 1


def one_model(folder):
    """Return which model readers find, None if none; theirs agree."""
    found = set()
    for reader in (slices_in, lambda op, path: Shards(op, path).files):
        try:
            places = reader("test", folder)
        except FileNotFoundError:
            continue
        assert places.keys() == {"weight", "bias"}
        for name, place in places.items():
            found |= set(io.load(getattr(place, "path", place))[name].flatten().tolist())
    assert len(found) <= 1, found
    return found.pop() if found else None


def flip(path, offset):
    dist.barrier()
    if dist.get_rank() == 0:
        with path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 4]))
    dist.barrier()


CASES = [Case(2, "wrapped", ""), Case(2, "captured", ""), Case(2, "blocks", "")]
CASES += [Case(1, "replaces_results", ""), Case(2, "other_classes", "")]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function}-{c.row}-{c.world}")
def test_processes(case, groups):
    groups.run(case)
