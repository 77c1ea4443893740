"""Random steps beside torch.optim: missing gradients, thawing, groups, schedules, options."""

import math

import pytest
import torch
from kinds import each_kind, each_kind_and_options
from optim_cases import (
    BF16,
    F16,
    F32,
    adam,
    assert_close,
    assert_in_buffers,
    give_grads,
    make_params,
    on_each_device,
    snapshot,
    torch_adam,
    twins,
)
from torch.nn import Parameter

from deepspeed_ext.optim import FusedSGD

STEPS = 100


def pair(kind, device, **options):
    """Our optimizer and the reference, the latter in float64 so that only ours rounds."""
    params = make_params(device)
    exact = twins(params, torch.float64)
    return params, exact, kind.make(params, device, **options), kind.reference(exact, **options)


@on_each_device
@each_kind_and_options
def test_options(device, kind, options):
    params, exact, ours, theirs = pair(kind, device, lr=1e-2, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        give_grads(generator, params, exact, missing=0.3)
        ours.step()
        theirs.step()
    assert_close(params, exact, STEPS)
    for p, e in zip(params, exact, strict=True):
        if "step" in theirs.state[e]:
            assert ours.state[p]["step"].item() == theirs.state[e]["step"].item()
        assert ours.state[p].keys() == theirs.state[e].keys() | {"step"}
        for key in kind.state:
            if key in ours.state[p]:
                assert ours.state[p][key].stride() == p.stride()
    assert_in_buffers(ours)


@on_each_device
@each_kind
def test_frozen_thawed_and_added_parameters_and_a_schedule(device, kind):
    params, exact, ours, theirs = pair(kind, device, lr=1e-2, **kind.usual)
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
    assert_in_buffers(ours)


@on_each_device
@each_kind
@pytest.mark.parametrize("where", ["cpu", "device"])
def test_lr_as_tensor(device, kind, where):
    lr = torch.tensor(1e-2, device=device if where == "device" else "cpu")
    params = make_params(device)
    exact = twins(params, torch.float64)
    ours, theirs = kind.make(params, device, lr=lr), kind.reference(exact, lr=1e-2)
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
@each_kind
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("fp32_states", [True, False])
def test_16_bit_parameters(device, kind, dtype, fp32_states):
    """Each step from equal state: rounded parameters would drift apart for good reasons."""
    params = make_params(device, dtype)
    ours = kind.make(params, device, lr=1e-2, fp32_optimizer_states=fp32_states, **kind.usual)
    generator = torch.Generator().manual_seed(4)
    for _ in range(5):
        exact = twins(params, torch.float64)
        theirs = kind.reference(exact, lr=1e-2, **kind.usual)
        theirs.load_state_dict(snapshot(ours))  # torch would share the step tensors
        give_grads(generator, params, exact)
        for p, e in zip(params, exact, strict=True):
            e.grad = p.grad.double().contiguous()
        ours.step()
        theirs.step()
        assert_close(params, exact, dtype=dtype)
    state = F32 if fp32_states else dtype
    assert all(ours.state[p][key].dtype == state for p in params for key in kind.state)
    assert_in_buffers(ours)


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
    assert_in_buffers(ours)


def test_wd_after_momentum():
    """As Apex does it: the penalty is added to the step, and never enters the buffer."""
    params = make_params()
    exact = twins(params, torch.float64)
    options = dict(lr=0.1, momentum=0.9, dampening=0.2)
    ours = FusedSGD(params, weight_decay=0.1, wd_after_momentum=True, **options)
    theirs = torch.optim.SGD(exact, **options)
    generator = torch.Generator().manual_seed(8)
    for _ in range(20):
        give_grads(generator, params, exact)
        before = [e.detach().clone() for e in exact]
        ours.step()
        theirs.step()
        with torch.no_grad():
            for e, old in zip(exact, before, strict=True):
                e -= 0.1 * 0.1 * old
    assert_close(params, exact, 20)
