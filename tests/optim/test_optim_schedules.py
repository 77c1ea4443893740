"""Learning-rate schedules: numbers of the real DeepSpeed, resuming, and whose groups are written.

recorded_schedules.json has what DeepSpeed 0.19.8 gave; record_schedules.py says how it was made.
"""

import copy
import json
import logging
import math
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim import (
    SCHEDULES,
    DeepSpeedCPUAdam,
    FusedSGD,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

RECORDED = json.loads(Path(__file__).with_name("recorded_schedules.json").read_text())["cases"]
CYCLE = dict(cycle_min_lr=0.01, cycle_max_lr=0.1, cycle_first_step_size=4)
SHORT = {  # of each schedule, one that is over after some ten steps
    LRRangeTest: dict(lr_range_test_step_size=3, lr_range_test_staircase=True),
    OneCycle: dict(**CYCLE, decay_step_size=2, decay_lr_rate=0.5, decay_mom_rate=0.002),
    WarmupLR: dict(warmup_num_steps=7),
    WarmupDecayLR: dict(total_num_steps=11, warmup_num_steps=5, warmup_max_lr=None),
    WarmupCosineLR: dict(total_num_steps=11, warmup_num_steps=5, warmup_min_ratio=0.1),
}
EACH = pytest.mark.parametrize("kind", SHORT, ids=lambda kind: kind.__name__)


def adam(*lrs):
    return torch.optim.Adam([{"params": [torch.zeros(1)], "lr": lr} for lr in lrs or (0.1, 0.3)])


def written(optimizer):
    return [(float(group["lr"]), group["betas"][0]) for group in optimizer.param_groups]


def advance(schedule, steps=1):
    for _ in range(steps):
        schedule.optimizer.step()
        schedule.step()


def name_of(case):
    return f"{case['schedule']}-{'-'.join(map(str, case['arguments'].values()))}"[:60]


def assert_near(got, want):
    """A value comes out of some ten roundings, each relative to the largest value there is."""
    torch.testing.assert_close(
        torch.tensor(got, dtype=torch.float64),
        torch.as_tensor(want, dtype=torch.float64),
        rtol=0,
        atol=16 * sys.float_info.epsilon * float(torch.as_tensor(want).abs().max()),
    )


@pytest.mark.parametrize("case", RECORDED, ids=name_of)
def test_numbers_are_those_of_deepspeed(case):
    optimizer = adam(*case["lrs"])
    schedule = SCHEDULES[case["schedule"]](optimizer, **case["arguments"])
    optimizer.step()  # once is enough for torch to see that it comes first
    kept = {iteration: (lrs, betas) for iteration, lrs, betas in case["values"]}
    lrs, betas = [], []
    for iteration in range(-1, case["steps"]):
        assert schedule.last_batch_iteration == iteration
        if iteration in kept:
            lrs.append([group["lr"] for group in optimizer.param_groups])
            betas.append([group["betas"][0] for group in optimizer.param_groups])
            assert schedule.get_last_lr() == schedule.get_lr() == lrs[-1]
        schedule.step()
    assert_near(lrs, [row for row, _ in kept.values()])
    assert_near(betas, [row for _, row in kept.values()])


def cosine(n):
    """WarmupCosineLR(total_num_steps=90, warmup_num_steps=20, cos_min_ratio=0.05), lr 0.3."""
    warm = 0.3 * (n + 1).clamp(min=1).log() / math.log(20)
    decayed = 0.05 * 0.3 + 0.95 * 0.3 * (math.pi * (n - 19).clamp(0, 70) / 140).cos().square()
    return torch.where(n < 20, warm, decayed)


def decay(n):
    """WarmupDecayLR(90, warmup_min_lr=0.02, warmup_max_lr=0.3, 20 linear steps)."""
    return 0.02 + 0.28 * torch.minimum(n.clamp(min=0) / 20, ((90 - n) / 70).clamp(0, 1))


def triangle(n):
    """OneCycle(0.01, 0.4, cycle_first_step_size=30, decay_step_size=10, decay_lr_rate=2)."""
    up_and_down = 0.4 - 0.39 * (n - 29).abs() / 30
    return torch.where(n < 59, up_and_down, 0.01 / (1 + 2 * (n - 59) / 10))


def stairs(n):
    """LRRangeTest(0.02, 7, 0.5, staircase)."""
    return 0.02 + 0.01 * ((n + 1) / 7).floor()


FORMULAS = [
    (WarmupCosineLR, cosine, dict(total_num_steps=90, warmup_num_steps=20, cos_min_ratio=0.05)),
    (
        WarmupDecayLR,
        decay,
        dict(
            **dict(total_num_steps=90, warmup_min_lr=0.02, warmup_max_lr=0.3),
            **dict(warmup_num_steps=20, warmup_type="linear"),
        ),
    ),
    (
        OneCycle,
        triangle,
        dict(
            **dict(cycle_min_lr=0.01, cycle_max_lr=0.4, cycle_first_step_size=30),
            **dict(decay_step_size=10, decay_lr_rate=2),
        ),
    ),
    (
        LRRangeTest,
        stairs,
        dict(
            **dict(lr_range_test_min_lr=0.02, lr_range_test_step_size=7),
            **dict(lr_range_test_step_rate=0.5, lr_range_test_staircase=True),
        ),
    ),
]


@pytest.mark.parametrize(("kind", "formula", "arguments"), FORMULAS)
def test_numbers_are_the_closed_formula(kind, formula, arguments):
    iterations = torch.arange(-1, 120, dtype=torch.float64)
    schedule, lrs = kind(adam(0.3), **arguments), []
    for _ in iterations:
        lrs += schedule.get_last_lr()
        advance(schedule)
    assert_near(lrs, formula(iterations))


def test_ends_are_exact():
    """Not 0.1 - 1e-17, in steps that users look at."""
    schedule = WarmupDecayLR(adam(0.9), 20, 0.2, None, 5)
    assert 0.2 + (0.9 - 0.2) != 0.9 and schedule.get_last_lr() == [0.2]
    advance(schedule, 6)
    assert schedule.get_last_lr() == [0.9]
    advance(schedule, 100)
    assert schedule.get_last_lr() == [0.2]


@EACH
def test_resumes_at_each_step(kind):
    """In every way, and to earlier iterations too: the bits that stepping there gives."""
    stepped = kind(adam(), **SHORT[kind])
    jumped, loaded = kind(adam(), **SHORT[kind]), kind(adam(), **SHORT[kind])
    rows = []
    for iteration in range(-1, 15):
        made = kind(adam(), **SHORT[kind], last_batch_iteration=iteration)
        changed = kind(adam(5.0, 6.0), **SHORT[kind])
        jumped.step(iteration)
        loaded.load_state_dict({"last_batch_iteration": iteration})  # DeepSpeed's
        changed.load_state_dict(json.loads(json.dumps(stepped.state_dict())))
        rows.append(written(stepped.optimizer))
        for other in (made, jumped, loaded, changed):
            assert other.last_batch_iteration == iteration and other.last_epoch == iteration + 1
            assert written(other.optimizer) == rows[-1]
            assert other.get_last_lr() == stepped.get_last_lr()
        advance(stepped)
        for other in (made, jumped, loaded, changed):
            advance(other)
            assert written(other.optimizer) == written(stepped.optimizer)
    for iteration in (3, 9, -1, 0):
        jumped.step(last_batch_iteration=iteration)
        assert written(jumped.optimizer) == rows[iteration + 1]


def test_resumes_where_the_optimizer_is_loaded_first_or_last():
    """lr of a saved group is a scheduled one; the group's own lr is saved beside it."""
    saved = WarmupCosineLR(adam(), 20, warmup_num_steps=4)
    advance(saved, 3)
    state = copy.deepcopy(saved.optimizer.state_dict()), saved.state_dict()
    first, last = adam(7.0, 8.0), adam()
    first.load_state_dict(state[0])
    resumed = [WarmupCosineLR(each, 20, warmup_num_steps=4) for each in (first, last)]
    for schedule in resumed:
        schedule.load_state_dict({"last_batch_iteration": state[1]["last_batch_iteration"]})
    last.load_state_dict(state[0])
    for each in (saved, *resumed):
        advance(each)
    assert saved.get_last_lr() == resumed[0].get_last_lr() == resumed[1].get_last_lr()
    assert [*map(written, (first, last))] == [written(saved.optimizer)] * 2


@EACH
def test_writes_into_the_groups_that_are_there(kind):
    """Groups are the same dicts; an lr that is a tensor is filled; added ones are scheduled too."""
    optimizer, lr = adam(), torch.tensor(0.2)
    optimizer.param_groups[1]["lr"] = lr
    groups = list(optimizer.param_groups)
    schedule = kind(optimizer, **SHORT[kind])
    last = schedule.get_last_lr()
    optimizer.add_param_group({"params": [torch.zeros(2)], "lr": 0.7})
    groups.append(optimizer.param_groups[2])
    assert schedule.state_dict()["base_lrs"] == pytest.approx([0.1, 0.2, 0.7])
    groups[0]["params"] = [torch.zeros(3)]
    advance(schedule, 3)
    assert all(mine is theirs for mine, theirs in zip(groups, optimizer.param_groups, strict=True))
    assert groups[1]["lr"] is lr and last[1] is not lr and isinstance(groups[0]["lr"], float)
    expected = kind(adam(0.1, float(lr.new_tensor(0.2)), 0.7), **SHORT[kind])
    advance(expected, 3)
    want = [each for each, _ in written(expected.optimizer)]
    assert [groups[0]["lr"], groups[2]["lr"]] == [want[0], want[2]] and lr == lr.new_tensor(want[1])
    for _ in range(2):  # by step() and by step(n)
        assert groups[1]["lr"] is lr is not schedule.get_last_lr()[1]
        assert schedule.get_last_lr() == [want[0], lr, want[2]]
        schedule.step(schedule.last_batch_iteration)
    if kind is OneCycle:
        assert {group["betas"] for group in groups} == {expected.get_mom()[0]}
        assert expected.get_mom()[0][1] == 0.999
    del optimizer.param_groups[1]
    advance(schedule)
    assert len(schedule.get_last_lr()) == 2


@EACH
def test_copies_go_their_own_way(kind):
    schedule = kind(adam(), **SHORT[kind])
    advance(schedule, 2)
    copied, loaded = copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))
    before = written(schedule.optimizer)
    for other in (copied, loaded):
        advance(other, 4)
        assert written(schedule.optimizer) == before
    advance(schedule, 4)
    assert written(copied.optimizer) == written(loaded.optimizer) == written(schedule.optimizer)


