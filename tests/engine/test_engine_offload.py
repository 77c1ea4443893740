"""Engines whose parameters rest in host memory, by offload_param."""

import pytest
import torch
import torch.distributed as dist
from processes import Case
from test_training_loops import STEPS, config
from torch import nn
from zero_cases import Net, assert_close, home, loss_of, whole

import deepspeed_ext
from deepspeed_ext import compat
from deepspeed_ext.compat import parameters, zero as compat_zero
from deepspeed_ext.dtensors import local, rests_on_host
from deepspeed_ext.offload.streamed import is_beside
from deepspeed_ext.optim import FusedAdam, FusedLamb

IN_HOST_MEMORY = {"stage": 3, "offload_param": {"device": "cpu"}}


def optimizers(row, folder):
    """Those that step on the CPU step shards that rest there; names that are not offloaded too."""
    made = []
    for block in (IN_HOST_MEMORY, {"stage": 3}):
        model = Net()
        given = config(3, zero_optimization=block)
        optimizer = None
        if row == "ours":
            given["optimizer"] = {"type": "Lamb", "params": {"lr": 1e-2}}
        else:
            params = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.NAdam(params, lr=1e-2)
        engine, stepped, *_ = deepspeed_ext.initialize(
            model=model, optimizer=optimizer, config=given
        )
        assert type(stepped) is (FusedLamb if row == "ours" else torch.optim.NAdam)
        for number in range(STEPS):
            engine.backward(loss_of(engine, number))
            engine.step()
        made.append(engine)
    for a, b in zip(*(engine.parameters() for engine in made), strict=True):
        assert_close(whole(a).to(home()), whole(b), row, exact=home() == "cpu")
    with pytest.raises(ValueError, match="is a FusedAdam with offload_param, expected one that"):
        with torch.device("meta"):  # as zero.Init has it
            model = Net()
        given = FusedAdam(model.parameters())
        deepspeed_ext.initialize(
            model=model, optimizer=given, config=config(3, zero_optimization=IN_HOST_MEMORY)
        )


def built_in_rows(row, folder):
    """Init of DeepSpeed: rows rest in host memory at once, and initialize takes them there."""
    given = config(3, row, zero_optimization=IN_HOST_MEMORY)
    engines = []
    for is_built in (True, False):
        with compat_zero.Init(config_dict_or_path=given, enabled=is_built):
            model = Net().to(home() if is_built else "cpu")
        if is_built:
            assert model.head.weight.ds_tensor.device.type == "cpu"
            with compat_zero.GatheredParameters(model.head.weight, modifier_rank=0):
                assert model.head.weight.device.type == home()
        engine, *_ = compat.initialize(model=model, config=given)
        assert type(engine.module.head.weight) is nn.Parameter or dist.get_world_size() > 1
        assert all(rests_on_host(p) or is_beside(p) for p in engine.parameters())
        for number in range(2):
            engine.backward(loss_of(engine, number))
            engine.step()
        engine.save_checkpoint(folder / f"{home()}-{row}-{is_built}")
        engines.append(engine)
    assert engines[1].load_checkpoint(folder / f"{home()}-{row}-True")[0]
    for engine in engines:
        engine.backward(loss_of(engine, 2))
        param = engine.module.head.weight
        gradient = parameters.safe_get_full_grad(param)
        parameters.safe_set_full_grad(param, gradient * 2)
        assert torch.equal(parameters.safe_get_full_grad(param), gradient * 2)
        engine.step()
        value = parameters.safe_get_full_fp32_param(param)
        wanted = value + 1 / 3
        parameters.safe_set_full_fp32_param(param, wanted)
        assert torch.equal(parameters.safe_get_full_fp32_param(param), wanted)
        engine.backward(loss_of(engine, 3) * 0)
        assert not parameters.safe_get_full_grad(param).any()
        engine.step()  # a step of Adam moves it by less than lr
        after = parameters.safe_get_full_fp32_param(param)
        torch.testing.assert_close(after, wanted, rtol=1e-2, atol=2e-2)
        assert row == "float32" or not torch.equal(after.cpu(), param.detach().float().cpu())
    for a, b in zip(*(engine.parameters() for engine in engines), strict=True):
        assert torch.equal(local(a), local(b))
    with pytest.raises(ValueError, match="remote_device is 'nvme', expected None"):
        compat_zero.Init(remote_device="nvme")


def on_disks(row, folder):
    """Parameters on NVMe are for one process: all refuse, and nothing has changed."""
    model = Net()
    block = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(folder)}}
    text = r'offload_param\.device is "nvme" on 2 processes, expected one process; or "cpu"'
    with pytest.raises(ValueError, match=text):
        deepspeed_ext.initialize(model=model, config=config(3, zero_optimization=block))
    assert all(type(param) is nn.Parameter for param in model.parameters())


CASES = [
    Case(2, "on_disks", ""),
    *(Case(2, "optimizers", row) for row in ("ours", "torch's")),
    Case(2, "built_in_rows", "float32"),
    *(Case(1, "built_in_rows", row) for row in ("float32", "bf16")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function}-{c.row}-{c.world}")
def test_processes(case, groups):
    groups.run(case)
