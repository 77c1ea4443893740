"""What torch promises of every optimizer: closures, hooks, versions, threads, memory, compile."""

import resource
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from optim_cases import (
    BF16,
    adam,
    assert_close,
    assert_in_buffers,
    assert_same_bits,
    give_grads,
    make_params,
    needs_cuda,
    on_each_device,
    torch_adam,
    twins,
)
from torch.nn import Parameter

from deepspeed_ext.optim import FusedAdam


@on_each_device
def test_closure(device):
    param = Parameter(torch.tensor([3.0], device=device))
    optimizer = adam([param], device, lr=0.1)

    def closure():
        optimizer.zero_grad()
        assert torch.is_grad_enabled()
        loss = (param * param).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[0] == 9.0 and losses == sorted(losses, reverse=True)
    assert optimizer.step() is None


def test_hooks_of_a_step():
    param = Parameter(torch.ones(2))
    optimizer = adam([param])
    param.grad = torch.ones(2)
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(len(o.state)))
    optimizer.register_step_post_hook(lambda o, *_: seen.append(o.state[param]["step"].item()))
    optimizer.step()
    optimizer.step()
    assert seen == [0, 1.0, 1, 2.0]


@on_each_device
@pytest.mark.parametrize("missing", [False, True])
def test_backward_notices_that_a_parameter_changed(device, missing):
    params = [Parameter(torch.ones(2, device=device)) for _ in range(2)]
    optimizer = adam(params, device)
    for p in params:
        p.grad = torch.ones_like(p)
    losses = [(p * p).sum() for p in params]
    if missing:
        params[1].grad = None
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[0].backward()
    if missing:
        losses[1].backward()


def test_state_has_version_counters_too():
    param = Parameter(torch.ones(2))
    optimizer = adam([param])
    param.grad = torch.ones(2)
    optimizer.step()
    before = {key: value._version for key, value in optimizer.state[param].items()}
    optimizer.step()
    assert all(value._version > before[key] for key, value in optimizer.state[param].items())


def test_under_torch_compile():
    params = make_params()
    exact = twins(params, torch.float64)
    optimizer, theirs = adam(params, lr=1e-2), torch_adam(exact, lr=1e-2)
    graphs = []
    step = torch.compile(lambda: optimizer.step(), backend=lambda graph, _: graphs.append(graph))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        give_grads(generator, params, exact)
        step()
        theirs.step()
    assert_close(params, exact, 3)
    assert not graphs  # the step is left alone


def test_two_optimizers_in_two_threads():
    def run(seed, results):
        params = make_params(seed=seed) + make_params(dtype=BF16, seed=seed)
        optimizer = adam(params, lr=1e-2, master_weights=True)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(30):
            give_grads(generator, params, missing=0.2)
            optimizer.step()
        results[seed] = params

    alone, together = {}, {}
    for seed in (0, 1):
        run(seed, alone)
    threads = [threading.Thread(target=run, args=(seed, together)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (0, 1):
        assert_same_bits(together[seed], alone[seed])


@pytest.mark.usefixtures("garbage_stays")
def test_memory_goes_with_the_last_reference():
    """Not at the next garbage collection, which knows nothing about the size of tensors."""
    params = [Parameter(torch.ones(1000)) for _ in range(3)]
    for p in params:
        p.grad = torch.ones(1000)
    optimizer = adam(params)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    entry = optimizer.state[params[0]]
    buffer = weakref.ref(optimizer._plans._plans[0].buckets[0])
    alive = weakref.ref(optimizer)
    del optimizer
    assert alive() is None and buffer() is None
    entry["exp_avg"] = None  # an entry that has outlived its optimizer is just a dict


def test_a_thousand_optimizers_leave_nothing_behind():
    param = Parameter(torch.ones(8000))
    param.grad = torch.ones(8000)

    def resident_bytes_after(count):
        for _ in range(count):
            optimizer = adam([param])
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident_bytes_after(100)
    assert resident_bytes_after(1000) - before < 0.1 * 1000 * 8 * 8000


LOAD = """
import sys, torch, resource
from deepspeed_ext.optim import DeepSpeedCPUAdam

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

params = [torch.nn.Parameter(torch.empty(1 << 18, dtype=torch.bfloat16)) for _ in range(32)]
optimizer = DeepSpeedCPUAdam(params)
entry = lambda p: dict(step=3, exp_avg=torch.zeros(p.shape), exp_avg_sq=torch.zeros(p.shape))
saved = optimizer.state_dict()
saved["state"] = {i: entry(p) for i, p in enumerate(params)}
before = peak()
optimizer.load_state_dict(saved)
print((peak() - before) / sum(p.numel() * 8 for p in params))
before = peak()
optimizer.load_state_dict(saved)
print((peak() - before) / sum(p.numel() * 8 for p in params))
"""


def test_loading_takes_the_memory_of_the_state_and_no_more():
    program = [sys.executable, "-c", LOAD]
    run = subprocess.run(program, capture_output=True, text=True, check=True)
    first, again = map(float, run.stdout.split())
    assert first < 1.1 and again < 1.1  # as in torch: the old state goes when the new one is there


@on_each_device
def test_zero_grad(device):
    param = Parameter(torch.ones(2, device=device))
    optimizer = adam([param], device)
    param.grad = torch.ones_like(param)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(param.grad, torch.zeros_like(param))
    optimizer.zero_grad()
    assert param.grad is None


@needs_cuda
def test_fused_adam_may_keep_gradients():
    param = Parameter(torch.ones(2, device="cuda"))
    optimizer = FusedAdam([param], set_grad_none=False)
    param.grad = torch.ones_like(param)
    optimizer.zero_grad()
    assert torch.equal(param.grad, torch.zeros_like(param))
    optimizer.zero_grad(set_to_none=True)
    assert param.grad is None


def test_named_parameters_and_groups():
    model = torch.nn.Linear(3, 2)
    groups = [
        {"params": [("weight", model.weight)], "lr": 1.0, "betas": [0.5, 0.5]},
        {"params": [("bias", model.bias)]},
    ]
    optimizer = adam(groups, lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    optimizer.step()
    assert_close([model.weight, model.bias], [weight - 1.0, bias - 0.5])
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight"]


def test_big_parameters_get_buffers_of_bounded_size(monkeypatch):
    monkeypatch.setattr("deepspeed_ext.optim.buckets._MAX_ELEMENTS", 512)
    params = [Parameter(torch.randn(n)) for n in (100, 1000, 300, 200, 10, 0)]
    exact = twins(params, torch.float64)
    optimizer, theirs = adam(params), torch_adam(exact)
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        give_grads(generator, params, exact, missing=0.3)
        optimizer.step()
        theirs.step()
    assert_close(params, exact, 3)
    assert_in_buffers(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    [plan] = optimizer._plans.current(optimizer)
    lengths = [bucket.buffers["exp_avg"][0].numel() for bucket in plan.buckets]
    assert lengths == [128, 1024, 320, 320]