def offloaded_sgd(params, **options):
    return OffloadOptimizer(params, FusedSGD, **options)


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD, offloaded_sgd])
@EACH
def test_the_rate_that_acts_is_that_of_the_schedule(kind, make):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = make([{"params": [params[0]]}, {"params": [params[1]], "lr": 0.5}], lr=0.25)
    schedule = kind(optimizer, **SHORT[kind])
    for _ in range(6):
        wanted = [p.detach() - lr for p, lr in zip(params, schedule.get_last_lr(), strict=True)]
        sum(p.sum() for p in params).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        # The step may be a fused multiplication and addition: half a unit in the last place of 1.
        torch.testing.assert_close([p.detach() for p in params], wanted, rtol=0, atol=2**-24)


def test_the_momentum_that_acts_is_that_of_the_cycle():
    results = []
    for make in (torch.optim.Adam, DeepSpeedCPUAdam):
        param = torch.nn.Parameter(torch.ones(5))
        optimizer = make([param], betas=(0.5, 0.95))
        schedule = OneCycle(optimizer, **CYCLE)
        assert schedule.get_mom() == [(0.9, 0.95)]
        for i in range(8):
            param.grad = torch.arange(5.0) - i
            optimizer.step()
            schedule.step()
        results.append(param.detach())
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.95) and schedule.get_mom() == [
            (0.9, 0.95)
        ]
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def test_a_beta_that_is_a_tensor_is_filled():
    beta = torch.tensor(0.5)
    optimizer = adam(0.1)
    optimizer.param_groups[0]["betas"] = (beta, torch.tensor(0.9))
    OneCycle(optimizer, **CYCLE)
    assert optimizer.param_groups[0]["betas"][0] is beta and float(beta) == pytest.approx(0.8)


