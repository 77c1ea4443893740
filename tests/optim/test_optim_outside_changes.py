"""State, groups and parameters that somebody changes between two steps: the next step is right."""

import copy
import weakref

import pytest
import torch
from optim_cases import (
    BF16,
    F16,
    F32,
    adam,
    assert_close,
    assert_in_buffers,
    give_grads,
    make_params,
    needs_cuda,
    on_each_device,
    torch_adam,
    twins,
)
from torch import nn
from torch.nn import Parameter

from deepspeed_ext.optim.plans import Change

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


class Beside:
    """Our optimizer and torch's in float64 on the same values, some steps into training."""

    def __init__(self, device="cpu", dtype=F32):
        self.params = make_params(device, dtype)
        self.exact = twins(self.params, torch.float64)
        self.ours = adam(self.params, device, **OPTIONS)
        self.theirs = torch_adam(self.exact, **OPTIONS)
        self.generator = torch.Generator().manual_seed(1)
        self.steps = 0
        self.step(3)

    def step(self, count):
        for _ in range(count):
            give_grads(self.generator, self.params, self.exact)
            self.ours.step()
            self.theirs.step()
        self.steps += count

    def check(self):
        self.step(3)
        assert_close(self.params, self.exact, self.steps)
        assert_in_buffers(self.ours)


@on_each_device
def test_state_moved_away_and_back(device):
    both = Beside(device)
    buffers = weakref.ref(both.ours._plans._plans[0].buckets[0])
    for there in ("cpu", device):  # as trainers do that share a GPU with inference
        for entry in both.ours.state.values():
            for key, value in entry.items():
                entry[key] = value.to(there, copy=True)
    assert buffers() is None  # or the memory would not be free for others
    both.check()


@pytest.mark.parametrize(
    "write",
    [
        lambda entry, value: entry.__setitem__("exp_avg", value),
        lambda entry, value: entry.update(exp_avg=value),
        lambda entry, value: (entry.pop("exp_avg"), entry.setdefault("exp_avg", value)),
        lambda entry, value: (
            entry.__delitem__("exp_avg"),
            entry.setdefault("exp_avg", value),
        ),
        lambda entry, value: entry.__ior__({"exp_avg": value}),
    ],
)
def test_replaced_values_count(write):
    both = Beside()
    for p, e in zip(both.params, both.exact, strict=True):
        write(both.ours.state[p], torch.full_like(p, 0.5))
        both.theirs.state[e]["exp_avg"] = torch.full_like(e, 0.5)
    both.check()


def test_values_written_in_place_count():
    both = Beside()
    for p, e in zip(both.params, both.exact, strict=True):
        both.ours.state[p]["exp_avg_sq"].mul_(2)
        both.ours.state[p]["step"].zero_()
        both.theirs.state[e]["exp_avg_sq"].mul_(2)
        both.theirs.state[e]["step"].zero_()
    both.check()


@pytest.mark.parametrize("how", ["del", "clear entry", "clear state", "new dict"])
def test_deleted_state_starts_anew(how):
    both = Beside()
    for optimizer, params in ((both.ours, both.params), (both.theirs, both.exact)):
        if how == "clear state":
            optimizer.state.clear()
        elif how == "new dict":
            optimizer.state = copy.copy(optimizer.state)
            del optimizer.state[params[0]]
        elif how == "del":
            del optimizer.state[params[2]]
        else:
            optimizer.state[params[2]].clear()
    both.check()


def test_state_that_is_given_before_the_first_step():
    both = Beside()
    late = [Parameter(torch.randn(3)), Parameter(torch.randn(2, 2))]
    late_exact = twins(late, torch.float64)
    for optimizer, params in ((both.ours, late), (both.theirs, late_exact)):
        optimizer.add_param_group({"params": params})
    entry = both.ours.state[late[0]]
    both.step(1)  # the entry is empty: nothing to step on, nothing lost
    entry = both.ours.state[late[0]]
    for optimizer, param in ((both.ours, late[0]), (both.theirs, late_exact[0])):
        entry = optimizer.state[param]
        entry["step"] = torch.tensor(5.0)
        entry["exp_avg"], entry["exp_avg_sq"] = torch.ones_like(param), torch.ones_like(param)
    both.params += late
    both.exact += late_exact
    both.check()
    assert both.ours.state[late[0]]["step"].item() == 8


