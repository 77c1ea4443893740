"""Checkpoints of sharded trainings: other numbers of processes, stages, tiers and state formats."""

import json
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from process_groups import with_long
from processes import Case
from torch import nn
from zero_cases import FORMATS, Net, adam, assert_close, loss_of, mesh_at_home, whole

from deepspeed_ext import io, zero
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim.formats import MASTER
from deepspeed_ext.zero.checkpoint import saving
from deepspeed_ext.zero.checkpoint.storage import Writer
from deepspeed_ext.zero.sharding import sharding_of

OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3}


def training(stage, tier="device", name="float32", seed=0):
    dtype, options = FORMATS[name]
    model = zero.shard(Net(seed).to(dtype), stage)
    groups = [
        {"params": [p for n, p in model.named_parameters() if "norm" not in n]},
        {"params": [p for n, p in model.named_parameters() if "norm" in n], "weight_decay": 0.0},
    ]
    if tier == "host":
        return model, OffloadOptimizer(groups, model=model, **OPTIONS, **options)
    return model, adam(groups, **OPTIONS, **options)


def train(model, optimizer, steps, first=0):
    for number in range(first, first + steps):
        for i in zero.accumulate(model, 2):
            loss_of(model, 2 * number + i).backward()
        optimizer.clip_and_step(0.5)
        optimizer.zero_grad()


