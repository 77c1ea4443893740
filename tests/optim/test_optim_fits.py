"""One of many parameters that becomes another between two steps: no other one takes harm."""

import copy

import pytest
import torch
from optim_cases import BF16, F32, assert_in_buffers, assert_same_bits, twins
from torch.nn import Parameter

from deepspeed_ext.optim import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedLamb,
    FusedSGD,
    HybridAdam,
    Lars,
)

CLASSES = {
    "DeepSpeedCPUAdam": (DeepSpeedCPUAdam, {}),
    "DeepSpeedCPUAdagrad": (DeepSpeedCPUAdagrad, {}),
    "DeepSpeedCPULion": (DeepSpeedCPULion, {}),
    "FusedSGD": (FusedSGD, {"momentum": 0.9}),
    "FusedLamb": (FusedLamb, {}),
    "HybridAdam": (HybridAdam, {}),
    "Lars": (Lars, {"momentum": 0.9}),
}
each_class = pytest.mark.parametrize("name", CLASSES)
each_place = pytest.mark.parametrize("changed", [0, 1, 2])


def trained(name, shape=(64,), dtype=F32, **options):
    """Three parameters that have been stepped together."""
    kind, more = CLASSES[name]
    generator = torch.Generator().manual_seed(1)
    params = [Parameter(torch.randn(shape, generator=generator).to(dtype)) for _ in range(3)]
    optimizer = kind(params, **more, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    for param in params:
        param.grad = None
    return params, optimizer


def tensors_of(params, optimizer):
    """Copies of parameters and of their state."""
    entries = (optimizer.state[param] for param in params)
    state = [value.clone() for entry in entries for _, value in sorted(entry.items())]
    return [param.detach().clone() for param in params] + state


@each_class
@each_place
@pytest.mark.parametrize("use", ["step", "clip_and_step", "reset_master"])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "with the others"])
def test_another_dtype_of_as_many_bytes(name, changed, use, together):
    params, optimizer = trained(name)
    others = [param for i, param in enumerate(params) if i != changed]
    params[changed].data = torch.ones(128, dtype=BF16)
    for param in params if together else params[changed : changed + 1]:
        param.grad = torch.ones_like(param)
    before = tensors_of(others, optimizer)
    call = getattr(optimizer, use)
    with pytest.raises(ValueError, match=rf"params\[{changed}\].* has shape \[64\], expected"):
        call(1.0) if use == "clip_and_step" else call()
    assert_same_bits(tensors_of(others, optimizer), before)


@each_class
@each_place
def test_another_dtype_of_the_same_shape(name, changed):
    params, optimizer = trained(name)
    expected = twins(params)
    reference = CLASSES[name][0](expected, **CLASSES[name][1])
    reference.load_state_dict(optimizer.state_dict())
    for model in (params, expected):
        model[changed].data = model[changed].data.to(BF16)
        for param in model:
            param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    reference.step()
    assert_same_bits(tensors_of(params, optimizer), tensors_of(expected, reference))
    assert_in_buffers(optimizer)


@each_class
@each_place
@pytest.mark.parametrize("options", [{}, {"state_dtype": torch.uint8}], ids=["float", "codes"])
def test_state_takes_the_shape_of_a_reshaped_parameter(name, changed, options):
    """With it, state dicts, copies and replaced values are those of the parameter."""
    params, optimizer = trained(name, (2, 3), **options)
    expected = twins(params)
    reference = CLASSES[name][0](expected, **CLASSES[name][1], **options)
    reference.load_state_dict(optimizer.state_dict())
    params[changed].data = params[changed].data.view(3, 2)

    def step():
        for mine, other in zip(params, expected, strict=True):
            other.grad = torch.randn(2, 3)
            mine.grad = other.grad.view(mine.shape)
        optimizer.step()
        reference.step()

    step()
    entry = optimizer.state[params[changed]]
    key = next(key for key in sorted(entry) if key != "step" and not key.endswith("_scale"))
    assert optimizer.state[params[changed]][key].shape == (3, 2)
    assert_in_buffers(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    step()
    value = optimizer.state[params[changed]][key].clone()
    optimizer.state[params[changed]][key] = value
    step()
    params, optimizer = copy.deepcopy((params, optimizer))
    step()
    flat = [[t.flatten() for t in tensors_of(*p)]
            for p in ((params, optimizer), (expected, reference))]  # fmt: skip
    assert_same_bits(*flat)


@each_place
@pytest.mark.parametrize("use", ["state_dict", "deepcopy", "replace old", "replace new"])
def test_a_reshaped_parameter_before_its_next_step(changed, use):
    params, optimizer = trained("DeepSpeedCPUAdam", (6,))
    param = params[changed]
    value = optimizer.state[param]["exp_avg"].clone()
    param.data = param.data.view(2, 3)
    if use == "state_dict":
        optimizer.load_state_dict(optimizer.state_dict())
    elif use == "deepcopy":
        params, optimizer = copy.deepcopy((params, optimizer))
        param = params[changed]
    else:
        optimizer.state[param]["exp_avg"] = value if use == "replace old" else value.view(2, 3)
        optimizer.step()
    assert torch.equal(optimizer.state[param]["exp_avg"], value.view(2, 3))
    assert optimizer.state[param]["exp_avg_sq"].shape == (2, 3)
    assert optimizer.state[param]["step"].shape == ()
    assert_in_buffers(optimizer)


def test_a_value_of_a_wrong_shape_is_none_of_a_reshaped_parameter():
    params, optimizer = trained("DeepSpeedCPUAdam", (2, 3))
    optimizer.state[params[1]]["exp_avg"] = torch.ones(6)
    with pytest.raises(ValueError, match=r"params\[1\]: exp_avg has shape \[6\], expected \[2, 3"):
        optimizer.step()


def test_scales_keep_their_shape_when_it_is_that_of_the_parameter():
    params, optimizer = trained("DeepSpeedCPUAdam", (1,), state_dtype=torch.uint8)
    params[1].data = params[1].data.view(1, 1, 1)
    params[1].grad = torch.ones(1, 1, 1)
    optimizer.step()
    entry = optimizer.state[params[1]]
    assert entry["exp_avg"].shape == (1, 1, 1) and entry["exp_avg_scale"].shape == (1,)
    assert entry["step"].shape == ()
