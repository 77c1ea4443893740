"""What only a GPU can show: graphs, several devices, other streams."""

import pytest
import torch
from optim_cases import (
    BF16,
    F32,
    adam,
    assert_close,
    assert_same_bits,
    give_grads,
    make_params,
    needs_cuda,
    state_tensors,
    torch_adam,
    twins,
)
from torch.nn import Parameter

from deepspeed_ext.optim import HybridAdam

pytestmark = needs_cuda
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


def same_start(dtype, lr):
    """Two equal optimizers that have stepped once, and static gradients for the first."""
    models = [make_params("cuda", dtype) for _ in range(2)]
    options = {"lr": lr, "weight_decay": 0.1, "amsgrad": True, "master_weights": True}
    optimizers = [adam(params, "cuda", **options) for params in models]
    generator = torch.Generator().manual_seed(1)
    give_grads(generator, *models)
    for optimizer in optimizers:
        optimizer.step()
    return models, optimizers, generator


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_replayed_graph_equals_eager_steps(dtype):
    lr = torch.tensor(1e-2, device="cuda")
    models, (captured, eager), generator = same_start(dtype, lr)
    scale = torch.tensor(2.0, device="cuda")
    found_inf = torch.tensor(0.0, device="cuda")
    for optimizer in (captured, eager):
        optimizer.grad_scale, optimizer.found_inf = scale, found_inf
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for step in range(5):
        fresh = twins(models[0])
        give_grads(generator, fresh)
        for params in models:
            for p, f in zip(params, fresh, strict=True):
                p.grad.copy_(f.grad)
        lr.fill_(1e-2 / (step + 1))
        found_inf.fill_(float(step == 2))
        graph.replay()
        eager.step()
        assert_same_bits(models[0], models[1])
        assert_same_bits(state_tensors(captured), state_tensors(eager))
    assert captured.state[models[0][0]]["step"].item() == 5


def test_first_step_in_a_capture_is_refused():
    param = Parameter(torch.ones(4, device="cuda"))
    param.grad = torch.ones_like(param)
    optimizer = adam([param], "cuda")
    graph = torch.cuda.CUDAGraph()
    text = r"a CUDA graph is being captured, expected at least one step before"
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match=text):
        optimizer.step()


def test_step_does_not_wait_for_the_device():
    params = make_params("cuda") + make_params("cuda", BF16)
    optimizer = adam(params, "cuda", lr=torch.tensor(1e-2, device="cuda"), master_weights=True)
    give_grads(torch.Generator().manual_seed(2), params)
    optimizer.step()
    optimizer.grad_scale = torch.tensor(2.0, device="cuda")
    optimizer.found_inf = torch.tensor(0.0, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_two
def test_two_devices_in_one_group():
    params = make_params("cuda:0") + make_params("cuda:1")
    same = twins(params)
    optimizer = adam(params, "cuda", lr=torch.tensor(1e-2, device="cuda:1"))
    theirs = torch_adam(same, lr=1e-2, fused=True)
    give_grads(torch.Generator().manual_seed(3), params, same)
    optimizer.step()
    theirs.step()
    torch.testing.assert_close([p.cpu() for p in params], [p.cpu() for p in same])


@needs_cuda
def test_hybrid_adam_steps_parameters_where_they_are():
    params = [p for pair in zip(make_params("cpu"), make_params("cuda"), strict=True) for p in pair]
    exact = twins(params, torch.float64)
    numbers = dict(lr=1e-2, weight_decay=0.1)
    ours, theirs = HybridAdam(params, **numbers), torch_adam(exact, **numbers)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        if step == 3:  # one goes to the GPU, one comes back
            for i, device in ((0, "cuda"), (1, "cpu")):
                params[i].data = params[i].data.to(device)
        give_grads(generator, params, exact)
        norm = ours.clip_and_step(1.0)
        wanted = torch.nn.utils.clip_grad_norm_(exact, 1.0, foreach=False)
        theirs.step()
        assert abs(float(norm) - float(wanted)) < 1e-4 * float(wanted)
    assert_close(params, exact, 6)
    params[2].grad[0] = float("nan")
    before = [p.detach().clone() for p in params]
    ours.clip_and_step(1.0)
    assert all(map(torch.equal, params, before)) and ours.skipped_steps == 1
