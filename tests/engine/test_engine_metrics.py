"""What is known of a step, and where it goes: the log, files, TensorBoard, Weights & Biases."""

import csv
import importlib.machinery
import json
import logging
import sys
import types

import pytest
import torch
from test_training_loops import config
from torch import nn

import deepspeed_ext


@pytest.fixture
def log(caplog):
    with caplog.at_level(logging.INFO, "deepspeed_ext"):
        yield caplog


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 2)

    def forward(self, input_ids):
        return self.table(input_ids).square().sum()


def train(steps, micro_steps=1, lose=1.0, **more):
    """Return the metrics of each step, the last one given to monitors by the end of the engine."""
    given = config(2, "fp16", steps=micro_steps, **more)
    found = []
    with deepspeed_ext.initialize(model=Words(), config=given)[0] as engine:
        assert engine.metrics() == {}
        for number in range(steps * micro_steps):
            engine.backward(engine(input_ids=torch.full((4, 3), number % 7)) * lose)
            engine.step()
            if engine.is_gradient_accumulation_boundary() or micro_steps == 1:
                found.append(engine.metrics())
        return engine, found


def test_metrics_of_a_step() -> None:
    engine, found = train(2, scheduler={"type": "ExponentialLR", "params": {"gamma": 0.5}})
    again = Words()
    for number, metrics in enumerate(found):
        assert metrics.keys() == {
            *("loss", "lr", "norm", "scale", "skipped"),
            *("samples_per_second", "tokens_per_second"),
        }
        ratio = metrics["tokens_per_second"] / metrics["samples_per_second"]
        assert ratio == pytest.approx(3) and metrics["skipped"] == 0 and metrics["scale"] == 1024
        assert metrics["lr"] == 1e-2 / 2**number  # of the step, not of the next
    wanted = again(torch.zeros(4, 3, dtype=torch.int64)).item()
    assert found[0]["loss"] == pytest.approx(wanted, rel=1e-2)
    assert found[-1]["norm"] == engine.get_global_grad_norm()


def test_losses_of_micro_steps_are_added_as_they_are_divided(log) -> None:
    given = config(1, steps=2)
    with deepspeed_ext.initialize(model=Words(), config=given)[0] as engine:
        losses = []
        for number in range(4):
            loss = engine(torch.full((4, 3), number, device=engine.device))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
            if number == 1:
                assert engine.metrics()["loss"] == pytest.approx(sum(losses) / 2)
        assert engine.metrics()["loss"] == pytest.approx(sum(losses[2:]) / 2)
        tokens = torch.ones(4, 3, dtype=torch.int64, device=engine.device)
        engine(tokens).backward()  # whose loss nobody knows
        engine.step()
        engine(tokens).backward()
        engine.step()
        assert "loss" not in engine.metrics()
        for scale in (engine.scale, lambda loss: loss):  # which the warning counts, and does not
            scale(engine(tokens)).backward()
            engine.step()
        told = [line for line in log.messages if "backwards are plain ones" in line]
        assert len(told) == 1 and "2 of 2" in told[0]


def test_a_step_that_is_skipped() -> None:
    _, found = train(2, lose=float("inf"))
    assert [metrics["skipped"] for metrics in found] == [1, 2]
    assert [metrics["scale"] for metrics in found] == [1024, 512]


