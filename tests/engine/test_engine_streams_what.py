"""Which models and optimizers stream in an engine, which are shards, and which are refused."""

import logging
from functools import partial

import pytest
import torch
import torch.distributed as dist
from stream_engines import (
    assert_same,
    each_rest as each_rest,
    given_for,
    made,
    no_process_group as no_process_group,
    rests_in,
    trained,
    weights_of,
)
from torch import nn
from zero_cases import Net

from deepspeed_ext import moe, zero
from deepspeed_ext.dtensors import is_dtensor
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim import DeepSpeedCPUAdam, FusedLamb, HybridAdam
from deepspeed_ext.random_ltd import convert_to_random_ltd


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x)


def test_layers_that_drop_tokens(rest):
    ltd = {
        "enabled": True,
        "total_layer_num": 3,
        "random_ltd_layer_num": 1,
        "random_ltd_layer_id": [1],
        "model_mask_name": None,
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": 2,
            "max_value": 6,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": 4, "seq_per_step": 2},
        },
    }
    routing = {"enabled": True, "random_ltd": ltd}
    more = {"data_efficiency": {"enabled": True, "data_routing": routing}}
    found = []
    for block in ({"stage": 3}, rest):
        model = convert_to_random_ltd(Dropping(), Layer)
        with made(given_for("float32", block, **more), model) as engine:
            torch.manual_seed(1)
            losses = []
            for _ in range(4):
                loss = engine(torch.ones(2, 6, 8, device=engine.device))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            found.append(([(loss, 0.0) for loss in losses], weights_of(engine)))
    assert_same(found[1], found[0])


class Expert(nn.Module):
    """A block whose experts are never called as modules."""

    def __init__(self, form):
        super().__init__()
        layers = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
        expert = nn.Sequential(*layers) if form == "grouped" else Sequence(*layers)
        self.moe = moe.MoE(8, expert, num_experts=4, k=2)

    def forward(self, x):
        out, loss, _ = self.moe(x)
        self.loss = loss
        return x + out


class Sequence(nn.Sequential):
    """Of a class of its own, so that its forward runs for one expert after another."""


class Experts(nn.Module):
    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Expert(form) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean() + 0.01 * sum(layer.loss for layer in self.layers)


