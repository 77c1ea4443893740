"""What the optimizers refuse, each text once, and that nothing was changed."""

import re

import pytest
import torch
from optim_cases import adam, needs_cuda
from torch.nn import Parameter

from deepspeed_ext.optim import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdagrad,
    FusedAdam,
    FusedLion,
    FusedSGD,
)


def refused(text, kind=ValueError):
    return pytest.raises(kind, match=f"^{re.escape(text)}$")


REFUSED = [
    *(
        (kind, options, text)
        for kind in (DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad, FusedSGD)
        for options, text in (
            ({"lr": -1.0}, "lr is -1.0, expected at least 0"),
            ({"lr": float("nan")}, "lr is nan, expected at least 0"),
            ({"lr": torch.ones(2)}, "lr is a tensor of 2 elements, expected one"),
            ({"weight_decay": -0.1}, "weight_decay is -0.1, expected at least 0"),
        )
    ),
    *(
        (kind, options, text)
        for kind in (DeepSpeedCPUAdam, DeepSpeedCPULion)
        for options, text in (
            ({"betas": (1.0, 0.9)}, "betas[0] is 1.0, expected at least 0 and below 1"),
            ({"betas": (0.9, -0.5)}, "betas[1] is -0.5, expected at least 0 and below 1"),
            ({"betas": (0.9,)}, "betas is (0.9,), expected two numbers"),
        )
    ),
    (DeepSpeedCPUAdam, {"eps": -1e-8}, "eps is -1e-08, expected at least 0"),
    (DeepSpeedCPUAdagrad, {"eps": -1e-8}, "eps is -1e-08, expected at least 0"),
    (DeepSpeedCPUAdagrad, {"lr_decay": -1}, "lr_decay is -1, expected at least 0"),
    (
        DeepSpeedCPUAdagrad,
        {"initial_accumulator_value": -0.5},
        "initial_accumulator_value is -0.5, expected at least 0",
    ),
    (FusedSGD, {"momentum": -0.5}, "momentum is -0.5, expected at least 0"),
    (FusedSGD, {"dampening": float("nan")}, "dampening is nan, expected a number"),
    (
        FusedSGD,
        {"nesterov": True},
        "nesterov is True, expected False without momentum or with dampening",
    ),
    (
        FusedSGD,
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
        "nesterov is True, expected False without momentum or with dampening",
    ),
]


@pytest.mark.parametrize(("kind", "options", "text"), REFUSED)
def test_options(kind, options, text):
    title = kind.__name__
    with refused(f"{title}: {text}"):
        kind([Parameter(torch.ones(2))], **options)
    optimizer = kind([Parameter(torch.ones(2))])
    with refused(f"{title}: {text}"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], **options})
    assert len(optimizer.param_groups) == 1


def test_amsgrad_is_no_option_of_adagrad():
    with refused(
        "DeepSpeedCPUAdagrad: amsgrad is True, expected False: Adagrad has no such variant"
    ):
        DeepSpeedCPUAdagrad([Parameter(torch.ones(2))], amsgrad=True)


def complex_param():
    return Parameter(torch.ones(2, dtype=torch.complex64))


def integer_param():
    return Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            complex_param,
            "is torch.complex64, expected float32, bfloat16 or float16; "
            "use torch.optim.AdamW for it",
        ),
        (
            lambda: Parameter(torch.ones(2).double()),
            "is torch.float64, expected float32, bfloat16 or float16; use torch.optim.AdamW for it",
        ),
        (integer_param, "is torch.int32, expected float32, bfloat16 or float16"),
        (
            lambda: Parameter(torch.ones(4, 4)[:, ::2]),
            "has shape [4, 2] and strides [4, 2], expected no gaps or overlaps; "
            "use param.contiguous()",
        ),
        (
            lambda: Parameter(torch.ones(3, 1).expand(3, 2)),
            "has shape [3, 2] and strides [1, 0], expected no gaps or overlaps; "
            "use param.contiguous()",
        ),
    ],
)
def test_parameters(make, text):
    good = Parameter(torch.ones(2))
    with refused(f"DeepSpeedCPUAdam: params[1] {text}"):
        DeepSpeedCPUAdam([good, make()])
    optimizer = DeepSpeedCPUAdam([("good", good)])
    with refused(f"DeepSpeedCPUAdam: params[1] (bad) {text}"):
        optimizer.add_param_group({"params": [("bad", make())]})
    assert len(optimizer.param_groups) == 1


