"""Names, arguments and attributes of the older libraries' optimizers, for code written for them."""

import copy
import math
import pickle
import re

import pytest
import torch
from optim_cases import (
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
)
from torch.nn import Parameter

from deepspeed_ext.optim import CPUAdam, DeepSpeedCPUAdam, FusedAdam, HybridAdam

CLASSES = pytest.mark.parametrize(
    ("kind", "device"),
    [
        (CPUAdam, "cpu"),
        (HybridAdam, "cpu"),
        (DeepSpeedCPUAdam, "cpu"),
        *(
            pytest.param(kind, "cuda", marks=needs_cuda)
            for kind in (CPUAdam, HybridAdam, FusedAdam)
        ),
    ],
)


def refused(text, kind=ValueError):
    return pytest.raises(kind, match=f"^{re.escape(text)}$")


@on_each_device
@pytest.mark.parametrize("mode", [True, False])
def test_adam_w_mode(device, mode):
    optimizer = adam([Parameter(torch.ones(2, device=device))], device, decoupled=mode)
    assert optimizer.adam_w_mode is mode
    assert copy.deepcopy(optimizer).adam_w_mode is mode
    assert pickle.loads(pickle.dumps(optimizer)).adam_w_mode is mode
    other = adam([Parameter(torch.ones(2, device=device))], device, decoupled=not mode)
    other.load_state_dict(snapshot(optimizer))
    assert other.adam_w_mode is mode
    group = {"params": [Parameter(torch.ones(2, device=device))], "decoupled_weight_decay": False}
    optimizer.add_param_group(group)
    assert optimizer.adam_w_mode is False


@pytest.mark.parametrize("kind", [CPUAdam, HybridAdam])
def test_arguments_in_their_old_order(kind):
    param = Parameter(torch.ones(2))
    optimizer = kind([param], 1e-2, True, (0.8, 0.9), 1e-6, 0.1, False, 0.0, None)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (1e-2, (0.8, 0.9), 1e-6)
    assert (group["weight_decay"], optimizer.adam_w_mode) == (0.1, False)
    assert isinstance(optimizer, HybridAdam)
    kind([param], nvme_offload_fraction=0, nvme_offload_dir="/nowhere")
    for fraction in (0.5, 1.0, math.nan):
        with refused(
            f"{kind.__name__}: nvme_offload_fraction is {fraction}, expected 0; "
            "state_dtype=torch.uint8 makes state smaller, and "
            "deepspeed_ext.io.TensorStore keeps tensors on disk"
        ):
            kind([param], nvme_offload_fraction=fraction)


@CLASSES
def test_steps_as_adamw(kind, device):
    params = make_params(device)
    exact = [Parameter(p.detach().double()) for p in params]
    ours, theirs = kind(params, lr=1e-2, weight_decay=0.1), torch_adam(exact, lr=1e-2)
    theirs.param_groups[0]["weight_decay"] = 0.1
    generator = torch.Generator().manual_seed(1)
    for div_scale in (-1, 4.0, 1, 0.5, 65536.0):
        give_grads(generator, params)
        before = [p.grad.clone() for p in params]
        for p, q in zip(params, exact, strict=True):
            q.grad = p.grad.double() / (div_scale if div_scale > 0 else 1)
        assert ours.step(div_scale=div_scale) is None
        theirs.step()
        assert_same_bits([p.grad for p in params], before)
    assert_close(params, exact, 5)
    with_closure = ours.step(lambda: 3.0, 2.0)
    assert with_closure == 3.0 and ours.state[params[0]]["step"].item() == 6


