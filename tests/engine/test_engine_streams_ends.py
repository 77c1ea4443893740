"""Engines that stream: what is left of the model when initialize fails, or when they end."""

import gc

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
)
from zero_cases import Net

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
