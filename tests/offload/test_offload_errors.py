"""What OffloadOptimizer refuses, and in which words; what was refused has changed nothing."""

import re
import warnings

import pytest
import torch
from offload_cases import Pair, await_speculation, finish, warm
from optim_cases import assert_same_bits, on_each_device, snapshot
from torch.nn import Parameter

from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim import DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, FusedLamb, HybridAdam, Lars


def one():
    return [Parameter(torch.ones(3))]


CLASSES = (
    "expected DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion, FusedRMSprop or FusedSGD"
)
NORMS = "; it needs the norm of each whole tensor in the middle of a step"
REFUSED = {
    "LAMB": (TypeError, {"optimizer_class": FusedLamb}, f"is FusedLamb, {CLASSES}{NORMS}"),
    "LARS": (TypeError, {"optimizer_class": Lars}, f"is Lars, {CLASSES}{NORMS}"),
    "torch's": (TypeError, {"optimizer_class": torch.optim.AdamW}, f"is AdamW, {CLASSES}"),
    "an object": (TypeError, {"optimizer_class": "adam"}, f"optimizer_class is 'adam', {CLASSES}"),
    "fraction below 0": (
        ValueError,
        {"gpu_fraction": -0.1},
        "gpu_fraction is -0.1, expected 0 to 1",
    ),
    "fraction above 1": (ValueError, {"gpu_fraction": 1.5}, "gpu_fraction is 1.5, expected 0 to 1"),
    "fraction NaN": (ValueError, {"gpu_fraction": float("nan")}, "gpu_fraction is nan, expected 0"),
    "norm of 0": (ValueError, {"max_grad_norm": 0}, "max_grad_norm is 0"),
    "norm of NaN": (ValueError, {"max_grad_norm": float("nan")}, "max_grad_norm is nan"),
    "norm as text": (TypeError, {"max_grad_norm": "1"}, "max_grad_norm is '1', expected a number"),
    "budget": (
        ValueError,
        {"memory_budget": 39},
        "memory_budget is 39, expected at least ",
    ),
    "lr": (ValueError, {"lr": -1}, "lr is -1, expected"),
    "betas": (ValueError, {"betas": (0.9, 2)}, "betas[1] is 2.0, expected"),
    "state_dtype": (ValueError, {"state_dtype": torch.int8}, "state_dtype is torch.int8, expected"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments(name):
    kind, arguments, text = REFUSED[name]
    with pytest.raises(kind, match=r"^OffloadOptimizer: .*" + re.escape(text)):
        OffloadOptimizer(one(), **arguments)


def test_an_argument_that_nobody_has():
    with pytest.raises(TypeError, match="momentum"):
        OffloadOptimizer(one(), momentum=0.9)
    with pytest.raises(TypeError, match="positional"):
        OffloadOptimizer(one(), DeepSpeedCPUAdam, None)


def test_every_class_that_can_be_offloaded():
    assert OffloadOptimizer(one(), HybridAdam).param_groups[0]["lr"] == 1e-3


PARAMS = {
    "int": (
        Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False),
        r"is torch\.int32, expected",
    ),
    "double": (
        Parameter(torch.ones(2, dtype=torch.float64)),
        r"is torch\.float64, expected float32",
    ),
    "complex": (
        Parameter(torch.ones(2, dtype=torch.complex64)),
        r"is torch\.complex64, expected float32",
    ),
    "gaps": (Parameter(torch.ones(4, 4)[:, :2].detach()), "expected no gaps or overlaps"),
    "overlaps": (Parameter(torch.ones(1).expand(3)), "expected no gaps or overlaps"),
}


@pytest.mark.parametrize("name", PARAMS)
def test_parameters(name):
    """By their number, and nothing is added when one of a later group is refused."""
    param, text = PARAMS[name]
    text = rf"^OffloadOptimizer: params\[1\] .*{text}"
    with pytest.raises(ValueError, match=text):
        OffloadOptimizer([*one(), param])
    pair = warm()
    with pytest.raises(ValueError, match=r"^OffloadOptimizer: "):
        pair.ours.add_param_group({"params": [param]})
    assert len(pair.ours.param_groups) == len(pair.ours._host_optimizer.param_groups) == 1
    pair.train(2)


def test_modules_of_torch_script():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(torch.nn.Linear(2, 2))
    for model, what in (
        (scripted, "model is one"),
        (torch.nn.Sequential(torch.nn.Linear(2, 2), scripted), "model has '1', a module"),
    ):
        with pytest.raises(TypeError) as caught:
            OffloadOptimizer(model.parameters(), model=model)
        assert str(caught.value) == (
            f"OffloadOptimizer: {what} of TorchScript, which reads weights that are on their way,"
            " expected modules of Python; leave model out, and step() waits for all weights"
        )
        OffloadOptimizer(model.parameters()).close()


def test_the_same_parameter_twice():
    [param] = one()
    with pytest.raises(ValueError, match=r"params\[0\] is in its group twice, expected once"):
        OffloadOptimizer([param, param])
    optimizer = OffloadOptimizer([param])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [param]})
    assert len(optimizer.param_groups) == 1