def contents(model, optimizer):
    """Copies of weights, and of state by name, whole, in the dtype that a checkpoint has."""
    packed = optimizer.state_dict()
    names = {p: n for n, p in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    found = {name: whole(p).clone().cpu() for name, p in model.named_parameters()}
    for number, entry in packed["state"].items():
        for key, value in entry.items():
            found[f"{names[params[number]]}.{key}"] = whole(value).clone().cpu()
    return found


def saves(row, folder):
    """What `loads` of other numbers of processes finds; all formats."""
    world = dist.get_world_size()
    for name in FORMATS:
        model, optimizer = training(3 if name == "float32" else 1, "device", name)
        train(model, optimizer, 2)
        zero.save(folder / f"from{world}", name, model, optimizer, step=2, of=dist.get_rank())
        found = contents(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(found, folder / f"{world}{name}.pt")
    dist.barrier()


def loads(row, folder):
    """Each number of processes tries other formats, so that all have been there."""
    source, world = 4, dist.get_world_size()
    pairs = [(saved, target) for saved in FORMATS for target in TARGETS]
    for saved, (name, stage, tier) in pairs[WORLDS.index(world) :: len(WORLDS)]:
        expected = torch.load(folder / f"{source}{saved}.pt", weights_only=True)
        model, optimizer = training(stage, tier, name, seed=9)
        train(model, optimizer, len(saved) % 2)  # some have state already
        random = torch.get_rng_state()
        client = zero.load(folder / f"from{source}", saved, model, optimizer)
        assert world == source or torch.equal(torch.get_rng_state(), random)
        assert client == {"step": 2, "of": dist.get_rank() if world == source else 0}
        is_same = saved == name and (name != "codes" or world == source)
        compare(contents(model, optimizer), expected, f"{saved} to {name}", name, is_same)
        assert optimizer.param_groups[1]["weight_decay"] == 0.0
        train(model, optimizer, 1)


WORLDS = (1, 2, 3, 4, 8)
TARGETS = (
    ("float32", 2, "host"),
    ("bfloat16", 3, "device"),
    ("remainder", 0, "host"),
    ("codes", 3, "host"),
)


def compare(found, expected, what, name, is_same):
    """All that the target keeps is what was saved, as well as its format can say it."""
    for key, value in found.items():
        last = key.rpartition(".")[2]
        if key not in expected:
            assert last in (MASTER, "master_remainder"), key
            continue
        want = expected[key]
        if FORMATS[name][0] == torch.float32:
            want = expected.get(f"{key}.{MASTER}", want)
        tolerance = {"rtol": 0, "atol": 0}
        if last.startswith("exp_avg") and name in ("bfloat16", "codes") and not is_same:
            # Rounded at random to 8 bits, or to codes that are 1/10 apart at most.
            size = want.float().abs().max().item()
            tolerance = {"rtol": 2.0**-7 if name == "bfloat16" else 0.15, "atol": 0.02 * size}
        if last == "master_remainder" or what == "remainder to float32":
            continue
        want = want.to(value.dtype).float()
        assert_close(value.float(), want, f"{what}, {key}", **tolerance)


def master_weights(row, folder):
    """Float32 weights come out of bfloat16 ones with master weights or halves, and go into them."""
    for name in ("bfloat16", "remainder"):
        model, optimizer = training(1, "device", name)
        train(model, optimizer, 2)
        zero.save(folder / f"master_weights{name}", "a", model, optimizer)
        kept = {}
        for other in ("bfloat16", "remainder", "float32"):
            model, optimizer = training(3, "host", other, seed=3)
            train(model, optimizer, int(name == "remainder"))
            zero.load(folder / f"master_weights{name}", None, model, optimizer)
            if other == "float32":
                kept[other] = {n: whole(p) for n, p in model.named_parameters()}
                zero.save(folder / f"back{name}", "b", model, optimizer)
            elif other == "bfloat16":
                entry = lambda p, o=optimizer: o.state.get(p, {}).get(MASTER)  # noqa: E731
                kept[other] = {
                    n: whole(entry(p)) for n, p in model.named_parameters() if entry(p) is not None
                }
        for key, value in kept["bfloat16"].items():
            assert torch.equal(value, kept["float32"][key]), key
            assert not torch.equal(value, value.bfloat16().float()) or value.numel() < 7
        model, optimizer = training(2, "device", "bfloat16", seed=3)
        zero.load(folder / f"back{name}", None, model, optimizer)
        for key, value in kept["bfloat16"].items():
            assert torch.equal(whole(optimizer.state[model.get_parameter(key)][MASTER]), value)


def weights_alone(row, folder):
    """Masters that an optimizer has follow weights that are loaded without it."""
    for tier in ("device", "host"):
        model, optimizer = training(2, tier, "bfloat16")
        zero.save(folder / f"alone{tier}", "a", model, optimizer)
        model, optimizer = training(2, tier, "bfloat16", seed=5)
        train(model, optimizer, 2)
        zero.load(folder / f"alone{tier}", None, model)
        loaded = {n: whole(p).clone() for n, p in model.named_parameters()}
        train(model, optimizer, 1)
        if tier == "host":
            optimizer.synchronize()
        for name, param in model.named_parameters():  # a step of Adam is some lr at most
            assert_close(whole(param), loaded[name], name, rtol=0.02, atol=0.05)


def resumes(row, folder):
    """Bit for bit with as many processes, scheduler, scaler and random numbers included."""
    for tier in ("device", "host"):
        for name in ("float32", "codes"):
            model, optimizer = training(2, tier, name)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            scaler = zero.LossScaler(2.0**4, growth_interval=2)
            train(model, optimizer, 2)
            scheduler.step()
            state = {"scheduler": scheduler, "scaler": scaler, "position": [1, (2, "x")]}
            home = folder / f"resume{dist.get_world_size()}{tier}{name}"
            torch.rand(dist.get_rank() + 1)
            zero.save(home, "first", model, optimizer, **state)
            drawn = torch.rand(3)
            train(model, optimizer, 2, first=2)
            expected = contents(model, optimizer)
            model, optimizer = training(2, tier, name, seed=5)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            scaler = zero.LossScaler(2.0**7)
            rest = zero.load(home, None, model, optimizer, scheduler=scheduler, scaler=scaler)
            assert rest == {"position": [1, (2, "x")]}
            assert torch.equal(torch.rand(3), drawn) and scaler.get_scale() == 2.0**4
            assert (
                scheduler.last_epoch == 1 and optimizer.param_groups[0]["lr"] == OPTIONS["lr"] * 0.9
            )
            train(model, optimizer, 2, first=2)
            for key, value in contents(model, optimizer).items():
                assert torch.equal(value, expected[key]), key


def goes_on_meanwhile(row, folder):
    """Copies are saved; the next save waits; the latest is what was saved last."""
    home = folder / "meanwhile"
    model, optimizer = training(3, "host")
    kept, futures = {}, []
    for step in range(3):
        train(model, optimizer, 1, first=step)
        futures.append(zero.save(home, f"step{step}", model, optimizer, wait=False, step=step))
        kept[step] = contents(model, optimizer)
    futures[-1].result(60)
    backends = (
        sharding_of("test", model).saves_by._group,
        dist.group.WORLD._get_backend(torch.device("cpu")),
    )
    waits = {backend.options._timeout for backend in backends}
    assert len(waits) == 1, "who saves waits no longer for others than training does"
    write, go = Writer.write_data, threading.Event()
    Writer.write_data = lambda *arguments: go.wait(60) and write(*arguments)
    futures.append(zero.save(home, "last", model, optimizer, wait=False, step="last"))
    kept["last"] = contents(model, optimizer)
    train(model, optimizer, 1, first=7)
    assert not futures[-1].done()
    go.set()
    futures[-1].result(60)
    Writer.write_data = write
    assert all(future.done() for future in futures)
    dist.barrier()
    for step, tag in (("last", None), (0, "step0"), (1, "step1"), (2, "step2")):
        other, its = training(1, seed=4)
        assert zero.load(home, tag, other, its) == {"step": step}
        for key, value in contents(other, its).items():
            assert torch.equal(value, kept[step][key]), (step, key)


def replaces(row, folder):
    """A second save under a tag takes the place of the first, whose files go."""
    home = folder / "replaced"
    model, optimizer = training(2)
    zero.save(home, "only", model, optimizer)
    before = {path.name for path in (home / "only").iterdir()}
    train(model, optimizer, 1)
    name_latest, named = saving.name_latest, []

    def look_and_name(where, tag):  # by one process, when all is there
        named.append(tag)
        zero.inspect(where, tag)
        name_latest(where, tag)

    saving.name_latest = look_and_name
    zero.save(home, "only", model, optimizer)
    zero.save(home, "other", model, optimizer)
    saving.name_latest = name_latest
    assert named == ["only", "other"] * (dist.get_rank() == 0)
    dist.barrier()
    after = {path.name for path in (home / "only").iterdir()}
    assert len(after) == len(before) == dist.get_world_size() + 1
    assert before & after == {"manifest.json"}
    expected = contents(model, optimizer)
    model, optimizer = training(2, seed=4)
    zero.load(home, "only", model, optimizer)
    for key, value in contents(model, optimizer).items():
        assert torch.equal(value, expected[key])
    dist.barrier()


def replicas(row, folder):
    """What several processes have is written once, and read by all."""
    mesh = mesh_at_home((2, 2), ("r", "s"))
    for stage in (0, 3):
        model = zero.shard(Net(), stage, mesh=mesh)
        optimizer = adam(model.parameters(), **OPTIONS)
        train(model, optimizer, 1)
        home = folder / f"replicas{stage}"
        zero.save(home, "a", model, optimizer)
        expected = contents(model, optimizer)
        files = [io.inspect(path).tensors for path in (home / "a").glob("*.safetensors")]
        for prefix, wants_state in (("model.", False), ("optimizer.", True)):
            found = sum(t.nbytes for f in files for n, t in f.items() if n.startswith(prefix))
            is_state = [key.endswith(("exp_avg", "exp_avg_sq", "step")) for key in expected]
            pairs = zip(expected.values(), is_state, strict=True)
            assert found == sum(t.nbytes for t, state in pairs if state == wants_state)
        model = zero.shard(Net(seed=2), 3 - stage, mesh=mesh)
        optimizer = adam(model.parameters(), **OPTIONS)
        zero.load(home, "a", model, optimizer)
        for key, value in contents(model, optimizer).items():
            assert torch.equal(value, expected[key]), key
        dist.barrier()


def for_users_of_dcp(row, folder):
    """Any state dict, by torch's own functions."""
    path = folder / "dcp"
    mesh = mesh_at_home((dist.get_world_size(),))
    torch.manual_seed(1)
    plain = torch.randn(5, 3)
    distribute = torch.distributed.tensor.distribute_tensor
    shard, column, depth = map(torch.distributed.tensor.Shard, range(3))
    cube = torch.randn(3, 2, 5)
    state = {
        "plain": plain,
        "nested": {"rows": distribute(plain, mesh, [shard]), "list": [1, 2.5, None, "x", True]},
        "columns": distribute(plain.bfloat16(), mesh, [column]),
        "to rows": distribute(plain, mesh, [column]),
        "cube": distribute(cube, mesh, [depth]),
        "cube of rows": distribute(cube, mesh, [shard]),
        "empty": torch.empty(0, 4),
        "number": torch.tensor(3, dtype=torch.int16),
        "flag": torch.tensor([True, False]),
    }
    dcp.save(state, storage_writer=zero.Writer(path))
    target = {
        "plain": torch.zeros(5, 3),
        "nested": {"rows": distribute(torch.zeros(5, 3), mesh, [column]), "list": [0, 0, 0, 0, 0]},
        "columns": torch.zeros(5, 3),
        "to rows": distribute(torch.zeros(5, 3), mesh, [shard]),
        "cube": distribute(torch.zeros(3, 2, 5), mesh, [shard]),
        "cube of rows": distribute(torch.zeros(3, 2, 5), mesh, [depth]),
        "empty": torch.empty(0, 4),
        "number": torch.tensor(0, dtype=torch.int16),
        "flag": torch.tensor([False, False]),
    }
    dcp.load(target, storage_reader=zero.Reader(path))
    assert torch.equal(target["plain"], plain)
    assert torch.equal(target["nested"]["rows"].full_tensor(), plain)
    assert torch.equal(target["to rows"].full_tensor(), plain)
    assert torch.equal(target["cube"].full_tensor(), cube)
    assert torch.equal(target["cube of rows"].full_tensor(), cube)
    assert target["nested"]["list"] == [1, 2.5, None, "x", True]
    assert torch.equal(target["columns"], plain.bfloat16().float())
    assert target["number"] == 3 and target["flag"].tolist() == [True, False]
    for file in path.glob("*.safetensors"):
        assert io.load(file)  # which others can read


def consolidates(row, folder):
    for name in ("float32", "remainder", "bfloat16"):
        home, out = folder / f"whole{name}", folder / f"out{name}"
        model, optimizer = training(3, "host", name)
        train(model, optimizer, 2)
        zero.save(home, "a", model, optimizer)
        weights = {n: whole(p).float().cpu() for n, p in model.named_parameters()}
        if name == "bfloat16":
            for n, p in model.named_parameters():
                if MASTER in optimizer.state.get(p, {}):
                    weights[n] = whole(optimizer.state[p][MASTER]).cpu()
        if dist.get_rank() == 0:
            command = [sys.executable, "-m", "deepspeed_ext.zero", "consolidate", home, out]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            assert done.stdout == f"wrote {out / 'model.safetensors'}\n"
            found = io.load(out / "model.safetensors")
            assert found.keys() == weights.keys()
            for key, value in found.items():
                same = value.bfloat16().float() if name == "remainder" else value.float()
                assert torch.equal(same, weights[key]), key
            for dtype in (torch.int8, torch.float64, "float16"):
                with pytest.raises(ValueError, match=f"dtype is {dtype}, expected float32, bfloat"):
                    zero.consolidate(home, out / "no", dtype=dtype)
            assert not (out / "no").exists()
            files = zero.consolidate(home, out / "low", dtype=torch.float16, max_shard_bytes=200)
            index = json.loads(files[-1].read_text())
            assert len(files) > 5 and index["weight_map"].keys() == weights.keys()
        dist.barrier()
        with zero.Init(files=out / "low", init=lambda module: None) as init:
            model = Net()
        init.fill(zero.shard(model, 2))
        for key, param in model.named_parameters():
            assert param.dtype == torch.float32
            atol = 2.0**-8 if name == "remainder" else 0
            assert_close(whole(param).cpu(), weights[key].half().float(), key, rtol=0, atol=atol)


def refusals(row, folder):
    rank = dist.get_rank()
    home = folder / "refused"
    model, optimizer = training(2)
    train(model, optimizer, 1)
    zero.save(home, "a", model, optimizer, step=1)

    def refused(kind, text, function, *arguments, **named):
        with pytest.raises(kind) as caught:
            function(*arguments, **named)
        assert text == str(caught.value) or (
            text.endswith("...") and text[:-3] in str(caught.value)
        )

    for tag in ("a/b", "", "..", ".hidden", "latest", "x" * 201, "a\nb", 3):
        text = (
            f"zero.save: tag is {tag!r}, expected a name without / of 1 to 200 bytes, that is not"
            " 'latest' and does not begin with a dot"
        )
        refused(ValueError, text, zero.save, home, tag, model)
    text = (
        f"zero.save: process {rank} has tag {f't{rank}'!r}, process {1 - rank} has tag"
        f" {f't{1 - rank}'!r}, expected the same model and options on all processes"
    )
    refused(ValueError, text, zero.save, home, f"t{rank}", model)
    for function, tag, named, lines in (
        (zero.save, "b", {"wait": rank == 0}, ("wait True", "wait False")),
        (zero.save, "b", {f"s{rank}": 1}, ("client_state 's0'", "client_state 's1'")),
        (zero.load, "ab"[rank], {}, ("checkpoint 'a'", "checkpoint 'b'")),
    ):
        text = (
            f"zero.{function.__name__}: process {rank} has {lines[rank]}, process {1 - rank} has"
            f" {lines[1 - rank]}, expected the same model and options on all processes"
        )
        refused(ValueError, text, function, home, tag, model, **named)
    text = "zero.save: client_state['what']: value['x'] is a builtins.object, expected numbers..."
    refused(TypeError, text, zero.save, home, "b", model, what={"x": object()})
    for _ in zero.accumulate(model, 1):
        for function in (zero.save, zero.load):
            op = f"zero.{function.__name__}"
            text = (
                f"{op}: model is between micro-steps of zero.accumulate, expected the end of them"
            )
            refused(RuntimeError, text, function, home, "a", model)
        loss_of(model, 0).backward()
    assert sorted(path.name for path in home.iterdir()) == ["a", "latest"]
    refused(OSError, "No such file or directory...", zero.load, home, "missing", model)
    stranger = zero.shard(Net(blocks=4), 1)
    before = {n: whole(p).clone() for n, p in stranger.named_parameters()}
    text = "zero.load: the checkpoint has no 'blocks.3.gain', expected all that the model has..."
    refused(ValueError, text, zero.load, home, None, stranger)
    small = zero.shard(Net(blocks=2), 1)
    text = "zero.load: the checkpoint has 'blocks.2.gain', expected what the model has only..."
    refused(ValueError, text, zero.load, home, None, small)
    assert all(torch.equal(whole(p), before[n]) for n, p in stranger.named_parameters())
    other = adam(model.parameters())
    text = "zero.load: the checkpoint has 2 groups of parameters, expected 1 as the optimizer has"
    refused(ValueError, text, zero.load, home, "a", model, other)
    text = "zero.load: the checkpoint has ['step'] as client_state, expected 'scaler' among them"
    refused(ValueError, text, zero.load, home, "a", model, scaler=zero.LossScaler())
    foreign = adam([nn.Parameter(torch.ones(2))])
    text = (
        "zero.save: optimizer has param_groups[0]['params'][0], which is no parameter of the model,"
        " expected parameters of the model only"
    )
    refused(ValueError, text, zero.save, home, "b", model, foreign)
    dist.barrier()


CASES = [
    Case(4, "saves", ""),
    *(Case(world, "loads", "") for world in (1, 2, 3, 4, 8)),
    Case(2, "master_weights", ""),
    Case(2, "weights_alone", ""),
    Case(2, "resumes", ""),
    Case(2, "goes_on_meanwhile", ""),
    Case(2, "replaces", ""),
    Case(4, "replicas", ""),
    Case(2, "for_users_of_dcp", ""),
    Case(2, "consolidates", ""),
    Case(2, "refusals", ""),
]
LONG = (
    "saves--4",
    "loads--3",
    "loads--4",
    "loads--8",
)


@pytest.mark.parametrize("case", with_long(CASES, *LONG))
def test_processes(case, groups):
    if case.function == "loads":
        groups.run(Case(4, "saves", ""))
    groups.run(case)
