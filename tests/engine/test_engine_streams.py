"""Engines of one process whose parameters rest in host memory or on disk: the model streams."""

import copy
import gc
import logging
import math
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from test_training_loops import config
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from zero_cases import VOCABULARY, Net

import deepspeed_ext
from deepspeed_ext import moe, zero
from deepspeed_ext.dtensors import full, is_dtensor
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim import DeepSpeedCPUAdam, FusedLamb, HybridAdam
from deepspeed_ext.optim.formats import MASTER
from deepspeed_ext.random_ltd import convert_to_random_ltd

LOW = {"enabled": True, "bf16_master_weights_and_grads": True}
STEPS = 20


@pytest.fixture(autouse=True)
def alone():
    """No process group: initialize makes one, of this process."""
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():  # of a test that has failed
        dist.destroy_process_group()


@pytest.fixture(params=["cpu", "nvme"])
def rest(request, tmp_path):
    return rests_in(request.param, tmp_path)


def rests_in(device, folder):
    """Return zero_optimization of a config."""
    block = {"device": device} if device == "cpu" else {"device": "nvme", "nvme_path": str(folder)}
    return {"stage": 3, "offload_param": block}


def given_for(precision, zero_optimization, steps=1, **more):
    if precision == "low":
        return config(3, "float32", steps, zero_optimization=zero_optimization, bf16=LOW, **more)
    return config(3, precision, steps, zero_optimization=zero_optimization, **more)


def made(given, model=None, streamed=None, **arguments):
    """Return an engine, which streams if the config asks for it."""
    model = Net() if model is None else model
    engine = deepspeed_ext.initialize(model=model, config=given, **arguments)[0]
    wanted = "offload_param" in given["zero_optimization"] if streamed is None else streamed
    assert hasattr(engine.module, "_zero_stream") == wanted
    return engine


def loss_of(engine, number):
    generator = torch.Generator().manual_seed(number)
    tokens, targets = torch.randint(VOCABULARY, (2, 4, 5), generator=generator).to(engine.device)
    return cross_entropy(engine(tokens).float().flatten(0, 1), targets.flatten())


def trained(engine, numbers, factors=None):
    """Return losses and norms of steps, and what all weights are then."""
    told = []
    for number in numbers:
        loss = loss_of(engine, number)
        engine.backward(loss * (factors or {}).get(number, 1.0))
        engine.step()
        told.append((loss.item(), engine.get_global_grad_norm() or 0.0))
    return told, weights_of(engine)


def weights_of(engine):
    """Return master weights, or others as they are."""
    state, found = {} if engine.optimizer is None else engine.optimizer.state, {}
    for name, param in engine.module.named_parameters():
        weight = full(param.detach()) if is_dtensor(param) else param.detach()
        if param.requires_grad:
            weight = state.get(param, {}).get(MASTER, weight)
        found[name] = weight.cpu()
    return found


def assert_same(streamed, kept):
    """Bit for bit; beside a GPU norms are added up on the CPU, and so are others in last bits."""
    (told, weights), (others, wanted) = streamed, kept
    exact = {} if torch.cuda.is_available() else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(torch.tensor(told), torch.tensor(others), equal_nan=True, **exact)
    for name, weight in wanted.items():
        torch.testing.assert_close(weights[name], weight.to(weights[name].dtype), **exact)


