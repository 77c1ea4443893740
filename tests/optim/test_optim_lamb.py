"""FusedLamb beside the algorithm of the paper in plain torch: options, clipping, coefficients."""

import copy
import io
import pickle

import pytest
import torch
from optim_cases import (
    BF16,
    F16,
    F32,
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

from deepspeed_ext.optim import FusedLamb

STEPS = 20


class PlainLamb(torch.optim.Optimizer):
    """You et al. 2020, Algorithm 2, one parameter after the other, in the dtype of parameters."""

    def __init__(self, params, **options):
        defaults = dict(
            lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, bias_correction=True,
            eps_inside_sqrt=False, min_coeff=0.01, max_coeff=10.0, maximize=False,
            max_grad_norm=0.0,
        )  # fmt: skip
        super().__init__(params, defaults | options)

    @torch.no_grad()
    def step(self):
        self.coefficients = []
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = sum(grad.square().sum() for grad in grads if grad is not None) ** 0.5
        for group in self.param_groups:
            largest = group["max_grad_norm"]
            divisor = max(1.0, (norm + 1e-6) / largest) if largest > 0 else 1.0
            for p in group["params"]:
                if p.grad is not None:
                    self.step_one(group, p, p.grad / divisor)

    def step_one(self, group, p, grad):
        state = self.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        grad = -grad if group["maximize"] else grad
        state["exp_avg"] = m = beta1 * state["exp_avg"] + (1 - beta1) * grad
        state["exp_avg_sq"] = v = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad**2
        if group["bias_correction"]:
            m, v = m / (1 - beta1 ** state["step"]), v / (1 - beta2 ** state["step"])
        eps = group["eps"]
        update = m / ((v + eps).sqrt() if group["eps_inside_sqrt"] else v.sqrt() + eps)
        update = update + group["weight_decay"] * p
        coefficient = 1.0
        if p.norm() > 0 and update.norm() > 0:
            coefficient = float(p.norm() / update.norm())
            coefficient = min(max(coefficient, group["min_coeff"]), group["max_coeff"])
        self.coefficients.append(coefficient)
        p -= group["lr"] * coefficient * update


OPTIONS = {
    "defaults": {},
    "decay": {"weight_decay": 0.1},
    "eps inside": {"eps_inside_sqrt": True, "eps": 1e-3, "weight_decay": 0.01},
    "uncorrected": {"bias_correction": False, "eps": 1e-6, "betas": (0.5, 0.9)},
    "bounds": {"min_coeff": 0.8, "max_coeff": 1.1, "maximize": True},
    "clipped": {"max_grad_norm": 2.0, "weight_decay": 0.01},
}


@on_each_device
@pytest.mark.parametrize("name", OPTIONS)
def test_random_steps(device, name):
    params = make_params(device)
    exact = twins(params, torch.float64)
    ours = FusedLamb(params, lr=1e-2, **OPTIONS[name])
    theirs = PlainLamb(exact, lr=1e-2, **OPTIONS[name])
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        give_grads(generator, params, exact, missing=0.3 if step else 0.0)
        ours.step()
        theirs.step()
        got = ours.get_lamb_coeffs()
        assert got == pytest.approx(theirs.coefficients, rel=1e-4)
    assert_close(params, exact, 4 * STEPS)
    for p, e in zip(params, exact, strict=True):
        assert ours.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert ours.state[p]["step"].item() == theirs.state[e]["step"]
        assert ours.state[p]["exp_avg"].stride() == p.stride()
    assert_in_buffers(ours)


@on_each_device
def test_groups_have_options_of_their_own(device):
    params = make_params(device)
    exact = twins(params, torch.float64)

    def groups(model):
        fixed = {"params": model[:4], "weight_decay": 0.0, "min_coeff": 1.0, "max_coeff": 1.0}
        return [fixed, {"params": model[4:], "lr": 3e-3, "betas": (0.8, 0.9)}]

    ours = FusedLamb(groups(params), lr=1e-2, weight_decay=0.1)
    theirs = PlainLamb(groups(exact), lr=1e-2, weight_decay=0.1)
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        give_grads(generator, params, exact)
        ours.step()
        theirs.step()
    assert ours.get_lamb_coeffs()[:4] == [1.0] * 4
    assert_close(params, exact, 20)


@on_each_device
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_masters(device, dtype):
    """Originals in float32, of which the parameters are the rounded values."""
    params = make_params(device, dtype)
    exact = twins(params, torch.float64)
    ours = FusedLamb(params, lr=1e-2, weight_decay=0.1, master_weights=True)
    theirs = PlainLamb(exact, lr=1e-2, weight_decay=0.1)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        give_grads(generator, params, exact)
        for p, e in zip(params, exact, strict=True):
            e.grad = p.grad.double().contiguous()
        ours.step()
        theirs.step()
    masters = [ours.state[p]["master_param"] for p in params]
    assert_close(masters, exact, 20)
    assert_same_bits(params, [master.to(dtype) for master in masters])


@on_each_device
@pytest.mark.parametrize("state_dtype", [BF16, torch.uint8])
def test_compact_state_has_nearly_the_same_coefficients(device, state_dtype):
    """And leaves parameters about where they are with state in float32."""
    params, wide = make_params(device, BF16), make_params(device, BF16)
    ours = FusedLamb(params, lr=1e-2, state_dtype=state_dtype, master="remainder")
    theirs = FusedLamb(wide, lr=1e-2, master="float32")
    generator = torch.Generator().manual_seed(7)
    for _ in range(10):
        give_grads(generator, params, wide)
        ours.step()
        theirs.step()
    # A code is off by at most 1/16, which the norm of a single element shows in full.
    assert ours.get_lamb_coeffs() == pytest.approx(theirs.get_lamb_coeffs(), rel=0.15)
    for p, w in zip(params, wide, strict=True):
        torch.testing.assert_close(p, w, rtol=0.05, atol=0.05)


@on_each_device
def test_state_dict_round_trip(device):
    params, more = make_params(device), make_params(device)
    options = dict(lr=1e-2, weight_decay=0.1, max_grad_norm=1.5)
    first, second = FusedLamb(params, **options), FusedLamb(more, lr=1.0, max_grad_norm=1.5)
    generator = torch.Generator().manual_seed(4)
    for step in range(6):
        if step == 3:
            file = io.BytesIO()
            torch.save(snapshot(first), file)
            file.seek(0)
            second.load_state_dict(torch.load(file, weights_only=True))
            for p, m in zip(params, more, strict=True):
                m.data.copy_(p.data)
        give_grads(generator, params, more)
        first.step()
        if step >= 3:
            second.step()
    assert_same_bits(params, more)
    assert_same_bits(state_tensors(first), state_tensors(second))
    assert first.get_lamb_coeffs() == second.get_lamb_coeffs()
    copies = [copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    assert [made.max_grad_norm for made in copies] == [1.5, 1.5]
    assert copies[1].get_lamb_coeffs() == []


@on_each_device
def test_clipping_is_that_of_clip_and_step(device):
    params, more = make_params(device), make_params(device)
    ours, theirs = FusedLamb(params, lr=1e-2, max_grad_norm=0.5), FusedLamb(more, lr=1e-2)
    generator = torch.Generator().manual_seed(5)
    calls = []
    ours.register_step_post_hook(lambda *_: calls.append(0))
    for _ in range(3):
        give_grads(generator, params, more)
        ours.step()
        theirs.clip_and_step(0.5)
    assert_same_bits(params, more)
    assert len(calls) == 3
    params[0].grad[0, 0] = float("inf")
    ours.step()
    assert_same_bits(params, more)
    assert_same_bits(state_tensors(ours), state_tensors(theirs))
    assert ours.skipped_steps == 1


@on_each_device
def test_grad_scaler_and_clipping(device):
    params, more = make_params(device), make_params(device)
    ours, theirs = FusedLamb(params, max_grad_norm=0.5), FusedLamb(more, max_grad_norm=0.5)
    scaler = torch.amp.GradScaler(device, init_scale=64.0)
    generator = torch.Generator().manual_seed(6)
    for step in range(3):
        give_grads(generator, params, more)
        scaler.scale(torch.zeros((), device=device))
        for p in params:
            p.grad.mul_(scaler.get_scale())
        if step == 1:
            params[3].grad.view(-1)[0] = float("nan")
        scaler.step(ours)
        scaler.update()
        if step != 1:
            theirs.step()
    assert_close(params, more, 3)
    assert ours.skipped_steps == 0  # the scaler's


def test_plans_found_outdated_in_the_middle_of_a_step_keep_the_clipping():
    """The second bucket no longer fits when its turn comes: the step goes on, clipped."""
    params, more = ([Parameter(torch.ones(8)) for _ in range(2)] for _ in range(2))
    ours, theirs = (
        FusedLamb([{"params": [p]} for p in model], lr=0.1, max_grad_norm=1e-3)
        for model in (params, more)
    )
    for model in (params, more):
        for p in model:
            p.grad = torch.arange(8.0)
    ours.step()
    theirs.step()

    def swap(optimizer, group, work, scalars, apply=ours._apply):
        apply(group, work, scalars)
        if work.params[0] is params[0] and params[1].dtype == F32:
            params[1].data = params[1].data.to(BF16)
            params[1].grad = params[1].grad.to(BF16)

    ours._apply = swap.__get__(ours)
    ours.step()
    theirs.step()
    assert len(ours.get_lamb_coeffs()) == 2
    assert_close(params, more, dtype=BF16)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(amsgrad=True), "amsgrad is True, expected False"),
        (dict(max_grad_norm=-1.0), "max_grad_norm is -1.0, expected at least 0"),
        (dict(eps=-1.0), "eps is -1.0, expected at least 0"),
        (dict(betas=(0.9,)), "betas is (0.9,), expected two numbers"),
        (dict(betas=(0.9, 1.0)), "betas[1] is 1.0, expected at least 0 and below 1"),
        (dict(min_coeff=-0.1), "min_coeff is -0.1, expected at least 0"),
        (dict(max_coeff=0.001), "max_coeff is 0.001, expected at least min_coeff, 0.01"),
    ],
)
def test_refuses(options, text):
    with pytest.raises(ValueError) as caught:
        FusedLamb([Parameter(torch.ones(2))], **options)
    assert str(caught.value) == f"FusedLamb: {text}"
