"""Engines train as a loop over the parts that they are made of, bit for bit."""

import math
from functools import partial

import deepspeed_folder
import pytest
import torch
import torch.distributed as dist
from process_groups import with_long
from processes import Case
from torch import nn
from zero_cases import Net, adam, at_home, home, loss_of, whole

import deepspeed_ext
from deepspeed_ext import zero
from deepspeed_ext.dtensors import local
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim import DeepSpeedCPUAdam, DeepSpeedCPULion, FusedLamb
from deepspeed_ext.optim.schedules import WarmupLR

STEPS = 4
PRECISION = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def config(stage, precision="float32", steps=1, offload="none", **more):
    """Of a step of 4 samples in a process and micro-step."""
    given = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": steps,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        **more,
    }
    if precision != "float32":
        given[precision] = {"enabled": True}
    if precision == "fp16":
        given["fp16"] |= {"initial_scale_power": 10, "hysteresis": 1}
    if offload not in (False, "none"):
        block = "offload_param" if offload == "params" else "offload_optimizer"
        given["zero_optimization"][block] = {"device": "cpu"}
    return given


def by_hand(stage, precision, steps, offload, numbers):
    """Train by the parts, and return the weights after each step."""
    model = Net()
    used = PRECISION[precision]
    for param in model.parameters() if used else ():
        if param.requires_grad:
            param.data = param.data.to(used).float()  # where DeepSpeed's master weights begin
    zero.shard(model, stage, param_dtype=used, reduce_dtype=used and torch.float32)
    params = [p for p in model.parameters() if p.requires_grad]
    options = {"lr": 1e-2, "weight_decay": 0.1}
    if offload:
        optimizer = OffloadOptimizer(params, model=model, **options)
    else:
        optimizer = adam(params, **options)
    scaler = zero.LossScaler(2.0**10, hysteresis=1) if precision == "fp16" else None
    for first in range(0, numbers, steps):
        for i in zero.accumulate(model, steps):
            loss = loss_of(model, first + i) / steps
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.clip_and_step(0.5)
        else:
            scaler.step(optimizer, 0.5)
        optimizer.zero_grad()
        yield [whole(p) for p in model.parameters()]


def trains(row, folder):
    """Also with plain loss.backward(), where nothing has to be scaled."""
    stage, precision, steps, offload = row.split("-")
    stage, steps, offloads = int(stage), int(steps), offload != "none"
    engine, optimizer, loader, scheduler = deepspeed_ext.initialize(
        model=Net(), config=config(stage, precision, steps, offload)
    )
    assert loader is scheduler is None and isinstance(optimizer, OffloadOptimizer) == offloads
    rest = {local(p).device.type for p in engine.parameters()}
    if offload == "params":  # one process streams, and small parameters stay on the device
        assert "cpu" in rest and rest <= {"cpu", home()}
    else:
        assert rest == {home()}
    wanted = by_hand(stage, precision, steps, offloads, STEPS * steps)
    streams_to_gpu = home() == "cuda" and "cpu" in rest and dist.get_world_size() == 1
    for number in range(STEPS * steps):
        loss = loss_of(engine, number)
        if precision != "fp16" and number % 2:
            (loss / steps).backward()
        else:
            engine.backward(loss)
        is_last = number % steps == steps - 1
        assert engine.is_gradient_accumulation_boundary() == is_last
        engine.step()
        assert engine.was_step_applied() == is_last
        if is_last:
            got = [whole(p) for p in engine.parameters()]
            if streams_to_gpu:  # the norm that clips is added up where parameters are
                for mine, by_parts in zip(got, next(wanted), strict=True):
                    torch.testing.assert_close(mine.cpu(), by_parts.cpu(), rtol=1e-5, atol=1e-6)
            else:
                assert all(map(torch.equal, got, next(wanted))), number
            assert engine.get_global_grad_norm() > 0.5
    assert engine.global_steps == STEPS and engine.micro_steps == STEPS * steps
    assert engine.global_samples == STEPS * steps * 4 * dist.get_world_size()
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (
        4 * steps * dist.get_world_size(),
        steps,
    )
    engine.destroy()
    assert dist.is_initialized()  # it was there before


