"""Lars beside the algorithm of the paper in plain torch: options, groups, state."""

import pytest
import torch
from optim_cases import (
    BF16,
    F16,
    assert_close,
    assert_in_buffers,
    assert_same_bits,
    give_grads,
    make_params,
    on_each_device,
    snapshot,
    state_tensors,
    twins,
)
from torch.nn import Parameter

from deepspeed_ext.optim import Lars

STEPS = 20


class PlainLars(torch.optim.Optimizer):
    """You, Gitman & Ginsburg 2017, Algorithm 1, one parameter after the other."""

    def __init__(self, params, **options):
        defaults = dict(
            lr=1e-3, momentum=0.0, eeta=1e-3, weight_decay=0.0, epsilon=0.0, maximize=False
        )
        super().__init__(params, defaults | options)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, size, decay = p.grad, p.norm(), group["weight_decay"]
                trust = 1.0
                if size > 0 and grad.norm() > 0:
                    divisor = grad.norm() + decay * size + group["epsilon"]
                    trust = group["eeta"] * size / divisor
                grad = -grad if group["maximize"] else grad
                delta = group["lr"] * trust * (grad + decay * p)
                old = self.state[p].get("buffer", 0)
                self.state[p]["buffer"] = delta = group["momentum"] * old + delta
                p -= delta


OPTIONS = {
    "defaults": {},
    "momentum": {"momentum": 0.9, "eeta": 0.02},
    "decay": {"momentum": 0.9, "weight_decay": 0.1, "eeta": 0.1},
    "maximize": {"maximize": True, "epsilon": 0.3, "eeta": 0.1, "weight_decay": 0.01},
}


@on_each_device
@pytest.mark.parametrize("name", OPTIONS)
def test_random_steps(device, name):
    params = make_params(device)
    exact = twins(params, torch.float64)
    ours = Lars(params, lr=0.1, **OPTIONS[name])
    theirs = PlainLars(exact, lr=0.1, **OPTIONS[name])
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        give_grads(generator, params, exact, missing=0.3 if step else 0.0)
        if step == 7:
            for p in (params[0], exact[0]):
                p.grad.zero_()
        ours.step()
        theirs.step()
    assert_close(params, exact, STEPS)
    keys = {"step", "momentum_buffer"} if "momentum" in OPTIONS[name] else {"step"}
    assert all(ours.state[p].keys() == keys for p in params)
    assert_in_buffers(ours)


@on_each_device
def test_groups_have_options_of_their_own_and_may_change_them(device):
    params = make_params(device)
    exact = twins(params, torch.float64)

    def groups(model):
        return [{"params": model[:4], "momentum": 0.9}, {"params": model[4:], "eeta": 0.1}]

    ours, theirs = Lars(groups(params), lr=0.1), PlainLars(groups(exact), lr=0.1)
    generator = torch.Generator().manual_seed(2)
    for step in range(6):
        if step == 3:
            for optimizer in (ours, theirs):
                optimizer.param_groups[1]["momentum"] = 0.5
            for p in exact[4:]:
                theirs.state[p]["buffer"] = torch.zeros_like(p)  # begins with this momentum
        give_grads(generator, params, exact)
        ours.step()
        theirs.step()
    assert_close(params, exact, 10)
    assert all(ours.state[p]["step"].item() == 6 for p in params)
    assert_in_buffers(ours)


@on_each_device
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_masters(device, dtype):
    params = make_params(device, dtype)
    exact = twins(params, torch.float64)
    options = dict(lr=0.1, eeta=0.1, momentum=0.9, weight_decay=0.1)
    ours, theirs = Lars(params, master_weights=True, **options), PlainLars(exact, **options)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        give_grads(generator, params, exact)
        for p, e in zip(params, exact, strict=True):
            e.grad = p.grad.double().contiguous()
        ours.step()
        theirs.step()
    masters = [ours.state[p]["master_param"] for p in params]
    assert_close(masters, exact, 10)
    assert_same_bits(params, [master.to(dtype) for master in masters])


@on_each_device
def test_state_dict_round_trip(device):
    params, more = make_params(device), make_params(device)
    options = dict(lr=0.1, eeta=0.1, momentum=0.9, weight_decay=0.1)
    first, second = Lars(params, **options), Lars(more)
    generator = torch.Generator().manual_seed(4)
    for step in range(6):
        if step == 3:
            second.load_state_dict(snapshot(first))
            for p, m in zip(params, more, strict=True):
                m.data.copy_(p.data)
        give_grads(generator, params, more)
        first.step()
        if step >= 3:
            second.step()
    assert_same_bits(params, more)
    assert_same_bits(state_tensors(first), state_tensors(second))


@on_each_device
def test_clip_and_step_divides_first(device):
    """The norms of LARS are of the clipped gradients."""
    params, more = make_params(device), make_params(device)
    ours, theirs = (Lars(model, lr=0.1, eeta=0.1, epsilon=1.0) for model in (params, more))
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        give_grads(generator, params, more)
        ours.clip_and_step(0.5)
        torch.nn.utils.clip_grad_norm_(more, 0.5)
        theirs.step()
    assert_close(params, more, 3)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(momentum=1.0), "momentum is 1.0, expected at least 0 and below 1"),
        (dict(eeta=-1.0), "eeta is -1.0, expected at least 0"),
        (dict(epsilon=-1.0), "epsilon is -1.0, expected at least 0"),
    ],
)
def test_refuses(options, text):
    with pytest.raises(ValueError) as caught:
        Lars([Parameter(torch.ones(2))], **options)
    assert str(caught.value) == f"Lars: {text}"
