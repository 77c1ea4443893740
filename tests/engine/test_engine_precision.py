"""What the keys of precision, leaf_module and torch_adam do, and what is read of the loss scale."""

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn

import deepspeed_ext
from deepspeed_ext.dtensors import local
from deepspeed_ext.engine.leaf_modules import get_z3_leaf_modules
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim import DeepSpeedCPUAdam


def config(stage=0, optimizer="AdamW", **more):
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": optimizer, "params": {"lr": 0.5}},
        **more,
    }
    return {key: value for key, value in given.items() if value is not None}


def step(engine, factor=1.0):
    loss = engine(torch.ones(2, 3, device=engine.device)).float().square().mean()
    engine.backward(loss * factor)
    engine.step()
    return loss.item()


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_master_weights_begin_in_16_bits(name):
    dtype = torch.bfloat16 if name == "bf16" else torch.float16
    model = net()
    model[0].weight.requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    with deepspeed_ext.initialize(model=model, config=config(**{name: {"enabled": True}}))[0] as e:
        for param, was in zip(e.module.parameters(), before, strict=True):
            wanted = was.to(dtype).float() if param.requires_grad else was
            assert not torch.equal(was, was.to(dtype).float())
            assert torch.equal(local(param).cpu(), wanted) and param.dtype == torch.float32


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("checks", [True, False])
def test_a_step_with_nan_in_bf16(checks, offload):
    for own in (True, False) if offload == "none" else (True,):
        model = net()
        client = None if own else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        given = config(bf16={"enabled": True, "check_grad_overflow": checks})
        given["zero_optimization"]["offload_optimizer"] = {"device": offload}
        if not own:
            del given["optimizer"]
        with deepspeed_ext.initialize(model=model, optimizer=client, config=given)[0] as engine:
            step(engine, math.nan)
            assert engine.was_step_applied() is not checks
            assert engine.skipped_steps == int(checks)
            assert math.isnan(step(engine)) is not checks
            assert math.isnan(engine.get_global_grad_norm()) is not checks


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("has_low_state", [False, True])
def test_weights_that_are_bfloat16_themselves(has_low_state, offload):
    bf16 = {
        "enabled": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": has_low_state,
    }
    given = config(2, bf16=bf16)
    given["zero_optimization"]["offload_optimizer"] = {"device": offload}
    plain = net().bfloat16()
    options = {"state_dtype": torch.bfloat16} if has_low_state else {}
    wanted = DeepSpeedCPUAdam(plain.parameters(), lr=0.5, weight_decay=0, **options)
    with deepspeed_ext.initialize(model=net(), config=given)[0] as engine:
        plain, x = plain.to(engine.device), torch.ones(2, 3, device=engine.device)
        assert isinstance(engine.optimizer, OffloadOptimizer) == (offload == "cpu")
        for number in range(3):
            plain(x.bfloat16()).float().square().mean().backward()
            engine.backward(engine(x).float().square().mean())
            pairs = list(zip(engine.module.parameters(), plain.parameters(), strict=True))
            if number == 0 or engine.device.type == "cpu":  # where `wanted` steps
                assert all(torch.equal(local(a.grad), b.grad) for a, b in pairs), number
            assert all(a.dtype == a.grad.dtype == torch.bfloat16 for a, _ in pairs)
            engine.step()
            if engine.device.type == "cpu":
                wanted.step()
                assert all(torch.equal(local(a), b) for a, b in pairs), number
            wanted.zero_grad()
        state = engine.optimizer.state[next(engine.module.parameters())]
        assert state["exp_avg"].dtype == (torch.bfloat16 if has_low_state else torch.float32)
        assert "master_param" not in state


def test_what_is_read_of_the_loss_scale():
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
    engine, optimizer, *_ = deepspeed_ext.initialize(model=net(), config=config(fp16=fp16))
    scale = optimizer.loss_scaler
    assert scale is optimizer.loss_scale_config and optimizer.dynamic_loss_scale
    assert (scale.cur_scale, scale.loss_scale, scale.cur_iter) == (256, 256, 0)
    assert (scale.scale_window, scale.scale_factor, scale.min_scale) == (2, 2, 1)
    assert scale.dynamic and scale.cur_hysteresis == 1
    step(engine, math.nan)
    assert (scale.cur_scale, scale.cur_iter, optimizer.overflow) == (128, 1, True)
    assert repr(scale) == "LossScale(cur_scale=128, cur_iter=1)"
    with pytest.raises(AttributeError):
        scale.cur_scale = 1.0
    engine.destroy()
    known = weakref.ref(engine)
    copy.deepcopy(optimizer)
    del engine
    gc.collect()
    assert known() is None and scale.cur_iter == 0
    for more in ({"fp16": {"enabled": True, "loss_scale": 4}}, {}):
        with deepspeed_ext.initialize(model=net(), config=config(**more))[0] as engine:
            scale = engine.optimizer.loss_scaler
            assert not scale.dynamic and scale.cur_scale == (4 if more else 1)
            assert scale.scale_factor is scale.min_scale is scale.cur_hysteresis is None


def test_leaf_modules_of_the_config(caplog):
    class Inner(nn.Sequential):
        pass

    leaf = {"classes": ["Inner", "Nothing"], "names": "last", "name_suffixes": ["th"]}
    for stage in (3, 2):
        model = nn.Sequential()
        model.add_module("first", Inner(nn.Linear(3, 3)))
        model.add_module("fourth", nn.Sequential(nn.Linear(3, 3)))
        model.add_module("last", nn.Sequential(nn.Linear(3, 2)))
        given = config(stage)
        given["zero_optimization"]["leaf_module"] = leaf
        caplog.clear()
        with deepspeed_ext.initialize(model=model, config=given)[0] as engine:
            found = get_z3_leaf_modules(engine.module)
            assert found == (list(engine.module) if stage == 3 else [])
            text = "leaf_module.classes has ['Nothing'], of no module in model"
            assert (text in caplog.text) == (stage == 3) and "names has" not in caplog.text
            step(engine)
    caplog.clear()
    with deepspeed_ext.initialize(model=net(), config=config(3))[0] as engine:
        assert not get_z3_leaf_modules(engine.module) and "leaf_module" not in caplog.text


def test_torch_adam_with_offload_steps_in_host_memory():
    given = config(optimizer="Adam")
    given["optimizer"]["params"] |= {"torch_adam": True, "adam_w_mode": False, "weight_decay": 0.1}
    given["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    plain = net()
    wanted = torch.optim.Adam(plain.parameters(), lr=0.5, weight_decay=0.1)
    with deepspeed_ext.initialize(model=net(), config=given)[0] as engine:
        assert isinstance(engine.optimizer, OffloadOptimizer)
        for _ in range(2):
            step(engine)
            plain(torch.ones(2, 3)).square().mean().backward()
            wanted.step()
            wanted.zero_grad()
        for a, b in zip(engine.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.cpu(), b)
