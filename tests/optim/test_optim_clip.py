"""clip_and_step: against unscale, clip_grad_norm_ and step in float64; inf changes nothing."""

import copy
import re
import warnings

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

from deepspeed_ext.optim import DeepSpeedCPUAdagrad

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


def clip_exactly(params, optimizer, max_norm, scale=1.0):
    """What clip_and_step does, of float64 parameters in torch."""
    grads = [p.grad for p in params if p.grad is not None]
    for grad in grads:
        grad /= scale
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
    optimizer.step()
    return norm


@on_each_device
@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_equals_unscale_clip_and_step(device, dtype, scale):
    params = make_params(device, dtype)
    exact = [Parameter(p.detach().double()) for p in params]
    ours = adam(params, device, **OPTIONS, master_weights=True)
    theirs = torch_adam(exact, **OPTIONS)
    if scale:
        ours.grad_scale = torch.tensor(scale, device=device)
    generator = torch.Generator().manual_seed(1)
    for step, max_norm in enumerate((0.5, 1e6, 3.0, float("inf"), 1e-3)):
        give_grads(generator, params, missing=0.3, factor=(scale or 1.0) * (step + 1))
        before = [p.grad.clone() if p.grad is not None else None for p in params]
        for p, q in zip(params, exact, strict=True):
            q.grad = p.grad.double() if p.grad is not None else None
        norm = ours.clip_and_step(max_norm)
        expected = clip_exactly(exact, theirs, max_norm, scale or 1.0)
        assert norm.shape == () and norm.dtype == F32 and norm.device == params[0].device
        torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
        for p, grad in zip(params, before, strict=True):
            assert p.grad is None or torch.equal(p.grad, grad)
    master_weights = [ours.state[p].get("master_param", p) for p in params]
    assert_close(master_weights, exact, 5)
    for p, q in zip(params, exact, strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert_close([ours.state[p][key]], [theirs.state[q][key]], 5)
    assert ours.skipped_steps == 0
    assert hasattr(ours, "grad_scale") == bool(scale) and not hasattr(ours, "found_inf")


@on_each_device
def test_gradients_of_several_dtypes_and_groups_count_together(device):
    params = [Parameter(torch.zeros(2, device=device, dtype=d)) for d in (F32, BF16, F16, F32)]
    optimizer = adam([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], device)
    for p, value in zip(params, (1.0, 2.0, 3.0, 4.0), strict=True):
        p.grad = torch.full_like(p, value)
    params[3].grad = torch.full((2, 2), 4.0, device=device)[:, 0]  # not dense
    assert optimizer.clip_and_step(1.0).item() == pytest.approx(60**0.5, rel=1e-6)
    for p, value in zip(params, (1.0, 2.0, 3.0, 4.0), strict=True):
        expected = torch.full((2,), 0.1 * value / 60**0.5, device=device)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], expected, rtol=1e-5, atol=0)


@on_each_device
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("which", [0, 8])
def test_inf_or_nan_changes_nothing(device, bad, which):
    params = make_params(device) + make_params(device, BF16)
    optimizer = adam(
        [{"params": params[:9]}, {"params": params[9:]}], device, **OPTIONS, master_weights=True
    )
    generator = torch.Generator().manual_seed(2)
    give_grads(generator, params)
    optimizer.clip_and_step(1.0)
    before = copy.deepcopy((params, state_tensors(optimizer)))
    for group in (0, 9):
        give_grads(generator, params)
        params[which + group].grad.view(-1)[-1] = bad
        assert not optimizer.clip_and_step(1.0).isfinite()
        assert_same_bits(params, before[0])
        assert_same_bits(state_tensors(optimizer), before[1])
    assert optimizer.skipped_steps == 2
    give_grads(generator, params)
    optimizer.clip_and_step(1.0)
    assert optimizer.skipped_steps == 2
    assert {float(optimizer.state[p]["step"]) for p in params} == {2.0}


@on_each_device
def test_finite_gradients_never_count_as_inf(device):
    param = Parameter(torch.zeros(4, device=device))
    optimizer = adam([param], device)
    param.grad = torch.full_like(param, 3e38)
    norm = optimizer.clip_and_step(1.0)
    assert norm.item() == torch.finfo(F32).max  # it is larger, but inf would mean a skip
    assert optimizer.skipped_steps == 0
    torch.testing.assert_close(
        optimizer.state[param]["exp_avg"], torch.full_like(param, 0.05), rtol=1e-5, atol=0
    )


@on_each_device
def test_found_inf_of_the_scaler_skips(device):
    param = Parameter(torch.ones(3, device=device))
    optimizer = adam([param], device)
    param.grad = torch.ones_like(param)
    optimizer.found_inf = torch.ones(1, device=device)
    optimizer.clip_and_step(1.0)
    assert torch.equal(param, torch.ones_like(param)) and optimizer.skipped_steps == 1
    assert optimizer.found_inf.item() == 1


