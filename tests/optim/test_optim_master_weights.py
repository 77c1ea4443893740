"""master_weights: steps are those of fp32 parameters, and writes to the model are noticed."""

import pytest
import torch
from optim_cases import (
    BF16,
    F16,
    F32,
    adam,
    assert_close,
    assert_in_buffers,
    assert_same_bits,
    give_grads,
    make_params,
    on_each_device,
    torch_adam,
    twins,
)

from deepspeed_ext.optim import DeepSpeedCPUAdam


def master_weights(optimizer, params):
    return [optimizer.state[p]["master_param"] for p in params]


@on_each_device
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_is_fp32_adamw_and_rounding(device, dtype):
    params = make_params(device, dtype)
    exact = twins(params, torch.float64)
    options = {"lr": 1e-3, "weight_decay": 0.1}
    ours = adam(params, device, **options, master_weights=True)
    theirs = torch_adam(exact, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(100):
        give_grads(generator, params, exact, missing=0.2)
        for p, e in zip(params, exact, strict=True):
            e.grad = None if p.grad is None else p.grad.double().contiguous()
        ours.step()
        theirs.step()
    assert_close(master_weights(ours, params), exact, 100)
    assert_same_bits(params, [m.to(dtype) for m in master_weights(ours, params)])
    assert {m.dtype for m in master_weights(ours, params)} == {F32}
    assert_in_buffers(ours)


def stepped(device="cpu", steps=3, **options):
    """Parameters and an optimizer with master weights that have bits which the parameters lack."""
    params = make_params(device, BF16)
    optimizer = adam(params, device, lr=1e-3, master_weights=True, **options)
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        give_grads(generator, params)
        optimizer.step()
    return params, optimizer


def still_step(params, optimizer):
    """A step that moves nothing, so that master weights show where they came from."""
    optimizer.param_groups[0]["lr"] = 0.0
    give_grads(torch.Generator().manual_seed(3), params)
    optimizer.step()


@on_each_device
def test_parameters_in_fp32_have_no_master(device):
    params = make_params(device) + make_params(device, BF16)
    optimizer = adam(params, device, master_weights=True)
    give_grads(torch.Generator().manual_seed(4), params)
    optimizer.step()
    assert ["master_param" in optimizer.state[p] for p in params] == [False] * 9 + [True] * 9


@on_each_device
@pytest.mark.parametrize("write", ["copy_", "data", "one element"])
def test_takes_over_what_the_user_wrote(device, write):
    params, optimizer = stepped(device)
    before = [m.clone() for m in master_weights(optimizer, params)]
    target = params[1]
    with torch.no_grad():
        if write == "copy_":
            target.copy_(torch.full_like(target, 3.0))
        elif write == "data":
            target.data = torch.full_like(target, 3.0)
        else:
            target[1, 2] = 3.0
    still_step(params, optimizer)
    after = master_weights(optimizer, params)
    if write == "one element":
        before[1][1, 2] = 3.0
    else:
        before[1] = torch.full_like(before[1], 3.0)
    assert_same_bits(after, before)  # and no other master has lost its low bits
    assert_same_bits(params, [m.to(BF16) for m in after])


def test_a_steady_loop_does_not_compare_master_weights(monkeypatch):
    params, optimizer = stepped()
    monkeypatch.setattr(torch, "where", None)
    still_step(params, optimizer)


def test_moving_the_values_elsewhere_loses_nothing():
    params, optimizer = stepped()
    before = [m.clone() for m in master_weights(optimizer, params)]
    for p in params:
        p.data = p.data.clone()
    with torch.no_grad():
        params[0].copy_(params[0].clone())
    still_step(params, optimizer)
    assert_same_bits(master_weights(optimizer, params), before)


def test_reset_master_sees_what_version_counters_do_not():
    params, optimizer = stepped()
    params[0].data.fill_(3.0)
    optimizer.reset_master()
    assert_same_bits(master_weights(optimizer, params), [p.float() for p in params])
    still_step(params, optimizer)
    assert torch.equal(params[0], torch.full_like(params[0], 3.0))


@on_each_device
@pytest.mark.parametrize("write", [lambda data: data.mul_(4), lambda data: data[0].fill_(3.0)])
@pytest.mark.parametrize("master", ["float32", "remainder"])
def test_writes_that_nothing_tells_of(device, master, write):
    """Remainders need nobody to tell: a step reads what is there. Masters have to be told."""
    params = [p for p in make_params(device, BF16) if p.dim() and len(p)]
    optimizer = adam(params, device, lr=1e-3, master=master)
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        give_grads(generator, params)
        optimizer.step()
    versions = [p._version for p in params]
    for param in params:
        write(param.data)
    assert [p._version for p in params] == versions
    if master == "float32":
        optimizer.reset_master()
    wanted = [p.float() for p in params]
    still_step(params, optimizer)
    assert_same_bits([p.float() for p in params], wanted)


def test_a_checkpoint_without_masters_or_with_old_ones():
    params, optimizer = stepped()
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        del entry["master_param"]
    optimizer.load_state_dict(saved)
    assert_same_bits(master_weights(optimizer, params), [p.float() for p in params])

    for entry in saved["state"].values():
        entry["master_param"] = torch.full_like(entry["exp_avg"], 9.0)
    before = [p.float() for p in params]
    optimizer.load_state_dict(saved)
    still_step(params, optimizer)
    assert_same_bits(master_weights(optimizer, params), before)


def test_parameters_that_become_16_bit_get_master_weights():
    params = make_params()
    optimizer = DeepSpeedCPUAdam(params, master_weights=True)
    give_grads(torch.Generator().manual_seed(5), params)
    optimizer.step()
    averages = [optimizer.state[p]["exp_avg"].clone() for p in params]
    for p in params:
        p.grad, p.data = None, p.data.bfloat16()
    optimizer.reset_master()
    assert_same_bits(master_weights(optimizer, params), [p.float() for p in params])
    assert_same_bits([optimizer.state[p]["exp_avg"] for p in params], averages)
