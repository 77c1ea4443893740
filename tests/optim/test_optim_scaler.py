"""GradScaler: gradients are divided by the scale inside the step, and inf skips all of it."""

import pytest
import torch
from optim_cases import (
    BF16,
    F16,
    F32,
    adam,
    assert_close,
    assert_same_bits,
    give_grads,
    make_params,
    needs_cuda,
    on_each_device,
    snapshot,
    state_tensors,
    torch_adam,
    twins,
)
from torch.nn import Parameter
from waiting_scaler import waiting_scaler


@on_each_device
@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scaler(device, unscale_first):
    params = make_params(device)
    exact = twins(params, torch.float64)
    ours, theirs = adam(params, device, lr=1e-2), torch_adam(exact, lr=1e-2)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=1000)
    generator = torch.Generator().manual_seed(1)
    scale = 1024.0
    for step in range(6):
        give_grads(generator, params, exact)
        scaler.scale(torch.zeros((), device=device))
        for p in params:
            p.grad.mul_(scale)
        overflow = step in (2, 3)
        if overflow:
            params[3].grad[1, 1] = float("inf")
            scale /= 2
        before = [p.detach().clone() for p in params] + [t.clone() for t in state_tensors(ours)]
        if unscale_first:
            scaler.unscale_(ours)
        scaler.step(ours)
        scaler.update()
        if overflow:
            assert_same_bits(list(params) + state_tensors(ours), before or list(params))
        else:
            theirs.step()
    assert scaler.get_scale() == 256.0
    assert_close(params, exact, 4)
    assert all(ours.state[p]["step"].item() == 4 for p in params)
    assert not hasattr(ours, "grad_scale")


@on_each_device
def test_master_weights_and_fp16(device):
    params = make_params(device, F16)
    exact = twins(params, F32)
    ours = adam(params, device, master_weights=True)
    theirs = torch_adam(exact)
    scaler = torch.amp.GradScaler(device, init_scale=64.0)
    generator = torch.Generator().manual_seed(2)
    for step in range(3):
        give_grads(generator, params)
        for p, e in zip(params, exact, strict=True):
            e.grad = p.grad.float().contiguous() / 64
        if step == 1:
            params[0].grad[0, 0] = float("nan")
            before = snapshot(ours)
        scaler.scale(torch.zeros((), device=device))
        scaler.step(ours)
        if step == 1:
            assert_same_bits(
                state_tensors(ours),
                [v for e in before["state"].values() for _, v in sorted(e.items())],
            )
        else:
            theirs.step()
            scaler.update(64.0)
            continue
        scaler.update(64.0)
    assert_close([ours.state[p]["master_param"] for p in params], exact, 2)


@on_each_device
def test_numbers_set_by_hand_are_found_on_any_device(device):
    for where in {"cpu", device}:
        param = Parameter(torch.zeros(2, device=device, dtype=BF16))
        optimizer = adam([param], device, lr=1.0)
        param.grad = torch.full_like(param, 4.0)
        optimizer.grad_scale = torch.tensor(4.0, device=where)
        optimizer.found_inf = torch.tensor(1.0, device=where)
        optimizer.step()
        assert torch.equal(param, torch.zeros_like(param))
        assert optimizer.state[param]["step"].item() == 0
        optimizer.found_inf = torch.tensor(0.0, device=where)
        optimizer.step()
        assert optimizer.state[param]["exp_avg"][0].item() == pytest.approx(0.1)


@needs_cuda
def test_scaler_on_cuda_for_parameters_on_the_cpu(monkeypatch):
    param = Parameter(torch.zeros(2))
    optimizer = adam([param])
    scaler = waiting_scaler(monkeypatch, "cuda", init_scale=8.0)
    for overflow in (True, False):
        scaler.scale(torch.zeros((), device="cuda"))
        param.grad = torch.full_like(param, float("inf") if overflow else scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.state[param]["step"].item() == 1
    assert optimizer.state[param]["exp_avg"][0].item() == pytest.approx(0.1)