def test_parameter_replaced_in_its_group_with_its_state():
    """As pruning and point-cloud code does."""
    both = Beside()
    for optimizer, params in ((both.ours, both.params), (both.theirs, both.exact)):
        old = params[8]
        entry = optimizer.state.pop(old)
        for key in ("exp_avg", "exp_avg_sq"):
            entry[key] = entry[key][:100]
        params[8] = Parameter(old.detach()[:100].clone())
        optimizer.param_groups[0]["params"][8] = params[8]
        optimizer.state[params[8]] = entry
    both.check()


def test_groups_changed_without_asking():
    both = Beside()
    for optimizer in (both.ours, both.theirs):
        first = optimizer.param_groups[0]
        optimizer.param_groups.append({**first, "params": first["params"][4:], "lr": 1e-3})
        first["params"] = first["params"][:4]
    both.check()


def test_parameters_taken_out_of_a_group_and_put_into_it():
    both = Beside()
    late = Parameter(torch.randn(3))
    late_exact = Parameter(late.detach().double())
    for optimizer, params, new in (
        (both.ours, both.params, late),
        (both.theirs, both.exact, late_exact),
    ):
        params.append(new)
        optimizer.param_groups[0]["params"][2] = new
    untouched = both.params[2].detach().clone()
    both.step(1)
    assert torch.equal(both.params[2], untouched)
    both.check()


def test_incomplete_state_of_a_parameter_that_had_no_gradient():
    param = Parameter(torch.ones(3))
    optimizer = adam([param])
    optimizer.step()
    entry = optimizer.state[param]
    optimizer.step()
    entry["step"] = 5
    param.grad = torch.ones(3)
    text = r"state of params\[0\] has keys \['step'\], expected exp_avg among them"
    with pytest.raises(ValueError, match=text):
        optimizer.step()


@on_each_device
@pytest.mark.parametrize("change", ["storage", "transpose", "channels_last", "contiguous"])
def test_parameter_given_other_memory(device, change):
    both = Beside(device)
    for p in both.params:
        if change == "storage":
            p.data = p.data.clone()
        elif change == "transpose" and p is both.params[0]:
            p.data = p.data.mT.contiguous().mT
        elif (change == "channels_last" and p.dim() == 4) or change == "contiguous":
            p.data = p.data.contiguous()
    both.check()
    assert both.ours.state[both.params[1]]["exp_avg"].stride() == both.params[1].stride()