def short_groups(row, folder):
    """The boundary is said after the forward, as accelerate does; the last group is shorter."""
    engine, *_ = deepspeed_ext.initialize(model=Net(), config=config(int(row), steps=8))
    model = Net()
    zero.shard(model, int(row))
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = adam(params, lr=1e-2, weight_decay=0.1)
    number = 0
    for length in (3, 3, 1, 2):
        at = number
        for i in range(length):
            loss = loss_of(engine, number)
            engine.set_gradient_accumulation_boundary(is_boundary=i == length - 1)
            engine.backward(loss, scale_wrt_gas=False)
            engine.step()
            number += 1
        for i in zero.accumulate(model, length):
            loss_of(model, at + i).backward()
        optimizer.clip_and_step(0.5)
        optimizer.zero_grad()
        pairs = zip(engine.parameters(), model.parameters(), strict=True)
        assert all(torch.equal(whole(a), whole(b)) for a, b in pairs)
    assert engine.global_steps == 4


def client_optimizers(row, folder):
    """Group dicts stay the same objects: the rate that acts is that of a scheduler made before."""
    offloads = row == "offload"
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    client = torch.optim.AdamW([{"params": trained[:3]}, {"params": trained[3:], "lr": 3e-2}])
    before = list(client.param_groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(client, lambda step: 1 / (1 + step))
    given = config(2, offload=offloads)
    del given["optimizer"]
    engine, optimizer, _, same = deepspeed_ext.initialize(
        model=model, optimizer=client, lr_scheduler=scheduler, config=given
    )
    assert same is scheduler and isinstance(optimizer, OffloadOptimizer) == offloads
    assert all(map(lambda a, b: a is b, before, optimizer.param_groups))
    assert all(map(lambda a, b: a is b, before, client.param_groups))
    plain = Net().to(home())
    if dist.get_world_size() > 1:  # the engine does the same
        zero.shard(plain, 2)
    params = [p for p in plain.parameters() if p.requires_grad]
    offloading = DeepSpeedCPUAdam if home() == "cpu" else partial(OffloadOptimizer, model=plain)
    make = offloading if offloads else torch.optim.AdamW
    wanted = make([{"params": params[:3]}, {"params": params[3:], "lr": 3e-2}], weight_decay=1e-2)
    for number in range(STEPS):
        engine.backward(loss_of(engine, number))
        engine.step()
        assert engine.get_lr() == pytest.approx([1e-3 / (2 + number), 3e-2 / (2 + number)])
        for group, lr in zip(wanted.param_groups, (1e-3, 3e-2), strict=True):
            group["lr"] = lr / (1 + number)
        loss_of(plain, number).backward()
        if offloads:
            wanted.clip_and_step(0.5)
        else:
            nn.utils.clip_grad_norm_(params, 0.5)
            wanted.step()
        wanted.zero_grad()
        pairs = zip(engine.parameters(), plain.parameters(), strict=True)
        for a, b in pairs:
            assert torch.equal(whole(a), whole(b)), number


def resumes(row, folder):
    """In another stage, with the counters, the schedule, the scale and the client's state."""
    path = folder / f"resumes-{dist.get_world_size()}"

    def made(stage):
        engine, *_ = deepspeed_ext.initialize(
            model=Net(seed=stage),
            lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(
                o, lambda step: 1 / (1 + step)
            ),
            config=config(stage, "fp16", steps=2),
        )
        return engine

    def losses(engine, numbers):
        found = []
        for number in numbers:
            loss = loss_of(engine, number)
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        return found

    first = made(1)
    losses(first, range(4))
    first.save_checkpoint(path, client_state={"epoch": 3})
    rate, skipped = first.get_lr(), first.skipped_steps
    wanted = losses(first, range(4, 8))
    second = made(3)
    assert second.load_checkpoint(folder / "nothing") == (None, {})
    where, client = second.load_checkpoint(path)
    assert where.endswith("global_step2") and client == {"epoch": 3}
    assert (second.global_steps, second.micro_steps) == (2, 4)
    assert (second.get_lr(), second.skipped_steps) == (rate, skipped)
    torch.testing.assert_close(losses(second, range(4, 8)), wanted, rtol=1e-3, atol=1e-4)
    with pytest.raises(OSError, match="absent"):
        second.load_checkpoint(path, tag="absent")


def goes_on(row, folder):
    """After an error between forward, backward and step, and after an evaluation with gradients."""
    engine, *_ = deepspeed_ext.initialize(model=Net(), config=config(2, steps=2))
    plain, *_ = deepspeed_ext.initialize(model=Net(), config=config(2, steps=2))
    for number in range(4):
        loss_of(engine, 7)  # of which there is no backward
        with pytest.raises(ValueError, match=r"engine\.backward: loss is"):
            engine.backward(torch.zeros(3))
        with torch.no_grad():
            loss_of(engine, 5)
        for each in (engine, plain):
            each.backward(loss_of(each, number))
            each.step()
    pairs = zip(engine.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(whole(a), whole(b)) for a, b in pairs)
    for _ in range(2):  # also between micro-steps
        with pytest.raises(RuntimeError, match=r"engine\.step: there was no backward"):
            engine.step()
        engine.backward(loss_of(engine, 0))
        engine.step()
    engine.save_checkpoint(folder / "goes_on")
    engine.set_train_batch_size(3 * 4 * dist.get_world_size())
    assert engine.gradient_accumulation_steps() == 3
    engine.backward(loss_of(engine, 0))
    with pytest.raises(RuntimeError, match="between micro-steps"):
        engine.save_checkpoint(folder / "goes_on")
    with pytest.raises(RuntimeError, match="called between micro-steps"):
        engine.set_train_batch_size(16)


def optimizers_by_name(row, folder):
    """The class, the kind of weight decay, and the schedule are those of the names."""
    name, options, cls, wanted = NAMES[row]
    engine, optimizer, _, scheduler = deepspeed_ext.initialize(
        model=Net(),
        config=config(
            1,
            optimizer={"type": name, "params": options},
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        ),
    )
    assert type(optimizer) is at_home(cls)
    assert isinstance(scheduler, WarmupLR)
    assert wanted.items() <= optimizer.param_groups[0].items()
    assert engine.get_lr() == [0.0]
    before = [whole(p).clone() for p in engine.parameters()]
    for number in range(3):  # the rates of the first two steps are 0
        engine.backward(loss_of(engine, number))
        engine.step()
    after = [whole(p) for p in engine.parameters()]
    assert not all(map(torch.equal, before, after))


NAMES = {
    "adam": ("Adam", {"lr": 1e-2}, DeepSpeedCPUAdam, {"decoupled_weight_decay": True}),
    "coupled": (
        "Adam",
        {"adam_w_mode": False, "betas": [0.8, 0.9]},
        DeepSpeedCPUAdam,
        {"decoupled_weight_decay": False, "betas": (0.8, 0.9)},
    ),
    "torch": ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, {}),
    "lion": ("Lion", {"lr": 1e-3}, DeepSpeedCPULion, {}),
    "lamb": ("Lamb", {"max_coeff": 0.5, "min_coeff": 0.1}, FusedLamb, {"max_coeff": 0.5}),
    "other": ("NAdam", {"lr": 1e-3}, torch.optim.NAdam, {}),
}