@pytest.mark.parametrize("form", ["grouped", "one by one"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_experts(form, precision, rest):
    found = []
    for block in ({"stage": 3}, rest):
        with made(given_for(precision, block), Experts(form)) as engine:
            torch.manual_seed(1)
            losses = []
            for _ in range(6):
                loss = engine(torch.randn(2, 6, 8).to(engine.device))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            found.append(([(loss, 0.0) for loss in losses], weights_of(engine)))
    assert_same(found[1], found[0])


# Whose optimizers step what: by row the precisions in which the model streams.
OPTIMIZERS = {
    "torch's": partial(torch.optim.NAdam, lr=1e-2),
    "both": partial(HybridAdam, lr=1e-2),
    "lamb": partial(FusedLamb, lr=1e-2),
}


@pytest.mark.parametrize("row", [*OPTIMIZERS, "by name", "made"])
def test_other_optimizers_step_what_rests(row, rest):
    """They have no master weights, so in 16 bits weights are shards, or are refused on a disk."""
    for precision in ("float32", "low", "bf16"):
        found = []
        for block in ({"stage": 3}, rest):
            given, model = given_for(precision, block), Net()
            params = [p for p in model.parameters() if p.requires_grad]
            optimizer = None
            if row == "by name":
                given["optimizer"] = {"type": "NAdam", "params": {"lr": 1e-2}}
            else:
                del given["optimizer"]
                make = OPTIMIZERS.get(row, OPTIMIZERS["torch's"])
                optimizer = make if row == "made" else make(params)
            is_refused = precision == "bf16" and "offload_param" in block
            if is_refused and "nvme_path" in block["offload_param"]:
                with pytest.raises(ValueError, match='is "nvme" with bf16 or fp16 and this optim'):
                    made(given, model, optimizer=optimizer)
                continue
            streamed = "offload_param" in block and not is_refused
            with made(given, model, streamed, optimizer=optimizer) as engine:
                found.append(trained(engine, range(4)))
        if len(found) == 2:  # steps on the CPU and on a GPU round apart, here to 16 bits
            near = None if precision == "float32" else {"rtol": 2e-2, "atol": 2e-2}
            assert_same(found[1], found[0], not torch.cuda.is_available(), near)


def test_a_client_that_offload_optimizer_stands_in_for(rest):
    found = []
    for block in ({"stage": 3}, rest):
        model, block = Net(), {**block, "offload_optimizer": {"device": "cpu"}}
        client = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        given = given_for("bf16", block)
        del given["optimizer"]
        with made(given, model, optimizer=client) as engine:
            assert isinstance(engine.optimizer, OffloadOptimizer)
            found.append(trained(engine, range(4)))
    assert_same(found[1], found[0])


class Plain(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)


REFUSED = {
    "a model without blocks, expected a list of modules of one class in it": (Plain, {}, {}),
    "with ignore_unused_parameters false, expected true": (
        Net,
        {"ignore_unused_parameters": False},
        {},
    ),
    "with communication_data_type torch.bfloat16, expected none": (
        Net,
        {},
        {"communication_data_type": "bf16"},
    ),
    "with bf16.check_grad_overflow false, expected true": (
        Net,
        {},
        {"bf16": {"enabled": True, "check_grad_overflow": False}},
    ),
    "with parameters on meta, expected a model that has values": (
        lambda: Net().to("meta"),
        {},
        {},
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_does_not_stream_is_refused_on_a_disk(text, tmp_path, caplog):
    """In host memory such parameters are shards, as those of several processes."""
    make, block, more = REFUSED[text]
    if block.get("ignore_unused_parameters") is False and torch.__version__ < "2.13":
        pytest.skip("reduce_unused needs torch 2.13")
    with pytest.raises(ValueError) as caught:
        made(given_for("float32", rests_in("nvme", tmp_path) | block, **more), make())
    begin = 'initialize: zero_optimization.offload_param.device is "nvme" '
    assert str(caught.value).startswith(begin) and text in str(caught.value)
    assert not dist.is_initialized()
    caplog.set_level(logging.INFO, "deepspeed_ext")
    with made(given_for("float32", rests_in("cpu", "") | block, **more), make(), False) as engine:
        assert all(map(is_dtensor, engine.parameters()))
    assert "initialize: parameters rest as shards " in caplog.text


def test_errors_before_anything_is_changed(tmp_path):
    model = Net()
    rest = {"stage": 3, "offload_param": {"device": "nvme"}}
    with pytest.raises(ValueError, match=r"offload_param\.nvme_path is None, expected a folder on"):
        made(given_for("float32", rest), model)
    text = (
        r"initialize: zero_optimization\.offload_param\.nvme_path is .*none, expected a folder to"
    )
    with pytest.raises(OSError, match=text):
        made(given_for("bf16", rests_in("nvme", tmp_path / "none")), model)
    rest = rests_in("cpu", "")
    rest["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path / "none")}
    text = text.replace("param", "optimizer")
    for block in (rest, {**rest, "stage": 0}):
        with pytest.raises(OSError, match=text):
            made(given_for("bf16", block), model)
    assert all(map(torch.equal, model.state_dict().values(), Net().state_dict().values()))
    assert not dist.is_initialized()
    made(given_for("bf16", rests_in("cpu", "")), model).destroy()
    model = Net()
    zero.stream(model)
    with pytest.raises(ValueError, match="initialize: model is streamed already, expected one"):
        made(given_for("float32", rests_in("cpu", "")), model)
    assert not dist.is_initialized()


def test_an_optimizer_for_the_cpu_alone_steps_shards(tmp_path):
    """Beside a GPU; it would not step what stays there of a model that streams."""
    model = Net()
    client = DeepSpeedCPUAdam([p for p in model.parameters() if p.requires_grad])
    given = given_for("float32", rests_in("cpu", ""))
    del given["optimizer"]
    if torch.cuda.is_available():
        disk = {**given, "zero_optimization": rests_in("nvme", tmp_path)}
        with pytest.raises(ValueError, match='is "nvme" with a DeepSpeedCPUAdam, expected one th'):
            made(disk, model, optimizer=client)
    with made(given, model, not torch.cuda.is_available(), optimizer=client) as engine:
        trained(engine, range(2))