def test_no_parameters():
    with pytest.raises(ValueError, match="empty parameter list"):
        OffloadOptimizer([])


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), None, "1"])
def test_norms_of_a_call(value):
    pair = warm()
    pair.backward()
    with pytest.raises((ValueError, TypeError), match=r"^OffloadOptimizer: max_norm is "):
        pair.ours.clip_and_step(value)
    finish(pair)


# Gradients


def sparse(param):
    return torch.ones_like(param).to_sparse()


@on_each_device
@pytest.mark.parametrize("step", ["step", "clip_and_step"])
def test_sparse_gradients(device, step):
    pair = warm(device)
    pair.backward()
    await_speculation(pair.ours)
    weights, saved = [p.detach().clone() for p in pair.params], snapshot(pair.ours)
    pair.params[0].grad = sparse(pair.params[0])
    text = r"^OffloadOptimizer: gradient of params\[0\] is sparse, expected dense; use torch.optim"
    with pytest.raises(ValueError, match=text):
        pair.ours.step() if step == "step" else pair.ours.clip_and_step(1.0)
    assert_same_bits(pair.params[:1], weights[:1])
    assert torch.equal(pair.ours.state_dict()["state"][0]["exp_avg"], saved["state"][0]["exp_avg"])


@on_each_device
@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, DeepSpeedCPUAdagrad])
@pytest.mark.parametrize("when", ["first", "later"])
def test_sparse_gradients_of_an_embedding(device, when, kind):
    """They come by way of backward, whose hooks must let them pass. Adagrad alone takes them."""
    layer = torch.nn.Embedding(5, 3, sparse=True).to(device)
    optimizer = OffloadOptimizer(layer.parameters(), kind)
    for _ in range(3 if when == "later" else 0):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        optimizer.zero_grad()
    before = layer.weight.detach().clone()
    layer(torch.tensor([1, 2], device=device)).sum().backward()
    with pytest.raises(ValueError, match=r"gradient of params\[0\] is sparse, expected dense"):
        optimizer.step()
    assert torch.equal(layer.weight, before)
    optimizer.zero_grad()
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert not torch.equal(layer.weight, before)


@on_each_device
@pytest.mark.parametrize("step", ["step", "clip_and_step"])
def test_gradients_of_another_shape(device, step):
    """Torch refuses them, but for those that get another one afterwards."""
    pair = warm(device)
    pair.backward()
    pair.params[8].grad.data = torch.ones(256, device=device)
    weight = pair.params[8].detach().clone()
    with pytest.raises(ValueError, match=r"gradient of params\[8\] has shape \[256\], expected"):
        pair.ours.step() if step == "step" else pair.ours.clip_and_step(1.0)
    assert torch.equal(pair.params[8], weight)
    pair.zero_grad()


@on_each_device
@pytest.mark.parametrize("grad_dtype", [torch.float64, torch.int32])
def test_gradients_of_a_dtype_that_no_step_takes(device, grad_dtype):
    pair = warm(device)
    pair.backward()
    pair.params[8].grad.data = torch.ones(257, device=device, dtype=grad_dtype)
    text = rf"gradient of params\[8\] is {grad_dtype}, expected float32, bfloat16 or float16"
    with pytest.raises(ValueError, match=text):
        pair.ours.step()
    pair.zero_grad()


@on_each_device
def test_gradients_of_several_dtypes(device):
    """As the plain classes take them."""
    pair = warm(device, master="float32")
    for _ in range(4):
        pair.backward()
        for param in pair.params[::2]:
            param.grad.data = param.grad.data.bfloat16()
        pair.step()
        pair.check()


@on_each_device
def test_options_that_become_wrong(device):
    """They are refused as the plain class refuses them, and the step can be made up for."""
    pair = warm(device)
    pair.backward()
    pair.give()
    for optimizer, _ in pair.both():
        optimizer.param_groups[0]["betas"] = (0.9, 1.5)
        with pytest.raises(ValueError, match="beta"):
            optimizer.step()
        optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    finish(pair)


@on_each_device
def test_a_parameter_of_another_size(device):
    pair = warm(device)
    pair.params[8].grad = None
    pair.params[8].data = torch.ones(5, device=device)
    pair.params[8].grad = torch.ones(5, device=device)
    text = r"state of params\[8\]: exp_avg has shape \[257\], expected \[5\]"
    with pytest.raises(ValueError, match=f"^OffloadOptimizer: {text}"):
        pair.ours.step()


def test_state_that_is_no_state():
    pair = warm()
    pair.ours.state[pair.params[8]]["exp_avg"] = torch.ones(3)
    pair.backward()
    with pytest.raises(ValueError, match=r"state of params\[8\]: exp_avg has shape \[3\]"):
        pair.ours.step()


def test_grad_scaler_with_gradients_that_have_gone():
    pair = Pair(free_grads=True)
    pair.ours.grad_scale = torch.tensor(2.0)
    pair.ours.found_inf = torch.tensor(0.0)
    pair.backward()
    text = r"^OffloadOptimizer: free_grads is True, expected False with GradScaler"
    with pytest.raises(ValueError, match=text):
        pair.ours.step()
