"""Random steps beside torch.optim: missing gradients, thawing, groups, schedules, options."""

import math

import pytest
import torch
from optim_cases import (
    BF16,
    F16,
    F32,
    adam,
    assert_close,
    assert_in_slabs,
    give_grads,
    make_params,
    on_each_device,
    snapshot,
    torch_adam,
    twins,
)
from torch.nn import Parameter

STEPS = 100
OPTIONS = {
    "defaults": {},
    "decay": {"weight_decay": 0.1},
    "l2": {"weight_decay": 0.1, "decoupled": False},
    "amsgrad": {"amsgrad": True, "weight_decay": 0.01},
    "maximize": {"maximize": True, "decoupled": False, "weight_decay": 0.01},
    "betas": {"betas": (0.5, 0.9), "eps": 1e-3},
}


def pair(device, **options):
    """Our optimizer and torch's, the latter in float64 so that only ours rounds."""
    params = make_params(device)
    exact = twins(params, torch.float64)
    return params, exact, adam(params, device, **options), torch_adam(exact, **options)


@on_each_device
@pytest.mark.parametrize("name", OPTIONS)
def test_options(device, name):
    params, exact, ours, theirs = pair(device, lr=1e-2, **OPTIONS[name])
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        give_grads(generator, params, exact, missing=0.3)
        ours.step()
        theirs.step()
    assert_close(params, exact, STEPS)
    for p, e in zip(params, exact, strict=True):
        assert ours.state[p]["step"].item() == theirs.state[e]["step"].item()
        assert ours.state[p].keys() == theirs.state[e].keys()
        assert ours.state[p]["exp_avg"].stride() == p.stride()
    assert_in_slabs(ours)


@on_each_device
def test_frozen_thawed_and_added_parameters_and_a_schedule(device):
    params, exact, ours, theirs = pair(device, lr=1e-2, weight_decay=0.1)
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS) for optimizer in (ours, theirs)
    ]
    generator = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        if step == 30:
            for optimizer, model in ((ours, params), (theirs, exact)):
                more = twins(make_params(device, seed=7), model[0].dtype)
                model += more
                optimizer.add_param_group({"params": more, "lr": 3e-3, "weight_decay": 0.0})
        give_grads(generator, params, exact)
        for model in (params, exact):
            model[0].grad = None if step < 20 else model[0].grad  # thawed
            model[1].grad = None if step > 60 else model[1].grad  # frozen
        ours.step()
        theirs.step()
        for schedule in schedules:
            schedule.step()
    assert_close(params, exact, STEPS)
    assert ours.state[params[0]]["step"].item() == STEPS - 20
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    assert_in_slabs(ours)


@on_each_device
@pytest.mark.parametrize("where", ["cpu", "device"])
def test_lr_as_tensor(device, where):
    lr = torch.tensor(1e-2, device=device if where == "device" else "cpu")
    params = make_params(device)
    exact = twins(params, torch.float64)
    ours, theirs = adam(params, device, lr=lr), torch_adam(exact, lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    for _ in range(10):
        lr.mul_(0.9)
        theirs.param_groups[0]["lr"] = lr.item()
        give_grads(generator, params, exact)
        ours.step()
        theirs.step()
    assert_close(params, exact, 10)


@on_each_device
def test_no_bias_correction(device):
    param = Parameter(torch.zeros(4, device=device))
    optimizer = adam([param], device, lr=0.1, bias_correction=False)
    param.grad = torch.full_like(param, 2.0)
    optimizer.step()
    expected = -0.1 * (0.1 * 2) / (math.sqrt(0.001 * 4) + 1e-8)
    assert_close([param], [torch.full((4,), expected)])


@on_each_device
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("fp32_states", [True, False])
def test_16_bit_parameters(device, dtype, fp32_states):
    """Each step from equal state: rounded parameters would drift apart for good reasons."""
    params = make_params(device, dtype)
    ours = adam(params, device, lr=1e-2, weight_decay=0.1, fp32_optimizer_states=fp32_states)
    generator = torch.Generator().manual_seed(4)
    for _ in range(5):
        exact = twins(params, torch.float64)
        theirs = torch_adam(exact, lr=1e-2, weight_decay=0.1)
        theirs.load_state_dict(snapshot(ours))  # torch would share the step tensors
        give_grads(generator, params, exact)
        for p, e in zip(params, exact, strict=True):
            e.grad = p.grad.double().contiguous()
        ours.step()
        theirs.step()
        assert_close(params, exact, dtype=dtype)
    moment = F32 if fp32_states else dtype
    assert all(ours.state[p]["exp_avg_sq"].dtype == moment for p in params)
    assert_in_slabs(ours)


@on_each_device
def test_mixed_dtypes_in_one_group(device):
    params = make_params(device) + make_params(device, BF16, seed=1) + make_params(device, F16)
    exact = twins(params, torch.float64)
    ours, theirs = adam(params, device), torch_adam(exact)
    give_grads(torch.Generator().manual_seed(5), params, exact)
    for p, e in zip(params, exact, strict=True):
        e.grad = p.grad.double().contiguous()
    ours.step()
    theirs.step()
    for p, e in zip(params, exact, strict=True):
        assert_close([p], [e], dtype=p.dtype)


@on_each_device
def test_gradients_of_several_dtypes(device):
    params = make_params(device)
    exact = twins(params, torch.float64)
    ours, theirs = adam(params, device), torch_adam(exact)
    generator = torch.Generator().manual_seed(6)
    for _ in range(3):
        give_grads(generator, params, exact)
        for i, (p, e) in enumerate(zip(params, exact, strict=True)):
            p.grad.data = p.grad.data.to((F32, BF16, F16)[i % 3])
            e.grad = p.grad.double().contiguous()
        ours.step()
        theirs.step()
    assert_close(params, exact, 3)
    assert all(ours.state[p]["step"].item() == 3 for p in params)


@on_each_device
def test_first_gradients_one_by_one_do_not_make_a_call_each(device):
    params = [Parameter(torch.randn(5, device=device)) for _ in range(50)]
    exact = twins(params, torch.float64)
    ours, theirs = adam(params, device), torch_adam(exact)
    generator = torch.Generator().manual_seed(7)
    for step in range(50):
        give_grads(generator, params[: step + 1], exact[: step + 1])
        ours.step()
        theirs.step()
    assert_close(params, exact, 50)
    assert len(ours._plans.current(ours)[0].buckets) <= 17
    assert_in_slabs(ours)