def test_the_log(log) -> None:
    engine, _ = train(5, steps_per_print=2, wall_clock_breakdown=True, memory_breakdown=True)
    assert engine.steps_per_print() == 2 and engine.wall_clock_breakdown()
    lines = [line for line in log.messages if line.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 4"]
    for phase in ("forward", "backward", "step"):
        assert all(f", {phase} " in line and f"memory after {phase}" in line for line in lines)
    assert all(word in lines[0] for word in ("loss", "lr", "norm", "samples/s", "tokens/s"))
    log.clear()
    train(2, wall_clock_breakdown=True)  # without steps_per_print each step is
    assert len([line for line in log.messages if " ms" in line]) == 2
    log.clear()
    train(2)
    assert not [line for line in log.messages if line.startswith("step ")]


def test_the_state_is_dumped(log) -> None:
    train(1, dump_state=True)
    (text,) = (line for line in log.messages if '"config"' in line)
    state = json.loads(text.removeprefix("initialize: "))
    assert state["parameters"] == 14 and state["optimizer"].endswith("Adam")
    assert state["groups"][0]["lr"] == 1e-2 and state["config"]["dump_state"] is True


def rows_of(path):
    with path.open() as file:
        return list(csv.reader(file))


def test_files(tmp_path) -> None:
    block = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    _, found = train(3, csv_monitor=block)
    names = {"train_loss": "loss", "lr": "lr", "grad_norm": "norm", "loss_scale": "scale"}
    for name, key in names.items():
        head, *rows = rows_of(tmp_path / "run" / f"Train_Samples_{name}.csv")
        assert head == ["step", name]
        assert [float(value) for _, value in rows] == [metrics[key] for metrics in found], name
        assert [int(at) for at, _ in rows] == [4, 8, 12]  # samples
    train(1, csv_monitor=block)  # the files go on
    assert len(rows_of(tmp_path / "run" / "Train_Samples_lr.csv")) == 5


def test_a_monitor_that_fails_is_named_once(tmp_path, log) -> None:
    block = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    engine, *_ = deepspeed_ext.initialize(model=Words(), config=config(2, csv_monitor=block))
    with engine:
        for _ in range(4):
            engine.backward(engine(torch.ones(4, 3, dtype=torch.int64, device=engine.device)))
            engine.step()
            if engine.global_steps == 2:
                engine._reports._monitors["csv_monitor"]._files["Train/Samples/lr"].close()
        assert engine.global_steps == 4
    (text,) = (line for line in log.messages if "csv_monitor failed" in line)
    assert "the training goes on: ValueError" in text


def test_a_monitor_that_cannot_begin(tmp_path) -> None:
    (tmp_path / "file").touch()
    block = {"enabled": True, "output_path": str(tmp_path / "file")}
    model = Words()
    with pytest.raises(NotADirectoryError):
        deepspeed_ext.initialize(model=model, config=config(2, csv_monitor=block))
    assert type(model) is Words


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_at_the_start(package, monkeypatch) -> None:
    monkeypatch.setattr("deepspeed_ext.engine.monitors.find_spec", lambda name: None)
    model = Words()
    with pytest.raises(ImportError, match=f"{package}.enabled true, expected the package") as error:
        deepspeed_ext.initialize(model=model, config=config(2, **{package: {"enabled": True}}))
    assert error.value.name == package and type(model) is Words


def put_module(monkeypatch, name, **members) -> None:
    """Let there be a package of this name."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


class Writer:
    """Of TensorBoard, and a run of Weights & Biases."""

    def __init__(self, folder, options) -> None:
        self.folder, self.options, self.calls = folder, options, []

    def add_scalar(self, name, value, at) -> None:
        self.calls.append((name, value, at))

    def log(self, events, step) -> None:
        self.calls += [(name, value, step) for name, value in events.items()]

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.calls.append("closed")


def test_tensorboard_and_wandb(monkeypatch) -> None:
    made = []

    def make(folder=None, **options):
        made.append(Writer(folder, options))
        return made[-1]

    put_module(monkeypatch, "tensorboard")
    put_module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=make)
    put_module(monkeypatch, "wandb", init=make)
    board = {"enabled": True, "output_path": "runs", "job_name": "one"}
    run = {"enabled": True, "group": "g", "team": "t", "project": "p"}
    _, found = train(2, tensorboard=board, wandb=run)
    writer, other = made
    assert writer.folder == "runs/one"
    assert other.options == {"project": "p", "group": "g", "entity": "t"}
    assert writer.calls.pop() == "closed"
    assert writer.calls == other.calls
    losses = [call for call in writer.calls if call[0] == "Train/Samples/train_loss"]
    assert losses == [
        ("Train/Samples/train_loss", m["loss"], 4 * i) for i, m in enumerate(found, 1)
    ]
