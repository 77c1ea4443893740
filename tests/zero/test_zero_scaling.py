"""zero.LossScaler: when the scale changes, and that no process steps what another one skips."""

import copy
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from processes import Case
from torch import nn
from zero_cases import Net, adam, assert_close, loss_of, whole

from deepspeed_ext import zero
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim import DeepSpeedCPUAdam, FusedSGD
from deepspeed_ext.zero.torch_steps import clip_and_step

OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3}


def scales(sequence, interval, hysteresis, smallest, scale=2.0**10):
    """The rule in plain words, and the scale after each step."""
    left, good = hysteresis, 0
    for overflows in sequence:
        if overflows:
            good = 0
            if left > 1:
                left -= 1
            else:
                scale = max(scale / 2, smallest)
        else:
            good += 1
            if good == interval:
                scale, good, left = scale * 2, 0, hysteresis
        yield scale


def one_parameter():
    param = nn.Parameter(torch.ones(3))
    return param, DeepSpeedCPUAdam([param])


@pytest.mark.parametrize("hysteresis", (1, 2, 3))
@pytest.mark.parametrize("interval", (1, 3))
def test_scales_follow_the_rule(hysteresis, interval):
    generator = torch.Generator().manual_seed(interval + 10 * hysteresis)
    sequence = (torch.rand(60, generator=generator) < 0.5).tolist()
    param, optimizer = one_parameter()
    options = {"growth_interval": interval, "hysteresis": hysteresis, "min_scale": 2.0**-40}
    scaler = zero.LossScaler(2.0**10, **options)
    for i, want in enumerate(scales(sequence, interval, hysteresis, 2.0**-40)):
        used = scaler.get_scale()
        param.grad = torch.full((3,), math.inf if sequence[i] else used)
        assert scaler.step(optimizer) is not sequence[i]
        assert scaler.get_scale() == want, i
        other = zero.LossScaler(2.0**5, **options)
        other.load_state_dict(scaler.state_dict())
        scaler = other
    assert optimizer.skipped_steps == sum(sequence)


def test_several_optimizers_share_the_scale_of_an_iteration():
    pairs = [one_parameter() for _ in range(2)]
    scaler = zero.LossScaler(2.0**10, growth_interval=2, hysteresis=1)
    scale = 2.0**10
    for i, infinite in enumerate((None, None, 0, None, 1, None, None)):
        for j, (param, _) in enumerate(pairs):
            scaler.scale(param.sum()).backward()
            assert torch.equal(param.grad, torch.full((3,), scale)), i
            if j == infinite:
                param.grad.fill_(math.inf)
        for j, (param, optimizer) in enumerate(pairs):
            twin = nn.Parameter(param.detach().clone())
            other = DeepSpeedCPUAdam([twin])
            other.load_state_dict(optimizer.state_dict())
            twin.grad = torch.ones(3)
            assert scaler.step(optimizer) is (j != infinite)
            if j != infinite:
                other.step()
            assert torch.equal(twin, param), (i, j)
            optimizer.zero_grad()
        scale *= {1: 2, 2: 0.5, 4: 0.5, 6: 2}.get(i, 1)
        assert scaler.get_scale() == scale, i


def test_a_scale_stays_until_all_have_stepped():
    """Each has gradients of both losses, and one loss is scaled after the other has stepped."""
    (first, one), (second, two) = one_parameter(), one_parameter()
    scaler = zero.LossScaler(8.0, growth_interval=1)
    for want in (8.0, 16.0, 32.0):
        scaler.scale((first * second).sum())
        if want > 8:  # the first time, nothing tells of the second optimizer
            scaler.step(one)
            assert scaler.scale(torch.ones(())) == want
        else:
            scaler.step(one)
        scaler.step(two)


def test_an_optimizer_that_is_stepped_no_more_holds_nothing_up():
    """Its last iteration ends when another one, given the scale again, steps again."""
    (first, one), (second, two) = one_parameter(), one_parameter()
    scaler = zero.LossScaler(8.0, growth_interval=1)
    scaler.scale((first * second).sum()).backward()
    scaler.step(one)
    scaler.step(two)
    used = []
    for _ in range(5):
        used.append(float(scaler.scale(torch.ones(()))))
        scaler.step(one)
    assert used == [16.0, 16.0, 64.0, 128.0, 256.0]


def test_steps_without_a_new_scale_are_iterations_of_their_own():
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedSGD([param], lr=1.0)
    scaler = zero.LossScaler(8.0, growth_interval=1)
    scaler.scale(param.sum()).backward()
    for scale in (8.0, 16.0, 32.0):
        before = param.detach().clone()
        param.grad.fill_(scale)
        assert scaler.step(optimizer)
        assert torch.equal(before - param, torch.ones(3)), scale
        assert scaler.get_scale() == 2 * scale


def test_a_loaded_state_has_no_part_of_the_steps_before():
    param, optimizer = one_parameter()
    options = {"growth_interval": 2, "hysteresis": 1}
    scaler = zero.LossScaler(8.0, **options)
    kept = scaler.state_dict()
    for value in (8.0, math.inf):
        param.grad = torch.full((3,), value)
        scaler.step(optimizer)
        scaler.load_state_dict(kept)
        assert scaler.state_dict() == kept and scaler.get_scale() == 8.0
        assert float(scaler.scale(torch.ones(()))) == 8.0


