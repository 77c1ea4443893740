"""What engines that stream make of weights alone: master weights get all bits of them."""

import pytest
import torch
import torch.distributed as dist
from stream_engines import (
    assert_same,
    each_rest as each_rest,
    given_for,
    made,
    no_process_group as no_process_group,
    trained,
    weights_of,
)
from zero_cases import Net

from deepspeed_ext import zero
from deepspeed_ext.dtensors import is_dtensor
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.zero.alone import Alone

ALONE = [{"load_module_only": True}, {"load_optimizer_states": False}]


def _rounded(weights):
    return {name: weight.bfloat16().float() for name, weight in weights.items()}


@pytest.mark.parametrize("arguments", ALONE)
@pytest.mark.parametrize("writer", ["in memory", "streams"])
def test_a_checkpoint_without_state(writer, arguments, rest, tmp_path):
    """Of an engine that has trained, whose other state stays as it is; on a disk, too."""
    if "nvme_path" in rest["offload_param"]:
        rest["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    kept, streamed = given_for("bf16", {"stage": 3}), given_for("bf16", rest)
    with made(kept if writer == "in memory" else streamed, Net(seed=1)) as engine:
        _, saved = trained(engine, range(4))
        engine.save_checkpoint(tmp_path / "saved")
    found = []
    for given in (kept, streamed):
        with made(given, Net(seed=2)) as engine:
            trained(engine, range(2))
            engine.load_checkpoint(tmp_path / "saved", **arguments)
            before = weights_of(engine)
            for name, param in engine.module.named_parameters():
                if param.requires_grad:
                    assert torch.equal(before[name], saved[name]), name
            found.append(trained(engine, range(4, 8)))
    assert_same(found[1], found[0])
    assert any(not torch.equal(weight, _rounded(saved)[name]) for name, weight in saved.items())


def test_an_engine_that_has_not_trained(rest, tmp_path):
    with made(given_for("bf16", {"stage": 3}), Net(seed=1)) as engine:
        trained(engine, range(4))
        engine.save_checkpoint(tmp_path)
        wanted = weights_of(engine)
    with made(given_for("bf16", rest)) as engine:
        engine.load_checkpoint(tmp_path, load_module_only=True)
        for name, param in engine.module.named_parameters():
            if param.requires_grad:
                assert torch.equal(weights_of(engine)[name], wanted[name])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_tensors_in_float32(precision, rest):
    """By the engine's load_state_dict, also after hooks that give them other names."""

    def loaded(engine):
        trained(engine, range(2))
        state = {f"module.{name}": weight.clone() for name, weight in Net(5).state_dict().items()}
        old = "module.blocks.0.up.old"
        state[old] = state.pop("module.blocks.0.up.weight")

        def rename(module, given, prefix, *_):
            given[prefix + "weight"] = given.pop(old)

        up = engine.module.blocks[0].up
        is_plain = not is_dtensor(up.weight)
        if is_plain:
            up.register_load_state_dict_pre_hook(rename)
        else:  # the shards of weights are found by name
            state["module.blocks.0.up.weight"] = state.pop(old)
        engine.load_state_dict(state)
        return trained(engine, range(4, 8))

    found = []
    for block in ({"stage": 3}, rest):
        with made(given_for(precision, block)) as engine:
            found.append(loaded(engine))
    assert_same(found[1], found[0])


def test_what_fits_is_exact_where_a_load_fails(rest):
    with made(given_for("bf16", rest)) as engine:
        trained(engine, range(2))
        state = {f"module.{name}": weight.clone() for name, weight in Net(5).state_dict().items()}
        wanted = state["module.blocks.0.up.weight"]
        state["module.head.weight"] = torch.ones(3)
        with pytest.raises(RuntimeError, match=r"size mismatch for module\.head\.weight"):
            engine.load_state_dict(state)
        assert torch.equal(weights_of(engine)["blocks.0.up.weight"], wanted)
        for name, weight in weights_of(engine).items():
            assert weight.isfinite().all(), name
        assert all(not module._load_state_dict_pre_hooks for module in engine.module.modules())


@pytest.mark.parametrize("master", ["float32", "remainder"])
def test_plain_loops_load_masters_alone(master, tmp_path):
    """Of any format that was saved, by zero.load."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh("cpu", (1,))

    def begun(seed, kind):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))).bfloat16()
        zero.stream(model, to="cpu")
        Alone(model, 3, mesh, ()).attach()
        optimizer = OffloadOptimizer(model.parameters(), model=model, lr=1e-2, master=kind)
        model(torch.ones(2, 8, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    model, optimizer = begun(0, master)
    zero.save(tmp_path, "here", model, optimizer)
    wanted = [dict(entry) for entry in optimizer.state_dict()["state"].values()]
    other, theirs = begun(1, "float32")
    moment = theirs.state[other[0].weight]["exp_avg"].clone()
    zero.load(tmp_path, "here", other, has_masters=theirs)
    for param, mine, entry in zip(other.parameters(), model.parameters(), wanted, strict=True):
        assert torch.equal(param, mine)
        found = theirs.state[param]["master_param"]
        if master == "float32":
            assert torch.equal(found, entry["master_param"])
        assert torch.equal(found.bfloat16(), mine) and not torch.equal(found, mine.float())
    assert torch.equal(theirs.state[other[0].weight]["exp_avg"], moment)
    optimizer.close()
    theirs.close()