def theirs(row, folder):
    """From DeepSpeed's folder and from its import, with counters, schedule, scale and client."""
    model = Net()
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}
    run = deepspeed_folder.Run(
        [deepspeed_folder.drawn(shapes)],
        stage=int(row),
        processes=3,
        dtype=torch.float16,
        frozen={n: p.half() for n, p in model.named_parameters() if not p.requires_grad},
        ties={"head.weight": "embedding.weight"},
        scaler={"cur_scale": 64.0, "cur_iter": 9, "last_overflow_iter": 2, "scale_window": 1000},
        client={"epoch": 2},
    )
    folder = folder / f"{dist.get_world_size()}"
    if dist.get_rank() == 0:
        run.write(folder / row)
        zero.import_deepspeed(folder / row, folder / f"{row}-ours")
    dist.barrier()
    given = config(3, "fp16", steps=2, scheduler={"type": "WarmupLR", "params": {}})
    for path in (folder / row, folder / f"{row}-ours"):
        engine, *_ = deepspeed_ext.initialize(model=Net(seed=1), config=given)
        where, client = engine.load_checkpoint(path)
        assert where == str(path / "global_step4") and client == {"epoch": 2}
        found = engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps
        assert found == (5, 60, 1, 10)
        assert engine.lr_scheduler.last_batch_iteration == 3
        assert engine._stepping.scaler.get_scale() == 64
        for name, param in engine.module.named_parameters():
            if name in run.groups[0]:
                assert torch.equal(whole(param), run.groups[0][name]["fp32"])
        engine.backward(loss_of(engine, 0))
        engine.step()
    no_scale, *_ = deepspeed_ext.initialize(model=Net(seed=1), config=config(1))
    assert no_scale.load_checkpoint(folder / row, load_optimizer_states=False)[1]["loss_scaler"]