@pytest.mark.parametrize("period", (2, 3))
@pytest.mark.parametrize("is_first", (False, True))
@pytest.mark.parametrize("free_grads", (False, True))
def test_optimizers_of_different_periods(period, is_first, free_grads):
    """One accumulates, or has its gradient first and steps last, while the other steps."""
    often, seldom = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    one = OffloadOptimizer([often], FusedSGD, lr=1.0, free_grads=free_grads)
    two = OffloadOptimizer([seldom], FusedSGD, lr=1.0, free_grads=free_grads)
    scaler = zero.LossScaler(4.0, growth_interval=1, optimizers=[one, two])
    for number in range(12):
        if not is_first or number % period == 0:
            scaler.scale(seldom.sum()).backward()
        scaler.scale(often.sum()).backward()
        assert scaler.step(one)
        one.zero_grad()
        assert often.eq(-1 - number).all()
        if number % period == period - 1:
            assert scaler.step(two)
            two.zero_grad()
            assert seldom.eq(-(number // period + 1) * (1 if is_first else period)).all()
    assert scaler.get_scale() > 16
    for each in (one, two):
        each.close()


@pytest.mark.parametrize(
    "copied", (copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler)))
)
def test_copies_go_on_alike(copied):
    param, optimizer = one_parameter()
    scaler = zero.LossScaler(4.0, growth_interval=3)
    for _ in range(4):
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
    other = copied(scaler)
    assert other.state_dict() == scaler.state_dict() and other.growth_interval == 3
    assert other.scale(torch.ones(())) == scaler.get_scale()
    assert other.step(optimizer)


@pytest.mark.parametrize("free_grads", (False, True))
@pytest.mark.parametrize("own", (None, 0.5))
def test_the_norm_of_the_optimizer_stays(own, free_grads):
    param, twin = (nn.Parameter(torch.ones(4)) for _ in range(2))
    ours = OffloadOptimizer(
        [param], FusedSGD, lr=1.0, max_grad_norm=own, model=None, free_grads=free_grads
    )
    theirs = torch.optim.SGD([twin], lr=1.0)
    scaler = zero.LossScaler(2.0**10)
    for limit in (None, 0.25, math.inf):
        scaler.scale((param * 2).sum()).backward()
        (twin * 2).sum().backward()
        norm = own if limit is None else limit
        nn.utils.clip_grad_norm_([twin], math.inf if norm is None else norm)
        assert scaler.step(ours) if limit is None else scaler.step(ours, limit)
        theirs.step()
        for each in (ours, theirs):
            each.zero_grad()
        assert_close(param.detach(), twin.detach(), f"{limit}")
    ours.close()


def test_losses_of_float16():
    param = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = DeepSpeedCPUAdam([param])
    text = (
        "zero.LossScaler: the static scale is 65536.0, expected at most 65504.0, as a loss of"
        " float16 has a gradient of it; or a float32 loss"
    )
    with pytest.raises(ValueError) as caught:
        zero.LossScaler(growth_interval=None).scale(param.sum())
    assert str(caught.value) == text
    scaler = zero.LossScaler(2.0**15, growth_interval=None)
    scaled = scaler.scale(param.sum())
    assert scaled == 3 * 2.0**15  # which float16 does not hold
    scaled.backward()
    assert scaler.step(optimizer)
    dynamic = zero.LossScaler(hysteresis=1)
    for want in (False, True):
        optimizer.zero_grad()
        dynamic.scale(param.sum()).backward()
        assert dynamic.step(optimizer) is want


def test_a_static_scale_stays():
    param, optimizer = one_parameter()
    scaler = zero.LossScaler(8.0, growth_interval=None, hysteresis=1)
    for value in (math.nan, 1.0, math.inf):
        param.grad = torch.full((3,), value)
        before = param.detach().clone()
        assert scaler.step(optimizer) is (value == 1.0)
        assert torch.equal(before, param) is not (value == 1.0)
        assert scaler.get_scale() == 8.0


def test_the_smallest_scale_is_the_end():
    param, optimizer = one_parameter()
    scaler = zero.LossScaler(8.0, min_scale=3.0, hysteresis=1)
    for want in (4.0, 3.0):
        param.grad = torch.full((3,), math.inf)
        assert not scaler.step(optimizer) and scaler.get_scale() == want
    text = (
        "zero.LossScaler: a gradient is inf or NaN, expected finite ones with the smallest scale,"
        " 3.0; nothing was stepped: the loss itself may be NaN"
    )
    with pytest.raises(FloatingPointError) as caught:
        scaler.step(optimizer)
    assert str(caught.value) == text and torch.equal(param.detach(), torch.ones(3))


def test_the_scale_stays_in_range():
    param, optimizer = one_parameter()
    scaler = zero.LossScaler(2.0**126, growth_interval=1)
    param.grad = torch.ones(3)
    assert scaler.step(optimizer) and scaler.get_scale() == 2.0**126