@on_each_device
def test_with_grad_scaler(device):
    scaler = torch.amp.GradScaler(device, init_scale=64.0)
    params = twins(make_params(device))
    exact = twins(params, torch.float64)
    ours, theirs = adam(params, device, **OPTIONS), torch_adam(exact, **OPTIONS)
    generator = torch.Generator().manual_seed(3)
    for bad in (False, True, False):
        give_grads(generator, params, exact)
        scale = scaler.get_scale()
        scaler.scale(torch.zeros((), device=device))
        for p in params:
            p.grad *= scale
        if bad:
            params[0].grad[0, 0] = float("inf")
        scaler.unscale_(ours)
        ours.clip_and_step(1.0)
        scaler.update()
        if not bad:
            clip_exactly(exact, theirs, 1.0)
    assert scaler.get_scale() == 32.0 and ours.skipped_steps == 1
    assert_close(params, exact, 3)


def test_hooks_and_schedulers_see_a_step():
    param = Parameter(torch.ones(3))
    optimizer = adam([param])
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    param.grad = torch.ones(3)
    optimizer.clip_and_step(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    assert seen == ["pre", "post"]


def test_without_gradients():
    param = Parameter(torch.ones(3))
    optimizer = adam([param])
    assert optimizer.clip_and_step(1.0).item() == 0
    assert optimizer.skipped_steps == 0 and not optimizer.state_dict()["state"]


def test_copies_count_anew():
    param = Parameter(torch.ones(3))
    optimizer = adam([param])
    param.grad = torch.full((3,), float("nan"))
    optimizer.clip_and_step(1.0)
    assert optimizer.skipped_steps == 1
    assert copy.deepcopy(optimizer).skipped_steps == 0
    optimizer.load_state_dict(snapshot(optimizer))
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_max_norm_is_positive(max_norm):
    optimizer = adam([Parameter(torch.ones(3))])
    text = f"DeepSpeedCPUAdam: max_norm is {max_norm}, expected above 0"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        optimizer.clip_and_step(max_norm)


def test_sparse_gradients_are_named_before_anything_is_stepped():
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    first = Parameter(torch.ones(3))
    first.grad = torch.ones(3)
    embedding(torch.tensor([1, 3])).sum().backward()
    optimizer = adam([{"params": [first]}, {"params": embedding.parameters()}])
    text = (
        "DeepSpeedCPUAdam: gradient of params[1] is sparse, expected dense; "
        "use torch.optim.SparseAdam for it"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        optimizer.clip_and_step(1.0)
    assert torch.equal(first, torch.ones(3)) and not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("bad", [False, True])
def test_sparse_gradients_where_the_class_takes_them(bad):
    params = [Parameter(torch.ones(5, 2)), Parameter(torch.ones(3))]
    indices = torch.tensor([[1, 3, 1]])  # a row twice
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, float("inf") if bad else 6.0]])
    params[0].grad = torch.sparse_coo_tensor(indices, values, (5, 2))
    params[1].grad = torch.full((3,), 2.0)
    optimizer = DeepSpeedCPUAdagrad(params, lr=0.1)
    norm = optimizer.clip_and_step(1.0)
    if bad:
        assert norm.isinf() and optimizer.skipped_steps == 1
        assert all(torch.equal(p, torch.ones_like(p)) for p in params)
        return
    expected = (36 + 64 + 9 + 16 + 12) ** 0.5
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    sums = torch.zeros(5, 2)
    sums[1], sums[3] = torch.tensor([36.0, 64.0]), torch.tensor([9.0, 16.0])
    torch.testing.assert_close(optimizer.state[params[0]]["sum"], sums / expected**2)


@needs_cuda
def test_never_waits_for_the_device():
    params = make_params("cuda", BF16)
    optimizer = adam(params, "cuda", **OPTIONS, master_weights=True)
    give_grads(torch.Generator().manual_seed(4), params)
    optimizer.clip_and_step(1.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.clip_and_step(1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.skipped_steps == 0


@needs_cuda
def test_in_a_cuda_graph():
    params = make_params("cuda")
    twin_params = copy.deepcopy(params)
    optimizer, twin = adam(params, "cuda", **OPTIONS), adam(twin_params, "cuda", **OPTIONS)
    generator = torch.Generator().manual_seed(5)
    give_grads(generator, params, twin_params)
    with torch.cuda.stream(torch.cuda.Stream()):
        optimizer.clip_and_step(1.0)
    twin.clip_and_step(1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = optimizer.clip_and_step(1.0)
    for factor in (1.0, float("inf"), 3.0):
        for p, q in zip(params, twin_params, strict=True):
            p.grad.copy_(torch.randn(p.shape, generator=generator))
            p.grad *= factor
            q.grad.copy_(p.grad)
        graph.replay()
        expected = twin.clip_and_step(1.0)
        torch.testing.assert_close(norm, expected, rtol=0, atol=0, equal_nan=True)
    assert_same_bits(params, twin_params)
    assert optimizer.skipped_steps == twin.skipped_steps == 1


@needs_cuda
def test_counter_is_made_before_a_capture():
    params = make_params("cuda")
    optimizer = adam(params, "cuda")
    give_grads(torch.Generator().manual_seed(6), params)
    optimizer.step()
    text = (
        "FusedAdam: a CUDA graph is being captured, "
        "expected at least one call of clip_and_step before, which makes its counter"
    )
    with (
        pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.clip_and_step(1.0)
