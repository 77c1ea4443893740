"""What torch promises of every optimizer, and the plain classes too, holds when it is offloaded."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from offload_cases import (
    FORMATS,
    KINDS,
    WARM,
    Pair,
    assert_same_state,
    await_speculation,
    finish,
    warm,
)
from optim_cases import BF16, adam, assert_close, assert_same_bits, make_params, on_each_device
from torch import nn
from torch.nn import Parameter

from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim import DeepSpeedCPUAdam, FusedSGD


@on_each_device
def test_closure(device):
    param = Parameter(torch.tensor([3.0], device=device))
    optimizer = OffloadOptimizer([param], lr=0.1)

    def closure():
        optimizer.zero_grad()
        assert torch.is_grad_enabled()
        loss = (param * param).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        losses = [optimizer.step(closure).item() for _ in range(6)]
    assert losses[0] == 9.0 and losses == sorted(losses, reverse=True)
    assert optimizer.step() is None
    assert optimizer.stats()["early"] >= 4


@pytest.mark.parametrize("step", ["step", "clip_and_step"])
def test_hooks_of_a_step(step):
    param = Parameter(torch.ones(2))
    optimizer = OffloadOptimizer([param])
    param.grad = torch.ones(2)
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(len(o.state)))
    optimizer.register_step_post_hook(lambda o, *_: seen.append(o.state[param]["step"].item()))
    for _ in range(2):
        optimizer.step() if step == "step" else optimizer.clip_and_step(1.0)
    assert seen == [0, 1.0, 1, 2.0]


@on_each_device
def test_a_hook_before_the_step_may_change_gradients_and_options(device):
    pair = warm(device)

    def change(optimizer, *_):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            for param in group["params"]:
                param.grad.mul_(2.0)

    hooks = [optimizer.register_step_pre_hook(change) for optimizer, _ in pair.both()]
    pair.train(3)
    for hook in hooks:
        hook.remove()
    pair.train(3)


@on_each_device
@pytest.mark.parametrize("step", ["step", "clip_and_step"])
def test_schedulers_know_that_there_was_a_step(device, step):
    pair = Pair(device)
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20) for optimizer, _ in pair.both()
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            pair.train(1, max_norm=1e9 if step == "clip_and_step" else None)
            for schedule in schedules:
                schedule.step()
    pair.check_speculated(8)


@on_each_device
def test_backward_notices_that_a_parameter_changed(device):
    params = [Parameter(torch.ones(2, device=device)) for _ in range(2)]
    optimizer = OffloadOptimizer(params)
    for step in range(5):
        losses = [(p * p).sum() for p in params]
        for p in params:
            (p * 2).sum().backward()
        await_speculation(optimizer)
        if step == 4:
            params[1].grad = None
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[0].backward()
        if step == 4:
            losses[1].backward()
        optimizer.zero_grad()
    assert optimizer.stats()["committed"] >= 2


@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad(set_to_none):
    param = Parameter(torch.ones(2))
    optimizer = OffloadOptimizer([param])
    param.grad = torch.ones(2)
    optimizer.zero_grad(set_to_none)
    assert param.grad is None if set_to_none else torch.equal(param.grad, torch.zeros(2))


def test_named_parameters_and_groups():
    model = nn.Linear(3, 2)
    optimizer = OffloadOptimizer(
        [
            {"params": [("weight", model.weight)], "lr": 1.0, "betas": [0.5, 0.5]},
            {"params": [("bias", model.bias)]},
        ],
        lr=0.5,
    )
    model(torch.ones(1, 3)).sum().backward()
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    optimizer.step()
    assert_close([model.weight, model.bias], [weight - 1.0, bias - 0.5])
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight"]
    assert "lr: 0.5" in repr(optimizer)
    assert OffloadOptimizer(model.named_parameters()).param_groups[0]["param_names"]


def test_groups_and_defaults_look_like_those_of_the_class():
    for kind in KINDS.values():
        param = Parameter(torch.ones(2))
        ours = OffloadOptimizer([param], kind.offloaded, **kind.options)
        plain = kind.offloaded([param], **kind.options)
        assert ours.param_groups == plain.param_groups and ours.defaults == plain.defaults
        assert isinstance(ours, torch.optim.Optimizer)


# Groups that users edit


@on_each_device
@pytest.mark.parametrize("lr", ["number", "tensor"])
def test_options_edited_before_a_group_is_added(device, lr):
    """They are those of the user, not those of the last step."""
    pair = warm(device)
    more = [make_params(device, seed=3), make_params(device, seed=3)]
    value = torch.tensor(0.3) if lr == "tensor" else 0.3
    for (optimizer, _), added in zip(pair.both(), more, strict=True):
        optimizer.param_groups[0]["lr"] = value
        optimizer.param_groups[0]["weight_decay"] = 0.7
        optimizer.add_param_group({"params": added})
        assert optimizer.param_groups[0]["lr"] is value
        assert optimizer.param_groups[0]["weight_decay"] == 0.7
    pair.params += more[0]
    pair.twins += more[1]
    for _ in range(3):
        pair.backward()
        pair.step()
        assert_same_bits(pair.params, pair.twins)


@on_each_device
def test_keys_of_users_in_groups(device):
    pair = warm(device)
    note = torch.ones(3)
    for optimizer, _ in pair.both():
        optimizer.param_groups[0]["name"] = "all"
        optimizer.param_groups[0]["note"] = note
    pair.backward()
    pair.step()
    assert pair.ours.param_groups[0]["note"] is note
    assert pair.ours.state_dict()["param_groups"][0]["name"] == "all"


EDITS = {
    "appended": lambda params, new: params.append(new),
    "replaced": lambda params, new: params.__setitem__(2, new),
    "removed": lambda params, new: params.pop(2),
    "another list": None,
}


@on_each_device
@pytest.mark.parametrize("edit", EDITS)
def test_parameters_of_a_group_edited(device, edit):
    """The plain classes notice when somebody edits the list of a group."""
    pair = warm(device)
    news = [Parameter(torch.ones(3, 7, device=device)) for _ in range(2)]
    for (optimizer, params), new in zip(pair.both(), news, strict=True):
        group = optimizer.param_groups[0]
        if edit == "another list":
            group["params"] = [new, *params[4:]]
            params[:4] = [new]
        else:
            EDITS[edit](group["params"], new)
            EDITS[edit](params, new)
    for _ in range(4):
        pair.backward()
        pair.step()
        assert_same_bits(pair.params, pair.twins)


@on_each_device
@pytest.mark.parametrize("options", ({}, {"free_grads": True}, {"gpu_fraction": 0.5}), ids=str)
def test_a_parameter_that_is_replaced_keeps_the_state_that_is_moved(device, options):
    """As Gaussians are split and vocabularies grow: before the group knows it, or after."""

    def train(made):
        params = [Parameter(torch.linspace(-1, 1, n * 4, device=device).view(n, 4)) for n in (9, 5)]
        optimizer = made(params)
        gone = weakref.WeakSet()
        for number in range(8):
            for param in params:
                param.grad = torch.full_like(param, 0.1 + number % 3)
            optimizer.step()
            optimizer.zero_grad()
            if number % 2:
                for i in range(2):
                    old, more = params[i], params[i].detach()[:3] * 2
                    new = params[i] = Parameter(torch.cat((old.detach(), more)))
                    state = optimizer.state.pop(old)
                    for key in ("exp_avg", "exp_avg_sq"):
                        state[key] = torch.cat((state[key], state[key][:3] * 0.5))
                    if i:
                        optimizer.state[new] = state
                    optimizer.param_groups[0]["params"][i] = new
                    if not i:
                        optimizer.state[new] = state
                    gone.add(old)
                    del old
        optimizer.zero_grad()
        state = [optimizer.state[param] for param in params]
        return params, state, gone

    ours, our_state, gone = train(lambda params: OffloadOptimizer(params, lr=0.1, **options))
    plain, state, _ = train(lambda params: adam(params, device, lr=0.1))
    assert_same_bits(ours, plain)
    for mine, theirs in zip(our_state, state, strict=True):
        assert_same_bits([mine[key].cpu() for key in theirs], [v.cpu() for v in theirs.values()])
    gc.collect()
    assert len(gone) <= 2  # those of the last step, until the next one


@on_each_device
def test_a_parameter_that_leaves_a_group_is_not_stepped(device):
    pair = warm(device)
    left = [params.pop(3) for _, params in pair.both()]
    for optimizer, _ in pair.both():
        optimizer.param_groups[0]["params"].pop(3)
    before = left[0].detach().clone()
    for param in left:
        param.grad = torch.ones_like(param)
    pair.backward()
    pair.step()
    assert_same_bits(pair.params, pair.twins)
    assert torch.equal(left[0], before)


# Copies


def by_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


def by_torch(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": by_pickle, "torch.save": by_torch}
each_copy = pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)


@on_each_device
@each_copy
@pytest.mark.parametrize("name", FORMATS)
def test_copies_go_on_alike(device, duplicate, name):
    pair = warm(device, params=make_params(device, BF16), **FORMATS[name])
    pair.backward()
    await_speculation(pair.ours)
    other = duplicate(pair.ours)
    finish(pair, committed=1)
    pair.train(2)
    assert type(other) is OffloadOptimizer and other._settings == pair.ours._settings
    [group] = other.param_groups
    twin = warm(device, params=make_params(device, BF16), **FORMATS[name])
    twin.ours, twin.params = other, group["params"]
    twin.generator.set_state(copied_state(WARM))
    twin.backward()
    finish(twin)
    twin.train(2)


def copied_state(steps):
    """The generator of a pair after so many steps."""
    pair = Pair(params=make_params(dtype=BF16))
    for _ in range(steps):
        pair.backward()
    return pair.generator.get_state()


@each_copy
def test_copies_of_model_and_optimizer_belong_together(duplicate):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = OffloadOptimizer(model.parameters(), FusedSGD, model=model, momentum=0.9, lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    both = duplicate({"model": model, "optimizer": optimizer})
    for net, ours in ((model, optimizer), (both["model"], both["optimizer"])):
        for _ in range(4):
            net(torch.ones(2, 4)).square().sum().backward()
            await_speculation(ours)
            ours.step()
            ours.zero_grad()
        ours.synchronize()
    assert_same_bits(both["model"].parameters(), model.parameters())
    assert_same_state(both["optimizer"], optimizer)
    assert both["optimizer"].stats()["committed"] >= 2
    assert all(
        p is q
        for p, q in zip(
            both["model"].parameters(), both["optimizer"].param_groups[0]["params"], strict=True
        )
    )


@each_copy
def test_a_watched_model_can_be_copied_alone(duplicate):
    model = nn.Linear(4, 3)
    optimizer = OffloadOptimizer(model.parameters(), model=model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    other = duplicate(model)
    assert_same_bits(other.parameters(), model.parameters())
    other(torch.ones(2, 4))


def test_a_copy_keeps_what_the_constructor_was_given():
    params = make_params()
    optimizer = OffloadOptimizer(
        params, max_grad_norm=3.0, gpu_fraction=0.5, master="float32", seed=4, lr=0.5
    )
    other = copy.deepcopy(optimizer)
    assert other.max_grad_norm == 3.0 and other.param_groups[0]["lr"] == 0.5
    assert other._settings == optimizer._settings


def test_a_subclass_keeps_its_class():
    class Mine(OffloadOptimizer):
        pass

    optimizer = Mine([Parameter(torch.ones(2))])
    assert type(copy.deepcopy(optimizer)) is Mine


def test_it_is_the_default_class():
    param = Parameter(torch.ones(2))
    assert isinstance(OffloadOptimizer([param])._host_optimizer, DeepSpeedCPUAdam)


def test_state_is_given_itself():
    """As who wraps `state` in something and puts it back does: nothing is lost."""
    param = Parameter(torch.ones(3))
    optimizer = OffloadOptimizer([param], lr=0.1)
    param.grad = torch.ones(3)
    optimizer.step()
    before = dict(copy.deepcopy(optimizer.state[param]))
    optimizer.state = optimizer.state
    assert dict(optimizer.state[param]).keys() == before.keys()
    assert_same_bits(list(optimizer.state[param].values()), list(before.values()))
