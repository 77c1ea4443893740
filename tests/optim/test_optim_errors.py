"""What the optimizers refuse, each text once, and that nothing was changed."""

import re

import pytest
import torch
from optim_cases import adam, needs_cuda
from torch.nn import Parameter

from deepspeed_ext.optim import DeepSpeedCPUAdam, FusedAdam


def refused(text, kind=ValueError):
    return pytest.raises(kind, match=f"^{re.escape(text)}$")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "lr is -1.0, expected at least 0"),
        ({"lr": float("nan")}, "lr is nan, expected at least 0"),
        ({"lr": torch.ones(2)}, "lr is a tensor of 2 elements, expected one"),
        ({"betas": (1.0, 0.9)}, "betas[0] is 1.0, expected at least 0 and below 1"),
        ({"betas": (0.9, -0.5)}, "betas[1] is -0.5, expected at least 0 and below 1"),
        ({"eps": -1e-8}, "eps is -1e-08, expected at least 0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1, expected at least 0"),
    ],
)
def test_options(options, text):
    with refused(f"DeepSpeedCPUAdam: {text}"):
        DeepSpeedCPUAdam([Parameter(torch.ones(2))], **options)
    optimizer = DeepSpeedCPUAdam([Parameter(torch.ones(2))])
    with refused(f"DeepSpeedCPUAdam: {text}"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], **options})
    assert len(optimizer.param_groups) == 1


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


def test_wrong_class_for_the_device():
    with refused(
        "FusedAdam: params[0] is on cpu, expected cuda; use DeepSpeedCPUAdam for CPU parameters"
    ):
        FusedAdam([Parameter(torch.ones(2))])


@needs_cuda
def test_wrong_class_for_a_cuda_device():
    with refused(
        "DeepSpeedCPUAdam: params[1] is on cuda:0, expected cpu; use FusedAdam for CUDA parameters"
    ):
        DeepSpeedCPUAdam([Parameter(torch.ones(2)), Parameter(torch.ones(2, device="cuda"))])


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
        "DeepSpeedCPUAdam: params[0] is a Wrapper, expected a plain tensor; "
        "use torch.optim.AdamW for it",
        TypeError,
    ):
        DeepSpeedCPUAdam([Wrapper()])


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_dtensor(tmp_path):
    from torch.distributed.tensor import DeviceMesh, distribute_tensor

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        param = Parameter(distribute_tensor(torch.ones(2), DeviceMesh("cpu", [0])))
        with pytest.raises(TypeError, match=r"params\[0\] is a DTensor, expected a plain tensor"):
            DeepSpeedCPUAdam([param])
    finally:
        torch.distributed.destroy_process_group()


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


def test_sparse_gradient():
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1, 3])).sum().backward()
    with refused(
        "DeepSpeedCPUAdam: gradient of params[0] is sparse, expected dense; "
        "use torch.optim.SparseAdam for it"
    ):
        adam(embedding.parameters()).step()
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