@pytest.mark.parametrize(
    ("arguments", "text"),
    (
        (
            {"init_scale": 0.5},
            "init_scale is 0.5, expected min_scale, 1.0, to 8.507059173023462e+37",
        ),
        (
            {"init_scale": math.inf},
            "init_scale is inf, expected min_scale, 1.0, to 8.507059173023462e+37",
        ),
        ({"growth_factor": 1}, "growth_factor is 1, expected a number above 1"),
        ({"backoff_factor": 1}, "backoff_factor is 1, expected a number between 0 and 1"),
        ({"hysteresis": 0}, "hysteresis is 0, expected a whole number above 0"),
        ({"min_scale": 0}, "min_scale is 0, expected a number above 0"),
        (
            {"growth_interval": 0},
            "growth_interval is 0, expected a whole number above 0, or None",
        ),
    ),
)
def test_arguments_are_checked(arguments, text):
    with pytest.raises(ValueError) as caught:
        zero.LossScaler(**arguments)
    assert str(caught.value) == f"zero.LossScaler: {text}"


def test_state_is_checked():
    scaler = zero.LossScaler()
    good = scaler.state_dict()
    assert good == {"scale": 2.0**16, "good_steps": 0, "hysteresis_left": 2}
    for key, value in (("scale", math.nan), ("good_steps", -1), ("hysteresis_left", 0)):
        with pytest.raises(ValueError, match=f"^zero.LossScaler: {key} is {value}, expected"):
            scaler.load_state_dict(good | {key: value})
    with pytest.raises(ValueError, match=r"state_dict has keys \['scale'\], expected"):
        scaler.load_state_dict({"scale": 1.0})
    assert scaler.state_dict() == good


def test_what_is_no_optimizer():
    param, _ = one_parameter()
    with pytest.raises(TypeError, match=r"optimizer is a list, expected a torch.optim.Optimizer"):
        zero.LossScaler().step([param])


def trains(row, folder):
    """Scaled by powers of two, float32 training is the same bit for bit; inf stops all."""
    stage, kind = row.split("-")
    models = [zero.shard(Net(), int(stage)) for _ in range(2)]
    optimizers = []
    for model in models:
        if kind == "offload":
            made = OffloadOptimizer(model.parameters(), model=model, **OPTIONS)
        elif kind == "torch":
            made = torch.optim.AdamW(model.parameters(), lr=1e-2)
        else:
            made = adam(model.parameters(), **OPTIONS)
        optimizers.append(made)
    scaler = zero.LossScaler(2.0**12, growth_interval=2, hysteresis=1)
    for number in range(8):
        for i in zero.accumulate(models[0], 2):
            scaler.scale(loss_of(models[0], 2 * number + i)).backward()
        if number % 3 == 2:
            spoil_in_one_process(models[0], number)
            assert not scaler.step(optimizers[0], max_norm=0.1)
        else:
            assert scaler.step(optimizers[0], max_norm=0.1)
            for i in zero.accumulate(models[1], 2):
                loss_of(models[1], 2 * number + i).backward()
            if kind == "torch":
                clip_and_step(optimizers[1], 0.1)
            else:
                optimizers[1].clip_and_step(0.1)
        for each in (*models, *optimizers):
            each.zero_grad()
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, scaler.state_dict())
        assert everywhere == [everywhere[0]] * len(everywhere)
        for (name, ours), theirs in zip(
            models[0].named_parameters(), models[1].parameters(), strict=True
        ):
            assert_close(whole(ours), whole(theirs), f"{name} {number}", exact=True)


def spoil_in_one_process(model, number):
    if dist.get_rank() == number % dist.get_world_size():
        gradient = model.embedding.weight.grad.to_local()
        gradient[0] = math.inf if number % 2 else math.nan


def float16(row, folder):
    """Gradients that would vanish or overflow; near what float32 gives."""
    for stage in (1, 3):
        model = zero.shard(Net(), stage, param_dtype=torch.float16)
        plain = zero.shard(Net(), stage)
        optimizers = [adam(m.parameters(), **OPTIONS) for m in (model, plain)]
        scaler = zero.LossScaler(2.0**24, hysteresis=1)  # too large: float16 ends at 2**16
        stepped = 0
        while stepped < 4:
            scaler.scale(loss_of(model, stepped)).backward()
            if scaler.step(optimizers[0]):
                loss_of(plain, stepped).backward()
                optimizers[1].step()
                stepped += 1
            for optimizer in optimizers:
                optimizer.zero_grad()
        assert optimizers[0].skipped_steps > 2
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            # A gradient is off by some 2**-9 of the largest; Adam moves by lr (g / (|g| + eps)).
            assert_close(whole(ours), whole(theirs), f"{name} {stage}", rtol=0, atol=0.02)


CASES = [
    Case(2, "trains", "1-plain"),
    Case(2, "trains", "3-offload"),
    Case(2, "trains", "2-torch"),
    Case(2, "float16", ""),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function}-{c.row}-{c.world}")
def test_processes(case, groups):
    groups.run(case)