PAIRS = pytest.mark.parametrize(
    ("on_cpu", "on_cuda"),
    [
        (DeepSpeedCPUAdam, FusedAdam),
        (DeepSpeedCPULion, FusedLion),
        (DeepSpeedCPUAdagrad, FusedAdagrad),
    ],
)


@PAIRS
def test_wrong_class_for_the_device(on_cpu, on_cuda):
    with refused(
        f"{on_cuda.__name__}: params[0] is on cpu, expected cuda; "
        f"use {on_cpu.__name__} for CPU parameters"
    ):
        on_cuda([Parameter(torch.ones(2))])


@needs_cuda
@PAIRS
def test_wrong_class_for_a_cuda_device(on_cpu, on_cuda):
    with refused(
        f"{on_cpu.__name__}: params[1] is on cuda:0, expected cpu; "
        f"use {on_cuda.__name__} for CUDA parameters"
    ):
        on_cpu([Parameter(torch.ones(2)), Parameter(torch.ones(2, device="cuda"))])


def test_parameter_without_memory_at_the_step():
    param = Parameter(torch.ones(2, device="meta"))
    optimizer = DeepSpeedCPUAdam([param])
    optimizer.step()
    param.grad = torch.ones(2, device="meta")
    with refused(
        "DeepSpeedCPUAdam: params[0] is on meta, expected cpu; give it memory before the first step"
    ):
        optimizer.step()


class Wrapper(torch.Tensor):
    """As DTensor does it: a tensor whose memory belongs to other tensors."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2,), requires_grad=True)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def test_wrapper_subclass():
    with refused(
        "DeepSpeedCPUAdam: params[0] is a Wrapper, expected a plain tensor or a DTensor; "
        "use torch.optim.AdamW for it",
        TypeError,
    ):
        DeepSpeedCPUAdam([Wrapper()])


def test_parameter_twice_in_a_group():
    param = Parameter(torch.ones(2))
    with (
        pytest.warns(UserWarning, match="duplicate"),
        refused("DeepSpeedCPUAdam: params[0] is in its group twice, expected once"),
    ):
        DeepSpeedCPUAdam([param, param])


def with_grad(grad):
    """Two good parameters, and one whose gradient has been tampered with."""
    params = [Parameter(torch.ones(2)), Parameter(torch.ones(3)), Parameter(torch.ones(3))]
    for p in params:
        p.grad = torch.ones_like(p)
    params[1].grad = None  # so that the numbers of the op are not those of the user
    params[2].grad.data = grad
    return params


@pytest.mark.parametrize(
    ("grad", "text"),
    [
        (torch.ones(4), "has shape [4], expected [3]"),
        (torch.ones(3).double(), "is torch.float64, expected float32, bfloat16 or float16"),
    ],
)
def test_gradients(grad, text):
    params = with_grad(grad)
    optimizer = adam(params)
    with refused(f"DeepSpeedCPUAdam: gradient of params[2] {text}"):
        optimizer.step()
    assert torch.equal(params[0], torch.ones(2))


@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, DeepSpeedCPULion, FusedSGD])
def test_sparse_gradient(kind):
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1, 3])).sum().backward()
    with refused(
        f"{kind.__name__}: gradient of params[0] is sparse, expected dense; "
        "use torch.optim.SparseAdam for it"
    ):
        kind(embedding.parameters()).step()
    assert torch.equal(embedding.weight, before)


def test_strided_at_the_step():
    param = Parameter(torch.ones(3))
    optimizer = adam([param])
    param.grad = torch.ones(3)
    param.data = torch.ones(6)[::2]
    with refused(
        "DeepSpeedCPUAdam: params[0] has shape [3] and strides [2], "
        "expected no gaps or overlaps; use param.contiguous()"
    ):
        optimizer.step()
    assert torch.equal(param, torch.ones(3))
    param.data = torch.ones(3)
    optimizer.step()
    param.data = torch.ones(6)[::2]
    with refused(
        "DeepSpeedCPUAdam: params[0] has shape [3] and strides [2], "
        "expected no gaps or overlaps; use param.contiguous()"
    ):
        optimizer.step()
    assert optimizer.state[param]["step"].item() == 1


def test_state_that_is_no_tensor():
    param = Parameter(torch.ones(3))
    optimizer = adam([param])
    param.grad = torch.ones(3)
    optimizer.step()
    optimizer.state[param]["exp_avg"] = 0.5
    with refused("DeepSpeedCPUAdam: state of params[0]: exp_avg is 0.5, expected a tensor"):
        optimizer.step()
