"""What goes wrong around an engine, and that it goes on; two engines; compiled ones."""

import copy
import json
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from processes import Case
from test_training_loops import config
from torch import nn
from zero_cases import Net, loss_of, whole

import deepspeed_ext
from deepspeed_ext.optim import DeepSpeedCPUAdam
from deepspeed_ext.torch_internals.dispatch import queue_callback
from deepspeed_ext.zero import alone, sharding


def made(stage=2, steps=1, seed=0, **more):
    given = config(stage, steps=steps, **more)
    return deepspeed_ext.initialize(model=Net(seed), config=given)[0]


def train(engine, *numbers):
    for number in numbers:
        engine.backward(loss_of(engine, number))
        engine.step()


def assert_same(engine, other):
    pairs = zip(engine.parameters(), other.parameters(), strict=True)
    for number, (a, b) in enumerate(pairs):
        assert torch.equal(whole(a), whole(b)), number


def processes_differ(row, folder):
    """An error in all of them, which names the key, or the process that has found something."""
    rank = dist.get_rank()
    config_of = {"clipping": config(1, gradient_clipping=0.5 + rank), "groups": config(1)}
    path = folder / "on_one.json"
    if rank == 0:
        path.write_text(json.dumps(config(1)))
    config_of["file"] = str(path) if rank == 0 else "absent.json"
    text = {
        "clipping": r"process \d has gradient_clipping 0.5, .*has gradient_clipping 1.5"
        if rank == 0
        else r"process 1 has gradient_clipping 1.5",
        "groups": "parameters of group 0: embedding.weight, expected|has parameters of group 0",
        "file": "another process failed" if rank == 0 else "absent.json",
    }[row]
    model = Net()
    params = list(model.parameters())[: 1 + rank] if row == "groups" else None
    with pytest.raises((ValueError, RuntimeError, OSError), match=text):
        deepspeed_ext.initialize(model=model, model_parameters=params, config=config_of[row])
    assert type(model) is Net
    train(made(1), 0)


def processes_differ_later(row, folder):
    """In rates of a client, in what they see of a folder, and in what they ask for."""
    rank = dist.get_rank()
    model = Net()
    client = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
    with pytest.raises(ValueError, match=r"has group 0.lr 0\.\d"):
        deepspeed_ext.initialize(None, model, client, config=config(0))
    engine = made(1)
    engine.save_checkpoint(folder / "seen")
    with pytest.raises(ValueError, match="has the checkpoint"):
        engine.load_checkpoint(folder / ("seen" if rank == 0 else "unseen"))
    with pytest.raises(ValueError, match="has train_batch_size"):
        engine.set_train_batch_size(engine.train_batch_size() * (1 + rank))
    train(engine, 0)