def test_momentum_of_1_is_refused_before_anything_is_written():
    schedule = OneCycle(adam(0.1), **CYCLE, decay_step_size=1, decay_mom_rate=0.06)
    advance(schedule, 9)
    before = written(schedule.optimizer), schedule.state_dict()
    with refused("momentum is 1.008 at iteration 9, expected below 1; lower decay_mom_rate"):
        schedule.step()
    assert (written(schedule.optimizer), schedule.state_dict()) == before
    growing = dict(**CYCLE, decay_step_size=1, decay_mom_rate=1)
    advance(OneCycle(adam(0.1), **growing, cycle_momentum=False), 20)
    advance(OneCycle(torch.optim.SGD([torch.zeros(1)]), **growing), 20)


def test_what_is_odd_is_said(caplog):
    with caplog.at_level(logging.WARNING, "deepspeed_ext"):
        OneCycle(torch.optim.SGD([torch.zeros(1)], momentum=0.5), **CYCLE)
        WarmupDecayLR(adam(), 3, warmup_num_steps=5)
        WarmupCosineLR(adam(), 5, warmup_num_steps=5)
        OneCycle(torch.optim.SGD([torch.zeros(1)], momentum=0.5), **CYCLE, cycle_momentum=False)
    assert [record.getMessage() for record in caplog.records] == [
        "OneCycle: no group of SGD has betas: its momentum stays as it is",
        "WarmupDecayLR: total_num_steps is 3, less than the 5 steps of the warm-up, which is taken "
        "to its end; then the rate drops to its least",
    ]