def unscaled(row, folder):
    """A plain backward with fp16 would be divided by a scale that it does not have."""
    engine, *_ = deepspeed_ext.initialize(model=Net(), config=config(2, "fp16", steps=2))
    before = [whole(p).clone() for p in engine.parameters()]
    engine.backward(loss_of(engine, 0))
    engine.step()
    (loss_of(engine, 1) / 2).backward()
    with pytest.raises(RuntimeError, match="1 of 2 backwards are of a loss that was not scaled"):
        engine.step()
    assert all(p.grad is None for p in engine.parameters())
    assert all(map(torch.equal, before, map(whole, engine.parameters())))
    with pytest.raises(ValueError, match=r"engine.scale: loss is of shape \[2\], expected one"):
        engine.scale(torch.ones(2, requires_grad=True))
    other, *_ = deepspeed_ext.initialize(model=Net(), config=config(2, "fp16", steps=2))
    for number in range(4):
        engine.backward(loss_of(engine, number))
        engine.step()
        other.scale(loss_of(other, number)).backward()
        other.step()
    assert engine.global_steps == other.global_steps == 2
    engine.empty_partition_cache()
    for one, two in zip(engine.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def client_of_ours(row, folder):
    """An optimizer of this package is placed as torch's is; one that offloads is refused."""
    model = Net().to(home())
    client = adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    given = config(2)
    del given["optimizer"]
    engine, *_ = deepspeed_ext.initialize(model=model, optimizer=client, config=given)
    plain, *_ = deepspeed_ext.initialize(
        model=Net(), config=config(2, optimizer={"type": "AdamW", "params": {"lr": 1e-2}})
    )
    for number in range(3):
        for each in (engine, plain):
            each.backward(loss_of(each, number))
            each.step()
    pairs = zip(engine.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(whole(a), whole(b)) for a, b in pairs)
    model = Net().to(home())
    trained = [p for p in model.parameters() if p.requires_grad]
    with pytest.raises(ValueError, match="OffloadOptimizer of parameters that are not sharded"):
        deepspeed_ext.initialize(model=model, optimizer=OffloadOptimizer(trained), config=given)


def no_syncs(row, folder):
    """Backwards inside of no_sync are of micro-steps that are not the last one."""
    engine, *_ = deepspeed_ext.initialize(model=Net(), config=config(1))
    plain, *_ = deepspeed_ext.initialize(model=Net(), config=config(1, steps=2))
    with engine.no_sync():
        with engine.no_sync():  # which ends nothing of the outer one
            pass
        engine.backward(loss_of(engine, 0) / 2)
    engine.backward(loss_of(engine, 1) / 2)
    engine.step()
    for number in range(2):
        plain.backward(loss_of(plain, number))
        plain.step()
    pairs = zip(engine.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(whole(a), whole(b)) for a, b in pairs)


CASES = [
    *(Case(2, "trains", f"{stage}-float32-2-none") for stage in range(4)),
    *(Case(2, "trains", row) for row in ("2-bf16-3-none", "3-fp16-2-none", "2-float32-2-offload")),
    *(Case(2, "trains", f"3-{row}-params") for row in ("float32-2", "bf16-3", "fp16-2")),
    Case(1, "trains", "3-float32-2-params"),
    Case(1, "trains", "1-float32-2-none"),
    *(Case(2, "short_groups", str(stage)) for stage in (0, 3)),
    *(Case(2, "client_optimizers", row) for row in ("none", "offload")),
    Case(2, "resumes", ""),
    *(Case(2, "theirs", row) for row in "23"),
    Case(2, "goes_on", ""),
    Case(2, "no_syncs", ""),
    Case(2, "unscaled", ""),
    Case(2, "client_of_ours", ""),
    *(Case(2, "optimizers_by_name", row) for row in NAMES),
]


FOUR = [Case(4, "trains", row) for row in ("3-bf16-3-none", "1-float32-2-offload")]


@pytest.mark.parametrize("case", with_long(CASES + FOUR, *(f"trains-{c.row}-4" for c in FOUR)))
def test_processes(case, groups):
    groups.run(case, least=1)


@pytest.fixture(scope="module")
def alone():
    """No process group: initialize makes one."""
    assert not dist.is_initialized()
    yield
    assert not dist.is_initialized()


def test_a_script_without_torchrun(alone) -> None:
    data = [(torch.full((3,), float(i)), torch.tensor(i % 2)) for i in range(10)]
    model = nn.Linear(3, 2)
    with deepspeed_ext.initialize(model=model, training_data=data, config=config(0))[0] as engine:
        for x, y in engine.training_dataloader:
            x, y = x.to(engine.device), y.to(engine.device)
            engine.backward(nn.functional.cross_entropy(engine(x), y))
            engine.step()
        assert engine.global_steps == 3 and engine.weight is model.weight
        assert math.isfinite(engine.get_global_grad_norm())


def test_a_last_micro_batch_that_is_not_full_is_left_out(alone) -> None:
    data, given = list(range(10)), config(0, dataloader_drop_last=True)
    model = nn.Linear(3, 2)
    with deepspeed_ext.initialize(model=model, training_data=data, config=given)[0] as engine:
        for loader in (engine.training_dataloader, engine.deepspeed_io(data)):
            assert [len(batch) for batch in loader] == [4, 4]
        with pytest.raises(ValueError, match="has 3 samples for each process with dataloader_dr"):
            engine.deepspeed_io(data[:3])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model": None}, "initialize: model is a NoneType, expected"),
        ({"config": None}, "initialize: config is None, expected"),
        ({"model_parameters": [nn.Parameter(torch.ones(2))]}, "shape \\[2\\] that is not in model"),
        ({"config": config(0, optimizer={"type": "Adamm"})}, "optimizer.type is 'Adamm'"),
        (
            {"config": config(0, optimizer={"type": "Adam", "params": {"lrr": 1}})},
            "optimizer.params is .*lrr",
        ),
        (
            {"config": config(0, offload=True, optimizer={"type": "Lamb"})},
            "'Lamb' with offload_optimizer, expected one that steps",
        ),
        ({"config": config(0, scheduler={"type": "Warmup"})}, "scheduler.type is 'Warmup'"),
        ({"config": config(0, train_batch_size=5)}, "train_batch_size is 5, expected"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(2))])}, "not in model"),
    ],
)
def test_errors(arguments, text, alone) -> None:
    given = {"model": nn.Linear(3, 2), "config": config(0), **arguments}
    with pytest.raises(ValueError, match=text):
        deepspeed_ext.initialize(**given)
    assert not dist.is_initialized()


def test_a_group_without_nccl_trains_on_the_cpu(monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        engine, *_ = deepspeed_ext.initialize(model=nn.Linear(3, 2), config=config(0))
    finally:
        dist.destroy_process_group()
    assert engine.device.type == "cpu"
    assert "the process group is of gloo, so the model trains on the CPU" in caplog.text


def test_a_model_that_is_only_called(alone) -> None:
    """Frozen, without an optimizer, as models of reference are."""
    model = nn.Linear(3, 2).requires_grad_(False)
    given = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
    with deepspeed_ext.initialize(None, model, None, [], config=given)[0] as engine:
        assert engine(torch.ones(1, 3, device=engine.device)).shape == (1, 2)
        with pytest.raises(RuntimeError, match="has no optimizer"):
            engine.step()