@pytest.mark.parametrize("state", ["memory", "disk"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16", "low"])
def test_trains_as_in_memory(precision, steps, state, rest, tmp_path):
    """Frozen, tied and unused weights are in the model; with inf in a step, and clipping."""
    factors = {4 * steps: math.inf} if precision == "fp16" else {}
    numbers = range(STEPS * steps)
    offload = {} if precision == "low" else {"offload_optimizer": {"device": "cpu"}}
    with made(given_for(precision, {"stage": 3, **offload}, steps)) as engine:
        kept = trained(engine, numbers, factors)
    if state == "disk":
        rest["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    with made(given_for(precision, rest, steps)) as engine:
        assert isinstance(engine.optimizer, OffloadOptimizer)
        if precision == "low" and steps > 1:  # sums of gradients are of 16 bits without offload
            trained(engine, numbers)
            return
        assert_same(trained(engine, numbers, factors), kept)
        assert engine.skipped_steps == len(factors)
        assert engine.module._zero_stream.stats()["fetched"] > 0


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_checkpoints_come_from_and_go_to_any_stage(precision, rest, tmp_path):
    def goes_on(first, second, folder):
        with made(first, Net(seed=1)) as engine:
            trained(engine, range(4))
            engine.save_checkpoint(folder, client_state={"epoch": 2})
            wanted = trained(engine, range(4, 8))
        with made(second, Net(seed=2)) as engine:
            trained(engine, range(2))
            assert engine.load_checkpoint(folder)[1] == {"epoch": 2}
            assert engine.global_steps == 4
            assert_same(trained(engine, range(4, 8)), wanted)

    streamed = given_for(precision, rest)
    frozen = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    goes_on(streamed, streamed, tmp_path / "same")
    goes_on(streamed, given_for(precision, frozen), tmp_path / "from")
    goes_on(given_for(precision, frozen), streamed, tmp_path / "to")


def test_whole_weights_for_others(rest, tmp_path):
    rest["stage3_gather_16bit_weights_on_model_save"] = True
    with made(given_for("bf16", rest)) as engine:
        trained(engine, range(2))
        assert engine.save_16bit_model(tmp_path / "model")
        saved = load_file(tmp_path / "model" / "model.safetensors")
        before = weights_of(engine)
        for name, weight in saved.items():
            assert weight.dtype == torch.bfloat16 and torch.equal(weight, before[name].bfloat16())
        assert {*before} == {*saved}
        trained(engine, range(2, 4))
        engine.module.load_state_dict(saved, strict=False)
        for name, weight in engine.module.state_dict().items():
            assert torch.equal(weight.cpu(), saved.get(name, saved["embedding.weight"])), name
        loss_of(engine, 5)


@pytest.mark.parametrize("steps", [1, 2])
def test_errors_evaluations_and_short_groups(rest, steps):
    """What a loop may do between micro-steps is as in memory."""

    def loop(engine):
        told = []
        for number in range(6 * steps):
            loss = loss_of(engine, number)
            with torch.no_grad():
                told.append(loss_of(engine, number + 1).item())
            if number == 2 * steps:
                loss.register_hook(lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    engine.backward(loss)
                loss = loss_of(engine, number)
            if number == 4 * steps:
                engine.backward(loss)
                engine.zero_grad()
                loss = loss_of(engine, number)
            engine.set_gradient_accumulation_boundary(number % steps == steps - 1 or number == 3)
            engine.backward(loss)
            engine.step()
            told.append(loss.item())
        return [told], weights_of(engine)

    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    with made(given_for("bf16", offload, steps)) as engine:
        kept = loop(engine)
    with made(given_for("bf16", rest, steps)) as engine:
        assert_same(loop(engine), kept)


class Checkpointed(Net):
    """Whose blocks are computed again, with inputs that are to leave."""

    use_reentrant = False

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_whose_inputs_leave(rest, reentrant):
    model = Checkpointed()
    model.use_reentrant = reentrant
    more = {"activation_checkpointing": {"cpu_checkpointing": True}}
    with made(given_for("bf16", {"stage": 3}), copy.deepcopy(model)) as engine:
        kept = trained(engine, range(4))
    with made(given_for("bf16", rest, **more), model) as engine:
        assert_same(trained(engine, range(4)), kept)


def test_compiled(rest):
    block = {"compile": {"disable": False, "backend": "eager"}}
    with made(given_for("bf16", {"stage": 3})) as engine:
        kept = trained(engine, range(4))
    with made(given_for("bf16", rest, **block)) as engine:
        assert engine.is_compiled
        assert_same(trained(engine, range(4)), kept)


def test_an_adapter_on_a_frozen_base(rest):
    def model():
        made = Net()
        for name, param in made.named_parameters():
            param.requires_grad_("norm" in name or "gain" in name)
        return made

    with made(given_for("bf16", {"stage": 3}), model()) as engine:
        kept = trained(engine, range(4))
    with made(given_for("bf16", rest), model()) as engine:
        assert_same(trained(engine, range(4)), kept)


def test_a_model_that_is_only_called(rest):
    given = given_for("bf16", rest)
    del given["optimizer"]
    with made(given) as engine, torch.no_grad():
        assert math.isfinite(loss_of(engine, 0)) and engine.optimizer is None
        assert engine(torch.zeros(1, 2, dtype=torch.long, device=engine.device)).dtype == (
            torch.bfloat16
        )


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
            found.append(([losses], weights_of(engine)))
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
            found.append(([losses], weights_of(engine)))
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
        if len(found) == 2:
            assert_same(found[1], found[0])


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
    with pytest.raises(OSError, match=r"zero\.stream: nvme_path is .*none, expected a folder"):
        made(given_for("float32", rests_in("nvme", tmp_path / "none")), model)
    zero.stream(model)
    with pytest.raises(ValueError, match="initialize: model is streamed already, expected one"):
        made(given_for("float32", rests_in("cpu", "")), model)
    assert not dist.is_initialized()


def test_an_optimizer_for_the_cpu_alone_steps_shards():
    """Beside a GPU; it would not step what stays there of a model that streams."""
    model = Net()
    client = DeepSpeedCPUAdam([p for p in model.parameters() if p.requires_grad])
    given = given_for("float32", rests_in("cpu", ""))
    del given["optimizer"]
    with made(given, model, not torch.cuda.is_available(), optimizer=client) as engine:
        trained(engine, range(2))


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_a_model_that_streams_already(micro_steps, tmp_path):
    """Below stage 3, in float32, it is one like any other."""
    found = []
    for streamed in (False, True):
        block = {"stage": 0, "offload_optimizer": {"device": "cpu"}}
        model = Net()
        if streamed:
            zero.stream(model, "nvme", nvme_path=tmp_path, blocks=["blocks.*"])
        with made(given_for("float32", block, micro_steps), model, streamed) as engine:
            found.append(trained(engine, range(4 * micro_steps)))
    assert_same(found[1], found[0])
    model = Net()
    zero.stream(model)
    for given in (given_for("bf16", {"stage": 1}), given_for("float32", {"stage": 3})):
        with pytest.raises(ValueError, match="initialize: model is streamed already, expected one"):
            made(given, model)
    with pytest.raises(ValueError, match=r"zero\.shard: model is streamed, expected one that is"):
        zero.shard(model, 1, mesh=None if dist.is_initialized() else _mesh())


def _mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.init_device_mesh("cpu", (1,))


def test_models_go_with_their_engines(rest):
    engine = made(given_for("bf16", rest))
    trained(engine, range(2))
    engine.destroy()
    stream = engine.module._zero_stream
    assert math.isfinite(loss_of(engine, 0))  # it can be called still
    known = weakref.ref(engine.module)
    del engine, stream
    gc.collect()
    assert known() is None
