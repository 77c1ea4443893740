"""safe_get_* and safe_set_*: whole and local weights, gradients and state, in each stage."""

import pytest
import torch
import torch.distributed as dist
from processes import Case
from zero_cases import Net, home, loss_of

import deepspeed_ext.compat as deepspeed
from deepspeed_ext.dtensors import local

utils = deepspeed.utils


def values(row, folder):
    stage, precision, device = row.split("-")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": int(stage), "offload_optimizer": {"device": device}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        precision: {"enabled": True},
    }
    if precision == "fp16":
        config["fp16"]["initial_scale_power"] = 8  # so that no step is skipped
    model = Net()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    param = model.embedding.weight
    frozen = model.blocks[1].down.weight
    assert utils.safe_get_full_grad(param) is None
    assert utils.safe_get_full_optimizer_state(param, "exp_avg") is None
    loss = loss_of(engine, 0)
    engine.backward(loss)
    gradient = utils.safe_get_full_grad(param)
    assert gradient.dtype == torch.float32 and gradient.shape == param.shape and gradient.any()
    assert torch.equal(utils.safe_get_local_grad(param), local(param.grad).float())
    utils.safe_set_full_grad(param, gradient * 2)
    assert torch.equal(utils.safe_get_full_grad(param), gradient * 2)
    utils.safe_update_full_grad_vectorized([param, frozen], lambda whole, _: whole / 2)
    assert torch.equal(utils.safe_get_full_grad(param), gradient)
    utils.safe_set_full_grad(param, gradient * 2)
    before = utils.safe_get_full_fp32_param(param)
    engine.step()
    assert not torch.equal(before, utils.safe_get_full_fp32_param(param))
    average = utils.safe_get_full_optimizer_state(param, "exp_avg")
    scale = 2**8 if precision == "fp16" else 1
    torch.testing.assert_close(average, gradient * 0.2 / scale, rtol=1e-5, atol=1e-7)
    assert utils.safe_get_full_fp32_param(frozen) is None
    assert utils.safe_get_local_fp32_param(frozen) is None
    assert utils.safe_get_full_optimizer_state(frozen, "exp_avg") is None
    whole = torch.arange(param.numel()).view(param.shape) / 64
    utils.safe_set_full_fp32_param(param, whole)
    utils.safe_set_full_optimizer_state(param, whole, "exp_avg_sq")
    part = utils.safe_get_local_fp32_param(param)
    state = utils.safe_get_local_optimizer_state(param, "exp_avg_sq")
    assert torch.equal(part, state.to(part.device))
    assert torch.equal(utils.safe_get_full_fp32_param(param), whole.to(home()))
    utils.safe_set_local_fp32_param(param, part + 1)
    utils.safe_set_local_optimizer_state(param, part + 2, "exp_avg")
    assert torch.equal(utils.safe_get_full_fp32_param(param), whole.to(home()) + 1)
    assert torch.equal(utils.safe_get_full_optimizer_state(param, "exp_avg"), whole.to(home()) + 2)
    with pytest.raises(ValueError, match=r"safe_set_full_fp32_param: value has shape \[2\]"):
        utils.safe_set_full_fp32_param(param, torch.zeros(2))
    with pytest.raises(ValueError, match="safe_set_local_grad: param has no such value"):
        utils.safe_set_local_grad(param, part)
    clones = deepspeed.checkpoint.utils.clone_tensors_for_torch_save(engine.module.state_dict())
    assert torch.equal(clones["embedding.weight"], whole.cpu() + 1)
    if stage == "3":
        assert param.ds_shape == whole.shape and param.ds_numel == whole.numel()
        assert not param.ds_persist
    engine.destroy()
    assert dist.is_initialized()


ROWS = ["0-bf16-none", "2-fp16-none", "2-bf16-cpu", "3-bf16-none"]


@pytest.mark.parametrize("row", ROWS)
def test_values_are_read_and_written(groups, row):
    groups.run(Case(2, "values", row))
