"""Engines that stream: what is left of the model when initialize fails, or when they end."""

import copy
import gc
import io
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
from stream_engines import (
    assert_same,
    each_rest as each_rest,
    given_for,
    loss_of,
    made,
    no_process_group as no_process_group,
    trained,
)
from zero_cases import Net

import deepspeed_ext
from deepspeed_ext import compat
from deepspeed_ext.engine import streaming
from deepspeed_ext.offload import OffloadOptimizer


def hooks_of(model):
    """Return how many hooks, and which marks, modules have."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_pre_hooks", "_backward_hooks")
    counts = [len(getattr(module, name)) for module in model.modules() for name in hooks]
    return sum(counts), {name for module in model.modules() for name in vars(module)}


def given_up(model, rest, **arguments):
    with pytest.raises((ZeroDivisionError, OSError)):
        made(given_for("bf16", rest), model, **arguments)
    gc.collect()
    assert not dist.is_initialized()


@pytest.mark.parametrize("where", ["optimizer", "schedule", "room", "mark"])
def test_a_failure_leaves_a_model_to_begin_with(where, rest, monkeypatch):
    """Weights may be in 16 bits already; nothing else is left."""
    with made(given_for("bf16", rest)) as engine:
        wanted = trained(engine, range(4))
    model = Net()
    before = hooks_of(model)
    arguments = {}
    with monkeypatch.context() as patch:
        if where == "optimizer":
            patch.setattr(OffloadOptimizer, "_watch", lambda self: 1 / 0)
        elif where == "schedule":
            arguments["lr_scheduler"] = lambda optimizer: 1 / 0
        elif where == "mark":
            patch.setattr(streaming.Alone, "attach", lambda self: 1 / 0)
        else:

            def full(*args, **kwargs):
                raise OSError(28, "zero.stream: nvme_path is /full with too little room")

            patch.setattr(streaming, "stream", full)
        given_up(model, rest, **arguments)
    assert hooks_of(model) == before
    assert not any(map(vars, model.parameters()))  # no marks
    assert model.cpu()(torch.zeros(1, 2, dtype=torch.long)).isfinite().all()
    with made(given_for("bf16", rest), model) as engine:
        assert_same(trained(engine, range(4)), wanted)


def test_an_engine_ends_again_that_a_thread_has_kept(rest):
    """One that computes meanwhile: the stream is there until nobody does."""
    model = Net()
    before = hooks_of(model)
    engine = made(given_for("float32", rest), model)
    refused = []

    def end(*_):
        with pytest.raises(
            RuntimeError, match=r"^zero.stream: close\(\) is called while a"
        ) as told:
            engine.destroy()
        refused.append(str(told.value))

    def meanwhile(*_):
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()

    block = next(module for module in model.modules() if "_zero_stream_block" in vars(module))
    hook = next(block.children()).register_forward_pre_hook(meanwhile)
    with torch.no_grad():
        loss_of(engine, 0)
    hook.remove()
    assert len(refused) == 1
    engine.destroy()
    assert hooks_of(model) == before


def test_a_model_goes_on_after_its_engine(rest):
    """It is an ordinary one then; another engine may have it, and the first one takes nothing."""
    model = Net()
    before = hooks_of(model)
    first = made(given_for("bf16", rest), model)
    with pytest.raises(
        ValueError, match="which an engine streams, expected a model that none does"
    ):
        made(given_for("bf16", rest), model)
    trained(first, range(2))
    first.destroy()
    first.destroy()
    assert hooks_of(model) == before and not any(map(vars, model.parameters()))
    model.to(first.device)
    assert loss_of(first, 0).isfinite() and loss_of(first, 0).dtype == torch.float32
    first.empty_partition_cache()
    found = []
    for block in ({"stage": 3}, rest):
        with made(given_for("bf16", block), copy.deepcopy(model.cpu())) as engine:
            found.append(trained(engine, range(4)))
    assert_same(found[1], found[0])
    with made(given_for("bf16", rest), model) as engine:  # while the first one is there
        assert_same(trained(engine, range(4)), found[0])


@pytest.mark.parametrize("make", [deepspeed_ext.initialize, compat.initialize])
@pytest.mark.parametrize("kind", ["streams", "whole"])
def test_a_model_is_pickled(kind, make, rest):
    """While its engine trains: an ordinary model comes of it, which an engine takes."""
    given = given_for("bf16", rest) if kind == "streams" else given_for("float32", {"stage": 0})
    engine = make(model=Net(), config=given)[0]
    trained(engine, range(2))
    file = io.BytesIO()
    torch.save(engine.module, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    for found in (pickle.loads(pickle.dumps(engine.module)), read):
        for name, weight in engine.module.state_dict().items():
            assert torch.equal(found.state_dict()[name], weight)
        assert found.cpu()(torch.zeros(1, 2, dtype=torch.long)).isfinite().all()
    copied = copy.deepcopy(engine.module)
    assert vars(copied).get("_deepspeed_ext_sharding") is None
    engine.destroy()
    pickle.dumps(engine.module)
    with made(given, read) as engine:
        trained(engine, range(2))
