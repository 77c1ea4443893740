"""Engines of one process whose parameters rest in host memory or on disk: the model streams."""

import copy
import gc
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from stream_engines import (
    assert_same,
    each_rest as each_rest,
    given_for,
    loss_of,
    made,
    no_process_group as no_process_group,
    trained,
    weights_of,
)
from torch.utils.checkpoint import checkpoint
from zero_cases import Net

from deepspeed_ext import compat, zero
from deepspeed_ext.compat import parameters, zero as compat_zero
from deepspeed_ext.offload import OffloadOptimizer

STEPS = 20


@pytest.mark.parametrize("state", ["memory", pytest.param("disk", marks=pytest.mark.long)])
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


def test_values_of_parameters(rest):
    """What is written to weights is in master weights, and what is written to these in weights."""
    model = Net()
    engine = compat.initialize(model=model, config=given_for("bf16", rest))[0]
    trained(engine, range(2))
    param = engine.module.blocks[0].up.weight
    master = parameters.safe_get_full_fp32_param(param)
    assert torch.equal(master.bfloat16(), param.cpu()) and not torch.equal(master, param.cpu())
    with compat_zero.GatheredParameters(engine.module, modifier_rank=0):
        torch.nn.init.constant_(param, 0.5)
    assert (parameters.safe_get_full_fp32_param(param) == 0.5).all()
    wanted = torch.full_like(master, 1 / 3)
    parameters.safe_set_full_fp32_param(param, wanted)
    for steps in range(2):
        loss = loss_of(engine, steps)
        engine.backward(loss)
        gradient = parameters.safe_get_full_grad(param)
        assert gradient.any() and gradient.dtype == torch.float32
        parameters.safe_set_full_grad(param, torch.zeros_like(gradient))
        assert not parameters.safe_get_full_grad(param).any()
        engine.step()
        if steps == 0:
            momentum = parameters.safe_get_full_optimizer_state(param, "exp_avg")
            parameters.safe_set_full_optimizer_state(param, torch.zeros_like(momentum), "exp_avg")
    engine.destroy()


@pytest.mark.parametrize(
    ("precision", "steps"), [("bf16", 1), ("bf16", 2), ("fp16", 2), ("low", 1)]
)
def test_gradients_that_are_written(precision, steps, rest):
    """Have all bits that they have in memory; what is read and written back changes nothing."""

    def loop(given):
        engine, found, told = compat.initialize(model=Net(), config=given)[0], [], []
        params = [param for param in engine.module.parameters() if param.requires_grad]
        for number in range(4 * steps):
            loss = loss_of(engine, number)
            engine.backward(loss)
            if number % steps == steps - 1:
                for param in params:
                    gradient = parameters.safe_get_full_grad(param)
                    for factor in (1.0, 1 / 3):
                        if gradient is not None:
                            parameters.safe_set_full_grad(param, gradient * factor)
                            found.append(parameters.safe_get_full_grad(param).cpu())
            engine.step()
            told.append((loss.item(), engine.get_global_grad_norm() or 0.0))
        weights = weights_of(engine)
        engine.destroy()
        return found, (told, weights)

    kept, wanted = loop(given_for(precision, {"stage": 3}, steps))
    gradients, streamed = loop(given_for(precision, rest, steps))
    for mine, theirs in zip(gradients, kept, strict=True):
        assert torch.equal(mine, theirs)
    assert_same(streamed, wanted)


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
        return [(loss, 0.0) for loss in told], weights_of(engine)

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
        assert loss_of(engine, 0).isfinite() and engine.optimizer is None
        assert engine(torch.zeros(1, 2, dtype=torch.long, device=engine.device)).dtype == (
            torch.bfloat16
        )


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
    stream = engine.module._zero_stream
    engine.destroy()
    known = weakref.ref(engine.module)
    del engine, stream
    gc.collect()
    assert known() is None