def test_torch_takes_them_for_its_own():
    schedules = [kind(adam(), **arguments) for kind, arguments in SHORT.items()]
    assert all(isinstance(schedule, LRScheduler) for schedule in schedules)
    assert [*SCHEDULES.values()] == [*SHORT] and [*SCHEDULES] == [kind.__name__ for kind in SHORT]
    optimizer = adam(0.4)
    kinds = LinearLR(optimizer, 0.5, 1.0, 2), WarmupDecayLR(optimizer, 6, 0.1, None, 2)
    sequence, lrs = SequentialLR(optimizer, [*kinds], [2]), []
    for _ in range(9):
        lrs += sequence.get_last_lr()
        advance(sequence)
    assert_near(lrs, [0.2, 0.3, 0.1, 0.1, 0.4, 0.4, 0.325, 0.25, 0.175])


def test_a_step_before_the_optimizers_is_warned_of():
    schedule = WarmupLR(adam())
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        schedule.step()
    assert schedule.last_batch_iteration == 0


@pytest.mark.filterwarnings("error")
def test_going_on_is_not_warned_of():
    """By the constructor, by step(n), by loading, also before the optimizer's first step."""
    schedule = WarmupLR(adam(), last_batch_iteration=0)
    schedule.step(0)
    schedule.load_state_dict({"last_batch_iteration": 0})
    assert schedule.get_lr() == schedule.get_last_lr() == [0.0, 0.0]