class Fails(torch.autograd.Function):
    """An error in a backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in backward")


def fail(engine, where):
    """Fail in a backward: before it comes to the model, or in a block, or of a plain one there."""
    block = engine.module.blocks[1]
    hook = block.register_forward_hook(lambda *call: Fails.apply(call[-1]))
    loss = loss_of(engine, 8)
    hook.remove()
    with pytest.raises(ArithmeticError):
        if where == "plain":
            loss.backward()
        else:
            engine.backward(loss if where == "block" else Fails.apply(loss))


def errors_in_backward(row, folder):
    """The step that is under way is dropped, with earlier micro-steps of it, and begins anew."""
    stage, where = row.split("-")
    engine, plain = made(int(stage), steps=2), made(int(stage), steps=2)
    train(engine, 0, 1, 7)
    fail(engine, where)
    with pytest.raises(RuntimeError, match="there was no backward since"):
        engine.step()
    train(engine, 2)
    assert engine.global_steps == 1
    train(engine, 3)
    train(plain, 0, 1, 2, 3)
    assert_same(engine, plain)
    assert engine.metrics()["loss"] == plain.metrics()["loss"]


def errors_after_backward(row, folder):
    """Gradients of a backward that was not stepped stay, as in torch; zero_grad drops them."""
    engine, plain = made(), made()
    engine.backward(loss_of(engine, 5))  # and whatever stands before the step raises
    engine.zero_grad()
    train(engine, 0)
    train(plain, 0)
    assert_same(engine, plain)


class Raises(torch.optim.lr_scheduler.LambdaLR):
    """A schedule whose second step raises."""

    def step(self, *args):
        if self.last_epoch == 1:
            self.last_epoch += 1
            raise ArithmeticError("in the schedule")
        super().step(*args)


def schedules_raise(row, folder):
    """The step before it is whole, and the next one follows."""
    engine = deepspeed_ext.initialize(
        model=Net(), lr_scheduler=lambda o: Raises(o, lambda step: 1), config=config(2)
    )[0]
    plain = made()
    train(engine, 0)
    engine.backward(loss_of(engine, 1))
    with pytest.raises(ArithmeticError, match="in the schedule"):
        engine.step()
    assert engine.was_step_applied() and engine.global_steps == 2
    assert all(p.grad is None for p in engine.parameters())
    train(engine, 2)
    train(plain, 0, 1, 2)
    assert_same(engine, plain)


def two_engines(row, folder):
    """Their micro-steps take turns; each trains as if it were alone."""
    stage = int(row)
    both = [made(stage, 2, seed=1), made(3 - stage, 2, seed=2)]
    for number in range(4):
        losses = [loss_of(engine, number) for engine in both]
        for engine, loss in zip(both, losses, strict=True):
            engine.backward(loss)
        for engine in reversed(both):
            engine.step()
    for engine, other in zip(
        both, (made(stage, 2, seed=1), made(3 - stage, 2, seed=2)), strict=True
    ):
        train(other, *range(4))
        assert_same(engine, other)


def several_backwards(row, folder):
    """A micro-step with two losses is one micro-step."""
    plain = made(int(row), steps=6, optimizer={"type": "AdamW", "params": {"lr": 1e-2}})
    engine = made(int(row), steps=3, optimizer={"type": "AdamW", "params": {"lr": 1e-2}})
    for number in range(6):
        engine.backward(loss_of(engine, number) / 2)
        if number % 2:
            assert engine.is_gradient_accumulation_boundary() == (number == 5)
            engine.step()
    train(plain, *range(6))
    assert engine.global_steps == plain.global_steps == 1
    for a, b in zip(engine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(a), whole(b))


def unmanaged(row, folder):
    """Each step is of as many backwards as there were; all are divided alike."""
    engine = made(int(row), steps=2, managed_gradient_accumulation=False)
    plain, number = made(int(row), steps=2), 0
    for count in (3, 1, 2):
        for i in range(count):
            engine.backward(loss_of(engine, number))
            plain.set_gradient_accumulation_boundary(i == count - 1)
            plain.backward(loss_of(plain, number))
            plain.step()
            number += 1
        engine.step()
        assert engine.was_step_applied() and engine.micro_steps == plain.micro_steps == number
        assert engine.global_samples == 4 * number * dist.get_world_size()
    for a, b in zip(engine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(a), whole(b), rtol=1e-4, atol=1e-6)
    with pytest.raises(RuntimeError, match="is false, expected no call"):
        engine.set_gradient_accumulation_boundary(True)


def sums(row, folder):
    """Twice as much, of two processes, as the mean; also of unused parameters and micro-steps."""
    stage, precision = row.split("-")
    given = config(int(stage), precision, steps=2)
    engine, plain = (
        deepspeed_ext.initialize(model=Net(), config={**given, "gradient_allreduce_op": op})[0]
        for op in ("sum", "Mean")
    )
    for number in range(4):
        engine.backward(loss_of(engine, number))
        plain.backward(2 * loss_of(plain, number))
        engine.step()
        plain.step()
    assert_same(engine, plain)
    assert engine.get_global_grad_norm() == plain.get_global_grad_norm() > 0.5


def compiled(row, folder):
    """Bit for bit what the same operators give that are not compiled."""
    engine = made(int(row), 2, compile={"disable": False, "backend": "eager"})
    plain = made(int(row), 2)
    assert engine.is_compiled and not plain.is_compiled
    train(engine, *range(4))
    with torch.no_grad():
        assert torch.equal(loss_of(engine, 5), loss_of(engine, 5))
    train(engine, 4, 5)
    train(plain, *range(6))
    assert_same(engine, plain)
    assert engine.module.state_dict().keys() == plain.module.state_dict().keys()


def other_batch_sizes(row, folder):
    """A checkpoint goes on with other sizes; counters of samples go on from theirs."""
    first, second = made(2, steps=2), made(2, steps=1)
    train(first, 0, 1)
    first.save_checkpoint(folder / "sizes")
    second.load_checkpoint(folder / "sizes")
    samples = first.global_samples
    train(second, 2)
    assert second.global_steps == 2
    assert second.global_samples == samples + 4 * dist.get_world_size()


def calls_the_module(row, folder):
    """A forward of the model itself, as scripts do that have unwrapped it."""
    engine, plain = made(1, steps=2), made(1, steps=2)
    for number in range(4):
        engine.backward(loss_of(engine.module, number))
        engine.step()
    train(plain, *range(4))
    assert_same(engine, plain)


def resumes(row, folder):
    """What one process has whole goes on where it is in shards, and the other way round."""
    engine, sharded = made(1, steps=2), made(3, steps=2)
    assert type(engine.module) is Net and type(sharded.module) is not Net
    train(engine, 0, 1)
    engine.save_checkpoint(folder / "alone")
    sharded.load_checkpoint(folder / "alone")
    for each in (engine, sharded):
        train(each, 2, 3)
    assert_same(engine, sharded)
    sharded.save_checkpoint(folder / "alone")
    engine.load_checkpoint(folder / "alone")
    for each in (engine, sharded):
        train(each, 4, 5)
    assert_same(engine, sharded)
    state = engine._consolidated_16bit_state_dict()
    assert all(torch.equal(t.cpu(), state[n]) for n, t in engine.module.state_dict().items())


CASES = [
    *(Case(2, "sums", row) for row in ("0-float32", "1-bf16", "2-float32", "3-fp16")),
    *(Case(2, "unmanaged", row) for row in "03"),
    Case(2, "processes_differ_later", ""),
    *(Case(2, "processes_differ", row) for row in ("clipping", "groups", "file")),
    *(Case(2, "errors_in_backward", row) for row in ("0-loss", "1-plain", "3-block")),
    Case(2, "errors_after_backward", ""),
    Case(2, "schedules_raise", ""),
    Case(2, "two_engines", "1"),
    Case(2, "several_backwards", "2"),
    Case(2, "other_batch_sizes", ""),
    *(Case(2, "compiled", row) for row in ("1", "3")),
    *(Case(1, "errors_in_backward", row) for row in ("0-loss", "1-plain", "2-block")),
    *(Case(1, name, "1") for name in ("two_engines", "several_backwards", "compiled")),
    *(Case(world, "calls_the_module", "") for world in (1, 2)),
    Case(1, "resumes", ""),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.function}-{case.row}-{case.world}")
def test_processes(case, groups):
    groups.run(case)


def test_engines_leave_the_group_in_any_order_and_are_not_copied() -> None:
    assert not dist.is_initialized()
    first, second = (
        deepspeed_ext.initialize(model=nn.Linear(3, 2), config=config(0))[0] for _ in range(2)
    )
    first.destroy()
    first.destroy()  # again does nothing
    for call in (first.step, lambda: first.backward(torch.ones(1))):
        with pytest.raises(RuntimeError, match=r"engine.*: the engine was destroyed"):
            call()
    assert dist.is_initialized()
    second.backward(second(torch.ones(4, 3, device=second.device)).sum())
    second.step()
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"no copy of an engine; copy engine.state_dict"):
            copied(second)
    second.destroy()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (config(0, optimizer={"type": "Adamm"}), "optimizer.type is 'Adamm'"),
        (config(0, optimizer={"type": "SGD", "params": {"lrr": 1}}), "optimizer.params .*lrr"),
        (config(0, optimizer={"type": "AdamW", "params": {"lr": -1}}), "lr is -1"),
        (config(0, offload=True, optimizer={"type": "Adam", "params": {"lrr": 1}}), "lrr"),
        (config(0, scheduler={"type": "WarmupLR", "params": {"warmup": 1}}), "warmup"),
        (config(0, compile={"disable": False, "backend": "foo"}), "compile: torch.compile takes"),
        (config(0, compile={"disable": False, "kwargs": {"fullgraph": True}}), "fullgraph is True"),
    ],
)
def test_mistakes_are_found_before_the_model_is_sharded(given, text) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=text):
        deepspeed_ext.initialize(model=model, config=given)
    assert type(model) is nn.Linear and not dist.is_initialized()


@pytest.mark.parametrize(("stage", "teller"), [(2, alone), (3, sharding)])
def test_an_error_that_ended_a_backward_is_told_late(stage, teller, monkeypatch) -> None:
    """As by the thread of a GPU: the micro-steps that came since are whole, and stay."""
    held = []

    def hold(call):
        held.append(call)
        queue_callback(call)

    def fail_in_backward(module, inputs, output):
        output.register_hook(lambda _: 1 / 0)

    engines = [made(stage, 2), made(stage, 2)]
    for engine, is_late in zip(engines, (True, False), strict=True):
        train(engine, 0, 1, 2)
        with monkeypatch.context() as patch:
            patch.setattr(teller, "queue_callback", hold)
            fails = engine.module.embedding.register_forward_hook(fail_in_backward)
            loss = loss_of(engine, 3)
            fails.remove()
            with pytest.raises(ZeroDivisionError):
                engine.backward(loss)
        if not is_late:
            held.clear()
        engine.backward(loss_of(engine, 4))
        engine.step()
        loss = loss_of(engine, 5)
        held.clear()
        engine.backward(loss)
        engine.step()
        train(engine, 6, 7)
    assert_same(*engines)
    for engine in engines:
        engine.destroy()


def test_a_client_that_cannot_be_offloaded() -> None:
    model = nn.Linear(3, 2)
    in_codes = DeepSpeedCPUAdam(model.parameters(), state_dtype=torch.uint8)
    for client in (torch.optim.SGD(model.parameters()), in_codes):
        given = config(0, offload=True)
        with pytest.raises(ValueError, match="with offload_optimizer, expected torch's Adam"):
            deepspeed_ext.initialize(model=model, optimizer=client, config=given)
    assert type(model) is nn.Linear


def test_gradients_that_would_not_be_added_up_in_float32() -> None:
    model = nn.Linear(3, 2).bfloat16()
    given = config(0, data_types={"grad_accum_dtype": "fp32"})
    with pytest.raises(ValueError, match=r"parameter 'weight' is torch\.bfloat16, expected bf16"):
        deepspeed_ext.initialize(model=model, config=given)
    assert type(model) is nn.Linear


def test_a_model_that_is_sharded_already() -> None:
    with deepspeed_ext.initialize(model=nn.Linear(3, 2), config=config(0))[0] as engine:
        for model in (engine, engine.module):
            with pytest.raises(ValueError, match="which is sharded already, expected a model that"):
                deepspeed_ext.initialize(model=model, config=config(0))
        engine.backward(engine(torch.ones(4, 3, device=engine.device)).sum())
        engine.step()
        with pytest.raises(ValueError, match="schedule is given, expected None"):
            engine.compile(schedule=[])


def test_a_step_that_is_skipped_without_fp16() -> None:
    given = config(0) | {"scheduler": {"type": "StepLR", "params": {"step_size": 9}}}
    with deepspeed_ext.initialize(model=nn.Linear(3, 2), config=given)[0] as engine:
        before = engine.module.weight.detach().clone()
        for factor, was_applied in ((math.nan, False), (1.0, True)):
            engine.backward(engine(torch.ones(4, 3, device=engine.device)).sum() * factor)
            engine.step()
            assert engine.was_step_applied() is was_applied
            assert engine.skipped_steps == engine.metrics()["skipped"] == 1
            assert torch.equal(engine.module.weight, before) is not was_applied
        assert engine.global_steps == 2 and engine.lr_scheduler.last_epoch == 2


def test_an_infinite_gradient_is_no_other_parameters_matter() -> None:
    """Without clipping; a class of torch's steps with what there is."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    given = config(0, gradient_clipping=0.0)
    with deepspeed_ext.initialize(model=model, optimizer=optimizer, config=given)[0] as engine:
        before = model.weight.detach().clone()
        loss = (
            model.weight.sum()
            + (model.bias * torch.tensor([math.inf, 1], device=engine.device)).sum()
        )
        engine.backward(engine(torch.zeros(1, 2, device=engine.device)).sum() * 0 + loss)
        engine.step()
        assert engine.get_global_grad_norm() == math.inf
        assert torch.equal(model.weight, before - 0.5)


