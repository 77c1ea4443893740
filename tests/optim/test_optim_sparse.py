"""DeepSpeedCPUAdagrad with sparse gradients, beside torch.optim.Adagrad."""

import copy
import re

import pytest
import torch
from optim_cases import BF16, F32, assert_close, assert_in_buffers, assert_same_bits, snapshot
from torch.nn import Parameter

from deepspeed_ext.optim import DeepSpeedCPUAdagrad

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
OPTIONS = {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}


def sparse(shape, rows, generator, dtype=F32, sparse_dims=1):
    """A gradient of some rows, of which one may come twice."""
    indices = torch.stack(
        [torch.randint(n, (rows,), generator=generator) for n in shape[:sparse_dims]]
    )
    values = torch.randn(rows, *shape[sparse_dims:], generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def make(dtype=F32):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    return [
        Parameter(draw(50, 6)),
        Parameter(draw(7)),
        Parameter(draw(5, 20).t()),
        Parameter(draw(6, 4, 3)),
        Parameter(draw(1000)),
    ]


def give_grads(params, generator, dtype=F32):
    """Sparse ones of several kinds, between dense ones."""
    grads = [
        sparse(params[0].shape, 12, generator, dtype),
        torch.randn(params[1].shape, generator=generator).to(dtype),
        sparse(params[2].shape, 5, generator, dtype),
        sparse(params[3].shape, 7, generator, dtype, sparse_dims=2),
        sparse(params[4].shape, int(torch.randint(3, (), generator=generator)), generator, dtype),
    ]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


@pytest.mark.parametrize("maximize", [False, True])
def test_matches_torch(maximize):
    params = make()
    exact = [Parameter(p.detach().double().contiguous()) for p in params]
    ours = DeepSpeedCPUAdagrad(params, maximize=maximize, **OPTIONS)
    theirs = torch.optim.Adagrad(exact, maximize=maximize, **OPTIONS)
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        give_grads(params, generator)
        for p, e in zip(params, exact, strict=True):
            e.grad = p.grad.double()
        ours.step()
        theirs.step()
    assert_close(params, exact, 30)
    for p, e in zip(params, exact, strict=True):
        assert ours.state[p]["step"].item() == 30
        assert_close([ours.state[p]["sum"]], [theirs.state[e]["sum"]], 30)
    assert_in_buffers(ours)


def test_touches_only_the_rows_of_the_gradient():
    params = [Parameter(torch.randn(5, 3))]
    optimizer = DeepSpeedCPUAdagrad(params)
    params[0].grad = torch.sparse_coo_tensor([[3, 1, 3]], torch.ones(3, 3), (5, 3))
    optimizer.step()  # makes the state
    before = params[0].detach().clone()
    params[0].data[0] = float("nan")
    optimizer.state[params[0]]["sum"][0] = float("nan")
    optimizer.step()
    changed = (params[0].detach() != before).all(1)
    assert changed.tolist() == [True, True, False, True, False]
    assert torch.equal(optimizer.state[params[0]]["sum"][1:, 0], torch.tensor([2.0, 0, 8, 0]))


@pytest.mark.parametrize("grad_dtype", [F32, BF16])
def test_master_weights_and_gradients_of_another_dtype(grad_dtype):
    """Rows step as the same rows of dense gradients do, to the bit, on 16-bit parameters too."""
    sparse_params, dense_params = make(BF16), make(BF16)
    ours = DeepSpeedCPUAdagrad(sparse_params, master_weights=True, **OPTIONS)
    same = DeepSpeedCPUAdagrad(dense_params, master_weights=True, **OPTIONS)
    generator = torch.Generator().manual_seed(2)
    for _ in range(10):
        give_grads(sparse_params, generator, BF16)
        for p, d in zip(sparse_params, dense_params, strict=True):
            p.grad.data = p.grad.coalesce() if p.grad.is_sparse else p.grad
            d.grad = p.grad.to_dense()
            for param in (p, d):
                param.grad.data = param.grad.data.to(grad_dtype)
        ours.step()
        same.step()
    assert_same_bits(sparse_params, dense_params)
    for p, d in zip(sparse_params, dense_params, strict=True):
        for key, value in same.state[d].items():
            assert torch.equal(ours.state[p][key], value), key
    assert_in_buffers(ours)


def test_scaled_gradients_and_skipped_steps():
    params, unscaled = make(), make()
    ours, same = (DeepSpeedCPUAdagrad(model, **OPTIONS) for model in (params, unscaled))
    generator = torch.Generator().manual_seed(3)
    give_grads(unscaled, generator)
    for p, u in zip(params, unscaled, strict=True):
        p.grad = u.grad * 8
    ours.grad_scale, ours.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    ours.step()
    same.step()
    assert_same_bits(params, unscaled)
    before = copy.deepcopy([p.detach() for p in params]), snapshot(ours)["state"]
    ours.found_inf = torch.tensor(1.0)
    ours.step()
    assert_same_bits(params, before[0])
    for i, entry in snapshot(ours)["state"].items():
        assert all(torch.equal(value, before[1][i][key]) for key, value in entry.items())


GOOD = torch.sparse_coo_tensor([[1]], torch.ones(1, 3), (5, 3), check_invariants=True)


@pytest.mark.parametrize(
    ("options", "grad", "text"),
    [
        ({"weight_decay": 0.1}, GOOD, "weight_decay is 0.1, expected 0 with sparse gradients"),
        (
            {},
            torch.sparse_coo_tensor([[1]], torch.ones(1, 3), (4, 3), check_invariants=True),
            "gradient of params[1] has shape [4, 3], expected [5, 3]",
        ),
        (
            {},
            GOOD.double(),
            "gradient of params[1] is torch.float64, expected float32, bfloat16 or float16",
        ),
    ],
)
def test_refuses(options, grad, text):
    params = [Parameter(torch.ones(4)), Parameter(torch.ones(5, 3))]
    params[0].grad, params[1].grad = torch.ones(4), GOOD.clone()
    params[1].grad.data = grad
    optimizer = DeepSpeedCPUAdagrad(params, **options)
    with pytest.raises(ValueError, match=f"^DeepSpeedCPUAdagrad: {re.escape(text)}$"):
        optimizer.step()
    assert all(torch.equal(p, torch.ones_like(p)) for p in params)


def test_a_first_step_on_sparse_gradients_counts_although_lr_is_0():
    """Only one of dense zeros is taken for none; see FlatStateOptimizer._is_dry_step."""
    param = Parameter(torch.ones(4, 2))
    param.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (4, 2))
    optimizer = DeepSpeedCPUAdagrad([param], lr=0.0)
    optimizer.step()
    assert optimizer.state[param]["step"] == 1