def test_what_others_write_to_lr_lasts_until_the_next_step():
    """The own lr is that of before all schedulers; the one that steps last has the say."""
    optimizer = adam(0.1)
    first, second = WarmupLR(optimizer, warmup_num_steps=2), WarmupCosineLR(optimizer, 9)
    optimizer.param_groups[0]["lr"] = 5.0
    assert first.get_last_lr() == [0.0]
    optimizer.param_groups[0]["lr"] = 0.0
    assert WarmupLR(optimizer, warmup_min_lr=0.05).get_last_lr() == [0.05]  # below its own, 0.1
    first.step(5)
    assert written(optimizer) == [(0.1, 0.9)]
    second.step(8)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * math.log(9) / math.log(1000))
    first.base_lrs[0] = 0.9  # as users of torch do
    advance(first)
    assert optimizer.param_groups[0]["lr"] == 0.9


@pytest.mark.parametrize("steps", [0, 1, 2, 2.0])
def test_the_least_warm_up_is_two_steps(steps):
    schedule, lrs = WarmupLR(adam(0.8), warmup_num_steps=steps, warmup_type="linear"), []
    for _ in range(5):
        lrs += schedule.get_last_lr()
        advance(schedule)
    assert lrs == [0, 0, 0.4, 0.8, 0.8]


def refused(text, kind=ValueError):
    return pytest.raises(kind, match=f": {re.escape(text)}$")


LEAST = "expected a finite number, at least 0"
WHOLE = "expected a whole number, at least"
TOO_MANY = (
    "values, expected 2, one for each group; one number is for all groups, those that are added "
    "later too"
)
DECAY = dict(total_num_steps=9)
REFUSED = [
    (WarmupLR, dict(warmup_min_lr=-0.1), f"warmup_min_lr is -0.1, {LEAST}"),
    (WarmupLR, dict(warmup_max_lr=math.inf), f"warmup_max_lr is inf, {LEAST}"),
    (WarmupLR, dict(warmup_min_lr=[0.1, math.nan]), f"warmup_min_lr[1] is nan, {LEAST}"),
    (
        WarmupLR,
        dict(warmup_min_lr=0.2),
        "warmup_min_lr is 0.2, expected at most warmup_max_lr, 0.1",
    ),
    (WarmupLR, dict(warmup_max_lr=[1.0] * 3), f"warmup_max_lr has 3 {TOO_MANY}"),
    (WarmupLR, dict(warmup_num_steps=-1), f"warmup_num_steps is -1, {WHOLE} 0"),
    (WarmupLR, dict(warmup_num_steps=None), f"warmup_num_steps is None, {WHOLE} 0"),
    (WarmupLR, dict(warmup_num_steps=2.5), f"warmup_num_steps is 2.5, {WHOLE} 0"),
    (WarmupLR, dict(warmup_num_steps=math.inf), f"warmup_num_steps is inf, {WHOLE} 0"),
    (WarmupLR, dict(warmup_type="cosine"), "warmup_type is 'cosine', expected log or linear"),
    (WarmupLR, dict(last_batch_iteration=-2), f"last_batch_iteration is -2, {WHOLE} -1"),
    (
        *(WarmupDecayLR, dict(**DECAY, warmup_min_lr=[0.0, 0.2])),
        "warmup_min_lr is 0.2, expected at most warmup_max_lr, 0.001",
    ),
    (WarmupDecayLR, dict(total_num_steps=0), f"total_num_steps is 0, {WHOLE} 1"),
    (WarmupCosineLR, dict(total_num_steps=9.5), f"total_num_steps is 9.5, {WHOLE} 1"),
    (WarmupCosineLR, dict(**DECAY, cos_min_ratio=1.5), "cos_min_ratio is 1.5, expected 0 to 1"),
    (WarmupCosineLR, dict(**DECAY, warmup_min_ratio=-1), "warmup_min_ratio is -1, expected 0 to 1"),
    (LRRangeTest, dict(lr_range_test_step_size=0), f"lr_range_test_step_size is 0, {WHOLE} 1"),
    (LRRangeTest, dict(lr_range_test_step_rate=-1), f"lr_range_test_step_rate is -1, {LEAST}"),
    (
        *(OneCycle, dict(cycle_min_lr=0.2, cycle_max_lr=0.1)),
        "cycle_min_lr is 0.2, expected at most cycle_max_lr, 0.1",
    ),
    (
        *(OneCycle, dict(**CYCLE, cycle_min_mom=0.95)),
        "cycle_min_mom is 0.95, expected at most cycle_max_mom, 0.9",
    ),
    (
        *(OneCycle, dict(**CYCLE, cycle_max_mom=1.0)),
        "cycle_max_mom is 1.0, expected at least 0 and below 1",
    ),
    (OneCycle, {**CYCLE, "cycle_first_step_size": 0}, f"cycle_first_step_size is 0, {WHOLE} 1"),
    *(
        (OneCycle, {**CYCLE, name: -1}, f"{name} is -1, {WHOLE} 0")
        for name in (
            *("cycle_second_step_size", "cycle_first_stair_count", "cycle_second_stair_count"),
            "decay_step_size",
        )
    ),
    (OneCycle, dict(**CYCLE, decay_lr_rate=-0.5), f"decay_lr_rate is -0.5, {LEAST}"),
    (OneCycle, dict(**CYCLE, decay_mom_rate=-0.5), f"decay_mom_rate is -0.5, {LEAST}"),
]