@on_each_device
def test_module_cast_after_some_steps(device):
    model = nn.Linear(6, 5).to(device)
    exact = copy.deepcopy(model).double()
    ours = adam(model.parameters(), device, lr=1e-2, fp32_optimizer_states=False)
    theirs = torch_adam(exact.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(2)
    give_grads(generator, list(model.parameters()), list(exact.parameters()))
    ours.step()
    theirs.step()
    model.bfloat16()
    give_grads(generator, list(model.parameters()), list(exact.parameters()))
    ours.step()
    theirs.step()
    assert_close(model.parameters(), exact.parameters(), dtype=BF16)
    assert {ours.state[p]["exp_avg"].dtype for p in model.parameters()} == {BF16}


def test_cast_to_a_type_of_the_same_size():
    params = make_params(dtype=BF16)
    optimizer = adam(params, lr=1e-2, fp32_optimizer_states=False)
    for dtype in (BF16, F16):
        for p in params:
            p.grad, p.data = None, p.data.to(dtype)
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert {optimizer.state[p]["exp_avg"].dtype for p in params} == {F16}
    assert {optimizer.state[p]["step"].item() for p in params} == {2.0}


@needs_cuda
def test_module_moved_after_some_steps():
    both = Beside("cuda")
    for p in both.params:
        p.grad, p.data = None, p.data.cpu()
    give_grads(both.generator, both.params)
    with pytest.raises(ValueError, match=r"params\[0\] is on cpu, expected cuda; use DeepSpeedCPU"):
        both.ours.step()
    for p in both.params:
        p.grad, p.data = None, p.data.cuda()
    both.check()


def test_materialised_from_meta_after_construction():
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    params = list(model.parameters())
    optimizer = adam(params, **OPTIONS)
    for p in params:
        torch.utils.swap_tensors(p, Parameter(torch.randn(p.shape)))
    exact = twins(params, torch.float64)
    theirs = torch_adam(exact, **OPTIONS)
    give_grads(torch.Generator().manual_seed(3), params, exact)
    optimizer.step()
    theirs.step()
    assert_close(params, exact)


def test_lazy_module_that_takes_shape_after_construction():
    model = nn.LazyLinear(2)
    optimizer = adam(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert_close([model.weight], [before - 0.5])


def test_size_changed_is_an_error():
    param = Parameter(torch.ones(5))
    optimizer = adam([param])
    param.grad = torch.ones(5)
    optimizer.step()
    for size in (4, 6):
        param.grad, param.data = None, torch.ones(size)
        param.grad = torch.ones(size)
        text = rf"state of params\[0\]: exp_avg has shape \[5\], expected \[{size}\]"
        with pytest.raises(ValueError, match=text):
            optimizer.step()
        assert torch.equal(param, torch.ones(size))


def replace_a_value(optimizer, params):
    optimizer.state[params[1]]["exp_avg"] = optimizer.state[params[1]]["exp_avg"].clone()


def replace_state(optimizer, params):
    optimizer.state[params[1]] = dict(optimizer.state[params[1]])


def reverse_a_group(optimizer, params):
    optimizer.param_groups[0]["params"].reverse()


def want_other_state(optimizer, params):
    optimizer.param_groups[0]["amsgrad"] = True


def turn_a_matrix(optimizer, params):
    matrix = next(p for p in params if p.dim() == 2 and min(p.shape) > 1)
    matrix.data = matrix.data.t().contiguous().t()


def write_a_weight(optimizer, params):
    with torch.no_grad():
        params[1] += 1


CHANGES = [
    (Change.VALUES, replace_a_value),
    (Change.STATE, replace_state),
    (Change.GROUPS, reverse_a_group),
    (Change.OPTIONS, want_other_state),
    (Change.LOOKS, turn_a_matrix),
    (Change.WEIGHTS, write_a_weight),
]


@pytest.mark.parametrize(("change", "make"), CHANGES)
def test_each_change_is_found_by_its_own_check(change, make):
    """The others see nothing, so that this fails without the one; a step is told no more of it."""
    params = make_params("cpu", BF16)
    optimizer = adam(params, "cpu", **OPTIONS, master_weights=True)
    generator = torch.Generator().manual_seed(1)
    give_grads(generator, params)
    optimizer.step()
    assert found_in(optimizer) == set()
    make(optimizer, params)
    assert found_in(optimizer) == {change}
    optimizer.step()
    assert found_in(optimizer) == set()


def found_in(optimizer):
    """Return what plans say has changed; what is seen in buckets only if they are current."""
    change = optimizer._plans.changes(optimizer)
    if change is not None:
        return {change}
    buckets = [bucket for plan in optimizer._plans._plans for bucket in plan.buckets]
    return {optimizer._plans.changes(optimizer, bucket) for bucket in buckets} - {None}


def test_every_change_has_a_test():
    assert [change for change, _ in CHANGES] == list(Change)


def test_nothing_is_made_again_without_need():
    """The plans of a steady loop stay; so this is the fast path."""
    both = Beside()
    plans = both.ours._plans._plans
    buckets = [list(plan.buckets) for plan in plans]
    tensors = [dict(entry) for entry in both.ours.state.values()]
    both.step(3)
    both.ours.state_dict()
    both.ours.zero_grad()
    both.ours.add_param_group({"params": [Parameter(torch.ones(3))]})
    both.ours.step()
    assert both.ours._plans._plans is plans
    assert [plan.buckets for plan in plans] == [*buckets, []]
    for entry, before in zip(both.ours.state.values(), tensors, strict=True):
        assert all(entry[key] is before[key] for key in before)


@pytest.mark.parametrize("changed", [0, 3, 6])
def test_a_change_noticed_in_the_middle_of_a_step_repeats_nothing(monkeypatch, changed):
    """Buckets before the changed one have been stepped by then; those after it have not."""
    monkeypatch.setattr("deepspeed_ext.optim.buckets._MAX_PARAMS", 2)
    params = [Parameter(torch.randn(4, 6)) for _ in range(7)]
    exact = twins(params, torch.float64)
    ours, theirs = adam(params, **OPTIONS), torch_adam(exact, **OPTIONS)
    generator = torch.Generator().manual_seed(3)
    for step in range(4):
        if step == 2:  # another order of the same values in memory
            params[changed].data = params[changed].data.t().contiguous().t()
        give_grads(generator, params, exact)
        ours.step()
        theirs.step()
    assert_close(params, exact, 4)
    assert [ours.state[param]["step"].item() for param in params] == [4] * 7
    assert_in_buffers(ours)