@CLASSES
def test_div_scale_beside_grad_scale_and_found_inf(kind, device):
    """As GradScaler hands them over: scaler.step(optimizer, div_scale=...)."""
    param = Parameter(torch.ones(2, device=device))
    optimizer = kind([param], betas=(0.0, 0.999))
    param.grad = torch.full_like(param, 48.0)
    optimizer.grad_scale = torch.tensor([4.0], device=device)
    optimizer.step(div_scale=2.0)
    assert optimizer.state[param]["exp_avg"].tolist() == [6.0, 6.0]
    optimizer.found_inf = torch.tensor(1.0, device=device)
    before = copy.deepcopy([param, *state_tensors(optimizer)])
    optimizer.step(div_scale=2.0)
    assert_same_bits([param, *state_tensors(optimizer)], before)
    assert optimizer.grad_scale.tolist() == [4.0]
    del optimizer.found_inf, optimizer.grad_scale
    optimizer.step()  # which has forgotten the scale
    assert optimizer.state[param]["exp_avg"].tolist() == [48.0, 48.0]


@CLASSES
def test_hooks_run_once(kind, device):
    param = Parameter(torch.ones(2, device=device))
    optimizer = kind([param])
    param.grad = torch.ones_like(param)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for call in (lambda: optimizer.step(div_scale=2.0), lambda: optimizer.clip_and_step(1.0)):
        call()
        assert calls == ["pre", "post"]
        calls.clear()


WANT = "expected above 0 (2**-126 to below inf), or -1 not to divide"
NUMBER = "expected a number; set the attribute grad_scale to divide by a tensor"


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (0, ValueError, f"0, {WANT}"),
        (0.0, ValueError, f"0.0, {WANT}"),
        (-2.0, ValueError, f"-2.0, {WANT}"),
        (math.nan, ValueError, f"nan, {WANT}"),
        (math.inf, ValueError, f"inf, {WANT}"),
        (1e-45, ValueError, f"1e-45, {WANT}"),  # 1 / 1e-45 is inf in float32
        ("2", TypeError, f"'2', {NUMBER}"),
        (True, TypeError, f"True, {NUMBER}"),
        (None, TypeError, f"None, {NUMBER}"),
        (torch.tensor(2.0), TypeError, f"tensor(2.), {NUMBER}"),
    ],
)
def test_div_scale_that_cannot_be(wrong, kind, text):
    param = Parameter(torch.ones(2))
    optimizer = CPUAdam([param])
    param.grad = torch.ones(2)
    with refused(f"CPUAdam: div_scale is {text}", kind):
        optimizer.step(div_scale=wrong)
    with refused(f"CPUAdam: div_scale is {text}", kind):
        optimizer.step(lambda: pytest.fail("the closure ran"), wrong)
    assert torch.equal(param, torch.ones(2)) and not optimizer.state


def test_a_step_that_fails_forgets_the_scale():
    param = Parameter(torch.ones(2))
    optimizer = CPUAdam([param], betas=(0.0, 0.999))

    def closure():
        raise KeyError("closure")

    with pytest.raises(KeyError):
        optimizer.step(closure, div_scale=2.0)
    param.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].tolist() == [1.0, 1.0]


@needs_cuda
def test_div_scale_in_a_cuda_graph_and_without_waiting():
    param = Parameter(torch.ones(2, device="cuda"))
    optimizer = FusedAdam([param], betas=(0.0, 0.999))
    param.grad = torch.full_like(param, 8.0)
    optimizer.step(div_scale=2.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step(div_scale=2.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step(div_scale=4.0)
    for _ in range(2):
        graph.replay()
    assert optimizer.state[param]["exp_avg"].tolist() == [2.0, 2.0]
    assert optimizer.state[param]["step"].item() == 4


def test_a_scaler_that_unscales_before_the_step():
    """For trainers that clip between: they ask this attribute who unscales."""
    param, twin = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    ours, theirs = adam([param]), adam([twin])
    ours._step_supports_amp_scaling = False
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for values in ([3.0, 4.0], [math.inf, 4.0], [-3.0, 4.0]):
        scaler.scale(torch.zeros(()))
        scale = scaler.get_scale()
        param.grad, twin.grad = torch.tensor(values) * scale, torch.tensor(values)
        scaler.unscale_(ours)
        torch.nn.utils.clip_grad_norm_(param, 1.0)
        scaler.step(ours)
        scaler.update()
        theirs.clip_and_step(1.0)
    torch.testing.assert_close(param, twin, rtol=1e-6, atol=0)
    assert ours.state[param]["step"].item() == theirs.state[twin]["step"].item() == 2