@pytest.mark.parametrize(("kind", "arguments", "text"), REFUSED)
def test_what_makes_no_sense_is_refused(kind, arguments, text):
    optimizer = adam()
    with refused(text):
        kind(optimizer, **arguments)
    assert written(optimizer) == [(0.1, 0.9), (0.3, 0.9)]
    assert "initial_lr" not in optimizer.param_groups[0]


WRONG_KIND = [
    (WarmupLR, dict(warmup_max_lr="auto"), "warmup_max_lr is 'auto', expected a number"),
    (WarmupLR, dict(warmup_num_steps="8"), "warmup_num_steps is '8', expected a whole number"),
    (WarmupLR, dict(warmup_num_steps=True), "warmup_num_steps is True, expected a whole number"),
    (
        LRRangeTest,
        dict(lr_range_test_staircase="no"),
        "lr_range_test_staircase is 'no', expected a bool",
    ),
    (OneCycle, dict(**CYCLE, cycle_momentum="no"), "cycle_momentum is 'no', expected a bool"),
]


@pytest.mark.parametrize(("kind", "arguments", "text"), WRONG_KIND)
def test_what_is_of_the_wrong_kind_is_refused(kind, arguments, text):
    with refused(text, TypeError):
        kind(adam(), **arguments)


@EACH
def test_what_is_no_optimizer_is_refused(kind):
    with refused("optimizer is a Linear, expected a torch.optim.Optimizer", TypeError):
        kind(torch.nn.Linear(1, 1), **SHORT[kind])


def test_states_that_do_not_fit_change_nothing():
    schedule = WarmupLR(adam(), last_batch_iteration=4)
    before = written(schedule.optimizer), schedule.state_dict()
    key, states = "last_batch_iteration", "state_dict has keys ['_step_count', 'last_epoch']"
    for state, text in (
        ({"last_epoch": 3, "_step_count": 4}, f"{states}, expected {key} among them"),
        ({key: 1.5}, f"{key} is 1.5, {WHOLE} -1"),
        ({key: 1, "base_lrs": [0.1]}, f"base_lrs has 1 {TOO_MANY}"),
    ):
        with refused(text):
            schedule.load_state_dict(state)
    with refused(f"{key} is -3, {WHOLE} -1"):
        schedule.step(-3)
    assert (written(schedule.optimizer), schedule.state_dict()) == before


def test_a_list_has_none_for_a_group_that_was_added():
    schedule = WarmupLR(adam(), warmup_max_lr=[0.1, 0.2])
    schedule.optimizer.add_param_group({"params": [torch.zeros(1)]})
    before = schedule.state_dict()
    with refused(f"warmup_max_lr has 2 {TOO_MANY}".replace("expected 2", "expected 3")):
        schedule.step()
    assert schedule.last_batch_iteration == before["last_batch_iteration"]