def test_a_schedule_that_wants_to_know_the_loss() -> None:
    model = nn.Linear(3, 2)
    client = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(client, patience=0)
    given = {"train_micro_batch_size_per_gpu": 4}
    with deepspeed_ext.initialize(None, model, client, lr_scheduler=schedule, config=given)[
        0
    ] as engine:
        for _ in range(3):
            engine.backward(engine(torch.ones(4, 3, device=engine.device)).sum())
            engine.step(lr_kwargs={"metrics": 1.0})
        assert engine.get_lr() == [pytest.approx(0.01)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"lr_scheduler": "other"}, "lr_scheduler is of a SGD that is not optimizer"),
        ({"frozen": True}, "model has no parameter that needs a gradient"),
        ({"training_data": iter([1])}, "training_data is a list_iterator, expected a dataset"),
        ({"training_data": []}, "training_data is empty, expected a dataset"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mistakes(arguments, text) -> None:
    model = nn.Linear(3, 2)
    if arguments.pop("frozen", False):
        model.requires_grad_(False)
    if "lr_scheduler" in arguments:
        other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        arguments = {"lr_scheduler": torch.optim.lr_scheduler.StepLR(other, 1)}
    with pytest.raises(ValueError, match=text):
        deepspeed_ext.initialize(model=model, config=config(0), **arguments)
    assert not dist.is_initialized()


def test_named_parameters_and_batch_sizes() -> None:
    model = nn.Linear(3, 2)
    engine, *_ = deepspeed_ext.initialize(
        model=model, model_parameters=model.named_parameters(), config=config(0)
    )
    with engine:
        assert len(engine.optimizer.param_groups[0]["params"]) == 2
        for size in (8.0, "8", 0, 6):
            with pytest.raises(ValueError, match=f"train_batch_size is {size!r}, expected a multi"):
                engine.set_train_batch_size(size)
        with pytest.raises(ValueError, match="save_filename is '', expected the name of a file"):
            engine.save_16bit_model("nowhere", "")
